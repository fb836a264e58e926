"""A request that a process holds, the stages it goes through, and the records that engine, waves and sources add."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from ls_edge.core.records import TrackSpan
from ls_edge.runtime.protocol.messages import Itinerary, Ran, RequestId, TransferId

INFINITY = float("inf")
MAX_HOLDERS_SEEN = 64
"""Limit on the remembered holders of a request."""
STORY = 16
"""Transitions that a held request remembers: enough for two visits of the engine, small compared with its tokens."""


class Stage(Enum):
    """Stage of a held request; only peers have ``QUEUED``, ``RUNNING`` and ``JOINING``."""

    NEW = "new"
    WAITING = "waiting"
    """Undecided: no holder, or no credit."""
    QUEUED = "queued"
    RUNNING = "running"
    OFFERED = "offered"
    """Sent to the next holder, which has not answered yet."""
    CUSTODY = "custody"
    """Accepted by the next holder; a copy is kept here."""
    AWAY = "away"
    """The next holder has passed it on; this process still answers for it."""
    JOINING = "joining"
    """Its tracks run side by side."""
    ENDED = "ended"
    """Not held any more."""

    __hash__ = object.__hash__  # each transition looks pairs of stages up; Enum's own hash is computed in Python


class EngineVisit(msgspec.Struct, eq=False):
    """Work of the engine of this process for a request."""

    block: int = -1
    """Block that is queued or running."""
    queued_at: float = 0.0
    until: float = 0.0
    """Time at which the running call counts as stuck."""
    ran: tuple[int, ...] = ()
    engine_us: int = 0


class Trail(msgspec.Struct, eq=False):
    """Whereabouts of a request as its source knows them, from ACCEPT, RELEASE and MOVED."""

    holder: str = ""
    """Process that has the tokens, after the next holder has passed them on."""
    before: str = ""
    """Process that keeps the copy before that of :attr:`holder`."""
    passed_on: set[str] = set()
    """Former holders, whose next holders have passed the request on as well."""
    seen: dict[str, None] = {}
    """Processes that have accepted it, sent MOVED or returned it, in order."""

    def accepted(self, by: str) -> None:
        """Note that a process has the tokens now."""
        self.passed_on.discard(by)
        self.note(by)

    def moved(self, before: str, holder: str) -> None:
        """Note that ``holder`` has the tokens now and ``before`` the copy."""
        if self.before:
            self.passed_on.add(self.before)
        self.passed_on -= {before, holder}
        self.before, self.holder = before, holder
        self.note(before, holder)

    def note(self, *names: str) -> None:
        """Remember processes that had the tokens."""
        for name in names:
            if len(self.seen) < MAX_HOLDERS_SEEN:
                self.seen[name] = None


class HeldRequest(msgspec.Struct, eq=False):
    """Tokens that this process holds, their itinerary, and the transfer by which they came."""

    transfer: TransferId
    itinerary: Itinerary
    tokens: Any
    deadline: float
    """End of the request's budget, on the clock of this process."""
    upstream: str | None
    """Process that gets PROGRESS and RELEASE; None in the source and for the tracks of a joiner."""
    arrived: float
    tie_break: int = 0
    """Chooses between equal holders: counts up, so that they take turns."""
    returning: str = ""
    avoid: dict[str, float] = {}
    """Processes that are not offered it, and until when: they refused it or returned it unchanged."""
    codec_us: int = 0
    is_decoded: bool | None = None
    """Of an image: whether this process has its pixels; None before it has begun to decode it."""
    bundle_id: str = ""
    """The only bundle whose blocks may run on them; empty for any of the model."""
    stage: Stage = Stage.NEW
    number: int = 0
    """Counts up over the requests that a machine holds."""
    owner: str = ""
    downstream: str = ""
    sent: TransferId | None = None
    """The transfer by which they were last handed on."""
    check_at: float = INFINITY
    """Time of the next check in its present stage; set only by :class:`Timers`."""
    timer_at: float = INFINITY
    """Earliest entry of it among the timers."""
    ran_at: float = 0.0
    """Time at which its next holder accepted it or last reported a further block."""
    hop_at: float = INFINITY
    """Deadline for progress of its next holder."""
    keep_until: float = INFINITY
    """Deadline for a further block of its next holder."""
    keep_end: float = INFINITY
    """Deadline of its next holder in any case."""
    most_done: int = 0
    """Blocks that have run, as far as its next holder has reported."""
    waiting_since: float | None = None
    """Start of its wait for a credit or another process."""
    waits_for: tuple[str, ...] = ()
    """Neighbors whose credit it waits for, in the stage ``WAITING``."""
    reason: str = ""
    """Reason that it could not continue when that was last tried (``ReturnReason``)."""
    reroutes: int = 0
    progress_at: float = 0.0
    """Time of the last PROGRESS that was sent for it."""
    failure: str = ""
    """Reason that the last holder of a track did not run it."""
    engine: EngineVisit = msgspec.field(default_factory=EngineVisit)
    waves: int = 0
    """Waves of it that this process has begun."""
    tracks: list[TrackSpan] = []
    """Tracks of these waves, for the trace."""
    waited_us: int = 0
    """Time for which tracks of others were waited for."""
    wave: OpenWave | None = None
    open_track: OpenTrack | None = None
    """The track of a wave of this process that these tokens are, until the track ends."""
    trail: Trail | None = None
    way_out: str = ""
    """In its source: process that brought it home from beyond the reach of the source."""
    story: deque[tuple[float, Stage, Stage, str]] = msgspec.field(default_factory=lambda: deque(maxlen=STORY))
    """Its last transitions: time, from, to, why."""

    @property
    def request(self) -> RequestId:
        """The request."""
        return self.transfer.request

    def history(self) -> str:
        """Return its story, a line a transition."""
        lines = [f"{at:.6f} {before.value} -> {after.value}: {why}" for at, before, after, why in self.story]
        return "\n".join([f"request {self.request.hex()[:8]}, transfer {self.transfer.hop}:", *lines])


class InvalidState(Exception):
    """Internal state is inconsistent; raised only by ``Machine.validate``."""


def require(holds: bool, what: str, request: HeldRequest | None = None) -> None:
    """Raise :class:`InvalidState`, with the story of the request that it concerns, unless ``holds``."""
    if not holds:
        raise InvalidState(f"{what}\n{request.history()}" if request else what)


@dataclass(eq=False)
class PlannedTrack:
    """Blocks for one holder."""

    holder: str
    allowed: frozenset[int]
    """Blocks of the wave that it has."""
    block_us: int
    expected_us: int
    """Time from the start of the wave until its tokens are back; before its first block, the time to reach it."""
    blocks: tuple[int, ...] = ()


class OpenTrack(msgspec.Struct, eq=False):
    """A track of a wave from its start until its end."""

    wave: OpenWave
    plan: PlannedTrack
    request: HeldRequest
    began: float
    out: Any = None
    ran: tuple[Ran, ...] = ()
    row: TrackSpan | None = None
    """Set when it has ended."""


class OpenWave(msgspec.Struct, eq=False):
    """The tracks that a request in the stage ``JOINING`` waits for."""

    ident: int
    request: HeldRequest
    tracks: list[OpenTrack] = []
