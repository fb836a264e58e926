"""Messages that processes exchange, as specified in ``PROTOCOL.md`` in this folder.

The types of the fields state the allowed values. ``framing`` has the bytes of messages, ``routing`` their order.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.files import MAX_BYTES
from ls_edge.core.parts import STEM
from ls_edge.core.peer_reports import COUNT, Count, Microseconds, ShortText, Visit
from ls_edge.core.peers_file import Name

MAJOR, MINOR = 1, 0
MAX_BUDGET_US = 600_000_000
"""Limit on the budget of a request: ten minutes. Work for a source that is gone ends by then."""
MAX_AVOID = 16
MAX_CANCELED = 1024
MAX_CHUNK = 48 * 1024
"""Limit on the bytes of a file in one message; at 1 Gbit/s it delays other messages by 0.4 ms."""
MAX_MANIFEST = MAX_BYTES
"""Limit on an offered ``manifest.json``, in bytes."""
MAX_FILES = 8
"""Limit on the files whose processes are accepted at the same time during a change of the fleet."""
MAX_BEHIND = 64
MAX_FINDINGS = 64
MAX_MEASURE_MS = 60_000
MAX_DOCUMENT = 60_000
"""Limit on the document in FINDINGS, in bytes."""
MAX_FILE = 2**40
MAX_EXPLANATION = 4096
"""Limit on the explanation in a COMPLAINT, in characters."""
DIGEST_BYTES = 32

# Numbers within these types overflow neither the results computed from them nor a header.
Id64 = Annotated[int, Meta(ge=0)]
"""64 bits, the largest integers of MessagePack."""
Hops = Annotated[int, Meta(ge=0, lt=COUNT - 1)]
"""Less than the largest count by one, since the next transfer adds one."""
Budget = Annotated[int, Meta(ge=0, le=MAX_BUDGET_US)]
"""Remaining time, in microseconds."""
TokenSize = Annotated[int, Meta(ge=1, le=1 << 20)]
FileSize = Annotated[int, Meta(ge=0, lt=MAX_FILE)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
"""SHA-256."""
DigestOrNone = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
"""SHA-256, or empty."""
Version = Annotated[int, Meta(ge=0, lt=1 << 32)]
Blocks = tuple[Count, ...]
RequestId = Annotated[bytes, Meta(min_length=16, max_length=16)]
"""128 random bits, known only to processes that had the tokens."""
Ran = tuple[Count, Name]
"""A block, and the process that ran it."""
Track = Annotated[tuple[Ran, ...], Meta(min_length=1)]
Wave = Annotated[tuple[Track, ...], Meta(min_length=1)]


_ALIAS = re.compile(r"\.[0-9a-f]{8}\Z")
MAX_OWNER_NAME = 54


def new_alias(name: str) -> str:
    """Return an alias for one source process, since several processes may share a name and a key."""
    return f"{name[:MAX_OWNER_NAME]}.{secrets.token_hex(4)}"


def without_alias(name: str) -> str:
    """Return the name of a source without the suffix that distinguishes its processes."""
    return _ALIAS.sub("", name)


def may_be_called(owner: str, name: str) -> bool:
    """Return whether ``name`` is ``owner`` or one of its aliases."""
    return name == owner or re.fullmatch(re.escape(owner[:MAX_OWNER_NAME]) + _ALIAS.pattern, name) is not None


def new_incarnation() -> int:
    """Return a random number that distinguishes this process from earlier ones with its name."""
    return secrets.randbits(63)


class TransferId(NamedTuple):
    """Identity of one transfer: a request, a branch of it, and the number of transfers so far."""

    request: RequestId
    branch: Id64
    """Random number; a copy that is sent again starts a new branch."""
    hop: Hops
    """Number of transfers from the source to here; 0 for the source's own copy."""


class _Text(str, Enum):
    """Word on the wire. Python 3.10 lacks ``enum.StrEnum``."""

    __str__ = str.__str__


class RefuseReason(_Text):
    """Reason to refuse a RUN. Receivers of REFUSE accept other words as well."""

    BUSY = "busy"
    DRAINING = "draining"
    COLD = "cold"
    CANCELED = "canceled"
    NOT_FINITE = "not finite"
    OTHER_BUNDLE = "other bundle"
    LOSES_TOKENS = "loses tokens"
    """The link to the sender ends each time that tokens are sent to it, as where large packets do not pass."""


class ReturnReason(_Text):
    """Reason to send tokens back to the source. Receivers of RUN accept other words as well."""

    DONE = "done"
    UNREACHABLE = "unreachable"
    CREDIT = "credit"
    BUDGET = "budget"
    HOPS = "hops"
    NOT_FINITE = "not finite"
    NO_IMAGE = "no image"
    """The image cannot be decoded; the word is followed by ``: `` and the reason."""


class TrackRef(msgspec.Struct, frozen=True, array_like=True):
    """Identity of a track; its joiner is the ``source`` of the itinerary and gets the tokens back."""

    wave: Id64
    """64 random bits."""
    index: Count
    before: Count
    """Number of blocks that ran before the wave: the slot of the first block of the track."""
    origin: Name
    """Source of the request, which alone may cancel the track."""


class Itinerary(msgspec.Struct, frozen=True, array_like=True):
    """History and remaining work of a request, sent along with its tokens."""

    source: Name
    policy: ShortText
    remaining: Blocks
    """Blocks that remain to be run, in the preferred order: the trained order, or a drawn permutation."""
    max_skips: Count
    waves: tuple[Wave, ...] = ()
    """Blocks that ran: waves of tracks of (block, holder)."""
    skipped: Blocks = ()
    visits: tuple[Visit, ...] = ()
    relays: tuple[Name, ...] = ()
    """Holders that have passed the tokens on since the last block ran."""
    waves_wanted: Count = 0
    """Number of waves in which the policy ``parallel`` runs a band; 0 for other policies."""
    track: TrackRef | None = None
    avoid: Annotated[tuple[Name, ...], Meta(max_length=MAX_AVOID)] = ()
    """Processes that refused, lost or returned the request without progress, and are not offered it."""
    codec: ShortText = ""
    """Codec of the tokens; empty for the codec that each receiver announces."""

    @property
    def owner(self) -> str:
        """Source of the request, also for a track."""
        return self.source if self.track is None else self.track.origin

    @property
    def arrangement(self) -> Arrangement:
        """Arrangement of the blocks that ran."""
        return Arrangement(tuple(tuple(tuple(b for b, _ in track) for track in wave) for wave in self.waves))

    @property
    def blocks(self) -> int:
        """Number of blocks that have run, remain, or were skipped."""
        return sum(len(track) for wave in self.waves for track in wave) + len(self.remaining) + len(self.skipped)

    @property
    def blocks_done(self) -> int:
        """Number of blocks that ran: the slot of the next one."""
        done = 0 if self.track is None else self.track.before
        for wave in self.waves:
            for track in wave:
                done += len(track)
        return done

    @property
    def has_stem(self) -> bool:
        """Whether the request includes stem and head; otherwise its source runs them."""
        if self.waves:
            return self.waves[0][0][0][0] == STEM
        return self.remaining[:1] == (STEM,)

    @property
    def slot(self) -> int:
        """Slot of the next block: the number of blocks that ran before; -1 for the stem."""
        return self.blocks_done - self.has_stem

    def ran(self, blocks: Sequence[int], holder: str) -> Itinerary:
        """Return the itinerary after ``holder`` ran ``blocks`` in sequence, outside of a wave."""
        steps = tuple([(block, holder) for block in blocks])
        if self.waves and len(self.waves[-1]) == 1:
            waves = (*self.waves[:-1], ((*self.waves[-1][0], *steps),))
        else:
            waves = (*self.waves, (steps,))
        return msgspec.structs.replace(
            self, waves=waves, remaining=tuple([b for b in self.remaining if b not in blocks]), relays=()
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
        """Return the itinerary after skipping some of the remaining blocks."""
        remaining = tuple(block for block in self.remaining if block not in blocks)
        return msgspec.structs.replace(self, skipped=(*self.skipped, *blocks), remaining=remaining)


class FileVersion(msgspec.Struct, frozen=True, array_like=True):
    """A ``peers.yaml`` that was applied to the fleet."""

    version: Version
    """Number of the change that introduced it."""
    digest: Digest
    """SHA-256 of its content."""


class _Message(msgspec.Struct, frozen=True, tag_field="t"):
    pass


class _Description(_Message, frozen=True):
    name: Name
    role: ShortText
    """``peer``, ``source``, ``observer`` or ``pusher``."""
    incarnation: Id64
    minor: Count
    model_id: ShortText
    bundle_id: ShortText
    blocks: Blocks = ()
    engine: ShortText = ""
    codec: ShortText = "raw"
    note: ShortText | msgspec.UnsetType = msgspec.UNSET
    """Reason why a peer does not serve its bundle, for ``ls-edge status``."""
    files: Annotated[tuple[FileVersion, ...], Meta(max_length=MAX_FILES)] = ()
    """The ``peers.yaml`` that the sender uses, and further ones whose processes it accepts."""


class Hello(_Description, frozen=True, tag="hello"):
    """Description of the sender: the first message of the side that dialed, repeated after changes."""


class Welcome(_Description, frozen=True, tag="welcome"):
    """Description of the sender, in reply to an accepted HELLO."""


class State(_Message, frozen=True, tag="state"):
    """Load and health of a process, sent after changes that neighbors need to know."""

    warm: bool
    draining: bool
    stuck: bool
    """Whether the engine has not replied for too long."""
    credits: Count
    """Number of requests that the sender would accept now."""
    queue: Count
    calls: Id64
    """Number of engine calls since the start, which shows progress."""
    block_us: Microseconds
    wait_us: Microseconds = 0
    reaches: tuple[Name, ...] = ()
    reach_blocks: Blocks = ()


class Bye(_Message, frozen=True, tag="bye"):
    """The sender leaves and closes its links."""

    reason: ShortText = ""


class Run(_Message, frozen=True, tag="run"):
    """Tokens for a peer that runs blocks or relays them, or (``returning``) on their way back to the source."""

    transfer: TransferId
    budget_us: Budget
    """Remaining time; a point in time would mean nothing on another clock."""
    itinerary: Itinerary
    codec: ShortText
    count: TokenSize
    dim: TokenSize
    returning: ShortText = ""
    """Reason for sending the tokens back (:class:`ReturnReason`); empty while they go forward."""
    bundle_id: ShortText | msgspec.UnsetType = msgspec.UNSET
    """Bundle whose blocks alone may run on the tokens; unset for any bundle of the model."""


class Accept(_Message, frozen=True, tag="accept"):
    """The receiver of a RUN has the tokens and keeps a copy; nothing is computed yet."""

    transfer: TransferId
    credits: Count


class Refuse(_Message, frozen=True, tag="refuse"):
    """The receiver of a RUN does not accept it; ``reason`` is a word of :class:`RefuseReason`."""

    transfer: TransferId
    reason: ShortText
    credits: Count = 0


class Progress(_Message, frozen=True, tag="progress"):
    """Sign of life from a holder to the previous one."""

    transfer: TransferId


class Release(_Message, frozen=True, tag="release"):
    """The next holder has accepted the tokens, so the copy kept for this transfer may be dropped."""

    transfer: TransferId
    holder: Name
    link_us: Microseconds = 0
    """Time of the transfer to the next holder, from the decision to its ACCEPT."""


class Moved(_Message, frozen=True, tag="moved"):
    """Notice to the source that the sender holds a request now."""

    transfer: TransferId
    before: Name
    """Process that keeps the previous copy."""


class Cancel(_Message, frozen=True, tag="cancel"):
    """The source has ended these requests: work on them stops, and late tokens are refused for ``budget_us``."""

    requests: Annotated[tuple[RequestId, ...], Meta(max_length=MAX_CANCELED)]
    budget_us: Budget


class Complaint(_Message, frozen=True, tag="complaint"):
    """Notice to the sender of a message that could not be used."""

    what: Annotated[str, Meta(max_length=MAX_EXPLANATION)]
    model_id: ShortText = ""
    """The sender's model, if a HELLO was refused because its model differs."""


class StoreState(_Text):
    """State of an offered bundle. Receivers of STORED accept other words as well."""

    IDLE = "idle"
    """The receiver of this STORED has offered no bundle."""
    BUSY = "busy"
    RECEIVING = "receiving"
    BUILDING = "building"
    """All parts are stored and verified; their engines are built while the previous bundle is served."""
    READY = "ready"
    """All parts are stored and verified, and their engines are built; INSTALL switches to them."""
    SWITCHING = "switching"
    """The peer drains, or opens and warms up the engines of the offered bundle."""
    ACTIVE = "active"
    """The peer serves the offered bundle, and is warm."""
    FAILED = "failed"


class Offer(_Message, frozen=True, tag="offer"):
    """Offer of a bundle, from a pusher. The receiver continues to serve its own bundle."""

    manifest: Digest
    size: Annotated[int, Meta(ge=0, le=MAX_MANIFEST)]
    """Bytes of ``manifest.json``; 0 for a bundle that the receiver still has."""
    file: DigestOrNone = b""
    """SHA-256 of the ``peers.yaml`` to use with the bundle; empty for the present one."""
    file_size: FileSize = 0
    version: Version = 0
    """Number of the change that introduces the file."""


class Want(_Message, frozen=True, tag="want"):
    """Request for bytes of a file of the offered bundle, to a pusher."""

    digest: Digest
    offset: FileSize
    size: Annotated[int, Meta(ge=1, le=MAX_CHUNK)]


class Chunk(_Message, frozen=True, tag="chunk"):
    """Requested bytes, from a pusher."""

    digest: Digest
    offset: FileSize
    data: Annotated[bytes, Meta(min_length=1, max_length=MAX_CHUNK)]


class Install(_Message, frozen=True, tag="install"):
    """Command of a pusher to switch to the offered bundle and file: drain, switch, and warm up."""

    manifest: Digest
    ends_change: bool = False
    """Whether all peers have switched; a peer that has switched then accepts only the processes of its own file."""


class Stored(_Message, frozen=True, tag="stored"):
    """State of the store and of the offered bundle, to a pusher."""

    state: ShortText
    manifest: DigestOrNone = b""
    """SHA-256 of the manifest of the offered bundle."""
    active: DigestOrNone = b""
    """SHA-256 of the manifest of the bundle that is served."""
    previous: DigestOrNone = b""
    """SHA-256 of the manifest of the previous bundle, which is kept."""
    parts: Count = 0
    """Number of files that the peer needs of the offered bundle, without the manifest."""
    size: FileSize = 0
    missing: FileSize = 0
    """Bytes that the peer has not requested yet."""
    reason: ShortText = ""
    """Reason for ``failed`` or ``busy``, for not being ``active`` yet, or for returning to another bundle."""
    built: Count = 0
    """Number of engines, of ``total``, that were built (``building``) or opened (``switching``) so far."""
    total: Count = 0
    step: ShortText = ""
    """Current step of the engine that is built or opened next."""
    behind: Annotated[tuple[Name, ...], Meta(max_length=MAX_BEHIND)] = ()
    """Linked sources that have not announced the offered ``peers.yaml`` yet."""
    previous_model: DigestOrNone = b""
    """Id of the model of the previous bundle."""


class FindingRow(msgspec.Struct, frozen=True, array_like=True):
    """Result of one check of a peer's machine."""

    status: ShortText
    """``ok``, ``warn`` or ``bad``."""
    what: ShortText
    detail: ShortText
    fix: ShortText = ""
    """Command or change that solves the problem; empty if there is none."""


class Inspect(_Message, frozen=True, tag="inspect"):
    """Request of an observer or pusher to check the machine as ``ls-edge doctor`` does, or for a document."""

    measure_ms: Annotated[int, Meta(ge=0, le=MAX_MEASURE_MS)] = 0
    """Time to spend on engines at each batch size; 0 checks the machine."""
    events: bool = False
    """Whether to send the latest events of routing, instead of checking the machine."""


class Findings(_Message, frozen=True, tag="findings"):
    """Reply to INSPECT."""

    rows: Annotated[tuple[FindingRow, ...], Meta(max_length=MAX_FINDINGS)]
    document: Annotated[bytes, Meta(max_length=MAX_DOCUMENT)] = b""
    """Measurement as the JSON document of ``ls-edge bench --out``, or events as text; empty if that failed."""


PushMessage = Offer | Chunk | Install
"""Messages that only a pusher may send."""
Message = (
    Hello | Welcome | State | Bye | Run | Accept | Refuse | Progress | Release | Moved | Cancel | Complaint
    | Offer | Want | Chunk | Install | Stored | Inspect | Findings
)  # fmt: skip
