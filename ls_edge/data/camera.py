"""Frames of cameras, network streams, and video files, decoded by OpenCV (extra ``camera``).

A live source (``camera``, ``camera:1``, ``rtsp://...``, ``http://...``) returns its newest frame; frames that arrive
while a request is in progress are dropped. A video file returns every frame.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.errors import DataError
from ls_edge.device.requirements import require_import

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".avi", ".webm")
STREAMS = ("rtsp://", "rtsps://", "http://", "https://")
_KEPT = 8
"""Number of decoded frames that are kept for threads that read slightly out of order."""
_JOIN_S = 2.0
"""Maximum wait for the last frame of a live source, in seconds."""


def is_live(given: str) -> bool:
    """Return whether an argument names a camera or a network stream."""
    kind, _, index = given.partition(":")
    return given.startswith(STREAMS) or (kind == "camera" and (index.isdigit() or not index))


def is_video(given: str) -> bool:
    """Return whether an argument names a video file that exists."""
    return Path(given).suffix.lower() in VIDEOS and Path(given).is_file()


def frames(given: str) -> Generator[np.ndarray, None, None]:
    """Yield the frames of a camera, a network stream, or a video file as RGB pixels, uint8 ``[H, W, 3]``.

    Raise :class:`DataError` if it cannot be opened, and at the end of a live source.
    """
    if not is_live(given):
        if not Path(given).exists():
            raise DataError(f"{given}: no such file; check the path")
        yield from VideoFile(given)
        return
    with contextlib.closing(LiveFrames(given)) as live:
        while True:
            yield live.read()


class LiveFrames:
    """A camera or network stream; a thread keeps its newest frame."""

    def __init__(self, given: str) -> None:
        self.name = given
        self.ended = False
        """Whether there will be no more frames."""
        number = int(given.partition(":")[2] or 0) if given.startswith("camera") else None
        self._what = given if number is None else f"camera {number}"
        advice = (
            "check the address, user, and password"
            if number is None
            else "check that it is connected and that no other program uses it"
        )
        self._condition = threading.Condition()
        self._newest: np.ndarray | None = None
        self._count = 0
        opened: Future[None] = Future()
        arguments = (given if number is None else number, f"cannot open {self._what}; {advice}", opened)
        self._thread = threading.Thread(target=self._watch, args=arguments, name=f"frames of {given}", daemon=True)
        self._thread.start()
        try:
            opened.result()  # unlike OpenCV, which waits 30 s for a silent stream, this can be interrupted
        except BaseException:
            self.ended = True
            raise

    def read(self) -> np.ndarray:
        """Wait for a new frame and return the newest one as RGB pixels, uint8 ``[H, W, 3]``.

        Raise :class:`DataError` once the source has ended.
        """
        with self._condition:
            self._condition.wait_for(lambda: self._newest is not None or self.ended)
            frame, self._newest = self._newest, None
        if frame is None:
            raise DataError(f"{self._what} stopped after {self._count} frames; check its cable or network")
        return _rgb(frame)

    def _watch(self, what: int | str, problem: str, opened: Future[None]) -> None:
        try:
            capture = _open(what, problem)
        except Exception as error:  # noqa: BLE001  raised by the thread that waits
            opened.set_exception(error)
            return
        opened.set_result(None)
        while not self.ended:
            there, frame = capture.read()
            with self._condition:
                if there:
                    self._newest = frame
                    self._count += 1
                else:
                    self.ended = True
                self._condition.notify_all()
        capture.release()

    def close(self) -> None:
        """Release the camera; a second call does nothing."""
        with self._condition:
            self.ended = True
            self._condition.notify_all()
        self._thread.join(_JOIN_S)  # the thread releases the camera after the next frame


class VideoFile:
    """Frames of a video file; any thread may read them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._capture = self._opened()
        self._next = 0
        self._recent: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

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


def _open(what: int | str, problem: str) -> Any:
    """Open a capture with OpenCV's log silenced; raise :class:`DataError` with ``problem`` if that fails."""
    cv2 = opencv()
    logs, variable = cv2.utils.logging, "OPENCV_FFMPEG_LOGLEVEL"
    level, before = logs.getLogLevel(), os.environ.get(variable)
    logs.setLogLevel(logs.LOG_LEVEL_SILENT)
    os.environ.setdefault(variable, "-8")  # quiet; FFmpeg reads it when it opens its first source
    try:
        capture = cv2.VideoCapture(what)
    finally:
        logs.setLogLevel(level)
        if before is None:
            del os.environ[variable]
    if not capture.isOpened():
        raise DataError(problem)
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # limits the driver's queue
    return capture


def opencv() -> Any:
    """Return the module of OpenCV; raise :class:`UsageError` if it cannot be imported."""
    require_import("a camera, stream, or video", ("cv2",), "camera")
    return importlib.import_module("cv2")
