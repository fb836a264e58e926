"""A request that a process holds, the stages it goes through, and the parts that engine and waves add to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ls_edge.core.records import TrackSpan
from ls_edge.runtime.protocol.messages import Itinerary, Ran, RequestId, TransferId
from ls_edge.runtime.routing.wave_planner import PlannedTrack

INFINITY = float("inf")
_STORY = 16
"""Transitions that a held request remembers: enough for two visits of the engine, small compared with its tokens."""


class Stage(Enum):
    """Stage of a held request; only peers have ``QUEUED``, ``RUNNING`` and ``JOINING``."""

    NEW = "new"
    """Not held yet."""
    WAITING = "waiting"
    """Undecided: no holder, or no credit."""
    QUEUED = "queued"
    """For the engine."""
    RUNNING = "running"
    """On the engine."""
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


@dataclass(eq=False, slots=True)
class EngineVisit:
    """Work of the engine of this process for a request."""

    block: int = -1
    """Block that is queued or running."""
    queued_at: float = 0.0
    until: float = 0.0
    """Time at which the running call counts as stuck."""
    ran: list[int] = field(default_factory=list)
    """Blocks that ran here."""
    engine_us: int = 0


@dataclass(eq=False, slots=True)
class JoinVisit:
    """Work of the waves of a request that this process joined."""

    waves: int = 0
    """Waves that were begun here."""
    rows: list[TrackSpan] = field(default_factory=list)
    """Their tracks, for the trace."""
    wait_us: int = 0
    """Time for which tracks of others were waited for."""


@dataclass(eq=False, slots=True)
class HeldRequest:
    """Tokens that this process holds, their itinerary, and the transfer by which they came."""

    transfer: TransferId
    itinerary: Itinerary
    tokens: Any = field(repr=False)
    deadline: float
    """End of the request's budget, on the clock of this process."""
    upstream: str | None
    """Process that gets PROGRESS and RELEASE; None in the source and for the tracks of a joiner."""
    arrived: float
    tie_break: int = 0
    """Chooses between equal holders: counts up, so that they take turns."""
    returning: str = ""
    """Reason for sending the tokens back to the source (``ReturnReason``); empty while they go forward."""
    avoid: dict[str, float] = field(default_factory=dict)
    """Processes that are not offered it, and until when: they refused it or returned it unchanged."""
    codec_us: int = 0
    """Time to decode the tokens."""
    bundle_id: str = ""
    """The only bundle whose blocks may run on them; empty for any of the model."""
    stage: Stage = Stage.NEW
    number: int = 0
    """Counts up over the requests that a machine holds."""
    downstream: str = ""
    """The next holder, while there is one."""
    sent: TransferId | None = None
    """The transfer by which they were last handed on."""
    link_us: int = 0
    """Time until that transfer was accepted."""
    check_at: float = INFINITY
    """Time of the next check in its present stage; set only by ``CustodyMachine.set_check``."""
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
    """Neighbours whose credit it waits for, in the stage ``WAITING``."""
    reroutes: int = 0
    progress_at: float = 0.0
    """Time of the last PROGRESS that was sent for it."""
    failure: str = ""
    """Reason that the last holder of a track did not run it."""
    engine: EngineVisit = field(default_factory=EngineVisit)
    joins: JoinVisit = field(default_factory=JoinVisit)
    wave: OpenWave | None = None
    """The wave that it waits for, in the stage ``JOINING``."""
    open_track: OpenTrack | None = None
    """The track of a wave of this process that these tokens are, until the track ends."""
    story: deque[tuple[float, Stage, Stage, str]] = field(default_factory=lambda: deque(maxlen=_STORY), repr=False)
    """Its last transitions: time, from, to, why."""

    @property
    def request(self) -> RequestId:
        """The request."""
        return self.transfer.request

    @property
    def owner(self) -> str:
        """The source of the request."""
        return self.itinerary.owner

    def history(self) -> str:
        """Return its story, a line a transition."""
        lines = [f"{at:.6f} {before.value} -> {after.value}: {why}" for at, before, after, why in self.story]
        return "\n".join([f"request {self.request.hex()[:8]}, transfer {self.transfer.hop}:", *lines])


@dataclass(eq=False)
class OpenTrack:
    """A track of a wave from its start until its end."""

    wave: OpenWave
    plan: PlannedTrack
    request: HeldRequest
    """Its own tokens."""
    began: float
    out: Any = field(default=None, repr=False)
    ran: tuple[Ran, ...] = ()
    row: TrackSpan | None = None
    """Set when it has ended."""


@dataclass(eq=False)
class OpenWave:
    """The tracks that a request in the stage ``JOINING`` waits for."""

    ident: int
    number: int
    """Which wave of this visit."""
    request: HeldRequest
    tracks: list[OpenTrack] = field(default_factory=list)
