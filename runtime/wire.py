"""Every message that processes exchange, and how it becomes frames. ``PROTOCOL.md`` beside this file says it in words.

A message is one or two ZeroMQ frames: a header, and the tokens where it carries any. The header is ``LS``, the major
version in one byte, then MessagePack of one of the tagged structs below. Nothing is used before it was checked:
:func:`decode` raises :class:`WireError` for all that is not exactly a message, and :func:`ls_edge.runtime.codec.decode`
does the same for tokens.

Left out: who sends what when (``routing``), sockets (``links``).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ls_edge.errors import WireError

MAJOR, MINOR = 1, 0
_MAGIC = b"LS"
_PREFIX = _MAGIC + bytes([MAJOR])
MAX_HEADER = 64 * 1024
"""Longest header in bytes; an itinerary of a thousand blocks fits."""


class Ticket(NamedTuple):
    """Identity of one transfer: a request, a branch of it, and how many transfers that branch made before."""

    session: bytes
    """128 random bits a source process."""
    request: int
    branch: int
    """64 random bits; a copy that is sent again starts a new branch."""
    hop: int

    @property
    def key(self) -> RequestKey:
        """The request that this transfer belongs to."""
        return (self.session, self.request)


RequestKey = tuple[bytes, int]
Ran = tuple[int, str]
"""A block, and who ran it."""


class VisitRow(msgspec.Struct, frozen=True, array_like=True):
    """The time that a request spent with one holder, in microseconds of that holder's clock."""

    holder: str
    blocks: tuple[int, ...]
    queue_us: int
    engine_us: int
    codec_us: int


class Itinerary(msgspec.Struct, frozen=True, array_like=True):
    """What a request has been through and what remains; it travels with the tokens."""

    source: str
    policy: str
    remaining: tuple[int, ...]
    """Blocks still to run, the most wanted first: the trained order, or a permutation that was drawn."""
    max_skips: int
    via_source: bool = False
    """Whether every hop goes through the source (for peers that cannot reach each other)."""
    waves: tuple[tuple[tuple[Ran, ...], ...], ...] = ()
    """What ran: waves of tracks of (block, holder)."""
    skipped: tuple[int, ...] = ()
    visits: tuple[VisitRow, ...] = ()
    relays: tuple[str, ...] = ()
    """Holders that passed the tokens on without running a block, since the last block that ran."""

    @property
    def blocks_done(self) -> int:
        """How many blocks ran; the slot of the next one."""
        return sum(len(track) for wave in self.waves for track in wave)

    def ran(self, block: int, holder: str) -> Itinerary:
        """Return the itinerary after ``holder`` ran ``block`` on the one track."""
        if self.waves and len(self.waves[-1]) == 1:
            waves = (*self.waves[:-1], ((*self.waves[-1][0], (block, holder)),))
        else:
            waves = (*self.waves, (((block, holder),),))
        return msgspec.structs.replace(
            self, waves=waves, remaining=tuple(b for b in self.remaining if b != block), relays=()
        )

    def skip_rest(self) -> Itinerary:
        """Return the itinerary with all that remains skipped."""
        return msgspec.structs.replace(self, skipped=(*self.skipped, *self.remaining), remaining=())


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


class Hello(_Message, frozen=True, tag="hello"):
    """First message on a link, from both sides, and again when what it says changes."""

    name: str
    role: str
    """``peer`` or ``source``."""
    incarnation: int
    """Random for each process start."""
    minor: int
    model_id: str
    bundle_id: str
    blocks: tuple[int, ...] = ()
    engine: str = ""
    """What runs the blocks, for reports."""
    codec: str = "raw"
    """How this process wants its tokens."""
    session: bytes = b""
    """Of a source."""


class State(_Message, frozen=True, tag="state"):
    """How a process is; repeated, and sent at once when something matters."""

    warm: bool
    draining: bool
    stuck: bool
    """Whether its engine has not answered for longer than it should."""
    credits: int
    """Requests that it would accept now."""
    queue: int
    """Requests that wait for its engine."""
    calls: int
    """Engine calls that it has finished, ever; shows that it advances."""
    block_us: int
    """What one engine call takes it, usually."""
    reaches: tuple[str, ...] = ()
    """Names of the processes that it has a link to."""
    reach_blocks: tuple[int, ...] = ()
    """Blocks of the peers that it has a link to."""


class Bye(_Message, frozen=True, tag="bye"):
    """The sender leaves; its links will close."""

    reason: str = ""


class Run(_Message, frozen=True, tag="run"):
    """Tokens change hands: to a peer that runs blocks or relays, or (``returning``) on the way back to the source."""

    ticket: Ticket
    budget_us: int
    """Time that remains; clocks differ, so never a moment."""
    itinerary: Itinerary
    codec: str
    count: int
    dim: int
    returning: str = ""
    """Why the tokens go back, empty where they go forward."""


class Accept(_Message, frozen=True, tag="accept"):
    """The receiver of a Run keeps a copy and has nothing computed yet."""

    ticket: Ticket
    credits: int


class Refuse(_Message, frozen=True, tag="refuse"):
    """The receiver of a Run does not take it.

    ``busy``, ``draining``, ``cold`` (not warm yet), ``cancelled``, or ``tokens`` (of another model).
    """

    ticket: Ticket
    reason: str
    credits: int = 0


class Progress(_Message, frozen=True, tag="progress"):
    """The holder's engine advances; to the holder before it."""

    ticket: Ticket
    blocks_done: int


class Release(_Message, frozen=True, tag="release"):
    """The next holder has accepted: the copy that was kept for this transfer may go."""

    ticket: Ticket


class Moved(_Message, frozen=True, tag="moved"):
    """To the source: who holds a request now."""

    ticket: Ticket
    holder: str
    before: str
    """Who keeps the copy that would be routed again."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """The source needs nothing more of this request; work on it stops and a tombstone stays until ``budget_us``."""

    session: bytes
    request: int
    budget_us: int


class Complaint(_Message, frozen=True, tag="complaint"):
    """A message could not be used; to its sender."""

    what: str


Message = (
    Hello | State | Bye | Run | Accept | Refuse | Progress | Release | Moved | Cancel | Complaint
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    return _PREFIX + _encoder.encode(message)


def decode(frame: bytes | memoryview) -> Message:
    """Read a header frame; raises :class:`WireError` for everything that is not exactly a message."""
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
        message = _decoder.decode(view[3:])
    except (msgspec.MsgspecError, RecursionError, ValueError, OverflowError) as error:
        raise WireError(f"malformed header ({error}); dropped") from None
    _check(message)
    return message


def _check(message: Message) -> None:
    ticket = getattr(message, "ticket", None)
    if ticket is not None and (
        len(ticket.session) != 16 or not all(0 <= n < 2**64 for n in (ticket.request, ticket.branch, ticket.hop))
    ):
        raise WireError("ticket out of range; dropped")
    if isinstance(message, Run):
        if not (0 < message.count <= 1 << 20 and 0 < message.dim <= 1 << 20 and 0 <= message.budget_us < 1 << 50):
            raise WireError(
                f"tokens {message.count} x {message.dim}, budget {message.budget_us} us: out of range; dropped"
            )
        blocks = [block for wave in message.itinerary.waves for track in wave for block, _ in track]
        blocks += [*message.itinerary.remaining, *message.itinerary.skipped]
        if len(set(blocks)) != len(blocks) or any(b < 0 for b in blocks):
            raise WireError("itinerary names a block twice or a negative one; dropped")
    if isinstance(message, Hello) and not 0 < len(message.name) <= 63:
        raise WireError(f"hello with a name of {len(message.name)} characters, 1 to 63 are allowed; dropped")
