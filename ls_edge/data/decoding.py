"""Decoding of images to RGB with Pillow.

All images for answers, calibration and training are decoded here: those of others in a process with limits of memory
and CPU time (:mod:`ls_edge.data.decoders`).
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageFile, UnidentifiedImageError

from ls_edge.core.errors import DataError, LsEdgeError
from ls_edge.data.any_image import FORMATS, read_any

# The sender of a damaged file controls the text of the warning, which Python would print and remember forever.
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_SIDE = 1 << 14
"""Maximum width and height in pixels. Pillow keeps a pointer for each row, so tall images need additional memory."""
MAX_PIXELS = 1 << 26
# Number of pixels above which a JPEG is decoded at half its width and height.
_DRAFT_PIXELS = 1 << 24

_ORIENTATION = 0x0112
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(
    image: Any,
    name: str = "image",
    *,
    exif_orientation: bool = False,
    keep_gray: bool = False,
    on_header: Callable[[int], None] = lambda _pixels: None,
) -> Image.Image:
    """Decode an image of any kind (:mod:`ls_edge.data.any_image`) to RGB.

    With ``keep_gray``, decode a gray image to 8-bit gray, which needs a third of the memory. With
    ``exif_orientation``, turn the image upright by its EXIF orientation.

    ``on_header`` is called with the number of pixels of an encoded image before they are decoded.

    Raise :class:`DataError` with ``name`` if the image cannot be read, is damaged, exceeds a limit of this module, or
    has pixels of unknown range (see :func:`to_rgb`), and :class:`UsageError` for an object that is not an image.
    """
    content = read_any(image, name)
    try:
        if not isinstance(content, bytes):
            picture = Image.fromarray(content) if isinstance(content, np.ndarray) else content
            picture.load()  # also turns a TIFF upright
            picture = picture.copy() if "transparency" in picture.info else picture
            return to_rgb(_upright(picture) if exif_orientation else picture, name, keep_gray=keep_gray)
        with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
            on_header(_check(opened, name))
            opened.load()
            return to_rgb(_upright(opened) if exif_orientation else opened, name, keep_gray=keep_gray)
    except LsEdgeError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(name, "far more pixels") from None
    except MemoryError:
        reason = "it takes too much memory"
    except UnidentifiedImageError:
        reason = "its format is not supported"
    except OSError as error:
        reason = str(error).strip(". ")
    except Exception:  # noqa: BLE001 - decoders raise errors of all kinds, with messages about Python internals
        reason = "it is damaged"
    raise DataError(f"cannot decode {name}: {reason}; replace or remove it")


def to_rgb(image: Image.Image, name: str = "image", *, keep_gray: bool = False) -> Image.Image:
    """Convert an image of any mode to 8-bit RGB; remove metadata about transparency from ``image``.

    Integers of 16 bits (or 12 bits, if a TIFF declares them) and floats from 0..1 are scaled to 8 bits; Pillow's own
    conversion would clip both at 255. Raise :class:`DataError` for floats outside 0..1 and for 32-bit integers, whose
    white level is unknown.
    """
    if image.mode == "F" or image.mode.startswith("I"):  # gray of more than 8 bits
        return _from_wide(image, name)
    image.info.pop("transparency", None)  # Pillow warns about it, and RGB has none
    return image if image.mode == "RGB" or (keep_gray and image.mode == "L") else image.convert("RGB")


def _check(opened: ImageFile.ImageFile, name: str) -> int:
    """Raise :class:`DataError` if an image is too large; let Pillow decode large JPEGs at half their size.

    Return the number of pixels.
    """
    width, height = opened.size
    pixels = width * height
    if max(width, height) > MAX_SIDE or pixels > MAX_PIXELS:
        raise _too_large(name, f"{width} x {height} pixels")
    if opened.format in ("JPEG", "MPO") and pixels > _DRAFT_PIXELS:
        opened.draft(None, (width // 2, 1))
    return pixels


def _too_large(name: str, size: str) -> DataError:
    return DataError(f"{name} has {size}, the limit is {MAX_SIDE} a side and {MAX_PIXELS} in all; scale it down")


def _from_wide(image: Image.Image, name: str) -> Image.Image:
    """Convert gray pixels of more than 8 bits to RGB."""
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # a TIFF has them
    advice = "save it with 8 or 16 bits per channel"
    if image.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # also false for NaN
            raise DataError(f"{name} has float pixels from {low:g} to {high:g}, but white is 1; {advice}")
        gray = np.rint(values * np.float32(255)).astype(np.uint8)
    else:
        if image.mode == "I" and image.format not in ("PNG", "PPM"):  # these two have 16-bit pixels
            raise DataError(
                f"{name} has 32-bit or signed integer pixels from {values.min()} to {values.max()} and an unknown "
                f"white level; {advice}"
            )
        bits = tags.get(_BITS_PER_SAMPLE, (16,))
        white = (1 << (bits[0] if isinstance(bits, tuple) else bits)) - 1
        scaled = values.astype(np.uint32)
        scaled *= 255
        scaled += white // 2
        scaled //= white
        gray = scaled.astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        gray = 255 - gray
    return Image.fromarray(gray).convert("RGB")


def is_turned(encoded: bytes) -> bool:
    """Return whether an encoded image has an EXIF orientation that viewers apply, but Pillow does not."""
    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            return image.format != "TIFF" and _turn_of(image) is not None
    except Exception:  # noqa: BLE001 - as in decode
        return False


def _turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return the transposition that turns an image upright by its EXIF orientation; None if there is none to apply."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - damaged metadata raises errors of all kinds, but the pixels are good
        return None
    return _TURNS.get(orientation) if isinstance(orientation, int) else None


def _upright(image: Image.Image) -> Image.Image:
    """Return the image, turned and mirrored by its EXIF orientation."""
    method = _turn_of(image)
    if method is None:
        return image
    turned = image.transpose(method)
    turned.format = image.format
    return turned
