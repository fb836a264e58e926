"""Images named on a command line: files, folders, standard input, and frames of cameras, streams, and videos."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.errors import DataError
from ls_edge.data.camera import frames, is_live, is_video, opencv
from ls_edge.data.image_files import EXTENSIONS, read_folder

MAX_IMAGE_BYTES = 1 << 28


@dataclass(frozen=True)
class ImageInput:
    """An image, or a camera, stream, or video with a sequence of frames."""

    name: str
    read: Callable[[], bytes] | None = None
    error: DataError | None = None


def expand_argument(given: str) -> Iterator[ImageInput]:
    """Yield the inputs of one argument; raise :class:`UsageError` for a camera if OpenCV is missing."""
    if is_live(given) or is_video(given):
        opencv()
        yield ImageInput(given)
    elif given == "-":
        yield ImageInput("-", lambda: _read_whole("standard input", sys.stdin.buffer))
    elif Path(given).is_dir():
        yield from _folder(given)
    elif Path(given).exists():
        yield ImageInput(given, lambda: _read_file(given))
    else:
        yield ImageInput(given, error=DataError("no such file or folder; check the path"))


def _folder(given: str) -> Iterator[ImageInput]:
    try:
        tree = read_folder(Path(given)).images
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

    Frames are RGB pixels.
    """
    for item in inputs:
        try:
            if item.error is not None:
                yield item.name, item.error
            elif item.read is not None:
                yield item.name, item.read()
            else:
                with contextlib.closing(frames(item.name)) as found:
                    yield from ((f"{item.name}#{number}", frame) for number, frame in enumerate(found))
        except DataError as error:
            yield item.name, error
