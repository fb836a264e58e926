"""Codec ``fp16``: half precision."""

from __future__ import annotations

import numpy as np

from ls_edge.runtime.protocol.codecs.wire_codec import Tokens, WireCodec

_FP16_MAX = np.float32(np.finfo(np.float16).max)


class Fp16(WireCodec):
    """Half precision: an error of at most 2**-11 of a token's largest value.

    The largest value has to be from 2**-14 to 65504; larger values and infinity become 65504.
    """

    name = "fp16"
    replay_tolerance = 1e-2
    value_bytes = 2

    def encode(self, tokens: Tokens) -> memoryview:
        """Round to half precision."""
        return np.clip(tokens, -_FP16_MAX, _FP16_MAX).astype(np.float16).data.cast("B")

    def decode(self, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
        """Widen to float32."""
        return np.frombuffer(frame, dtype=np.float16).astype(np.float32).reshape(1, count, dim)
