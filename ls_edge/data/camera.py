"""Frames of cameras, network streams, and video files, decoded by OpenCV (extra ``camera``).

A live source (:mod:`ls_edge.data.frame_source`) returns its newest frame; frames that arrive while a request is in
progress are dropped. A process of its own reads it (:mod:`ls_edge.data.capture`): a read of OpenCV can hang, and a
thread in it would crash an interpreter that ends. A video file returns every frame.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.closing import Closing
from ls_edge.core.errors import THREAD_LIMIT, DataError, UsageError
from ls_edge.core.text import counted
from ls_edge.data import capture as protocol
from ls_edge.data.frame_source import FrameSource
from ls_edge.device.requirements import need, require_import
from ls_edge.device.threads import can_start_threads

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".avi", ".webm", ".mpg", ".mpeg", ".ts", ".wmv", ".flv", ".3gp")
_USE = "a camera, stream, or video"
_KEPT = 8
"""Number of decoded frames that are kept for threads that read slightly out of order."""
_SLACK_S = 2.0
"""Seconds for the process to start and to answer, in addition to those for the source."""


def is_live(given: str) -> bool:
    """Return whether an argument names a camera or a network stream."""
    return FrameSource.parse(given) is not None


def is_video(given: str) -> bool:
    """Return whether an argument names a video file that exists."""
    return Path(given).suffix.lower() in VIDEOS and Path(given).is_file()


def frames(given: str) -> Generator[np.ndarray, None, None]:
    """Yield the frames of a camera, a network stream, or a video file as RGB pixels, uint8 ``[H, W, 3]``.

    Raise :class:`DataError` if it cannot be opened, and at the end of a live source. A URL of a photo has one frame.
    """
    source = FrameSource.parse(given)
    if source is None:
        yield from VideoFile(given)
        return
    with LiveFrames(source) as live:
        while True:
            yield live.read()
            if live.is_photo:
                return


class LiveFrames(Closing):
    """A camera or network stream, read by a process that keeps its newest frame."""

    def __init__(self, source: FrameSource) -> None:
        """Open the source; raise :class:`DataError` if that fails."""
        self.is_photo = False
        """Whether the source is a single image, which every call of :meth:`read` returns."""
        self.problem = ""
        """Reason why there are no more frames; empty until the end."""
        self.taken = 0
        """Number of frames that were returned."""
        self._what = f"camera {source.address}" if source.is_device else source.name
        self._photo: np.ndarray | None = None
        self._lock = threading.Lock()
        self._process = subprocess.Popen(  # noqa: S603  our own interpreter and script
            [sys.executable, protocol.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._end = weakref.finalize(self, _end, self._process)
        problem = f"cannot open {self._what}; {source.advice}"
        try:
            request = {"address": source.address, "is_device": source.is_device, "stall_s": protocol.STALL_S}
            kind, content = self._ask(json.dumps(request), problem)
            if kind == protocol.NO_LIBRARY:
                raise UsageError(need(_USE, f"OpenCV ({content.decode()})", "camera"))
            if kind == protocol.NO_VIDEO:
                problem = f"{self._what} has no video; name a stream with one"
            if kind != protocol.OPENED:
                raise DataError(problem if can_start_threads() else THREAD_LIMIT)
            if str(source.address).startswith("http"):  # it may lead to a single image
                self.is_photo = self._ask("single", self._silence)[0] == protocol.SINGLE
        except BaseException:
            self.close()
            raise

    def read(self) -> np.ndarray:
        """Wait for a new frame and return the newest one as RGB pixels, uint8 ``[H, W, 3]``.

        Raise :class:`DataError` once the source has ended or sent nothing for 30 seconds.
        """
        if self._photo is not None:
            return self._photo
        kind, content = self._ask("next", self._silence)
        if kind != protocol.NEXT:
            count = int(content) if kind == protocol.ENDED else self.taken
            self.problem = f"{self._what} stopped after {counted(count, 'frame')}; check its cable or network"
            self.close()
            raise DataError(self.problem)
        self.taken += 1
        height, width = protocol.FRAME.unpack_from(content)
        frame = _rgb(np.frombuffer(content, np.uint8, offset=protocol.FRAME.size).reshape(height, width, -1))
        if self.is_photo:
            self._photo = frame
            self.close()
        return frame

    @property
    def _silence(self) -> str:
        return f"{self._what} sent no frame for {protocol.STALL_S:.0f} s; check its cable or network"

    def _ask(self, request: str, silence: str) -> tuple[bytes, bytes]:
        """Return the answer to a request, with an empty kind if the process ends; raise DataError after ``silence``."""
        end = time.monotonic() + protocol.STALL_S + _SLACK_S
        with self._lock, contextlib.suppress(OSError):
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            if self.problem or not self._end.alive:
                return b"", b""
            self._process.stdin.write(f"{request}\n".encode())
            header = _read(self._process.stdout.fileno(), protocol.HEADER.size, end)
            if header is not None:
                kind, size = protocol.HEADER.unpack(header)
                if (content := _read(self._process.stdout.fileno(), size, end)) is not None:
                    return kind, bytes(content)
        if time.monotonic() < end:
            return b"", b""
        self.problem = silence
        self.close()
        raise DataError(silence)

    def close(self) -> None:
        """End the process, which wakes a reader in another thread; a second call does nothing."""
        self.problem = self.problem or "closed"
        self._end()
        with self._lock:
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _read(descriptor: int, size: int, end: float) -> bytearray | None:
    """Return ``size`` bytes of a pipe; None if it ends, or at the time ``end``."""
    content = bytearray(size)
    view = memoryview(content)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while view:
        if not poll.poll(max(0.0, end - time.monotonic()) * 1e3) or not (count := os.readv(descriptor, [view])):
            return None
        view = view[count:]
    return content


class VideoFile:
    """Frames of a video file; any thread may read them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._capture = self._opened()
        self._next = 0
        self._recent: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()
        if self._at(0) is None:
            raise DataError(f"{path} has no frames; convert it, for example to MP4 with H.264")

    def _opened(self) -> Any:
        advice = "cannot be decoded as a video; convert it, for example to MP4 with H.264"
        return _open(self._path, f"{self._path} {advice}")

    @functools.cached_property
    def count(self) -> int:
        """Number of frames in the file, counted because headers may be wrong."""
        capture, count = self._opened(), 0
        while capture.grab():
            count += 1
        capture.release()
        return count

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield the pixels of each frame until the file ends."""
        index = 0
        while (frame := self._at(index)) is not None:
            yield frame
            index += 1

    def read(self, index: int) -> np.ndarray:
        """Return the pixels of a frame; raise :class:`DataError` if the file ends before it."""
        frame = self._at(index)
        if frame is None:
            raise DataError(f"{self._path} ends before frame {index}; it has changed")
        return frame

    def _at(self, index: int) -> np.ndarray | None:
        with self._lock:
            if index < self._next and index not in self._recent:
                # OpenCV seeks by the frame count in the header and by key frames, so it may miss the frame.
                self._capture.release()
                self._capture, self._next = self._opened(), 0
                self._recent.clear()
            if index >= self._next + _KEPT:
                self._recent.clear()
            while self._next < index - _KEPT and self._capture.grab():
                self._next += 1
            while self._next <= index:
                there, frame = self._capture.read()
                if not there:
                    return None
                self._recent[self._next] = _rgb(frame)
                self._recent.pop(self._next - _KEPT, None)
                self._next += 1
            return self._recent.get(index)


def _rgb(frame: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(frame[:, :, ::-1])


def _open(path: str, problem: str) -> Any:
    """Open a video with OpenCV's log silenced; raise :class:`DataError` with ``problem`` if that fails."""
    require_import(_USE, ("cv2",), "camera")
    cv2: Any = importlib.import_module("cv2")
    name = os.path.abspath(path)  # FFmpeg takes a name such as 10:30.mp4 for a protocol
    if name.encode(errors="ignore").decode() != name:  # OpenCV would crash
        raise DataError(f"{path}: the path of a video must be UTF-8; rename its file or folder")
    logs, variable = cv2.utils.logging, "OPENCV_FFMPEG_LOGLEVEL"
    level, before = logs.getLogLevel(), os.environ.get(variable)
    logs.setLogLevel(logs.LOG_LEVEL_SILENT)
    os.environ.setdefault(variable, "-8")  # quiet; FFmpeg reads it when it opens its first source
    try:
        capture = cv2.VideoCapture(name)
    finally:
        logs.setLogLevel(level)
        if before is None:
            del os.environ[variable]
    if not capture.isOpened():
        raise DataError(problem)
    return capture
