"""Answers of a source, its requests in flight, their records, and their counts."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import RequestError, printable
from ls_edge.core.parts import ENDS
from ls_edge.core.records import RequestRecord
from ls_edge.core.text import name_blocks, show_percent
from ls_edge.report.shown import Shown
from ls_edge.runtime.peer.counts import Durations
from ls_edge.runtime.protocol.messages import Itinerary, Wave
from ls_edge.runtime.protocol.payload import EncodedImage
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.routing.state.timers import Timer

if TYPE_CHECKING:
    from rich.console import Console

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Histogram buckets for latencies of answers: from milliseconds on one board to budgets of seconds."""


@dataclass(frozen=True, eq=False)
class Answer(Shown):
    """Answer to an image."""

    request: int
    logits: np.ndarray
    """Float32 ``[C]``."""
    prediction: int
    classes: tuple[str, ...] = field(repr=False)
    record: RequestRecord
    """Path, times and holders; see :mod:`ls_edge.core.records`."""

    @property
    def class_name(self) -> str:
        """Name of the most likely class."""
        return self.classes[self.prediction]

    @cached_property
    def probabilities(self) -> np.ndarray:
        """Float64 ``[C]``, the softmax of the logits."""
        return softmax(self.logits)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """Return the names and probabilities of the ``count`` most likely classes, in descending order."""
        return [(self.classes[index], probability) for index, probability in likeliest(self.logits, count)]

    def show(self, console: Console) -> None:
        """Print the most likely classes, the latency, and the skipped blocks."""
        named = ", ".join(f"{printable(name)} {show_percent(probability)}" for name, probability in self.top(3))
        remark = f", without {name_blocks(self.record.skipped)}: {self.record.why_skipped}" if self.degraded else ""
        console.print(f"{named}  ({self.latency_ms:.1f} ms{remark})")

    @property
    def degraded(self) -> bool:
        """Whether some blocks were skipped."""
        return self.record.degraded

    @property
    def latency_ms(self) -> float:
        """Time from the submission of the preprocessed image to the answer."""
        return self.record.latency_us / 1e3

    @property
    def arrangement(self) -> Arrangement:
        """The order in which blocks ran."""
        return self.record.arrangement


class RequestState(Enum):
    """Stage of a request in its source. Except in ``ROUTED``, the source itself ends it at its deadline."""

    WAITING = "waiting for its turn"
    STEM = "at the stem"
    ROUTED = "in the routing machine"
    HEAD = "at the head"
    ENDED = "ended"


@dataclass(eq=False)
class InFlightRequest:
    """A request in its source, from its submission until it has ended and no engine works on it."""

    request: int
    image: np.ndarray | EncodedImage | None
    started: float
    deadline: float
    submitted_us: int
    """Time of the submission, since the opening of the source."""
    name: str
    label: int | None
    future: Future[Answer] = field(default_factory=Future)
    state: RequestState = RequestState.WAITING
    at_worker: bool = False
    """Whether one of its jobs waits for the engines of this process, or runs; it cannot be interrupted."""
    begun: bool = False
    stem_us: int = 0
    sent: np.ndarray | EncodedImage | None = None
    """Stem tokens, or the image; kept if answers are audited."""
    answered: Complete | None = None
    """Result of routing: the input of the head."""
    timer: Timer = field(init=False)

    def __post_init__(self) -> None:
        """Create its timer."""
        self.timer = Timer(self.request)

    def again(self) -> InFlightRequest:
        """Return the request from its beginning, with the same future and deadline."""
        origin = self.request, self.image, self.started, self.deadline, self.submitted_us
        return InFlightRequest(*origin, self.name, self.label, self.future)

    def record(
        self,
        end: Complete | Fail | None,
        *,
        logits: np.ndarray | None = None,
        head_us: int = 0,
        error: RequestError | None = None,
    ) -> RequestRecord:
        """Return the record of this request, which ends now."""
        itinerary = None if end is None else end.itinerary
        skipped = () if itinerary is None or logits is None else itinerary.skipped
        return RequestRecord(
            id=self.request,
            image=self.name,
            label=self.label,
            prediction=None if logits is None else int(logits.argmax()),
            latency_us=round((time.monotonic() - self.started) * 1e6),
            degraded=bool(skipped),
            error=None if error is None else f"{type(error).__name__}: {error}",
            waves=() if itinerary is None else _waves_of_blocks(itinerary),
            skipped=skipped,
            attempts=1 if end is None else end.attempts,
            logits=None if logits is None else tuple(logits.tolist()),
            submitted_us=self.submitted_us,
            stem_us=self.stem_us,
            head_us=head_us,
            visits=() if itinerary is None else itinerary.visits,
            why_skipped=end.why_skipped if isinstance(end, Complete) and logits is not None else "",
        )


@dataclass(frozen=True, eq=False)
class PartResult:
    """End of a job of the stem or head."""

    inflight: InFlightRequest
    part: int
    output: np.ndarray | EncodedImage | None = None
    """Output of the part; None if it failed, or did not run because the request had ended."""
    us: int = 0
    error: RequestError | None = None


class RequestCounts:
    """Counts of the requests of a source, by their submission and by their end."""

    def __init__(self) -> None:
        self.submitted = self.answered = self.degraded = self.canceled = self.retries = 0
        kinds: list[type[RequestError]] = [RequestError, *RequestError.__subclasses__()]
        self.failed = {kind.__name__: 0 for kind in kinds}
        self.latency = Durations(LATENCY_BOUNDS_S)

    @property
    def in_flight(self) -> int:
        """Number of submitted requests that have not ended."""
        ended = self.answered + self.canceled + sum(self.failed.values())
        return max(0, self.submitted - ended)

    def add_answer(self, record: RequestRecord) -> None:
        """Count an answer."""
        self.answered += 1
        self.degraded += record.degraded
        self.retries += max(0, record.attempts - 1)
        self.latency.add(record.latency_us)

    def add_error(self, error: RequestError, record: RequestRecord) -> None:
        """Count a request that ended with an error."""
        name = type(error).__name__
        self.failed[name] = self.failed.get(name, 0) + 1
        self.retries += max(0, record.attempts - 1)


def _waves_of_blocks(itinerary: Itinerary) -> tuple[Wave, ...]:
    """Return the waves without stem and head, which belong to no arrangement."""
    if not itinerary.has_stem:
        return itinerary.waves
    waves = (tuple(tuple(step for step in track if step[0] not in ENDS) for track in w) for w in itinerary.waves)
    return tuple(wave for wave in waves if any(wave))


def itinerary_holders(itinerary: Itinerary) -> list[str]:
    """Return the processes that ran blocks of a request or joined its tracks, in order."""
    ran = [holder for wave in itinerary.waves for track in wave for _, holder in track]
    return list(dict.fromkeys([*ran, *(visit.holder for visit in itinerary.visits)]))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits, float64 ``[C]``."""
    exps = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(exps / exps.sum())


def likeliest(logits: np.ndarray, count: int) -> list[tuple[int, float]]:
    """Return index and probability of the ``count`` largest logits, in descending order."""
    probabilities = softmax(logits)
    return [(int(at), float(probabilities[at])) for at in np.argsort(-probabilities, kind="stable")[:count]]
