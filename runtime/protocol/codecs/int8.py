"""Codec ``int8``: eight bits per value."""

from __future__ import annotations

import numpy as np

from ls_edge.runtime.protocol.codecs.wire_codec import Tokens, WireCodec


class Int8(WireCodec):
    """Eight bits per value and one scale per token: an error of at most 1/254 of a token's largest value.

    The largest value has to be at least 1e-30; a token with NaN or infinity becomes NaN.
    """

    name = "int8"
    replay_tolerance = 1e-1
    value_bytes = 1

    def wire_bytes(self, count: int, dim: int) -> int:
        """Return the length in bytes: the scales, then the values."""
        return count * 4 + super().wire_bytes(count, dim)

    def encode(self, tokens: Tokens) -> memoryview:
        """Round to 127 steps of each token's largest value."""
        flat = tokens[0]
        scale = np.maximum(np.abs(flat).max(axis=1), np.float32(1e-30)) / np.float32(127)
        with np.errstate(invalid="ignore"):
            values = np.rint(flat / scale[:, None])
        finite = np.isfinite(scale)
        if not finite.all():
            values[~finite], scale[~finite] = 0, np.nan
        return memoryview(scale.tobytes() + values.astype(np.int8).tobytes())

    def decode(self, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
        """Multiply by the scales."""
        scale = np.frombuffer(frame, dtype=np.float32, count=count)
        values = np.frombuffer(frame, dtype=np.int8, offset=count * 4).reshape(count, dim)
        with np.errstate(over="ignore", invalid="ignore"):
            return (values.astype(np.float32) * scale[:, None]).reshape(1, count, dim)
