"""Codec ``raw``: float32 as in memory."""

from __future__ import annotations

import numpy as np

from ls_edge.runtime.protocol.codecs.wire_codec import Tokens, WireCodec


class Raw(WireCodec):
    """Exact values without a copy: the sender's array must not change while it is sent."""

    name = "raw"
    replay_tolerance = 1e-4
    value_bytes = 4

    def encode(self, tokens: Tokens) -> memoryview:
        """Return a view of the tokens."""
        return np.ascontiguousarray(tokens).data.cast("B")

    def decode(self, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
        """Return a view of the frame."""
        tokens: Tokens = np.ndarray((1, count, dim), np.float32, frame)
        return tokens
