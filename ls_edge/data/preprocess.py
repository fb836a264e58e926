"""From an image file to the stem's input, with Pillow and numpy alone.

The same steps as timm's transform for evaluation with a centre crop (``timm.data.create_transform``, which the
model was trained and measured with): RGB, the shorter side scaled to ``size / crop_pct``, a centre crop, scaled to
0..1, normalised. Transparency is dropped, and of an animation the first frame is taken, because timm does so too; the
EXIF orientation is applied only where :attr:`ls_edge.core.bundle.ImageSpec.exif_orientation` is set. timm's crop modes
``squash`` and ``border`` are left out. Unlike timm, 16-bit and float images keep their range (:func:`to_rgb`), in
training as well, which decodes with this module.

An image that cannot be decoded, or that would take absurd memory, is a :class:`DataError` that names it; neither
ends a run (:func:`iterate`).
"""

from __future__ import annotations

import io
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from PIL import Image, UnidentifiedImageError

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import BundleError, DataError
from ls_edge.data.datasets import ImageRef, ImageSet

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
"""Pillow's decoders that are used; its others run programs or are rarely tested."""

MAX_PIXELS = 1 << 26
"""Images above this, as stored or as scaled, are refused: 67 million pixels, 200 MB as RGB."""

PixelSource = bytes | np.ndarray | Image.Image
"""What :func:`decode` takes: an encoded file, pixels uint8 ``[H, W, 3]`` or ``[H, W]``, or an image of Pillow's."""

INTERPOLATIONS = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}

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
"""What turns an image of an EXIF orientation upright."""


class Preprocessor:
    """Callable that turns one image into the stem's input, float32 ``[3, H, W]``; safe to share between threads."""

    def __init__(self, spec: ImageSpec) -> None:
        """Raises :class:`BundleError` where the manifest asks for what does not exist."""
        if spec.interpolation not in INTERPOLATIONS:
            raise BundleError(
                f"the manifest's image.interpolation is {spec.interpolation!r}; known are {', '.join(INTERPOLATIONS)}"
            )
        if min(spec.size) < 1 or not 0 < spec.crop_pct <= 8 or min(spec.std) <= 0:
            raise BundleError(
                f"the manifest's image has size {list(spec.size)}, crop_pct {spec.crop_pct} and std {list(spec.std)}; "
                "all of them must be above 0, crop_pct at most 8"
            )
        self.spec = spec
        self._scale = (1 / (255 * np.asarray(spec.std, dtype=np.float64))).astype(np.float32)[:, None, None]
        self._offset = (np.asarray(spec.mean) / np.asarray(spec.std)).astype(np.float32)[:, None, None]

    def __call__(self, image: PixelSource, name: str = "image") -> np.ndarray:
        """Return float32 ``[3, H, W]``; ``image`` is an encoded file or pixels, see :func:`decode`."""
        rgb = decode(image, name, exif_orientation=self.spec.exif_orientation is True)
        pixels = np.asarray(self.crop(rgb, name))
        chw: np.ndarray = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
        chw *= self._scale
        chw -= self._offset
        return chw

    def crop(self, image: Image.Image, name: str = "image") -> Image.Image:
        """Scale and crop an RGB image to the spec's size."""
        height, width = self.spec.size
        scaled_width, scaled_height = self._scaled_size(image.width, image.height)
        if scaled_width * scaled_height > MAX_PIXELS:
            raise DataError(
                f"{name} has {image.width} x {image.height} pixels, so long and narrow that scaling it to the model's "
                "input needs too much memory; crop it"
            )
        if image.size != (scaled_width, scaled_height):
            image = image.resize((scaled_width, scaled_height), INTERPOLATIONS[self.spec.interpolation])
        if width > scaled_width or height > scaled_height:  # crop_pct above 1: black around it
            padded = Image.new("RGB", (max(width, scaled_width), max(height, scaled_height)))
            padded.paste(image, (max(0, (width - scaled_width) // 2), max(0, (height - scaled_height) // 2)))
            image = padded
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        target_height, target_width = (math.floor(side / self.spec.crop_pct) for side in self.spec.size)
        if target_height == target_width:
            if width <= height:
                return target_width, int(target_width * height / width)
            return int(target_height * width / height), target_height
        ratio = min(height / target_height, width / target_width)
        return round(width / ratio), round(height / ratio)


def decode(image: PixelSource, name: str = "image", *, exif_orientation: bool = False) -> Image.Image:
    """Decode to RGB, upright by its EXIF orientation where ``exif_orientation`` is set (pixels have none).

    Raises :class:`DataError` with ``name`` where it is no image, is cut off, has more than ``MAX_PIXELS``, or has
    pixels whose range is not known (:func:`to_rgb`).
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)) or 0 in image.shape:
            raise DataError(f"{name} is an array {image.dtype} {list(image.shape)}; give pixels as uint8 [H, W, 3]")
        rgb: Image.Image = Image.fromarray(image).convert("RGB")
        return rgb
    if isinstance(image, Image.Image):
        return to_rgb(_upright(image) if exif_orientation else image, name)
    opened: Image.Image
    try:
        with Image.open(io.BytesIO(image), formats=FORMATS) as opened:
            if opened.width * opened.height <= MAX_PIXELS:
                opened.load()
                return to_rgb(_upright(opened) if exif_orientation else opened, name)
            size = f"{opened.width} x {opened.height}"
    except DataError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        size = "far more"
    except Exception as error:  # noqa: BLE001 - decoders raise all kinds of errors on files that are broken
        reason = "its format is not supported" if isinstance(error, UnidentifiedImageError) else str(error).strip(". ")
        raise DataError(f"{name} is no image that can be read ({reason}); replace it or take it away") from None
    raise DataError(f"{name} has {size} pixels, the most is {MAX_PIXELS}; scale it down")


def to_rgb(image: Image.Image, name: str = "image") -> Image.Image:
    """Convert an image of any mode to 8-bit RGB; metadata about transparency is removed from ``image``.

    Integers of 16 bits (of 12 in a TIFF that declares it) are scaled to 8, floats from 0..1; Pillow's own conversion
    clips both at 255. Raises :class:`DataError` for floats outside 0..1 and integers of 32 bits, whose white is not
    known.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        return _from_wide(image, name)
    image.info.pop("transparency", None)  # Pillow warns of it, and RGB has none
    return image.convert("RGB")


def _from_wide(image: Image.Image, name: str) -> Image.Image:
    """Grey pixels of more than 8 bits as RGB."""
    values = np.asarray(image)
    tags = getattr(image, "tag_v2", {})  # of a TIFF
    advice = "save it with 8 or 16 bits a channel"
    if image.mode == "F":
        low, high = float(values.min()), float(values.max())
        if not 0 <= low <= high <= 1:  # false for what is not a number as well
            raise DataError(f"{name} has float pixels from {low:g} to {high:g}, and white is 1; {advice}")
        grey = np.rint(values * np.float32(255)).astype(np.uint8)
    else:
        if image.mode == "I" and image.format not in ("PNG", "PPM"):  # these two are 16 bits wide then
            raise DataError(
                f"{name} has pixels of 32-bit or signed integers, from {values.min()} to {values.max()}, whose white "
                f"is not known; {advice}"
            )
        bits = tags.get(_BITS_PER_SAMPLE, (16,))
        white = (1 << (bits[0] if isinstance(bits, tuple) else bits)) - 1
        grey = ((values.astype(np.uint32) * 255 + white // 2) // white).astype(np.uint8)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        grey = 255 - grey
    return Image.fromarray(grey).convert("RGB")


def _upright(image: Image.Image) -> Image.Image:
    """The image turned and mirrored by its EXIF orientation; as it is where that cannot be read."""
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - whatever the readers of broken metadata raise, the pixels are good
        return image
    method = _TURNS.get(orientation) if isinstance(orientation, int) else None
    if method is None:
        return image
    turned = image.transpose(method)
    turned.format = image.format
    return turned


def iterate(
    image_set: ImageSet,
    preprocessor: Preprocessor,
    on_skip: Callable[[ImageRef, DataError], None] | None = None,
    *,
    on_time: Callable[[float], None] | None = None,
    threads: int = 2,
    ahead: int = 8,
) -> Iterator[tuple[int, ImageRef, np.ndarray]]:
    """Yield ``(index, image, float32 [3, H, W])`` in the set's order, up to ``ahead`` images decoded beforehand.

    An image that cannot be used is left out, and ``on_skip`` is called with it each time that the set repeats it;
    ``on_time`` is called with the milliseconds that each of the others took. Both run in the consumer's thread.
    Raises :class:`DataError` at the end where not one image could be used.
    """

    def load(image: ImageRef) -> tuple[np.ndarray, float]:
        started = time.perf_counter()
        array = preprocessor(image.read(), image.name)
        return array, (time.perf_counter() - started) * 1e3

    used = 0
    first: DataError | None = None
    pending: deque[tuple[int, ImageRef, Future[tuple[np.ndarray, float]]]] = deque()
    upcoming = enumerate(image_set.images)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    try:
        while True:
            while len(pending) < ahead and (item := next(upcoming, None)) is not None:
                pending.append((*item, pool.submit(load, item[1])))
            if not pending:
                break
            index, image, future = pending.popleft()
            try:
                array, milliseconds = future.result()
            except DataError as error:
                first = first or error
                if on_skip is not None:
                    on_skip(image, error)
                continue
            if on_time is not None:
                on_time(milliseconds)
            used += 1
            yield index, image, array
    finally:
        pool.shutdown(cancel_futures=True)
    if not used:
        why = f"; the first: {first}" if first is not None else ""
        raise DataError(f"{image_set.source}: none of {len(image_set)} images can be used{why}")


def iterate_batches(
    image_set: ImageSet,
    preprocessor: Preprocessor,
    size: int,
    on_skip: Callable[[ImageRef, DataError], None] | None = None,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images float32 ``[B, 3, H, W]`` and labels int64 ``[B]`` of a labelled set; B is ``size`` but for the last.

    ``on_skip`` and errors as :func:`iterate`.
    """
    pixels: list[np.ndarray] = []
    labels: list[int] = []
    for _, image, array in iterate(image_set, preprocessor, on_skip, ahead=2 * size):
        assert image.label is not None
        pixels.append(array)
        labels.append(image.label)
        if len(pixels) == size:
            yield np.stack(pixels), np.array(labels)
            pixels, labels = [], []
    if pixels:
        yield np.stack(pixels), np.array(labels)
