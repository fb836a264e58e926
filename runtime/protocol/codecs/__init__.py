"""Payload of RUN: tokens in a named codec, images and logits.

A new codec is a file in this folder, an entry of :data:`CODECS` and a row of the table in ``PROTOCOL.md``, or a class
of another package.
"""

from __future__ import annotations

import numpy as np

from ls_edge.core import plugins
from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import UsageError, WireError
from ls_edge.core.parts import STEM, has_ends
from ls_edge.runtime.protocol.codecs.fp16 import Fp16
from ls_edge.runtime.protocol.codecs.image import MAX_IMAGE, EncodedImage
from ls_edge.runtime.protocol.codecs.int8 import Int8
from ls_edge.runtime.protocol.codecs.raw import Raw
from ls_edge.runtime.protocol.codecs.wire_codec import Tokens, WireCodec
from ls_edge.runtime.protocol.messages import Itinerary as Itinerary
from ls_edge.runtime.protocol.messages import Run

CODECS: dict[str, WireCodec] = {codec.name: codec for codec in (Raw(), Fp16(), Int8())}

IMAGE, LOGITS = "image", "logits"
"""Values in place of a codec: an encoded image before the stem has run, logits after the head has run."""
Payload = Tokens | EncodedImage
"""Tokens ``[1, N, D]``, logits ``[1, C]``, or an image."""

_FP16_EXPONENT = 0x7C00
"""Bits of a half-precision number that are all set only in NaN and infinity."""


def codec_of(name: str) -> WireCodec:
    """Return a codec of this or another package (:mod:`ls_edge.core.plugins`); raise :class:`WireError` for none."""
    if name not in CODECS:
        try:
            CODECS[name] = plugins.load("codecs", name, WireCodec, CODECS)()  # type: ignore[type-abstract]
        except UsageError as error:
            raise WireError(str(error)) from None
    return CODECS[name]


def wire_bytes(codec: str, count: int, dim: int) -> int:
    """Return the length in bytes of ``count`` tokens of ``dim`` values; raise as :func:`codec_of`."""
    return codec_of(codec).wire_bytes(count, dim)


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


def payload_of(itinerary: Itinerary) -> str:
    """Return the payload at this point of an itinerary: an image, logits, or tokens (an empty string)."""
    if STEM in itinerary.remaining:
        return IMAGE
    return LOGITS if itinerary.has_stem and not has_ends(itinerary.remaining) else ""


def check_payload(run: Run, manifest: Manifest) -> None:
    """Raise :class:`WireError` unless a RUN announces the payload that its itinerary and the model require."""
    kind, codec, shape = payload_of(run.itinerary), run.codec, (run.count, run.dim)
    if kind == IMAGE:
        if codec != IMAGE or run.dim != 1 or run.count > MAX_IMAGE:
            raise WireError(f"{codec} of {run.count} x {run.dim}, expected an image of at most {MAX_IMAGE} bytes")
        return
    is_done, tokens = kind == LOGITS, manifest.tokens
    wanted = (1, len(manifest.classes)) if is_done else (tokens.count, tokens.dim)
    if shape != wanted or (codec == LOGITS) != is_done or codec == IMAGE:
        what, kind = codec if codec in (IMAGE, LOGITS) else "tokens", LOGITS if is_done else "tokens"
        theirs = f"{'' if what == kind else f'{kind} '}{wanted[0]} x {wanted[1]}"
        raise WireError(f"{what} {shape[0]} x {shape[1]}, the model has {theirs}; dropped")


def write_payload(payload: Payload, codec: str) -> tuple[memoryview, str, int, int]:
    """Return the frame of a payload, and codec, count and dim of its RUN; ``codec`` is used for tokens."""
    if isinstance(payload, EncodedImage):
        return memoryview(payload.content), IMAGE, len(payload.content), 1
    if payload.ndim == 2:
        return encode("raw", payload), LOGITS, *payload.shape
    return encode(codec, payload), codec, *payload.shape[1:]


def read_payload(run: Run, frame: memoryview | bytes) -> Payload:
    """Decode the frame of a RUN that :func:`check_payload` has passed; raise as :func:`decode`."""
    if run.codec == IMAGE:
        if len(frame) != run.count:
            raise WireError(f"image frame of {len(frame)} bytes, {run.count} announced; dropped")
        return EncodedImage(bytes(frame))
    if run.codec == LOGITS:
        return decode("raw", frame, run.count, run.dim).reshape(run.count, run.dim)
    return decode(run.codec, frame, run.count, run.dim)


def is_finite(tokens: np.ndarray) -> bool:
    """Return whether no value is NaN or infinity; ``docs/results.md`` has the cost.

    Half-precision values are compared as integers, since numpy converts them one by one. A dot product of the values
    with themselves would be no cheaper, overflows for large finite values, and may wake threads of its library.
    """
    if tokens.dtype == np.float16:
        return not tokens.size or int((tokens.view(np.uint16) & _FP16_EXPONENT).max()) < _FP16_EXPONENT
    return 0 not in np.isfinite(tokens).tobytes()  # a third of the time of all() for few values
