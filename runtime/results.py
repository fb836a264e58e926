"""What a source gives back for an image, and how the record of a request is made."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ls_edge.arrangement import Arrangement
from ls_edge.errors import RequestError
from ls_edge.records import RequestRecord, TrackSpan, Visit
from ls_edge.runtime.protocol.messages import Itinerary, VisitRow
from ls_edge.runtime.routing.events import Answer as Answered
from ls_edge.runtime.routing.events import Fail


@dataclass(frozen=True, eq=False)
class Answer:
    """What came back for an image."""

    request: int
    logits: np.ndarray
    """Float32 ``[C]``."""
    prediction: int
    label: str
    """The name of the predicted class."""
    degraded: bool
    """Whether blocks were left out."""
    record: RequestRecord
    """Way, times, holders; see :mod:`ls_edge.records`."""

    @property
    def latency_ms(self) -> float:
        """From the submission of the preprocessed image to the answer."""
        return self.record.latency_ms

    @property
    def arrangement(self) -> Arrangement:
        """The order in which blocks ran."""
        return self.record.arrangement


@dataclass
class PeerView:
    """A peer as the source sees it now."""

    name: str
    blocks: tuple[int, ...]
    state: str
    """``alive``, ``cold``, ``suspect``, ``stuck``, ``draining``, ``lost``."""
    engine: str = ""
    warm: bool = False


class RequestState(Enum):
    """Where a request stands in its source; the source itself ends it at its deadline, unless it is ``ROUTED``."""

    WAITING = "waiting for its turn"
    STEM = "at the stem"
    ROUTED = "in the routing machine"
    HEAD = "at the head"
    ENDED = "ended"


@dataclass(eq=False)
class InFlightRequest:
    """A request as its source keeps it, from its submission until it has ended and no engine works on it."""

    request: int
    image: np.ndarray | None
    future: Future[Answer]
    started: float
    deadline: float
    name: str
    label: int | None
    state: RequestState = RequestState.WAITING
    at_worker: bool = False
    """Whether a job of it waits for the engines of this process or runs; that one cannot be interrupted."""
    begun: bool = False
    """Whether the stem began."""
    stem_ms: float = 0.0
    stem_tokens: np.ndarray | None = None
    """Kept where answers are audited."""
    answered: Answered | None = None
    """What the head is given."""


def record_of(
    inflight: InFlightRequest,
    end: Answered | Fail | None,
    now: float,
    logits: np.ndarray | None,
    head_ms: float,
    opened: float,
    error: RequestError | None = None,
) -> RequestRecord:
    """Make the record of a request that ends at ``now``; ``opened`` is when its source was (seconds, one clock)."""
    itinerary = end.itinerary if end is not None else None
    waves = itinerary.waves if itinerary is not None else ()
    plain = all(len(wave) == 1 for wave in waves)
    latency = (now - inflight.started) * 1e3
    visits = itinerary.visits if itinerary is not None else ()
    inside = sum(v.queue_us + v.engine_us + v.codec_us + v.wait_us for v in visits) / 1e3
    wire = max(0.0, latency - inflight.stem_ms - head_ms - inside) / (len(visits) + 1)
    return RequestRecord(
        id=inflight.request,
        image=inflight.name,
        label=inflight.label,
        prediction=None if logits is None else int(np.argmax(logits)),
        latency_ms=latency,
        degraded=bool(logits is not None and itinerary is not None and itinerary.skipped),
        error=None if error is None else f"{type(error).__name__}: {error}",
        order=tuple(step for wave in waves for step in wave[0]) if plain else None,
        waves=None if plain else waves,
        skipped=itinerary.skipped if itinerary is not None and logits is not None else (),
        attempts=end.attempts if end is not None else 1,
        logits=None if logits is None else tuple(map(float, logits)),
        submitted_ms=(inflight.started - opened) * 1e3,
        stem_ms=inflight.stem_ms,
        head_ms=head_ms,
        return_wire_ms=wire if visits else 0.0,
        visits=tuple(_visit(row, wire) for row in visits),
    )


def itinerary_holders(itinerary: Itinerary) -> list[str]:
    """Who ran blocks or joined tracks of a request, in this order."""
    ran = [holder for wave in itinerary.waves for track in wave for _, holder in track]
    return list(dict.fromkeys([*ran, *(visit.holder for visit in itinerary.visits)]))


def _visit(row: VisitRow, wire_ms: float) -> Visit:
    tracks = tuple(
        TrackSpan(
            t.wave, t.holder, t.blocks, t.begin_us / 1e3, t.end_us / 1e3, t.expected_us / 1e3, t.queue_us / 1e3,
            t.engine_us / 1e3, t.codec_us / 1e3, t.why,
        )
        for t in row.tracks
    )  # fmt: skip
    return Visit(
        row.holder, row.blocks, row.queue_us / 1e3, row.engine_us / 1e3, row.codec_us / 1e3, wire_ms,
        row.wait_us / 1e3, tracks,
    )  # fmt: skip
