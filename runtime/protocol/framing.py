"""Frames of messages: encoding and decoding.

A ZeroMQ message consists of a header frame, and a frame of tokens for each RUN in it. The header is ``LS``, the major
version as one byte, then MessagePack of one message or an array of messages: the messages that a process sends to
another in one turn share a header. All input is checked: :func:`decode` raises :class:`WireError` unless all fields
have allowed values, and ``codecs`` does the same for tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ls_edge.core.errors import WireError
from ls_edge.runtime.protocol.messages import MAJOR, Itinerary, Message, Run

_MAGIC = b"LS"
_PREFIX = _MAGIC + bytes([MAJOR])
MAX_HEADER = 64 * 1024
"""Limit on a header, in bytes; an itinerary of a thousand blocks fits."""
MAX_TOGETHER = 64

_Several = Annotated[list[Message], Meta(min_length=1, max_length=MAX_TOGETHER)]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message | list[Message]] = msgspec.msgpack.Decoder(Message | _Several)


def encode(message: Message) -> bytes:
    """Return the header frame of a message."""
    return _PREFIX + _encoder.encode(message)


def encode_padded(message: Message, size: int) -> bytes:
    """Return the header frame of a message with ``size`` additional bytes, in a field that receivers ignore."""
    return _PREFIX + _encoder.encode({**msgspec.msgpack.decode(_encoder.encode(message)), "padding": bytes(size)})


def encode_body(message: Message) -> bytes:
    """Return a message as bytes for :func:`join`."""
    return _encoder.encode(message)


def join(bodies: Sequence[bytes]) -> bytes:
    """Return the header frame of 1 to :data:`MAX_TOGETHER` messages, each from :func:`encode_body`."""
    if len(bodies) == 1:
        return _PREFIX + bodies[0]
    head = bytes((0x90 | len(bodies),)) if len(bodies) < 16 else bytes((0xDC, 0, len(bodies)))
    return b"".join((_PREFIX, head, *bodies))


def decode(frame: bytes | memoryview) -> list[Message]:
    """Read the messages in a header frame; raise :class:`WireError` if any part is invalid."""
    view = memoryview(frame)
    if len(view) > MAX_HEADER:
        raise WireError(f"header of {len(view)} bytes, at most {MAX_HEADER} are allowed; dropped")
    if view[:2] != _MAGIC or len(view) < 4:
        raise WireError(f"not an ls-edge message (begins with {bytes(view[:4])!r}); check what dials this port")
    if view[2] != MAJOR:
        raise WireError(
            f"protocol version {view[2]} was received and this is version {MAJOR}; install the same major version "
            "of ls-edge on all machines"
        )
    try:
        read = _decoder.decode(view[3:])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise WireError(f"malformed header ({_PATTERN.sub('of allowed characters', str(error))}); dropped") from None
    messages = read if isinstance(read, list) else [read]
    for message in messages:
        if isinstance(message, Run):
            _check_blocks(message.itinerary)
    return messages


_PATTERN = re.compile("matching regex '.*'")


def _check_blocks(itinerary: Itinerary) -> None:
    ran = [block for wave in itinerary.waves for track in wave for block, _ in track]
    blocks = [*ran, *itinerary.remaining, *itinerary.skipped]
    if len(set(blocks)) != len(blocks):
        raise WireError("itinerary names a block twice; dropped")
