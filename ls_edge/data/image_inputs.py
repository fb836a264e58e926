"""Images named on a command line: files, folders, standard input, and the frames of a camera (by OpenCV)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.image_files import EXTENSIONS, read_folder

MAX_IMAGE_BYTES = 1 << 28

VIDEOS = (".mp4", ".m4v", ".mov", ".mkv", ".avi", ".webm")


@dataclass(frozen=True)
class ImageInput:
    """An image, or a camera with an endless sequence of frames."""

    name: str
    read: Callable[[], bytes] | None = None
    camera: int | str | None = None
    """Number of a camera, or path of a video."""
    error: DataError | None = None


def expand_argument(given: str) -> Iterator[ImageInput]:
    """Yield the inputs of one argument; raise :class:`UsageError` for a camera if OpenCV is missing."""
    kind, _, index = given.partition(":")
    if kind == "camera" and (index.isdigit() or not index):
        _opencv()
        yield ImageInput(given, camera=int(index or 0))
    elif given == "-":
        yield ImageInput("-", lambda: _read_whole("standard input", sys.stdin.buffer))
    elif Path(given).suffix.lower() in VIDEOS and Path(given).is_file():
        _opencv()
        yield ImageInput(given, camera=given)
    elif Path(given).is_dir():
        yield from _folder(given)
    elif Path(given).exists():
        yield ImageInput(given, lambda: _read_file(given))
    else:
        yield ImageInput(given, error=DataError("no such file or folder; check the path"))


def _folder(given: str) -> Iterator[ImageInput]:
    try:
        tree = read_folder(Path(given))
    except DataError as error:
        yield ImageInput(given, error=error)
        return
    if not tree:
        endings = ", ".join(sorted(EXTENSIONS))
        yield ImageInput(given, error=DataError(f"the folder has no images; their names must end in {endings}"))
    for name in sorted(tree):
        yield ImageInput(str(Path(given) / name), tree[name])


def _read_file(path: str) -> bytes:
    try:
        with Path(path).open("rb") as stream:
            return _read_whole(path, stream)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}; check it and its permissions") from None


def _read_whole(name: str, stream: Any) -> bytes:
    content: bytes = stream.read(MAX_IMAGE_BYTES + 1)
    if not content:
        raise DataError(f"{name} is empty; give an encoded image, such as a JPEG")
    if len(content) > MAX_IMAGE_BYTES:
        raise DataError(f"{name} has more than {MAX_IMAGE_BYTES >> 20} MiB, the limit; scale it down")
    return content


def read_images(inputs: Iterable[ImageInput]) -> Generator[tuple[str, bytes | np.ndarray | DataError], None, None]:
    """Yield name and content of each image, or the :class:`DataError` of one that cannot be read.

    Frames of a camera are RGB pixels.
    """
    for item in inputs:
        if item.camera is not None:
            yield from _frames(item.name, item.camera)
        elif item.error is not None:
            yield item.name, item.error
        else:
            assert item.read is not None
            try:
                yield item.name, item.read()
            except DataError as error:
                yield item.name, error


def _frames(name: str, index: int | str) -> Iterator[tuple[str, np.ndarray | DataError]]:
    cv2 = _opencv()
    camera = cv2.VideoCapture(index)
    try:
        if not camera.isOpened():
            yield (
                name,
                DataError(
                    f"cannot open camera {index}; check that it is connected and that no other program uses it"
                    if isinstance(index, int)
                    else "cannot be decoded as a video; convert it, for example to MP4 with H.264"
                ),
            )
            return
        camera.set(cv2.CAP_PROP_BUFFERSIZE, 1)  # the newest frame, not an old one
        number = 0
        while True:
            there, frame = camera.read()
            if not there and isinstance(index, str):
                return
            if not there:
                yield name, DataError(f"camera {index} stopped after {number} frames; check its cable")
                return
            yield f"{name}#{number}", cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)
            number += 1
    finally:
        camera.release()


def _opencv() -> Any:
    try:
        return importlib.import_module("cv2")
    except ImportError:
        raise UsageError(
            "cameras and videos need OpenCV, which is not installed; install it with pip install opencv-python-headless"
        ) from None
