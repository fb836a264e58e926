"""A request that a process holds, its stages, and the records that the engine, waves and sources add to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from ls_edge.core.peer_reports import TrackSpan
from ls_edge.runtime.protocol.messages import Itinerary, Ran, RequestId, TransferId

INFINITY = float("inf")
STORY = 16
"""Transitions that a held request remembers: enough for two engine calls, and small compared with its tokens."""


class Stage(Enum):
    """Stage of a held request; ``QUEUED``, ``RUNNING`` and ``JOINING`` exist only in peers."""

    NEW = "new"
    WAITING = "waiting"
    """Without a next step: no holder is reachable, or none has a credit."""
    QUEUED = "queued"
    RUNNING = "running"
    OFFERED = "offered"
    """Sent to the next holder, which has not replied yet."""
    CUSTODY = "custody"
    """Accepted by the next holder; this process keeps a copy."""
    AWAY = "away"
    """Passed on by the next holder; this process is still responsible for it."""
    JOINING = "joining"
    """Split into tracks that run in parallel."""
    ENDED = "ended"
    """No longer held."""

    __hash__ = object.__hash__  # each transition looks up a pair of stages; Enum computes its own hash in Python


NEW, WAITING, QUEUED, RUNNING, OFFERED, CUSTODY, AWAY, JOINING, ENDED = Stage
"""The stages. Before Python 3.12, access as ``Stage.NEW`` takes ten times as long, and an answer needs a hundred."""


class EngineVisit(msgspec.Struct, eq=False):
    """Work of this process's engine for a request."""

    block: int = -1
    """Block that is queued or running."""
    until: float = 0.0
    """Time from which the running call counts as stuck."""
    ran: tuple[int, ...] = ()
    engine_us: int = 0


class Trail(msgspec.Struct, eq=False):
    """Location of a request as its source knows it from RELEASE and MOVED."""

    holder: str = ""
    """Process that has the tokens; empty until the next holder has passed them on."""
    before: str = ""
    """Process that keeps the previous copy."""


class HeldRequest(msgspec.Struct, eq=False):
    """Tokens that this process holds, their itinerary, and the transfer that brought them."""

    transfer: TransferId
    itinerary: Itinerary
    tokens: Any
    deadline: float
    """End of the budget, on this process's clock."""
    upstream: str | None
    """Process that gets PROGRESS and RELEASE; None in the source, and for a joiner's tracks."""
    arrived: float
    tie_break: int = 0
    """Counter that chooses between equal holders, so that they take turns."""
    returning: str = ""
    avoid: dict[str, float] = {}
    """Processes that refused the request or returned it unchanged, each with the time until which it gets no offer."""
    codec_us: int = 0
    is_decoded: bool | None = None
    """Whether the image is decoded; None before decoding starts."""
    bundle_id: str = ""
    """Bundle whose blocks alone may run on the tokens; empty for any bundle of the model."""
    stage: Stage = NEW
    number: int = 0
    """Rank among the requests of a machine: the oldest has the lowest."""
    owner: str = ""
    is_copy: bool = False
    """Whether it counts as a copy, not as work; see ``Credits``."""
    downstream: str = ""
    sent: TransferId | None = None
    """Latest transfer to a next holder."""
    check_at: float = INFINITY
    """Time of the next check in the current stage; set only by ``Timers``."""
    timer_at: float = INFINITY
    """Time of its earliest entry in ``Timers``."""
    hop_at: float = INFINITY
    """Deadline for progress of the next holder."""
    sent_at: float = 0.0
    """Time of the latest transfer to a next holder."""
    waiting_since: float | None = None
    """Start of the current wait for a credit or a process."""
    waits_for: tuple[str, ...] = ()
    """Neighbors whose credit it waits for in the stage ``WAITING``."""
    reason: str = ""
    """Reason (``ReturnReason``) why the last attempt to continue failed."""
    reroutes: int = 0
    progress_at: float = 0.0
    """Time of the last PROGRESS that this process sent for it."""
    failure: str = ""
    """Reason why the holder of a track did not run it."""
    engine: EngineVisit = msgspec.field(default_factory=EngineVisit)
    waves: int = 0
    """Number of waves that this process has begun."""
    tracks: list[TrackSpan] = []
    """Tracks of those waves, for the trace."""
    waited_us: int = 0
    """Time spent waiting for the tracks of other holders."""
    wave: OpenWave | None = None
    open_track: OpenTrack | None = None
    """Track that these tokens belong to, while a wave of this process is open."""
    story: deque[tuple[float, Stage, Stage, str]] = msgspec.field(default_factory=lambda: deque(maxlen=STORY))
    """Latest transitions: time, from, to, reason."""

    @property
    def request(self) -> RequestId:
        """Id of the request."""
        return self.transfer.request

    def history(self) -> str:
        """Return the story, one transition per line."""
        lines = [f"{at:.6f} {before.value} -> {after.value}: {why}" for at, before, after, why in self.story]
        return "\n".join([f"request {self.request.hex()[:8]}, transfer {self.transfer.hop}:", *lines])


@dataclass(eq=False)
class PlannedTrack:
    """Blocks for one holder."""

    holder: str
    allowed: frozenset[int]
    """Blocks of the wave that the holder has."""
    block_us: int
    expected_us: int
    """Time from the start of the wave until the tokens are back; without blocks, time to reach the holder."""
    blocks: tuple[int, ...] = ()


class OpenTrack(msgspec.Struct, eq=False):
    """A track of an open wave."""

    wave: OpenWave
    plan: PlannedTrack
    request: HeldRequest
    began: float
    out: Any = None
    ran: tuple[Ran, ...] = ()
    row: TrackSpan | None = None
    """Its line of the trace, once it has ended."""


class OpenWave(msgspec.Struct, eq=False):
    """Tracks that a request in the stage ``JOINING`` waits for."""

    ident: int
    request: HeldRequest
    tracks: list[OpenTrack] = []
