"""An image on its way to the stem: the encoded file, and what a peer has decoded of it."""

from __future__ import annotations

from typing import Any, NamedTuple

MAX_IMAGE = 1 << 20
"""Limit on an encoded image, in bytes: a few times the tokens of a model, so that no message waits much longer."""


class EncodedImage(NamedTuple):
    """A JPEG, PNG or another format of ``ls_edge.data.decoding``; it stands in the place of tokens."""

    content: bytes
    pixels: Any = None
    """The stem's input ``[1, 3, H, W]`` where this process has decoded it; it does not travel."""
