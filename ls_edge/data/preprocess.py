"""Preprocessing of images for the stem, with Pillow and numpy only.

The steps are those of timm's evaluation transform (``timm.data.create_transform``), with which the model was trained
and measured: convert to RGB, scale the shorter side (or as the crop mode says) to ``size / crop_pct``, crop the center,
scale to 0..1, normalize. As in timm, transparency is dropped, and only the first frame of an animation is used. The
EXIF orientation is applied only if :attr:`ls_edge.core.bundle.ImageSpec.exif_orientation` is set. Unlike in timm,
16-bit and float images keep their range (:func:`ls_edge.data.decoding.to_rgb`), in training as well.

An image that cannot be decoded or exceeds a limit raises :class:`DataError` with its name; :func:`iterate` skips it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.datasets import ImageRef, ImageSet
from ls_edge.data.decoding import decode

MAX_SCALED_PIXELS = 1 << 24
_WAIT_S = 0.1
"""Seconds between two calls of ``on_wait``."""

T = TypeVar("T")


class Preprocessor:
    """Callable that converts an image to the stem's input, float32 ``[3, H, W]``; safe to share between threads."""

    def __init__(self, spec: ImageSpec) -> None:
        self.spec = spec
        self._scale = (1 / (255 * np.asarray(spec.std, dtype=np.float64))).astype(np.float32)[:, None, None]
        self._offset = (np.asarray(spec.mean) / np.asarray(spec.std)).astype(np.float32)[:, None, None]

    def __call__(
        self, image: Any, name: str = "image", on_header: Callable[[int], None] = lambda _pixels: None
    ) -> np.ndarray:
        """Return an image of any kind as float32 ``[3, H, W]``; an array of this type is checked and returned.

        See :func:`~ls_edge.data.decoding.decode` for ``on_header`` and the errors.
        """
        name = name or "image"
        if isinstance(image, np.ndarray) and image.dtype == np.float32:
            return self._checked(image, name)
        upright = self.spec.exif_orientation is True
        decoded = decode(image, name, exif_orientation=upright, keep_gray=True, on_header=on_header)
        pixels = np.asarray(self.crop(decoded, name).convert("RGB"))
        chw: np.ndarray = np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)
        chw *= self._scale
        chw -= self._offset
        return chw

    def _checked(self, array: np.ndarray, name: str) -> np.ndarray:
        shape = (3, *self.spec.size)
        if array.shape != shape:
            raise UsageError(f"{name} has shape {array.shape}, the model takes {shape}; use source.preprocess")
        if not np.isfinite(array).all():
            raise DataError(f"{name} contains NaN or infinity; correct these values, or omit the image")
        return array

    def crop(self, image: Image.Image, name: str = "image") -> Image.Image:
        """Scale and crop an RGB or gray image to the spec's size."""
        height, width = self.spec.size
        scaled_width, scaled_height = self._scaled_size(image.width, image.height)
        if scaled_width * scaled_height > MAX_SCALED_PIXELS:
            raise DataError(
                f"{name} has {image.width} x {image.height} pixels and becomes {scaled_width} x {scaled_height} when "
                "its shorter side is scaled to the model's input; crop it"
            )
        if image.size != (scaled_width, scaled_height):
            image = image.resize((scaled_width, scaled_height), Image.Resampling[self.spec.interpolation.upper()])
        if width > scaled_width or height > scaled_height:  # crop mode "border", or a crop_pct above 1 (black)
            mean = tuple(round(255 * value) for value in self.spec.mean)
            color = mean if self.spec.crop_mode == "border" else (0, 0, 0)
            padded = Image.new("RGB", (max(width, scaled_width), max(height, scaled_height)), color)
            padded.paste(image, (max(0, (width - scaled_width) // 2), max(0, (height - scaled_height) // 2)))
            image = padded
        left, top = round((image.width - width) / 2), round((image.height - height) / 2)
        return image.crop((left, top, left + width, top + height))

    def _scaled_size(self, width: int, height: int) -> tuple[int, int]:
        target_height, target_width = (math.floor(side / self.spec.crop_pct) for side in self.spec.size)
        if self.spec.crop_mode == "squash":
            return target_width, target_height
        ratios = height / target_height, width / target_width
        if self.spec.crop_mode == "border":
            return max(1, round(width / max(ratios))), max(1, round(height / max(ratios)))
        if target_height == target_width:
            if width <= height:
                return target_width, int(target_width * height / width)
            return int(target_height * width / height), target_height
        return round(width / min(ratios)), round(height / min(ratios))


def iterate(
    image_set: ImageSet,
    preprocessor: Callable[[Any, str], T],
    on_skip: Callable[[ImageRef, DataError], None] | None = None,
    *,
    on_time: Callable[[float], None] | None = None,
    on_wait: Callable[[], object] = lambda: None,
    threads: int = 2,
    ahead: int = 8,
) -> Iterator[tuple[int, ImageRef, T]]:
    """Yield ``(index, image, prepared)`` in the order of the set; prepare up to ``ahead`` images in advance.

    ``prepared`` is the result of ``preprocessor``, such as float32 ``[3, H, W]`` from a :class:`Preprocessor`.
    ``on_skip`` receives each image that cannot be used, but not the end of a camera, and ``on_time`` the milliseconds
    of each other image. ``on_wait`` is called again and again while the next image is not there. All run in the
    consumer's thread, and may raise to end the iteration. Raise :class:`DataError` at the end if no image could be
    used.
    """

    def load(image: ImageRef) -> tuple[T, float]:
        started = time.perf_counter()
        return preprocessor(image.read(), image.name), (time.perf_counter() - started) * 1e3

    used = 0
    first: DataError | None = None
    live = image_set.live
    ahead = ahead if live is None else 1  # a frame that waits becomes outdated
    pending: deque[tuple[int, ImageRef, Future[tuple[T, float]]]] = deque()
    upcoming = enumerate(image_set.images)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
    try:
        while True:
            while len(pending) < ahead and (item := next(upcoming, None)) is not None:
                pending.append((*item, pool.submit(load, item[1])))
            if not pending:
                break
            index, image, future = pending.popleft()
            while not wait((future,), _WAIT_S).done:
                on_wait()
            try:
                array, milliseconds = future.result()
            except DataError as error:
                first = first or error
                if live is not None and live.problem:
                    break
                if on_skip is not None:
                    on_skip(image, error)
                continue
            if on_time is not None:
                on_time(milliseconds)
            used += 1
            yield index, image, array
    finally:
        if live is not None:
            live.close()
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
    """Yield images float32 ``[B, 3, H, W]`` and labels int64 ``[B]`` of a labeled set, in batches of ``size``.

    The last batch may be smaller. ``on_skip`` and errors are those of :func:`iterate`.
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
