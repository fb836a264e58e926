"""Image on its way to the stem."""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_IMAGE = 1 << 20
"""Limit on an encoded image, in bytes: a few times the size of tokens, so that messages wait little longer."""


class EncodedImage(NamedTuple):
    """Image file in a format of ``ls_edge.data.decoding``, in place of tokens."""

    content: bytes
    pixels: Any = None
    """Decoded input of the stem, ``[1, 3, H, W]``; never sent."""
