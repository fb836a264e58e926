"""Images from command-line arguments: files, folders, standard input, and frames of cameras, streams, and videos."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ls_edge.core.errors import DataError
from ls_edge.core.text import counted
from ls_edge.data.any_image import read_any, read_whole
from ls_edge.data.camera import frames, is_live, is_video
from ls_edge.data.datasets import describe_ignored
from ls_edge.data.frame_source import visible_name
from ls_edge.data.image_files import EXTENSIONS, read_folder
from ls_edge.device.requirements import require

Content = tuple[str, "bytes | np.ndarray | DataError"]
"""Name of an image, and its content or the reason why it cannot be read."""


@dataclass(frozen=True)
class ImageInput:
    """An image, or a camera, stream, or video that provides a sequence of frames."""

    name: str
    read: Callable[[], Any] | None = None
    frames: Callable[[], Generator[np.ndarray, None, None]] | None = None
    is_live: bool = False
    """Whether the frames have no end."""
    error: DataError | None = None
    note: str = ""
    """Summary of the folder, for its first image; otherwise empty."""


def expand_argument(given: str) -> Iterator[ImageInput]:
    """Yield the inputs of one argument; raise :class:`UsageError` for a camera if OpenCV is missing."""
    if is_live(given) or is_video(given):
        require("a camera, stream, or video", "camera")
        yield ImageInput(visible_name(given), frames=lambda: frames(given), is_live=is_live(given))
    elif given == "-":
        yield ImageInput("-", lambda: read_whole(sys.stdin.buffer if sys.stdin else io.BytesIO(), "standard input"))
    elif not given or not Path(given).exists():  # an empty path would be the working folder
        why = "no such file or folder; check the path" if given else "the path is empty; name a file or folder"
        yield ImageInput(visible_name(given), error=DataError(why))
    elif Path(given).is_dir():
        yield from _folder(given)
    else:
        yield ImageInput(given, lambda: read_any(given, given))


def _folder(given: str) -> Iterator[ImageInput]:
    try:
        listing = read_folder(Path(given))
    except DataError as error:
        yield ImageInput(given, error=error)
        return
    tree, left_out = listing.images, describe_ignored(Counter(reason for _, reason in listing.reasons()))
    note = left_out and f"{given}: {counted(len(tree), 'image')}{left_out}"
    if not tree:
        endings = ", ".join(sorted(EXTENSIONS))
        why = f"the folder has no images{left_out}; their names must end in {endings}"
        yield ImageInput(given, error=DataError(why))
    for name in sorted(tree):
        yield ImageInput(str(Path(given) / name), tree[name], note=note)
        note = ""


def read_images(inputs: Iterable[ImageInput]) -> Generator[Content, None, None]:
    """Yield the name of each image and its content, or a :class:`DataError` if it cannot be read.

    Frames are RGB pixels. Cameras and streams come last, and are read in turns.
    """
    with contextlib.ExitStack() as stack:
        live = []
        for item in inputs:
            contents = stack.enter_context(contextlib.closing(_contents(item)))
            if item.is_live:
                live.append(contents)
            else:
                yield from contents
        while live:
            for contents in tuple(live):
                if (found := next(contents, None)) is None:
                    live.remove(contents)
                else:
                    yield found


def _contents(item: ImageInput) -> Generator[Content, None, None]:
    try:
        if item.error is not None:
            yield item.name, item.error
        elif item.read is not None:
            yield item.name, item.read()
        elif item.frames is not None:
            with contextlib.closing(item.frames()) as found:
                yield from ((f"{item.name}#{number}", frame) for number, frame in enumerate(found))
    except DataError as error:
        yield item.name, error
