"""Process that reads a camera or a stream for :class:`ls_edge.data.camera.LiveFrames`, and keeps the newest frame.

It is a script that imports nothing of this package. A line of its standard input has the address, each further line is
a request: ``next`` for a frame that was not returned yet, ``single`` to learn whether the source is a single image.
Answers are a kind, the length of the content, and the content. The process ends with its standard input, whatever
OpenCV is doing; what FFmpeg and OpenCV print never leaves it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import re
import signal
import struct
import sys
import threading
import time
from typing import Any

HEADER = struct.Struct("<cI")
FRAME = struct.Struct("<II")
OPENED, CLOSED, NO_VIDEO, NO_LIBRARY, NEXT, ENDED, SINGLE, SEVERAL = (bytes([code]) for code in b"OCVLNESM")
"""Kinds of answers."""
STALL_S = 30.0
"""Silence, in seconds, after which a source is given up; older frames are never returned."""


class Capture:
    """A source that one thread reads while another one takes requests."""

    def __init__(self, out: int, log: int, stall_s: float) -> None:
        self._out, self._log, self._stall_s = out, log, stall_s
        self._lock = threading.Lock()
        self._newest: tuple[float, Any] | None = None
        self._count = 0
        self._ended = False
        self._request = ""

    def watch(self, address: int | str, *, is_device: bool) -> None:
        """Open the source and read its frames until it ends."""
        try:
            cv2: Any = importlib.import_module("cv2")
        except ImportError as error:
            self._answer(NO_LIBRARY, str(error).encode())
            return
        if is_device and isinstance(address, str):
            capture = cv2.VideoCapture(os.path.realpath(address), cv2.CAP_V4L2)
        else:
            capture = cv2.VideoCapture(address)
        if not capture.isOpened():
            self._answer(NO_VIDEO if self._has_no_video() else CLOSED)
            return
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(silence, stream)
        capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # limits the driver's queue
        self._answer(OPENED)
        while not self._ended:
            there, frame = capture.read()
            with self._lock:
                self._ended = not there
                if there:
                    # Frames grow old while the machine sleeps.
                    self._newest = time.clock_gettime(time.CLOCK_BOOTTIME), frame
                    self._count += 1
                self._serve()

    def ask(self, request: str) -> None:
        """Take a request, which is answered now or with a later frame."""
        with self._lock:
            self._request = request
            self._serve()

    def _serve(self) -> None:
        if self._request == "single" and (self._ended or self._count > 1):
            self._request = ""
            self._answer(SINGLE if self._count == 1 else SEVERAL)
        elif self._request == "next":
            newest, self._newest = self._newest, None
            if newest is not None and time.clock_gettime(time.CLOCK_BOOTTIME) - newest[0] < self._stall_s:
                self._request = ""
                height, width = newest[1].shape[:2]
                self._answer(NEXT, FRAME.pack(height, width), newest[1].tobytes())
            elif self._ended:
                self._request = ""
                self._answer(ENDED, str(self._count).encode())

    def _answer(self, kind: bytes, *content: bytes) -> None:
        for piece in (HEADER.pack(kind, sum(map(len, content))), *content):
            view = memoryview(piece)
            while view:
                view = view[os.write(self._out, view) :]

    def _has_no_video(self) -> bool:
        """Return whether FFmpeg received content without video, and reported neither a warning nor an error."""
        ctypes.CDLL(None).fflush(None)  # OpenCV prints with C's buffered streams
        text = os.pread(self._log, 1 << 20, 0).decode(errors="replace")
        levels = map(int, re.findall(r"^\[OPENCV:FFMPEG:(\d+)\]", text, re.M))
        has_content = re.search(r"^m=audio|Statistics: [1-9]", text, re.M) and "m=video" not in text
        return bool(has_content) and "timeout" not in text and all(level > 24 for level in levels)


def main() -> None:
    """Read the source that standard input names until standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the process that asks decides
        signal.signal(number, signal.SIG_IGN)
    threading.excepthook = lambda _: os._exit(1)  # the process that asks notices at once
    os.environ.update(OPENCV_FFMPEG_DEBUG="1", OPENCV_FFMPEG_LOGLEVEL="40")
    out, log = os.dup(1), os.memfd_create("log")
    for stream in (1, 2):
        os.dup2(log, stream)
    source = json.loads(sys.stdin.buffer.readline())
    capture = Capture(out, log, source.pop("stall_s"))
    threading.Thread(target=capture.watch, kwargs=source, daemon=True).start()
    for line in sys.stdin.buffer:
        capture.ask(line.decode().strip())
    os._exit(0)


if __name__ == "__main__":
    main()
