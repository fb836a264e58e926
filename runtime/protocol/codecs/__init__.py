"""Codecs, which write tokens on the wire.

A new codec is a file in this folder, an entry of :data:`CODECS` and a row of the table in ``PROTOCOL.md``, or a class
of another package.
"""

from __future__ import annotations

import numpy as np

from ls_edge.core import plugins
from ls_edge.core.errors import UsageError, WireError
from ls_edge.runtime.protocol.codecs.fp16 import Fp16
from ls_edge.runtime.protocol.codecs.int8 import Int8
from ls_edge.runtime.protocol.codecs.raw import Raw
from ls_edge.runtime.protocol.codecs.wire_codec import Tokens as Tokens
from ls_edge.runtime.protocol.codecs.wire_codec import WireCodec as WireCodec

_FP16_EXPONENT = 0x7C00
"""Bits of a half-precision number that are all set only in NaN and infinity."""


CODECS: dict[str, WireCodec] = {codec.name: codec for codec in (Raw(), Fp16(), Int8())}


def codec_of(name: str) -> WireCodec:
    """Return a codec of this or another package (:mod:`ls_edge.core.plugins`); raise :class:`WireError` for none."""
    if name not in CODECS:
        try:
            CODECS[name] = plugins.load("codecs", name, WireCodec, CODECS)()  # type: ignore[type-abstract]
        except UsageError as error:
            raise WireError(str(error)) from None
    return CODECS[name]


def encode(codec: str, tokens: Tokens) -> memoryview:
    """Encode tokens ``[1, N, D]``, which must not change while they are sent; raise as :func:`codec_of`."""
    return codec_of(codec).encode(tokens)


def decode(codec: str, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
    """Decode tokens ``[1, count, dim]``; raise :class:`WireError` if the length does not fit, or for an unknown codec.

    NaN and infinity pass: they are output of a model, not a malformed frame.
    """
    found = codec_of(codec)
    expected = found.wire_bytes(count, dim)
    if len(frame) != expected:
        raise WireError(
            f"tokens frame of {len(frame)} bytes, {expected} expected for {count} x {dim} as {codec}; dropped"
        )
    return found.decode(frame, count, dim)


def is_finite(tokens: np.ndarray) -> bool:
    """Return whether no value is NaN or infinity; ``docs/results.md`` has the cost.

    Half-precision values are compared as integers, since numpy converts them one by one. A dot product of the values
    with themselves would be no cheaper, overflows for large finite values, and may wake threads of its library.
    """
    if tokens.dtype == np.float16:
        return not tokens.size or int((tokens.view(np.uint16) & _FP16_EXPONENT).max()) < _FP16_EXPONENT
    return 0 not in np.isfinite(tokens).tobytes()  # a third of the time of all() for few values
