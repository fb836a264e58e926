"""What travels in the frames of RUN: tokens, in a codec that has a name, images and logits.

A new codec is a file in this folder, an entry of :data:`CODECS` and a row of the table in ``PROTOCOL.md``. Errors of
the logits after replay grow with the hops; :data:`REPLAY_TOLERANCE` holds what is tested.
"""

from __future__ import annotations

import numpy as np

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import WireError
from ls_edge.core.parts import STEM, has_ends
from ls_edge.runtime.protocol.codecs.fp16 import Fp16
from ls_edge.runtime.protocol.codecs.image import MAX_IMAGE, EncodedImage
from ls_edge.runtime.protocol.codecs.int8 import Int8
from ls_edge.runtime.protocol.codecs.raw import Raw
from ls_edge.runtime.protocol.codecs.wire_codec import Tokens, WireCodec
from ls_edge.runtime.protocol.messages import Itinerary as Itinerary
from ls_edge.runtime.protocol.messages import Run

CODECS: dict[str, WireCodec] = {codec.name: codec for codec in (Raw(), Fp16(), Int8())}

REPLAY_TOLERANCE = {codec.name: codec.replay_tolerance for codec in CODECS.values()}
"""Largest difference of logits, over the largest logit, between an answer and its replay (guarantee R2)."""

IMAGE, LOGITS = "image", "logits"
"""In the place of a codec: an encoded image before the stem has run, and the logits after the head has."""
PAYLOADS = (*CODECS, IMAGE, LOGITS)
Payload = Tokens | EncodedImage
"""Tokens ``[1, N, D]``, logits ``[1, C]``, or an image."""

_FP16_EXPONENT = 0x7C00
"""Bits of a half-precision number that are all set in NaN and infinity, and in nothing else."""


def codec_of(name: str) -> WireCodec:
    """Return the codec of a name; raises :class:`WireError` for an unknown one."""
    if name not in CODECS:
        raise WireError(f"unknown codec {name!r}; this version supports {', '.join(CODECS)}")
    return CODECS[name]


def wire_bytes(codec: str, count: int, dim: int) -> int:
    """Return the length in bytes of ``count`` tokens of ``dim`` values; raises as :func:`codec_of`."""
    return codec_of(codec).wire_bytes(count, dim)


def encode(codec: str, tokens: Tokens) -> memoryview:
    """Write tokens ``[1, N, D]``, which must not change while they are sent; raises as :func:`codec_of`."""
    return codec_of(codec).encode(tokens)


def decode(codec: str, frame: memoryview | bytes, count: int, dim: int) -> Tokens:
    """Read tokens ``[1, count, dim]``; raises :class:`WireError` where length or codec is not what was announced.

    Values that are not finite pass: they are numbers of the model's, not a malformed frame.
    """
    found = codec_of(codec)
    expected = found.wire_bytes(count, dim)
    if len(frame) != expected:
        raise WireError(
            f"tokens frame of {len(frame)} bytes, {expected} expected for {count} x {dim} as {codec}; dropped"
        )
    return found.decode(frame, count, dim)


def payload_of(itinerary: Itinerary) -> str:
    """Return what travels at this point of an itinerary: an image, logits, or tokens (an empty string)."""
    if STEM in itinerary.remaining:
        return IMAGE
    return LOGITS if itinerary.has_stem and not has_ends(itinerary.remaining) else ""


def check_payload(run: Run, manifest: Manifest) -> None:
    """Raise :class:`WireError` unless what a RUN announces is what the model has at this point of its itinerary."""
    kind, codec, shape = payload_of(run.itinerary), run.codec, (run.count, run.dim)
    if kind == IMAGE:
        if codec != IMAGE or run.dim != 1 or run.count > MAX_IMAGE:
            raise WireError(f"{codec} of {run.count} x {run.dim}, an image of at most {MAX_IMAGE} bytes has to come")
        return
    is_done, tokens = kind == LOGITS, manifest.tokens
    wanted = (1, len(manifest.classes)) if is_done else (tokens.count, tokens.dim)
    if shape != wanted or (codec == LOGITS) != is_done or codec == IMAGE:
        what, kind = codec if codec in (IMAGE, LOGITS) else "tokens", LOGITS if is_done else "tokens"
        theirs = f"{'' if what == kind else f'{kind} '}{wanted[0]} x {wanted[1]}"
        raise WireError(f"{what} {shape[0]} x {shape[1]}, the model has {theirs}; dropped")


def write_payload(payload: Payload, codec: str) -> tuple[memoryview, str, int, int]:
    """Return the frame of a payload, with the codec, count and dim of its RUN; ``codec`` is that of tokens."""
    if isinstance(payload, EncodedImage):
        return memoryview(payload.content), IMAGE, len(payload.content), 1
    if payload.ndim == 2:
        return encode("raw", payload), LOGITS, *payload.shape
    return encode(codec, payload), codec, *payload.shape[1:]


def read_payload(run: Run, frame: memoryview | bytes) -> Payload:
    """Read the frame of a RUN that :func:`check_payload` has passed; raises as :func:`decode`."""
    if run.codec == IMAGE:
        if len(frame) != run.count:
            raise WireError(f"image frame of {len(frame)} bytes, {run.count} announced; dropped")
        return EncodedImage(bytes(frame))
    if run.codec == LOGITS:
        return decode("raw", frame, run.count, run.dim).reshape(run.count, run.dim)
    return decode(run.codec, frame, run.count, run.dim)


def is_finite(tokens: np.ndarray) -> bool:
    """Whether no value is NaN or infinity; its cost is in ``docs/measurements.md``.

    Half-precision values are looked at as integers, since numpy converts them one by one. A dot product of the values
    with themselves would be no cheaper, overflows for large finite values, and may wake its library's threads.
    """
    if tokens.dtype == np.float16:
        return not tokens.size or int((tokens.view(np.uint16) & _FP16_EXPONENT).max()) < _FP16_EXPONENT
    return 0 not in np.isfinite(tokens).tobytes()  # a third of the time of all() where there are few values
