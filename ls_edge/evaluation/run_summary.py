"""Summary of a run: the document of ``ls-edge run --json`` and the input of all tables and reports.

:func:`summarize` needs only :mod:`ls_edge.core.records`, so it can summarize a trace. Unknown values (a latency without
answers, an accuracy without labels) are None (null in JSON), never NaN.

Lost work is not included: a record contains only the branch that answered, so ``busy`` counts the engine time of
answers, not of dropped branches. Requests in one batch share its engine time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from ls_edge.core.parts import ShownPart, shown_parts
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.records import PeerContext, PeerEvent, RequestRecord, RunContext, RunFacts, holder_times
from ls_edge.evaluation.classes import ClassCounts, missed_line

Floats = npt.NDArray[np.float64]
MOST_REASONS = 16


class Quantiles(msgspec.Struct, frozen=True):
    """Statistics in milliseconds; all None without values."""

    mean: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class Skips(msgspec.Struct, frozen=True):
    """Blocks that answers skipped."""

    mean: float | None = None
    max: int | None = None
    reasons: dict[str, int] = {}


class Hops(msgspec.Struct, frozen=True):
    """Transfers of tokens between two processes, including the return to the source, and two for a track of a helper.

    ``mean`` is per answer. The other fields are medians: ``wire`` over hops, the others over visits to a holder,
    including tracks that it ran for others.
    """

    mean: float | None = None
    wire_ms_p50: float | None = None
    queue_ms_p50: float | None = None
    engine_ms_p50: float | None = None
    codec_ms_p50: float | None = None


class PeerSummary(msgspec.Struct, frozen=True):
    """Work of one peer in a run."""

    blocks: tuple[ShownPart, ...]
    requests: int
    busy: float
    """Fraction of time in which its engine computed answers, from the first submission to the last answer or error."""
    state: PeerState
    blocks_run: int = 0
    lost: int = 0
    engine: str = ""
    wire_ms_p50: float | None = None
    """Median time of a hop of the answers that it worked on, which ``ls-edge plan --run`` uses."""


class SkipAccuracy(msgspec.Struct, frozen=True):
    """Accuracy of the answers with a certain number of skipped blocks; ``low`` and ``high`` are its 95 % interval."""

    skipped: int
    answers: int
    labeled: int
    top1: float | None
    low: float | None
    high: float | None


class RunSummary(RunFacts, frozen=True, kw_only=True):
    """Document of ``ls-edge run --json``."""

    requests: int
    answered: int
    failed: int
    degraded: int
    top1: float | None
    throughput: float | None
    """Answers per second, from the first submission to the last answer."""
    latency_ms: Quantiles
    skips: Skips
    retries: int
    hops: Hops
    peers: dict[str, PeerSummary]
    preprocess_ms: Quantiles
    duration_s: float | None
    """Seconds from the first submission to the last answer or error."""
    top1_interval: tuple[float, float] | None
    images: int
    """Number of distinct images among the answers with labels."""
    chance: float | None
    """Accuracy of the best constant answer."""
    balanced_top1: float | None
    """Mean of the accuracies of the classes."""
    top1_by_class: dict[str, float]
    accuracy_by_skips: tuple[SkipAccuracy, ...]
    errors: dict[str, int]

    @property
    def missed(self) -> str:
        """One line about classes without a correct answer; empty without any."""
        return missed_line([name for name, share in self.top1_by_class.items() if not share], self.answered)

    @property
    def distrust(self) -> str:
        """One line about peers that sent impossible messages; empty without any."""
        if not self.rejected:
            return ""
        each = "; ".join(f"{name} ({one.count:,}, such as {one.why})" for name, one in self.rejected.items())
        return f"impossible messages were dropped: {each}; check these devices"

    def to_json(self) -> str:
        """Return the indented document without a final newline."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def summarize(records: Sequence[RequestRecord], events: Sequence[PeerEvent], context: RunContext) -> RunSummary:
    """Summarize a run, which may be empty or without answers."""
    answers = [record for record in records if record.error is None]
    latency = np.array([record.latency_us / 1e3 for record in answers], dtype=np.float64)
    first = min((record.submitted_us for record in records), default=0)
    last_answer = max((record.submitted_us + record.latency_us for record in answers), default=first)
    last = max((record.submitted_us + record.latency_us for record in records), default=first)
    tally = Tally()
    for record in answers:
        tally.add(record.label, record.prediction, record.image)
    counts = _class_counts(answers, len(context.classes))
    skipped = [len(record.skipped) for record in answers]
    reasons = Counter(record.why_skipped for record in answers if record.why_skipped)
    facts = {name: getattr(context, name) for name in RunFacts.__struct_fields__}
    return RunSummary(
        **{**facts, "rejected": dict(context.rejected)},
        requests=len(records),
        answered=len(answers),
        failed=len(records) - len(answers),
        degraded=sum(record.degraded for record in answers),
        top1=tally.top1,
        throughput=1e6 * len(answers) / (last_answer - first) if last_answer > first else None,
        latency_ms=quantiles(latency),
        skips=Skips(sum(skipped) / len(skipped), max(skipped), dict(reasons.most_common(MOST_REASONS)))
        if skipped
        else Skips(),
        retries=sum(max(0, record.attempts - 1) for record in records),
        hops=_hops(answers),
        peers=_peers(answers, events, context, last - first),
        preprocess_ms=quantiles(np.asarray(context.preprocess_ms, dtype=np.float64)),
        duration_s=(last - first) / 1e6 if records else None,
        top1_interval=tally.interval,
        images=len(tally.images),
        chance=None if counts is None else counts.chance,
        balanced_top1=None if counts is None else counts.balanced,
        top1_by_class={} if counts is None else counts.by_class(context.classes),
        accuracy_by_skips=_by_skips(answers),
        errors=dict(Counter(error_type(record.error) for record in records if record.error is not None).most_common()),
    )


def quantiles(values: Floats) -> Quantiles:
    """Return mean, median, 95th and 99th percentile, and maximum of ``values [n]``; all are None without values."""
    if not values.size:
        return Quantiles()
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Quantiles(mean=float(values.mean()), p50=p50, p95=p95, p99=p99, max=float(values.max()))


def wilson(successes: float, trials: int) -> tuple[float, float] | None:
    """Return the 95 % Wilson score interval of a proportion (E. B. Wilson, 1927); None without trials.

    Unlike the normal interval, it stays within 0 to 1 and does not vanish if all answers are right.
    """
    if trials == 0:
        return None
    share, z = successes / trials, 1.959964
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    center = share + z * z / (2 * trials)
    scale = 1 + z * z / trials
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)


class Tally:
    """Count of answers, and the accuracy of those with labels."""

    def __init__(self) -> None:
        self.answers = self.labeled = self.right = 0
        self.images: set[str | int] = set()

    def add(self, label: int | None, prediction: int | None, image: str = "") -> None:
        """Count an answer; without the name of its image, it counts as an answer to a new image."""
        self.answers += 1
        if label is not None:
            self.labeled += 1
            self.right += label == prediction
            self.images.add(image or self.labeled)

    @property
    def top1(self) -> float | None:
        """Fraction of right answers; None without labels."""
        return self.right / self.labeled if self.labeled else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of :attr:`top1`; answers to the same image count as one trial."""
        trials = min(self.labeled, len(self.images))
        return None if self.top1 is None else wilson(self.top1 * trials, trials)


def error_type(error: str) -> str:
    """Return the type in an error's text: ``BudgetExceeded`` for ``BudgetExceeded: 500 ms are over``."""
    return error.partition(":")[0].strip() or "unknown"


def _median_ms(values_us: Sequence[float]) -> float | None:
    return float(np.median(values_us)) / 1e3 if values_us else None


def _hops(answers: Sequence[RequestRecord]) -> Hops:
    visited = [record for record in answers if record.visits]
    spent = [times for record in visited for times in holder_times(record)]
    wires = [record.hop_us for record in visited for _ in range(len(record.visits) + 1)]
    wires += [track.transfer_us / 2 for record in visited for track in record.tracks_of_others for _ in range(2)]
    return Hops(
        mean=sum(record.hops for record in answers) / len(answers) if answers else None,
        wire_ms_p50=_median_ms(wires),
        queue_ms_p50=_median_ms([times.queue_us for times in spent]),
        engine_ms_p50=_median_ms([times.engine_us for times in spent]),
        codec_ms_p50=_median_ms([times.codec_us for times in spent]),
    )


def _peers(
    answers: Sequence[RequestRecord], events: Sequence[PeerEvent], context: RunContext, span_us: float
) -> dict[str, PeerSummary]:
    requests: Counter[str] = Counter()
    blocks: dict[str, set[int]] = defaultdict(set)
    blocks_run: Counter[str] = Counter()
    engine_us: dict[str, int] = defaultdict(int)
    hops_us: dict[str, list[float]] = defaultdict(list)
    for record in answers:
        visited = {visit.holder for visit in record.visits}
        requests.update(record.holders | visited)
        for name in visited:
            hops_us[name].append(record.hop_us)
        for times in holder_times(record):
            engine_us[times.holder] += times.engine_us
        for block, holder in record.steps:
            blocks[holder].add(block)
            blocks_run[holder] += 1
    state: dict[str, PeerState] = {}
    lost: Counter[str] = Counter()
    for event in sorted(events, key=lambda event: event.at_us):
        state[event.peer] = event.state
        lost[event.peer] += event.state == PeerState.LOST
    unknown = PeerContext()
    result = {}
    for name in dict.fromkeys([*context.peers, *sorted(requests | state.keys())]):
        known = context.peers.get(name, unknown)
        result[name] = PeerSummary(
            blocks=shown_parts(known.blocks or sorted(blocks[name])),
            requests=requests[name],
            busy=min(1.0, engine_us[name] / span_us) if span_us > 0 else 0.0,
            state=known.state if known.state != PeerState.UNKNOWN else state.get(name, PeerState.UNKNOWN),
            blocks_run=blocks_run[name],
            lost=lost[name],
            engine=known.engine,
            wire_ms_p50=_median_ms(hops_us[name]),
        )
    return result


def _class_counts(answers: Sequence[RequestRecord], classes: int) -> ClassCounts | None:
    """Return the counts by class of the answers with labels; None without any."""
    pairs = [(one.label, one.prediction) for one in answers if one.label is not None and one.prediction is not None]
    if not pairs or not classes:
        return None
    labels, named = np.array(pairs).T
    return ClassCounts.of(labels, named, classes)


def _by_skips(answers: Sequence[RequestRecord]) -> tuple[SkipAccuracy, ...]:
    groups: dict[int, Tally] = defaultdict(Tally)
    for record in answers:
        groups[len(record.skipped)].add(record.label, record.prediction, record.image)
    return tuple(
        SkipAccuracy(skipped, tally.answers, tally.labeled, tally.top1, *(tally.interval or (None, None)))
        for skipped, tally in sorted(groups.items())
    )
