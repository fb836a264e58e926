"""Input images of any kind, without decoding them; used by sources with and without a bundle."""

from __future__ import annotations

import os
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.frame_source import visible_name

if TYPE_CHECKING:
    import PIL.Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Pillow decoders in use; other decoders start programs or are rarely tested."""

MAX_BYTES = 1 << 28
"""Size limit of a file and of standard input."""

Image: TypeAlias = "bytes | bytearray | memoryview | str | os.PathLike[str] | np.ndarray | PIL.Image.Image"
"""Bytes of a file (also as a uint8 array), a path, pixels as uint8 ``[H, W, 3]`` or ``[H, W]``, or a Pillow image."""


def read_any(image: Any, name: str) -> bytes | np.ndarray | PIL.Image.Image:
    """Return the bytes of a file, pixels as uint8 ``[H, W, 3]`` or ``[H, W]``, or a Pillow image.

    Raise :class:`DataError` for a file that cannot be read and :class:`UsageError` for an object of another kind.
    """
    if isinstance(image, (str, os.PathLike)):
        try:
            with open(image, "rb") as stream:
                return read_whole(stream, name)
        except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
            why = error.strerror if isinstance(error, OSError) else error
            raise DataError(
                f"cannot read {visible_name(os.fsdecode(image))}: {why}; check the path and its permissions"
            ) from None
    if isinstance(image, (bytes, bytearray, memoryview)):
        return bytes(image)
    if not isinstance(image, np.ndarray):
        if hasattr(image, "getexif"):
            return _unread(image) or image
        raise UsageError(
            f"{name} must be pixels, a Pillow image, or the bytes or the path of a file, not {type(image).__name__}"
        )
    if image.dtype == np.uint8 and image.ndim == 1:  # a result of cv2.imencode
        return image.tobytes()
    if image.dtype == np.uint8 and image.size and image.ndim in (2, 3) and image.shape[2:] in ((), (1,), (3,)):
        return image if image.shape[2:] != (1,) else image[..., 0]
    raise UsageError(f"{name} is an array {image.dtype} {list(image.shape)}; give pixels as uint8 [H, W, 3]")


def _unread(image: Any) -> bytes | None:
    """Return the file of a Pillow image if its pixels are not loaded, so that the limits of decoding apply.

    This also avoids a fault of Pillow, which maps uncompressed gray TIFF files into memory and mixes up their rows when
    it rotates them.
    """
    if (
        not (getattr(image, "tile", None) and getattr(image, "fp", None))
        or image.format not in (*FORMATS, "MPO")
        or image.tell()
    ):
        return None
    place = image.fp.tell()
    image.fp.seek(0)
    content = read_whole(image.fp, "image")
    image.fp.seek(place)
    return content


def read_whole(stream: IO[bytes], name: str) -> bytes:
    """Return the content of a stream; raise :class:`DataError` if it is empty or too large."""
    content = stream.read(MAX_BYTES + 1)
    if not content:
        raise DataError(f"{name} is empty; give an encoded image, such as a JPEG")
    if len(content) > MAX_BYTES:
        raise DataError(f"{name} has more than {MAX_BYTES >> 20} MiB, the limit; scale it down")
    return content
