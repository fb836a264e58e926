"""Payload of RUN: tokens in a named codec, an image, or logits."""

from __future__ import annotations

from typing import Any, NamedTuple

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import WireError
from ls_edge.core.parts import STEM, has_ends
from ls_edge.runtime.protocol.codecs import Tokens, decode, encode
from ls_edge.runtime.protocol.messages import Itinerary, Run

MAX_IMAGE = 1 << 20
"""Limit on an encoded image, in bytes: a few times the size of tokens, so that messages wait little longer."""
IMAGE, LOGITS = "image", "logits"
"""Values in place of a codec: an encoded image before the stem has run, logits after the head has run."""


class EncodedImage(NamedTuple):
    """Image file in a format of ``ls_edge.data.decoding``, in place of tokens."""

    content: bytes
    pixels: Any = None
    """Decoded input of the stem, ``[1, 3, H, W]``; never sent."""


Payload = Tokens | EncodedImage
"""Tokens ``[1, N, D]``, logits ``[1, C]``, or an image."""


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
