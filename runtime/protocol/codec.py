"""How tokens are written on the wire: ``raw`` float32, ``fp16``, or ``int8`` with one scale a token.

The tolerance of each, as largest error of a value over the largest value of its token: ``raw`` 0; ``fp16`` 2**-11 where
that largest value is from 2**-14 to 65504 (what is larger, infinity too, becomes 65504); ``int8`` 1/254 where it is at
least 1e-30 (a token with a value that is not finite becomes NaN). Errors of the logits after replay grow with the hops;
:data:`REPLAY_TOLERANCE` states what is tested. All numbers are little-endian.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ls_edge.errors import WireError

Tokens = NDArray[np.float32]
"""``[1, N, D]`` float32, C-contiguous."""

CODECS = ("raw", "fp16", "int8")

REPLAY_TOLERANCE = {"raw": 1e-4, "fp16": 1e-2, "int8": 1e-1}
"""Largest difference of logits, over the largest logit, between an answer and its replay (guarantee R2)."""

_FP16_EXPONENT = 0x7C00
"""Bits of a half-precision number that are all set in NaN and infinity, and in nothing else."""

_FP16_MAX = np.float32(np.finfo(np.float16).max)


def wire_bytes(codec: str, count: int, dim: int) -> int:
    """Length in bytes of ``count`` tokens of ``dim`` values; raises :class:`WireError` for an unknown codec."""
    if codec == "raw":
        return count * dim * 4
    if codec == "fp16":
        return count * dim * 2
    if codec == "int8":
        return count * 4 + count * dim
    raise WireError(f"unknown codec {codec!r}; this version knows {', '.join(CODECS)}")


def encode(codec: str, tokens: Tokens) -> memoryview:
    """Write tokens ``[1, N, D]``; ``raw`` does not copy, so the array must not change while it is sent."""
    if codec == "raw":
        return np.ascontiguousarray(tokens).data.cast("B")
    if codec == "fp16":
        return np.clip(tokens, -_FP16_MAX, _FP16_MAX).astype(np.float16).data.cast("B")
    if codec == "int8":
        flat = tokens[0]
        scale = np.maximum(np.abs(flat).max(axis=1), np.float32(1e-30)) / np.float32(127)
        with np.errstate(invalid="ignore"):
            values = np.rint(flat / scale[:, None])
        finite = np.isfinite(scale)
        if not finite.all():
            values[~finite], scale[~finite] = 0, np.nan
        return memoryview(scale.tobytes() + values.astype(np.int8).tobytes())
    raise WireError(f"unknown codec {codec!r}; this version knows {', '.join(CODECS)}")


def decode(codec: str, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
    """Read tokens ``[1, count, dim]``; raises :class:`WireError` where length or codec is not what was announced.

    ``raw`` gives a view of the frame. Values that are not finite pass: they are numbers of the model's, not a
    malformed frame.
    """
    expected = wire_bytes(codec, count, dim)
    if len(frame) != expected:
        raise WireError(
            f"tokens frame of {len(frame)} bytes, {expected} expected for {count} x {dim} as {codec}; dropped"
        )
    if codec == "raw":
        return np.frombuffer(frame, dtype=np.float32).reshape(1, count, dim)
    if codec == "fp16":
        return np.frombuffer(frame, dtype=np.float16).astype(np.float32).reshape(1, count, dim)
    scale = np.frombuffer(frame, dtype=np.float32, count=count)
    values = np.frombuffer(frame, dtype=np.int8, offset=count * 4).reshape(count, dim)
    with np.errstate(over="ignore", invalid="ignore"):
        return (values.astype(np.float32) * scale[:, None]).reshape(1, count, dim)


def is_finite(tokens: np.ndarray) -> bool:
    """Whether no value is NaN or infinity; ``docs/measurements.md`` says what it takes.

    Half-precision values are looked at as integers, since numpy converts them one by one. A dot product of the values
    with themselves would be no cheaper, overflows for large finite values, and may wake its library's threads.
    """
    if tokens.dtype == np.float16:
        return not tokens.size or int((tokens.view(np.uint16) & _FP16_EXPONENT).max()) < _FP16_EXPONENT
    return 0 not in np.isfinite(tokens).tobytes()  # a third of the time of all() where there are few values
