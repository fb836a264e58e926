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
"""Transitions that a held request remembers: enough for two visits of the engine, small beside its tokens."""


class Stage(Enum):
    """Where a held request stands; only peers have ``QUEUED``, ``RUNNING`` and ``JOINING``."""

    NEW = "new"
    """Not held yet."""
    WAITING = "waiting"
    """To be decided: no holder, or no credit."""
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
    """What the engine of this process did for a request."""

    block: int = -1
    """What is queued or running."""
    queued_at: float = 0.0
    until: float = 0.0
    """When the call that runs it hangs."""
    ran: list[int] = field(default_factory=list)
    """Blocks that ran here."""
    engine_us: int = 0


@dataclass(eq=False, slots=True)
class JoinVisit:
    """What waves that were joined by this process did for a request."""

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
    """When the request's budget ends, on this process's clock."""
    upstream: str | None
    """Who gets PROGRESS and RELEASE; None in the source and for the tracks of a joiner."""
    arrived: float
    tie_break: int = 0
    """Chooses between equal holders: counts up, so that they take turns."""
    returning: str = ""
    """Why the tokens go back to the source (``ReturnReason``); empty while they go forward."""
    avoid: dict[str, float] = field(default_factory=dict)
    """Who has refused it or returned it as it was, and until when it is not offered to them."""
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
    """What that transfer took until it was accepted."""
    check_at: float = INFINITY
    """When it has to be looked at in its present stage; set by ``CustodyMachine.set_check`` alone."""
    ran_at: float = 0.0
    """When its next holder accepted it, or last reported a further block."""
    hop_at: float = INFINITY
    """When its next holder has shown no progress for too long."""
    keep_until: float = INFINITY
    """When its next holder has kept it for too long without a further block."""
    keep_end: float = INFINITY
    """When its next holder has kept it for too long in any case."""
    most_done: int = 0
    """Blocks that have run, as far as its next holder has reported."""
    waiting_since: float | None = None
    """When it began to wait for a credit or another process."""
    waits_for: tuple[str, ...] = ()
    """Neighbours whose credit it waits for, in the stage ``WAITING``."""
    reroutes: int = 0
    progress_at: float = 0.0
    """When the last PROGRESS was sent."""
    failure: str = ""
    """Why the last holder of a track did not run it."""
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
