"""Every message that processes exchange, and how it becomes frames. ``PROTOCOL.md`` beside this file specifies them.

A message is one or two ZeroMQ frames: a header, and the tokens where it carries any. The header is ``LS``, the major
version in one byte, then MessagePack of one of the tagged structs below, or of an array of them: what a process sends
to another in one turn of its loop can go as one header, with the tokens of its RUNs in their order behind it. All input
is checked: :func:`decode_all` raises :class:`WireError` for bytes that are not exactly that, and ``codecs.decode`` does
the same for tokens.

Elsewhere: the order of messages (``routing``), sockets (``links``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import WireError
from ls_edge.core.peers_file import Name
from ls_edge.core.records import COUNT, Count, Microseconds, ShortText, Visit

MAJOR, MINOR = 2, 4
MINOR_OF_ONE = 1
"""Announced by processes of this package that read one message in a header, and no more."""
MINOR_OF_SEVERAL = 2
"""First minor version whose processes read several messages in one header."""
MINOR_OF_DEMANDS = 4
"""First minor version whose processes keep :attr:`Run.bundle_id`."""
MINOR_OF_CHANGES = 4
"""First minor version whose processes do not expect STATE from a neighbour whose STATE has not changed."""
_MAGIC = b"LS"
_PREFIX = _MAGIC + bytes([MAJOR])
MAX_LATENCY_WEIGHT = 1e6
"""Most that a second may be worth, in nats."""
MAX_FAR = 6
"""Most distances in :attr:`State.far_blocks`: a STATE shows what is up to 7 links away. Where links form a circle, the
news that a holder has gone takes so many STATE to get round."""
MAX_HEADER = 64 * 1024
"""Longest header in bytes; an itinerary of a thousand blocks fits."""
MAX_TOGETHER = 64
"""Most messages in one header."""
MAX_BUDGET_US = 600_000_000
"""Longest budget of a request: ten minutes. Work for a source that never returns ends with it at the latest."""
MAX_AVOID = 16
"""Most processes that an itinerary names to be avoided."""
MAX_CANCELLED = 1024
"""Most requests that one CANCEL names."""
MAX_CHUNK = 48 * 1024
"""Most bytes of a file in one message. It delays what else is on its way by 0.4 ms at 1 Gbit/s."""
MAX_MANIFEST = 16 * 1024 * 1024
"""Longest ``manifest.json`` that may be offered, in bytes."""
MAX_FINDINGS = 64
"""Most rows of a FINDINGS."""
MAX_FILE = 2**40
"""Bound of sizes of files and of places in them."""
MAX_EXPLANATION = 4096
"""Longest explanation of a COMPLAINT, in characters."""
_DIGEST_BYTES = 32

# A number that fits its type cannot overflow what is computed from it, nor its own header.
Id64 = Annotated[int, Meta(ge=0)]
"""64 bits; MessagePack itself has no larger integers."""
Hops = Annotated[int, Meta(ge=0, lt=COUNT - 1)]
"""One less than other counts, since the next transfer adds one."""
Budget = Annotated[int, Meta(ge=0, le=MAX_BUDGET_US)]
"""Remaining time, in microseconds."""
TokenSize = Annotated[int, Meta(ge=1, le=1 << 20)]
FileSize = Annotated[int, Meta(ge=0, lt=MAX_FILE)]
Digest = Annotated[bytes, Meta(min_length=_DIGEST_BYTES, max_length=_DIGEST_BYTES)]
"""SHA-256."""
Blocks = tuple[Count, ...]
RequestId = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""128 random bits, which only processes with the tokens of the request have."""
Ran = tuple[Count, Name]
"""A block, and the process that ran it."""
Track = Annotated[tuple[Ran, ...], Meta(min_length=1)]
Wave = Annotated[tuple[Track, ...], Meta(min_length=1)]


class TransferId(NamedTuple):
    """Identity of one transfer: a request, a branch of it, and how many transfers it took to get here."""

    request: RequestId
    branch: Id64
    """64 random bits; a copy that is sent again starts a new branch."""
    hop: Hops
    """Transfers from the source to here, this one included; 0 in the source, whose own copy was never sent."""


class _Text(str, Enum):
    """A word of the wire; on Python 3.10 there is no ``enum.StrEnum``."""

    __str__ = str.__str__


class RefuseReason(_Text):
    """Why a receiver does not take a Run; receivers of a Refuse accept other words too."""

    BUSY = "busy"
    DRAINING = "draining"
    COLD = "cold"
    CANCELLED = "cancelled"
    NOT_FINITE = "not finite"
    OTHER_BUNDLE = "other bundle"


class ReturnReason(_Text):
    """Why tokens go back to the source; receivers of a Run accept other words too."""

    DONE = "done"
    UNREACHABLE = "unreachable"
    CREDIT = "credit"
    BUDGET = "budget"
    VIA_SOURCE = "via source"
    HOPS = "hops"
    NOT_FINITE = "not finite"


class TrackRef(msgspec.Struct, frozen=True, array_like=True):
    """What makes tokens a track of a wave: its joiner is the itinerary's ``source``, and gets them back."""

    wave: Id64
    """64 random bits."""
    index: Count
    """Which track of it."""
    before: Count
    """Blocks that ran ahead of the wave: the slot of the track's first block."""
    origin: Name
    """The source of the request, from which a CANCEL of the track is believed."""


class Itinerary(msgspec.Struct, frozen=True, array_like=True):
    """What a request has been through and what remains; it travels with the tokens."""

    source: Name
    policy: ShortText
    remaining: Blocks
    """Blocks still to run, in the preferred order: the trained one, or a permutation that was drawn."""
    max_skips: Count
    via_source: bool = False
    """Whether every hop goes through the source (for peers that cannot reach each other)."""
    waves: tuple[Wave, ...] = ()
    """What ran: waves of tracks of (block, holder)."""
    skipped: Blocks = ()
    visits: tuple[Visit, ...] = ()
    relays: tuple[Name, ...] = ()
    """Holders that passed the tokens on without running a block, since the last block that ran."""
    latency_weight: Annotated[float, Meta(ge=0, le=MAX_LATENCY_WEIGHT)] = 1.0
    """What a second is worth to the policy ``quality``, in nats of log-likelihood."""
    waves_wanted: Count = 0
    """Waves in which the policy ``parallel`` runs a model; 0 for every other policy."""
    on_straggler: ShortText = "later"
    """What becomes of blocks whose track did not come back: they run ``later``, or are left out (``skip``)."""
    track: TrackRef | None = None
    avoid: Annotated[tuple[Name, ...], Meta(max_length=MAX_AVOID)] = ()
    """Processes that returned this request without progress, or not at all; set by its source, holders avoid them."""
    codec: ShortText = ""
    """Codec in which holders send these tokens, whatever their receivers announce; empty for what those announce."""
    hand_to: ShortText = ""
    """Peer that the first holder hands the tokens to before a block runs: how links are measured. Empty for nobody."""

    @property
    def owner(self) -> str:
        """The source of the request; of a track, that of the request which it is a part of."""
        return self.source if self.track is None else self.track.origin

    @property
    def arrangement(self) -> Arrangement:
        """What ran, without the holders."""
        return Arrangement(tuple(tuple(tuple(b for b, _ in track) for track in wave) for wave in self.waves))

    @property
    def blocks(self) -> int:
        """How many blocks it names."""
        return sum(len(track) for wave in self.waves for track in wave) + len(self.remaining) + len(self.skipped)

    @property
    def blocks_done(self) -> int:
        """How many blocks ran; the slot of the next one."""
        before = 0 if self.track is None else self.track.before
        return before + sum(len(track) for wave in self.waves for track in wave)

    def ran(self, blocks: Sequence[int], holder: str) -> Itinerary:
        """Return the itinerary after ``holder`` ran ``blocks`` one after the other on the one track."""
        steps = tuple((block, holder) for block in blocks)
        if self.waves and len(self.waves[-1]) == 1:
            waves = (*self.waves[:-1], ((*self.waves[-1][0], *steps),))
        else:
            waves = (*self.waves, (steps,))
        return msgspec.structs.replace(
            self, waves=waves, remaining=tuple(b for b in self.remaining if b not in blocks), relays=()
        )

    def joined(self, tracks: tuple[tuple[Ran, ...], ...]) -> Itinerary:
        """Return the itinerary after a wave of ``tracks``."""
        if len(tracks) == 1:
            after = self
            for block, holder in tracks[0]:
                after = after.ran((block,), holder)
            return after
        ran = {block for track in tracks for block, _ in track}
        return msgspec.structs.replace(
            self, waves=(*self.waves, tracks), remaining=tuple(b for b in self.remaining if b not in ran), relays=()
        )

    def skip(self, blocks: tuple[int, ...]) -> Itinerary:
        """Return the itinerary with these of the remaining blocks skipped."""
        remaining = tuple(block for block in self.remaining if block not in blocks)
        return msgspec.structs.replace(self, skipped=(*self.skipped, *blocks), remaining=remaining)


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


class _Description(_Message, frozen=True):
    name: Name
    role: ShortText
    """``peer``, ``source``, ``observer`` or ``pusher``."""
    incarnation: Id64
    """Random for each process start."""
    minor: Count
    model_id: ShortText
    bundle_id: ShortText
    blocks: Blocks = ()
    engine: ShortText = ""
    """What runs the blocks, for reports."""
    codec: ShortText = "raw"
    """The codec in which this process is to be sent tokens."""
    note: ShortText | msgspec.UnsetType = msgspec.UNSET
    """Why a peer does not serve the bundle that it should, for ``ls-edge status``."""


class Hello(_Description, frozen=True, tag="hello"):
    """Description of the sender: first message of who dialled a link, and again when it changes."""


class Welcome(_Description, frozen=True, tag="welcome"):
    """Answer to a Hello that was taken: description of the sender. Never answered."""


class State(_Message, frozen=True, tag="state"):
    """How a process is; repeated, and sent at once when something matters."""

    warm: bool
    draining: bool
    stuck: bool
    """Whether its engine has not answered for longer than it should."""
    credits: Count
    """Requests that it would accept now."""
    queue: Count
    """Requests that wait for its engine."""
    calls: Id64
    """Engine calls that it has finished, ever; shows that it advances."""
    block_us: Microseconds
    """What one block takes it, usually."""
    wait_us: Microseconds = 0
    """What its engine has to do before it could begin with something new."""
    reaches: tuple[Name, ...] = ()
    """Names of the processes that it has a link to."""
    reach_blocks: Blocks = ()
    """Blocks of the peers that it has a link to."""
    far_blocks: Annotated[tuple[Blocks, ...], Meta(max_length=MAX_FAR)] = ()
    """Blocks that are 2, 3, … links away from it, by the shortest way that does not begin at the receiver."""


class Bye(_Message, frozen=True, tag="bye"):
    """The sender leaves; its links will close."""

    reason: ShortText = ""


class Run(_Message, frozen=True, tag="run"):
    """Tokens change hands: to a peer that runs blocks or relays, or (``returning``) on the way back to the source."""

    transfer: TransferId
    budget_us: Budget
    """Time that remains; clocks differ, so never a moment."""
    itinerary: Itinerary
    codec: ShortText
    count: TokenSize
    dim: TokenSize
    returning: ShortText = ""
    """Why the tokens go back (:class:`ReturnReason`); empty where they go forward."""
    bundle_id: ShortText | msgspec.UnsetType = msgspec.UNSET
    """The only bundle whose blocks may run on these tokens; unset for any bundle of the model."""


class Accept(_Message, frozen=True, tag="accept"):
    """The receiver of a Run keeps a copy and has nothing computed yet."""

    transfer: TransferId
    credits: Count


class Refuse(_Message, frozen=True, tag="refuse"):
    """The receiver of a Run does not take it.

    ``reason`` is a word of :class:`RefuseReason`.
    """

    transfer: TransferId
    reason: ShortText
    credits: Count = 0


class Progress(_Message, frozen=True, tag="progress"):
    """The holder is well, and so are the tokens; to the holder before it."""

    transfer: TransferId
    blocks_done: Count


class Release(_Message, frozen=True, tag="release"):
    """The next holder has accepted: the copy that was kept for this transfer may go."""

    transfer: TransferId
    holder: Name
    """The next holder."""
    link_us: Microseconds = 0
    """What the transfer to the next holder took, from the decision to its ACCEPT."""


class Moved(_Message, frozen=True, tag="moved"):
    """To the source: the sender holds a request now."""

    transfer: TransferId
    before: Name
    """Who keeps the copy that would be routed again."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """The source needs nothing more of these requests; work on them stops, tombstones stay until ``budget_us``."""

    requests: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_CANCELLED)]
    budget_us: Budget


class Complaint(_Message, frozen=True, tag="complaint"):
    """A message could not be used; to its sender."""

    what: Annotated[str, Meta(max_length=MAX_EXPLANATION)]
    model_id: ShortText = ""
    """The sender's model, where a Hello was refused because it is another one."""


class StoreState(_Text):
    """How far an offered bundle is; receivers of a Stored accept other words too."""

    IDLE = "idle"
    """Nothing was offered by the process that is told."""
    BUSY = "busy"
    """Another process pushes at the moment."""
    RECEIVING = "receiving"
    READY = "ready"
    """All parts are there and verified; an Install switches to them."""
    SWITCHING = "switching"
    """It drains, or loads and warms up the engines of the offered bundle."""
    ACTIVE = "active"
    """It serves the offered bundle, and is warm."""
    FAILED = "failed"


class Offer(_Message, frozen=True, tag="offer"):
    """From a pusher: take this bundle. Nothing changes yet in what the receiver serves."""

    manifest: Digest
    """SHA-256 of ``manifest.json``."""
    size: Annotated[int, Meta(ge=0, le=MAX_MANIFEST)]
    """Bytes of ``manifest.json``; 0 for a bundle that the receiver still has."""


class Want(_Message, frozen=True, tag="want"):
    """To a pusher: send these bytes of a file of the offered bundle."""

    digest: Digest
    """SHA-256 of the file."""
    offset: FileSize
    size: Annotated[int, Meta(ge=1, le=MAX_CHUNK)]


class Chunk(_Message, frozen=True, tag="chunk"):
    """From a pusher: bytes that were asked for."""

    digest: Digest
    offset: FileSize
    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_CHUNK)]


class Install(_Message, frozen=True, tag="install"):
    """From a pusher: drain, switch to the bundle that was offered, and warm up."""

    manifest: Digest


class Stored(_Message, frozen=True, tag="stored"):
    """To a pusher: what is in the store, and how far the offered bundle is."""

    state: ShortText
    """A word of :class:`StoreState`."""
    manifest: bytes = b""
    """Of the bundle that was offered."""
    active: bytes = b""
    """SHA-256 of the manifest of the bundle that is served."""
    previous: bytes = b""
    """Of the one before, which is kept."""
    parts: Count = 0
    """Files of the offered bundle that it needs, the manifest not counted."""
    size: FileSize = 0
    """Their bytes."""
    missing: FileSize = 0
    """Bytes that it still has to ask for."""
    reason: ShortText = ""
    """Why it is ``failed`` or ``busy``, not ``active`` yet, or went back from the offered bundle."""


class FindingRow(msgspec.Struct, frozen=True, array_like=True):
    """What one check of a peer's machine found."""

    status: ShortText
    """``ok``, ``warn`` or ``bad``."""
    what: ShortText
    detail: ShortText
    fix: ShortText = ""
    """A command or a change that helps; empty where there is nothing to do."""


class Inspect(_Message, frozen=True, tag="inspect"):
    """From an observer or pusher: check your machine, as ``ls-edge doctor`` does."""


class Findings(_Message, frozen=True, tag="findings"):
    """Answer to an Inspect."""

    rows: Annotated[tuple[FindingRow, ...], Meta(max_length=MAX_FINDINGS)]


PushMessage = Offer | Chunk | Install
"""What only a pusher may send."""
Message = (
    Hello | Welcome | State | Bye | Run | Accept | Refuse | Progress | Release | Moved | Cancel | Complaint
    | Offer | Want | Chunk | Install | Stored | Inspect | Findings
)  # fmt: skip

_Several = Annotated[list[Message], Meta(min_length=1, max_length=MAX_TOGETHER)]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message | list[Message]] = msgspec.msgpack.Decoder(Message | _Several)


def encode(message: Message) -> bytes:
    """The header frame of a message."""
    return _PREFIX + _encoder.encode(message)


def encode_body(message: Message) -> bytes:
    """A message for :func:`join`."""
    return _encoder.encode(message)


def join(bodies: Sequence[bytes]) -> bytes:
    """The header frame of 1 to :data:`MAX_TOGETHER` messages, each from :func:`encode_body`."""
    if len(bodies) == 1:
        return _PREFIX + bodies[0]
    head = bytes((0x90 | len(bodies),)) if len(bodies) < 16 else bytes((0xDC, 0, len(bodies)))
    return b"".join((_PREFIX, head, *bodies))


def decode(frame: bytes | memoryview) -> Message:
    """Read a header frame; raises :class:`WireError` for everything that is not exactly one message."""
    messages = decode_all(frame)
    if len(messages) != 1:
        raise WireError(f"header of {len(messages)} messages, one is read here; dropped")
    return messages[0]


def decode_all(frame: bytes | memoryview) -> list[Message]:
    """Read a header frame of one message or several; raises :class:`WireError` where it, or one of them, is wrong."""
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
        elif isinstance(message, Stored):
            _check_digests(message)
    return messages


_PATTERN = re.compile("matching regex '.*'")


def _check_blocks(itinerary: Itinerary) -> None:
    ran = [block for wave in itinerary.waves for track in wave for block, _ in track]
    blocks = [*ran, *itinerary.remaining, *itinerary.skipped]
    if len(set(blocks)) != len(blocks):
        raise WireError("itinerary names a block twice; dropped")


def _check_digests(message: Stored) -> None:
    for digest in (message.manifest, message.active, message.previous):
        if len(digest) not in (0, _DIGEST_BYTES):
            raise WireError(f"digest of {len(digest)} bytes, {_DIGEST_BYTES} are needed; dropped")
