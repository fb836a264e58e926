"""Every message that processes exchange, and how it becomes frames. ``PROTOCOL.md`` beside this file specifies them.

A message is one or two ZeroMQ frames: a header, and the tokens where it carries any. The header is ``LS``, the major
version in one byte, then MessagePack of one of the tagged structs below, or of an array of them: what a process sends
to another in one turn of its loop can go as one header, with the tokens of its RUNs in their order behind it. All input
is checked: :func:`decode_all` raises :class:`WireError` for bytes that are not exactly that, and ``codecs.decode`` does
the same for tokens.

Elsewhere: the order of messages (``routing``), sockets (``links``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Annotated, Any, NamedTuple

import msgspec

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import WireError
from ls_edge.core.peers_file import is_name
from ls_edge.core.records import TrackSpan, Visit

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


class TransferId(NamedTuple):
    """Identity of one transfer: a request, a branch of it, and how many transfers it took to get here."""

    request: bytes
    """128 random bits, which only processes with the tokens of the request have."""
    branch: int
    """64 random bits; a copy that is sent again starts a new branch."""
    hop: int
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


RequestId = bytes
Ran = tuple[int, str]
"""A block, and who ran it."""


class TrackRef(msgspec.Struct, frozen=True, array_like=True):
    """What makes tokens a track of a wave: its joiner is the itinerary's ``source``, and gets them back."""

    wave: int
    """64 random bits."""
    index: int
    """Which track of it."""
    before: int
    """Blocks that ran ahead of the wave: the slot of the track's first block."""
    origin: str
    """The source of the request, from which a CANCEL of the track is believed."""


class Itinerary(msgspec.Struct, frozen=True, array_like=True):
    """What a request has been through and what remains; it travels with the tokens."""

    source: str
    policy: str
    remaining: tuple[int, ...]
    """Blocks still to run, in the preferred order: the trained one, or a permutation that was drawn."""
    max_skips: int
    via_source: bool = False
    """Whether every hop goes through the source (for peers that cannot reach each other)."""
    waves: tuple[tuple[tuple[Ran, ...], ...], ...] = ()
    """What ran: waves of tracks of (block, holder)."""
    skipped: tuple[int, ...] = ()
    visits: tuple[Visit, ...] = ()
    relays: tuple[str, ...] = ()
    """Holders that passed the tokens on without running a block, since the last block that ran."""
    latency_weight: float = 1.0
    """What a second is worth to the policy ``quality``, in nats of log-likelihood."""
    waves_wanted: int = 0
    """Waves in which the policy ``parallel`` runs a model; 0 for every other policy."""
    on_straggler: str = "later"
    """What becomes of blocks whose track did not come back: they run ``later``, or are left out (``skip``)."""
    track: TrackRef | None = None
    avoid: tuple[str, ...] = ()
    """Processes that returned this request without progress, or not at all; set by its source, holders avoid them."""
    codec: str = ""
    """Codec in which holders send these tokens, whatever their receivers announce; empty for what those announce."""
    hand_to: str = ""
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
    name: str
    role: str
    """``peer``, ``source``, ``observer`` or ``pusher``."""
    incarnation: int
    """Random for each process start."""
    minor: int
    model_id: str
    bundle_id: str
    blocks: tuple[int, ...] = ()
    engine: str = ""
    """What runs the blocks, for reports."""
    codec: str = "raw"
    """The codec in which this process is to be sent tokens."""
    note: str | msgspec.UnsetType = msgspec.UNSET
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
    credits: int
    """Requests that it would accept now."""
    queue: int
    """Requests that wait for its engine."""
    calls: int
    """Engine calls that it has finished, ever; shows that it advances."""
    block_us: int
    """What one block takes it, usually."""
    wait_us: int = 0
    """What its engine has to do before it could begin with something new."""
    reaches: tuple[str, ...] = ()
    """Names of the processes that it has a link to."""
    reach_blocks: tuple[int, ...] = ()
    """Blocks of the peers that it has a link to."""
    far_blocks: tuple[tuple[int, ...], ...] = ()
    """Blocks that are 2, 3, … links away from it, by the shortest way that does not begin at the receiver."""


class Bye(_Message, frozen=True, tag="bye"):
    """The sender leaves; its links will close."""

    reason: str = ""


class Run(_Message, frozen=True, tag="run"):
    """Tokens change hands: to a peer that runs blocks or relays, or (``returning``) on the way back to the source."""

    transfer: TransferId
    budget_us: int
    """Time that remains; clocks differ, so never a moment."""
    itinerary: Itinerary
    codec: str
    count: int
    dim: int
    returning: str = ""
    """Why the tokens go back (:class:`ReturnReason`); empty where they go forward."""
    bundle_id: str | msgspec.UnsetType = msgspec.UNSET
    """The only bundle whose blocks may run on these tokens; unset for any bundle of the model."""


class Accept(_Message, frozen=True, tag="accept"):
    """The receiver of a Run keeps a copy and has nothing computed yet."""

    transfer: TransferId
    credits: int


class Refuse(_Message, frozen=True, tag="refuse"):
    """The receiver of a Run does not take it.

    ``reason`` is a word of :class:`RefuseReason`.
    """

    transfer: TransferId
    reason: str
    credits: int = 0


class Progress(_Message, frozen=True, tag="progress"):
    """The holder is well, and so are the tokens; to the holder before it."""

    transfer: TransferId
    blocks_done: int


class Release(_Message, frozen=True, tag="release"):
    """The next holder has accepted: the copy that was kept for this transfer may go."""

    transfer: TransferId
    holder: str
    """The next holder."""
    link_us: int = 0
    """What the transfer to the next holder took, from the decision to its ACCEPT."""


class Moved(_Message, frozen=True, tag="moved"):
    """To the source: the sender holds a request now."""

    transfer: TransferId
    before: str
    """Who keeps the copy that would be routed again."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """The source needs nothing more of these requests; work on them stops, tombstones stay until ``budget_us``."""

    requests: tuple[bytes, ...]
    budget_us: int


class Complaint(_Message, frozen=True, tag="complaint"):
    """A message could not be used; to its sender."""

    what: str
    model_id: str = ""
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

    manifest: bytes
    """SHA-256 of ``manifest.json``."""
    size: int
    """Bytes of ``manifest.json``; 0 for a bundle that the receiver still has."""


class Want(_Message, frozen=True, tag="want"):
    """To a pusher: send these bytes of a file of the offered bundle."""

    digest: bytes
    """SHA-256 of the file."""
    offset: int
    size: int


class Chunk(_Message, frozen=True, tag="chunk"):
    """From a pusher: bytes that were asked for."""

    digest: bytes
    offset: int
    data: bytes


class Install(_Message, frozen=True, tag="install"):
    """From a pusher: drain, switch to the bundle that was offered, and warm up."""

    manifest: bytes


class Stored(_Message, frozen=True, tag="stored"):
    """To a pusher: what is in the store, and how far the offered bundle is."""

    state: str
    """A word of :class:`StoreState`."""
    manifest: bytes = b""
    """Of the bundle that was offered."""
    active: bytes = b""
    """SHA-256 of the manifest of the bundle that is served."""
    previous: bytes = b""
    """Of the one before, which is kept."""
    parts: int = 0
    """Files of the offered bundle that it needs, the manifest not counted."""
    size: int = 0
    """Their bytes."""
    missing: int = 0
    """Bytes that it still has to ask for."""
    reason: str = ""
    """Why it is ``failed`` or ``busy``, not ``active`` yet, or went back from the offered bundle."""


class FindingRow(msgspec.Struct, frozen=True, array_like=True):
    """What one check of a peer's machine found."""

    status: str
    """``ok``, ``warn`` or ``bad``."""
    what: str
    detail: str
    fix: str = ""
    """A command or a change that helps; empty where there is nothing to do."""


class Inspect(_Message, frozen=True, tag="inspect"):
    """From an observer or pusher: check your machine, as ``ls-edge doctor`` does."""


class Findings(_Message, frozen=True, tag="findings"):
    """Answer to an Inspect."""

    rows: tuple[FindingRow, ...]


PushMessage = Offer | Chunk | Install
"""What only a pusher may send."""
Message = (
    Hello | Welcome | State | Bye | Run | Accept | Refuse | Progress | Release | Moved | Cancel | Complaint
    | Offer | Want | Chunk | Install | Stored | Inspect | Findings
)  # fmt: skip

MAX_TOGETHER = 64
"""Most messages in one header."""
_Several = Annotated[list[Message], msgspec.Meta(min_length=1, max_length=MAX_TOGETHER)]

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
        raise WireError(f"malformed header ({error}); dropped") from None
    messages = read if isinstance(read, list) else [read]
    for message in messages:
        _check(message)
    return messages


# Ranges beyond the types above. A number that fits here cannot overflow what is computed from it, nor its own header.
_U64 = 2**64
COUNT = 2**16
"""Bound of everything that is counted: blocks, credits, hops, waves."""
MICROSECONDS = 2**32
"""Bound of times: 71 minutes."""
MAX_BUDGET_US = 600_000_000
"""Longest budget of a request: ten minutes. Work for a source that never comes back ends with it at the latest."""
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
_REQUEST_BYTES = 16
_DIGEST_BYTES = 32
MAX_TEXT = 256
"""Longest text that is neither a name nor an explanation, in characters."""
MAX_EXPLANATION = 4096
"""Longest explanation of a COMPLAINT, in characters."""


def _check(message: Message) -> None:
    check = _CHECKS.get(type(message))
    if check is not None:
        check(message)


def _check_transfer(transfer: TransferId) -> None:
    if len(transfer.request) != _REQUEST_BYTES:
        _check_requests(transfer.request)
    # One less than all, since the next transfer counts one more.
    if not (0 <= transfer.branch < _U64 and 0 <= transfer.hop < COUNT - 1):
        raise WireError("transfer out of range; dropped")


def _check_state(message: State) -> None:
    _check_numbers("state", COUNT, message.credits, message.queue, *message.reach_blocks)
    if len(message.far_blocks) > MAX_FAR:
        raise WireError(f"state with blocks at {len(message.far_blocks)} distances, at most {MAX_FAR}; dropped")
    for blocks in message.far_blocks:
        _check_numbers("state", COUNT, *blocks)
    _check_numbers("state", _U64, message.calls)
    _check_numbers("state", MICROSECONDS, message.block_us, message.wait_us)
    _check_names("state", message.reaches)


def _check_accept(message: Accept) -> None:
    _check_transfer(message.transfer)
    _check_numbers("credits", COUNT, message.credits)


def _check_refuse(message: Refuse) -> None:
    _check_transfer(message.transfer)
    _check_numbers("credits", COUNT, message.credits)
    _check_texts(message.reason)


def _check_progress(message: Progress) -> None:
    _check_transfer(message.transfer)
    _check_numbers("progress", COUNT, message.blocks_done)


def _check_release(message: Release) -> None:
    _check_transfer(message.transfer)
    _check_names("release", (message.holder,))
    _check_numbers("release", MICROSECONDS, message.link_us)


def _check_moved(message: Moved) -> None:
    _check_transfer(message.transfer)
    _check_names("moved", (message.before,))


def _check_cancel(message: Cancel) -> None:
    _check_requests(*message.requests)
    _check_numbers("cancel", MAX_BUDGET_US + 1, message.budget_us)
    if len(message.requests) > MAX_CANCELLED:
        raise WireError(f"cancel of {len(message.requests)} requests, at most {MAX_CANCELLED} are allowed; dropped")


def _check_hello(message: Hello | Welcome) -> None:
    _check_names("hello", (message.name,))
    _check_numbers("hello", _U64, message.incarnation)
    _check_numbers("hello", COUNT, message.minor, *message.blocks)
    _check_texts(message.role, message.model_id, message.bundle_id, message.engine, message.codec)
    _check_texts(message.note or "")


def _check_findings(message: Findings) -> None:
    if len(message.rows) > MAX_FINDINGS:
        raise WireError(f"{len(message.rows)} findings, at most {MAX_FINDINGS} are allowed; dropped")
    for row in message.rows:
        _check_texts(row.status, row.what, row.detail, row.fix)


def _check_complaint(message: Complaint) -> None:
    if len(message.what) > MAX_EXPLANATION:
        raise WireError(f"complaint of {len(message.what)} characters; dropped")
    _check_texts(message.model_id)


def _check_bye(message: Bye) -> None:
    _check_texts(message.reason)


def _check_push(message: Offer | Want | Chunk | Install | Stored) -> None:
    if isinstance(message, Offer):
        _check_digest(message.manifest)
        _check_numbers("offer", MAX_MANIFEST + 1, message.size)
    elif isinstance(message, Want):
        _check_digest(message.digest)
        _check_numbers("want", MAX_FILE, message.offset)
        if not 1 <= message.size <= MAX_CHUNK:
            raise WireError(f"want of {message.size} bytes, from 1 to {MAX_CHUNK} are allowed; dropped")
    elif isinstance(message, Chunk):
        _check_digest(message.digest)
        _check_numbers("chunk", MAX_FILE, message.offset)
        if not 1 <= len(message.data) <= MAX_CHUNK:
            raise WireError(f"chunk of {len(message.data)} bytes, from 1 to {MAX_CHUNK} are allowed; dropped")
    elif isinstance(message, Install):
        _check_digest(message.manifest)
    else:
        for digest in (message.manifest, message.active, message.previous):
            _check_digest(digest or bytes(_DIGEST_BYTES))
        _check_numbers("stored", COUNT, message.parts)
        _check_numbers("stored", MAX_FILE, message.size, message.missing)
        _check_texts(message.state, message.reason)


def _check_digest(digest: bytes) -> None:
    if len(digest) != _DIGEST_BYTES:
        raise WireError(f"digest of {len(digest)} bytes, {_DIGEST_BYTES} are needed; dropped")


def _check_run(run: Run) -> None:
    _check_transfer(run.transfer)
    if not (0 < run.count <= 1 << 20 and 0 < run.dim <= 1 << 20 and 0 <= run.budget_us <= MAX_BUDGET_US):
        raise WireError(f"tokens {run.count} x {run.dim}, budget {run.budget_us} us: out of range; dropped")
    it = run.itinerary
    if not all(wave and all(wave) for wave in it.waves):
        raise WireError("itinerary with an empty wave or track; dropped")
    ran = [step for wave in it.waves for track in wave for step in track]
    blocks = [block for block, _ in ran] + [*it.remaining, *it.skipped]
    if len(set(blocks)) != len(blocks) or (blocks and not 0 <= min(blocks) <= max(blocks) < COUNT):
        raise WireError("itinerary names a block twice or one out of range; dropped")
    holders = {holder for _, holder in ran} | {visit.holder for visit in it.visits}
    _check_names("itinerary", {it.source, *it.relays, *it.avoid} | holders)
    _check_numbers("itinerary", COUNT, it.max_skips)
    if not 0.0 <= it.latency_weight <= MAX_LATENCY_WEIGHT:
        raise WireError(f"latency weight {it.latency_weight}, from 0 to {MAX_LATENCY_WEIGHT:.0f} are allowed; dropped")
    _check_numbers("itinerary", COUNT, it.waves_wanted)
    if len(it.avoid) > MAX_AVOID:
        raise WireError(f"itinerary that avoids {len(it.avoid)} processes, at most {MAX_AVOID} are allowed; dropped")
    if it.track is not None:
        _check_numbers("track", _U64, it.track.wave)
        _check_numbers("track", COUNT, it.track.index, it.track.before)
        _check_names("track", (it.track.origin,))
    for visit in it.visits:
        _check_numbers("visit", MICROSECONDS, visit.queue_us, visit.engine_us, visit.codec_us, visit.wait_us)
        _check_numbers("visit", COUNT, *visit.blocks)
        for row in visit.tracks:
            _check_track_row(row)
    _check_texts(run.bundle_id or "")
    _check_texts(run.codec, run.returning, it.policy, it.on_straggler, it.codec, it.hand_to)


def _check_track_row(row: TrackSpan) -> None:
    _check_names("track", (row.holder,))
    _check_numbers("track", COUNT, row.wave, *row.blocks)
    times = (row.begin_us, row.end_us, row.expected_us, row.queue_us, row.engine_us, row.codec_us)
    _check_numbers("track", MICROSECONDS, *times)
    _check_texts(row.why)


def _check_requests(*requests: RequestId) -> None:
    for request in requests:
        if len(request) != _REQUEST_BYTES:
            raise WireError(f"request id of {len(request)} bytes, {_REQUEST_BYTES} are needed; dropped")


def _check_numbers(what: str, bound: int, *numbers: int) -> None:
    for number in numbers:
        if not 0 <= number < bound:
            raise WireError(f"{what} with the number {number}, from 0 to {bound - 1} are allowed; dropped")


def _check_names(what: str, names: Iterable[str]) -> None:
    for name in names:
        if not is_name(name):
            raise WireError(f"{what} with a name {name[:70]!r} that nobody may have; dropped")


def _check_texts(*texts: str) -> None:
    for text in texts:
        if len(text) > MAX_TEXT:
            raise WireError(f"text of {len(text)} characters, at most {MAX_TEXT} are allowed; dropped")
        if not text.isprintable():
            raise WireError(f"text {text[:40]!r} with characters that cannot be printed; dropped")


_CHECKS: dict[type[Any], Callable[[Any], None]] = {
    Hello: _check_hello, Welcome: _check_hello, State: _check_state, Bye: _check_bye, Run: _check_run,
    Accept: _check_accept, Refuse: _check_refuse, Progress: _check_progress, Release: _check_release,
    Moved: _check_moved, Cancel: _check_cancel, Complaint: _check_complaint, Findings: _check_findings,
    **dict.fromkeys((Offer, Want, Chunk, Install, Stored), _check_push),
}  # fmt: skip
