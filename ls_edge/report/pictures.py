"""Arrays as small PNG pictures in data URIs."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from PIL import Image

LEAST_SIDE = 96
"""Width in pixels below which pictures are enlarged."""


class Picture(msgspec.Struct, frozen=True):
    """A picture and its caption."""

    text: str
    source: str
    """PNG file as a data URI."""


def picture(values: np.ndarray) -> str:
    """Return values from 0 to 1, ``[H, W]`` (gray) or ``[H, W, 3]``, as a PNG file in a data URI; NaN is transparent.

    Small pictures are enlarged by a whole factor.
    """
    from PIL import Image  # which most reports do not need

    colors = values if values.ndim == 3 else np.repeat(values[..., None], 3, axis=2)
    solid = np.isfinite(colors).all(axis=2, keepdims=True)
    pixels = np.concatenate((np.clip(np.where(solid, colors, 0.0), 0, 1), solid), axis=2)
    times = -(-LEAST_SIDE // pixels.shape[1])
    made = Image.fromarray((255 * pixels).round().astype(np.uint8))
    return data_uri(made.resize((times * made.width, times * made.height), Image.Resampling.NEAREST))


def data_uri(image: Image.Image) -> str:
    """Return an image as a PNG file in a data URI."""
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"


def tiles(arrays: Sequence[np.ndarray] | np.ndarray, columns: int, gap: int = 1) -> np.ndarray:
    """Arrange arrays of the same shape in ``columns``, ``gap`` transparent values apart."""
    first = np.asarray(arrays[0])
    height, width = first.shape[0] + gap, first.shape[1] + gap
    rows = -(-len(arrays) // columns)
    sheet = np.full((rows * height - gap, columns * width - gap, *first.shape[2:]), np.nan)
    for number, one in enumerate(arrays):
        top, left = number // columns * height, number % columns * width
        sheet[top : top + height - gap, left : left + width - gap] = one
    return sheet


def shades(values: np.ndarray) -> np.ndarray:
    """Scale values from 0 (black, the smallest) to 1 (white, the largest)."""
    low, high = float(values.min()), float(values.max())
    found: np.ndarray = (values - low) / max(high - low, np.finfo(np.float64).tiny)
    return found


def around_gray(values: np.ndarray) -> np.ndarray:
    """Scale values so that 0 becomes gray (0.5) and the largest magnitude becomes black or white."""
    found: np.ndarray = 0.5 + values / (2 * max(float(np.abs(values).max()), np.finfo(np.float64).tiny))
    return found
