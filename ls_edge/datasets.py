"""Images with labels, without torch: class folders, tars of them, and the embedded digits.

An :class:`ImageSet` lists images; reading one gives encoded bytes or raw pixels, decoding is the caller's
(``ls_edge.runtime.preprocess`` on a board, timm's transforms in training).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

Part = Literal["train", "val", "all"]


@dataclass(frozen=True)
class ImageRef:
    """One image: its name inside the set, its class, and how to read it."""

    name: str
    """Path inside the set, ``class/file``; unique."""
    label: int | None
    """Index into :attr:`ImageSet.classes`; None where the set has no labels."""
    read: Callable[[], bytes | np.ndarray]
    """Return the encoded file, or pixels uint8 ``[H, W, 3]``."""


@dataclass(frozen=True)
class ImageSet:
    """Images of one part of a data set."""

    source: str
    """What the user named."""
    part: Part
    """``all`` where the data has no parts."""
    classes: tuple[str, ...]
    images: tuple[ImageRef, ...]
