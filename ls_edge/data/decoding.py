"""Decoding of images to RGB with Pillow, within fixed limits of memory and time.

A file of a few kilobytes can describe an image of gigabytes. Therefore, everything that determines the memory is read
from the header and checked before any pixel is decoded. All images for answers, calibration, and training are decoded
here.
"""

from __future__ import annotations

import io
import re
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageFile, TiffImagePlugin, UnidentifiedImageError

from ls_edge.core.errors import DataError, LsEdgeError
from ls_edge.data.any_image import FORMATS, read_any

# The sender of a damaged file controls the text of the warning, which Python would print and remember forever.
warnings.filterwarnings("ignore", module=r"PIL\.")

MAX_SIDE = 1 << 14
"""Maximum width and height in pixels. Pillow keeps a pointer for each row, so tall images need additional memory."""
MAX_PIXELS = 1 << 26
MAX_DECODED_BYTES = 3 << 27
"""Maximum memory for decoding one image, in bytes: 67 million pixels of RGB or 25 million pixels of 16-bit gray."""
MAX_SLOW_PIXELS, MAX_SLOW_BYTES = 1 << 20, 1 << 22
"""Limits of containers that Pillow decodes in Python, at about 0.5 us per sample."""

SMALL_BYTES = 1 << 25
"""Maximum memory of a small image: 8 million pixels of RGB, or 1.5 million pixels of a progressive JPEG."""

# Pillow parses headers and chunks in Python, with one to three reads for each marker, chunk, or block. These limits
# bound the time for any number of them to a fraction of a second.
MAX_HEADER_READS, MAX_READS = 1 << 13, 1 << 16
"""Maximum reads of a file before its size is known, and in total."""
# Number of strips or tiles above which an image is not small, since Pillow decodes them one by one.
_MANY_TILES = 1 << 10
# Number of pixels above which a JPEG is decoded at half its width and height.
_DRAFT_PIXELS = 1 << 24
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")
"""Marker of a JPEG, without zero and restart markers, which are part of the pixels."""
_MAX_SCANS = 100
"""Maximum scans of a JPEG; encoders write about ten, and a scan of 100 bytes can cover the whole image."""
# Maximum pixels in all scans of a progressive JPEG.
_MAX_SCANNED = 1 << 30
# Minimum bits per pixel of uncompressed files, by mode.
_RAW_BITS = {"1": 1, "P": 1, "L": 2, "RGB": 15}
_MAX_TIFF_NUMBERS = 1 << 17
"""Maximum numbers in the tags of a TIFF: offsets and sizes of 65,536 strips."""
_TIFF_BYTE_TYPES = (1, 2, 6, 7)

_ORIENTATION = 0x0112
_BITS_PER_SAMPLE, _PHOTOMETRIC, _WHITE_IS_ZERO = 258, 262, 0
_TILE_WIDTH, _TILE_LENGTH = 322, 323
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class _Reader(io.BytesIO):
    """An encoded file that can be read a limited number of times."""

    def __init__(self, encoded: bytes, name: str) -> None:
        super().__init__(encoded)
        self._name = name
        self.left = MAX_HEADER_READS

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; raise :class:`DataError` if there were too many reads."""
        self.left -= 1
        if self.left < 0:
            raise DataError(f"{self._name} has too many chunks, markers or blocks; save it again, as PNG or JPEG")
        return super().read(size)


def decode(
    image: Any,
    name: str = "image",
    *,
    exif_orientation: bool = False,
    keep_gray: bool = False,
    on_large: Callable[[], None] = lambda: None,
) -> Image.Image:
    """Decode an image of any kind (:mod:`ls_edge.data.any_image`) to RGB.

    With ``keep_gray``, decode a gray image to 8-bit gray, which needs a third of the memory. With
    ``exif_orientation``, turn the image upright by its EXIF orientation.

    ``on_large`` is called before an image is decoded that needs more than :data:`SMALL_BYTES`, or a comparable time. It
    may wait, and an :class:`LsEdgeError` that it raises ends the decoding.

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
        _check_tiff_tags(content, name)
        reader = _Reader(content, name)
        with Image.open(reader, formats=FORMATS) as opened:
            if _check(opened, content, name, copies=exif_orientation) > SMALL_BYTES:
                on_large()
            reader.left = MAX_SLOW_PIXELS if _is_slow(opened) else MAX_READS
            opened.load()
            return to_rgb(_upright(opened) if exif_orientation else opened, name, keep_gray=keep_gray)
    except LsEdgeError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_large(name, "far more pixels") from None
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
    if _is_wide(image):
        return _from_wide(image, name)
    image.info.pop("transparency", None)  # Pillow warns about it, and RGB has none
    return image if image.mode == "RGB" or (keep_gray and image.mode == "L") else image.convert("RGB")


def _check_tiff_tags(encoded: bytes, name: str) -> None:
    """Raise :class:`DataError` if the tags of a TIFF would fill the memory while Pillow and libtiff read the header.

    Tags may overlap in the file, and each strip in a list becomes an object. The layout is parsed exactly as in Pillow.
    """
    if encoded[:2] not in (b"II", b"MM"):
        return
    order, is_big = "<" if encoded[:2] == b"II" else ">", encoded[2] == 43
    (start,) = struct.unpack_from(f"{order}{'Q' if is_big else 'L'}", encoded, 8 if is_big else 4)
    (count,) = struct.unpack_from(f"{order}{'Q' if is_big else 'H'}", encoded, start)
    tag = struct.Struct(f"{order}HH{'Q8s' if is_big else 'L4s'}")
    start += 8 if is_big else 2
    tags = list(tag.iter_unpack(encoded[start : start + min(count, 1 << 16) * tag.size]))
    in_bytes = sum(length for _, kind, length, _ in tags if kind in _TIFF_BYTE_TYPES)
    numbers = sum(length for _, kind, length, _ in tags if kind not in _TIFF_BYTE_TYPES)
    if in_bytes > len(encoded) or numbers > _MAX_TIFF_NUMBERS or count > len(tags):
        raise DataError(f"{name} has tags with {in_bytes} bytes and {numbers} numbers; save it again, as PNG or JPEG")


def _check(opened: ImageFile.ImageFile, encoded: bytes, name: str, *, copies: bool) -> int:
    """Raise :class:`DataError` if decoding would exceed a limit; let Pillow decode large JPEGs at half their size.

    Return the number of bytes that decoding needs, or a larger number if it takes as long as for a larger image.
    """
    width, height = opened.size
    pixels = width * height
    if max(width, height) > MAX_SIDE or pixels > MAX_PIXELS:
        raise _too_large(name, f"{width} x {height} pixels")
    if _is_slow(opened) and (pixels > MAX_SLOW_PIXELS or len(encoded) > MAX_SLOW_BYTES):
        raise DataError(
            f"{name} has {pixels} pixels in a variant of {opened.format} that is slow to decode; the limit is "
            f"{MAX_SLOW_PIXELS} pixels and {MAX_SLOW_BYTES} bytes; save it as PNG"
        )
    is_raw = len(opened.tile) == 1 and opened.tile[0][0] == "raw"  # strips of a TIFF may share their bytes
    if is_raw and len(encoded) * 8 < pixels * _RAW_BITS.get(opened.mode, 8):
        raise DataError(
            f"{name} has {len(encoded)} bytes, too few for {width} x {height} pixels without compression; save it again"
        )
    needed = scanned = 0
    if opened.format in ("JPEG", "MPO"):
        scans = _scans(encoded)
        scanned = scans * pixels
        if scans > _MAX_SCANS or (scanned > _MAX_SCANNED and "progressive" in opened.info):
            raise DataError(
                f"{name} is a JPEG with {scans} scans of {pixels} pixels, the limit is {_MAX_SCANS} scans and "
                f"{_MAX_SCANNED} pixels in all of them; save it again"
            )
        if "progressive" in opened.info:
            needed = 6 * pixels  # libjpeg keeps the coefficients of the whole image
        if pixels > _DRAFT_PIXELS:
            opened.draft(None, (width // 2, 1))
            pixels = opened.width * opened.height
    by_mode = {"RGB": 4, "1": 5, "L": 5, "P": 5}  # including the copy in RGB
    needed += pixels * ((16 if _is_wide(opened) else by_mode.get(opened.mode, 8)) + 4 * copies)
    if opened.format == "WEBP":
        needed += 12 * pixels  # two canvases of libwebp, and the bytes object that Pillow makes from one
    if isinstance(opened, TiffImagePlugin.TiffImageFile):
        tags = opened.tag_v2
        needed += 4 * pixels + 16 * tags.get(_TILE_WIDTH, 0) * tags.get(_TILE_LENGTH, 0)  # a strip, a tile of libtiff
    if needed > MAX_DECODED_BYTES:
        raise DataError(
            f"{name} has {width} x {height} pixels and needs {needed >> 20} MiB to be decoded as {opened.format} "
            f"{opened.mode}, the limit is {MAX_DECODED_BYTES >> 20} MiB; scale it down"
        )
    return SMALL_BYTES + 1 if _is_slow(opened) or len(opened.tile) > _MANY_TILES else needed + scanned


def _scans(jpeg: bytes) -> int:
    """Return the number of scans of a JPEG up to its end marker, since a video may follow (motion photos)."""
    scans, at = 0, 0
    for _ in range(MAX_READS):
        found = _MARKER.search(jpeg, at)
        if found is None or found[1] == b"\xd9":
            return scans
        at = found.end()
        scans += found[1] == b"\xda"
        if found[1] not in (b"\x01", b"\xd8"):
            at += int.from_bytes(jpeg[at : at + 2], "big")
    return _MAX_SCANS + 1


def _is_slow(opened: ImageFile.ImageFile) -> bool:
    """Return whether Pillow decodes the pixels in Python, for some containers with one read per pixel."""
    return bool(opened.tile) and opened.tile[0][0] in Image.DECODERS


def _too_large(name: str, size: str) -> DataError:
    return DataError(f"{name} has {size}, the limit is {MAX_SIDE} a side and {MAX_PIXELS} in all; scale it down")


def _is_wide(image: Image.Image) -> bool:
    """Return whether the pixels are gray of more than 8 bits."""
    return image.mode == "F" or image.mode.startswith("I")


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
        with Image.open(_Reader(encoded, "image"), formats=FORMATS) as image:
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
