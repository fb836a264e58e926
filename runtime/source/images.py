"""Images that :meth:`Source.submit` accepts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.decoding import PixelSource
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.protocol.codecs import is_finite

Image = PixelSource | str | Path
"""Preprocessed float32 ``[3, H, W]``; or uint8 ``[H, W, 3]``, the bytes or the path of a file, or a Pillow image."""


def reader_of(spec: ImageSpec) -> tuple[Preprocessor, Callable[[Image, str], np.ndarray]]:
    """Return the preprocessor of a model, and a function that reads an image for its stem."""
    preprocess = Preprocessor(spec)
    return preprocess, lambda image, name: read_image(image, name, preprocess)


def read_image(image: Image, name: str, preprocess: Preprocessor) -> np.ndarray:
    """Return an image as float32 ``[3, H, W]``, preprocessed if needed.

    Raise :class:`DataError` with ``name`` for an image that cannot be read or contains NaN or infinity, and
    :class:`UsageError` for an array of another shape or any other object.
    """
    if isinstance(image, np.ndarray) and image.dtype == np.float32:
        shape = (3, *preprocess.spec.size)
        if image.shape != shape:
            raise UsageError(f"image has shape {image.shape}, the model takes {shape}; use source.preprocess")
        array = image
    elif isinstance(image, (str, Path)):
        try:
            array = preprocess(Path(image).read_bytes(), name)
        except OSError as error:
            raise DataError(f"cannot read {image}: {error.strerror}") from None
    elif isinstance(image, PixelSource):
        array = preprocess(image, name or "image")
    else:
        raise UsageError(
            f"image must be an array, a Pillow image, or the bytes or the path of a file, not {type(image).__name__}"
        )
    if not is_finite(array):
        raise DataError(f"{name or 'image'} contains NaN or infinity; correct these values, or omit the image")
    return array
