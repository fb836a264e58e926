"""Answers of a source, its requests in flight, and the record of a request."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import RequestError
from ls_edge.core.records import RequestRecord
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.events import Complete, Fail


@dataclass(frozen=True, eq=False)
class Answer:
    """Answer for an image."""

    request: int
    logits: np.ndarray
    """Float32 ``[C]``."""
    prediction: int
    label: str
    """The name of the predicted class."""
    degraded: bool
    """Some blocks were left out."""
    record: RequestRecord
    """Way, times, holders; see :mod:`ls_edge.core.records`."""

    @property
    def latency_ms(self) -> float:
        """From the submission of the preprocessed image to the answer."""
        return self.record.latency_us / 1e3

    @property
    def arrangement(self) -> Arrangement:
        """The order in which blocks ran."""
        return self.record.arrangement


class RequestState(Enum):
    """Stage of a request in its source, which ends it at its deadline unless it is ``ROUTED``."""

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
    """A job of it waits for the engines of this process or runs; it cannot be interrupted."""
    begun: bool = False
    """The stem has begun."""
    stem_us: int = 0
    stem_tokens: np.ndarray | None = None
    """Kept where answers are audited."""
    answered: Complete | None = None
    """Result of routing: the input of the head."""


def record_of(
    inflight: InFlightRequest,
    end: Complete | Fail | None,
    now: float,
    logits: np.ndarray | None,
    head_us: int,
    opened: float,
    error: RequestError | None = None,
) -> RequestRecord:
    """Make the record of a request that ends at ``now``; ``opened`` is when its source was (seconds, one clock)."""
    itinerary = end.itinerary if end is not None else None
    return RequestRecord(
        id=inflight.request,
        image=inflight.name,
        label=inflight.label,
        prediction=None if logits is None else int(logits.argmax()),
        latency_us=round((now - inflight.started) * 1e6),
        degraded=bool(logits is not None and itinerary is not None and itinerary.skipped),
        error=None if error is None else f"{type(error).__name__}: {error}",
        waves=itinerary.waves if itinerary is not None else (),
        skipped=itinerary.skipped if itinerary is not None and logits is not None else (),
        attempts=end.attempts if end is not None else 1,
        logits=None if logits is None else tuple(logits.tolist()),
        submitted_us=round((inflight.started - opened) * 1e6),
        stem_us=inflight.stem_us,
        head_us=head_us,
        visits=itinerary.visits if itinerary is not None else (),
        why_skipped=end.why_skipped if isinstance(end, Complete) and logits is not None else "",
    )


def itinerary_holders(itinerary: Itinerary) -> list[str]:
    """Return the processes that ran blocks or joined tracks of a request, in order."""
    ran = [holder for wave in itinerary.waves for track in wave for _, holder in track]
    return list(dict.fromkeys([*ran, *(visit.holder for visit in itinerary.visits)]))


def likeliest(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """Index and probability (softmax) of the ``count`` largest logits, the largest first."""
    exps = np.exp(logits.astype(np.float64) - logits.max())
    probabilities = exps / exps.sum()
    order = np.argsort(-probabilities, kind="stable")[:count]
    return [(int(index), float(probabilities[index])) for index in order]
