"""Codecs, which write tokens on the wire.

A new codec is a class and an entry of :data:`CODECS` here, with a row of the table in ``PROTOCOL.md``, or a class of
another package.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ls_edge.core import plugins
from ls_edge.core.errors import UsageError, WireError

Tokens = NDArray[np.float32]
"""``[1, N, D]`` float32, C-contiguous."""
_FP16_MAX = np.float32(np.finfo(np.float16).max)
_FP16_EXPONENT = 0x7C00
"""Bits of a half-precision number that are all set only in NaN and infinity."""


class WireCodec(ABC):
    """Format of tokens; ``CODECS`` has one instance of each subclass. All numbers are little-endian."""

    name: ClassVar[str]
    replay_tolerance: ClassVar[float]
    """Largest difference between the logits of an answer and of its replay, relative to the largest logit
    (guarantee R2). The error grows with the number of hops; these are the tested limits."""
    value_bytes: ClassVar[int]

    def wire_bytes(self, count: int, dim: int) -> int:
        """Return the length in bytes of ``count`` tokens of ``dim`` values."""
        return count * dim * self.value_bytes

    @abstractmethod
    def encode(self, tokens: Tokens) -> memoryview:
        """Encode tokens ``[1, N, D]``."""

    @abstractmethod
    def decode(self, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
        """Decode tokens ``[1, count, dim]`` from a frame of the right length; NaN and infinity pass."""


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
