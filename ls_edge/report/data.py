"""A run's records made ready for drawing: spans on a clock, arrays, the times at which peers were away.

The clock is the source's. A holder reports durations, not times, so a span starts where the ones before it on the
same path end: submission, stem, then for each visit wire, queue, codec, engine. Blocks of one visit share its
engine time by equal parts. Tracks of a wave start together, and the next wave starts after the longest of them.
Time that no duration explains (a branch that was lost with its peer) stands ahead of the first hop, as ``other``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ls_edge.summary import Floats, RunSummary
from ls_edge.trace import PeerEvent, RequestRecord

MOST_HOPS = 12
MOST_HOLDERS = 24
NOTABLE = 0.005
"""Share of a latency below which unexplained time is rounding."""


class Span(NamedTuple):
    """Some milliseconds of a request, since the start of the run."""

    stage: str
    """A name of :data:`ls_edge.report.theme.STAGES`."""
    start: float
    end: float
    holder: str = ""
    """Empty for what the source did itself."""
    block: int | None = None
    """Set for ``engine``."""
    row: int = 0
    """Which of several tracks side by side."""


def spans_of(record: RequestRecord) -> list[Span]:
    """Lay a request's durations out on the source's clock."""
    clock = record.submitted_ms
    spans = [Span("stem", clock, clock + record.stem_ms)]
    clock += record.stem_ms
    inner, end = _visits(record, clock)
    missing = record.submitted_ms + record.latency_ms - (end + record.return_wire_ms + record.head_ms)
    if missing > NOTABLE * record.latency_ms and record.visits:
        spans.append(Span("other", clock, clock + missing))
        inner = [span._replace(start=span.start + missing, end=span.end + missing) for span in inner]
        end += missing
    spans += inner
    spans.append(Span("wire", end, end + record.return_wire_ms))
    spans.append(Span("head", end + record.return_wire_ms, end + record.return_wire_ms + record.head_ms))
    return [span for span in spans if span.end > span.start]


def _visits(record: RequestRecord, start: float) -> tuple[list[Span], float]:
    """Spans of all visits and the time at which the last one ends."""
    place: dict[int, tuple[int, int]] = {}
    for wave_number, wave in enumerate(record.waves or ()):
        place.update({block: (wave_number, row) for row, track in enumerate(wave) for block, _ in track})
    spans: list[Span] = []
    wave_start = wave_end = start
    current = -1
    rows: dict[int, float] = {}
    for visit in record.visits:
        wave_number, row = place.get(visit.blocks[0], (current, 0)) if visit.blocks else (current, 0)
        if wave_number != current or not place:
            current, wave_start, rows = wave_number, wave_end, {}
        clock = rows.get(row, wave_start)
        for stage, duration in (("wire", visit.wire_ms), ("queue", visit.queue_ms), ("codec", visit.codec_ms)):
            spans.append(Span(stage, clock, clock + duration, visit.holder, None, row))
            clock += duration
        share = visit.engine_ms / max(1, len(visit.blocks))
        for block in visit.blocks:
            spans.append(Span("engine", clock, clock + share, visit.holder, block, row))
            clock += share
        rows[row] = clock
        wave_end = max(wave_end, clock)
    return spans, wave_end


def _unexplained(record: RequestRecord) -> float:
    """Milliseconds of an answer that its durations do not account for, as :func:`spans_of` shows them."""
    if record.waves is not None:
        return sum(span.end - span.start for span in spans_of(record) if span.stage == "other")
    known = sum(visit.wire_ms + visit.queue_ms + visit.codec_ms + visit.engine_ms for visit in record.visits)
    missing = record.latency_ms - known - record.stem_ms - record.head_ms - record.return_wire_ms
    return missing if missing > NOTABLE * record.latency_ms else 0.0


def _means(entry: list[float]) -> dict[str, float]:
    return {name: ms / entry[0] for name, ms in zip(("wire", "queue", "codec", "engine"), entry[1:], strict=True)}


class Away(NamedTuple):
    """A peer that could not be reached for a while."""

    peer: str
    start: float
    end: float


@dataclass(frozen=True)
class Engines:
    """Every block that ran, as arrays ``[n]``: which lane (peer), which block, from when to when (ms)."""

    lane: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    request: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lane)


@dataclass(frozen=True)
class RunData:
    """What the charts draw from."""

    summary: RunSummary
    records: Sequence[RequestRecord]
    events: Sequence[PeerEvent]

    @cached_property
    def answers(self) -> list[RequestRecord]:
        """Requests that ended with an answer."""
        return [record for record in self.records if record.error is None]

    @cached_property
    def latency(self) -> Floats:
        """Milliseconds, ``[answers]``."""
        return np.array([record.latency_ms for record in self.answers], dtype=np.float64)

    @cached_property
    def submitted(self) -> Floats:
        """Milliseconds since the start of the run, ``[answers]``."""
        return np.array([record.submitted_ms for record in self.answers], dtype=np.float64)

    @cached_property
    def start_ms(self) -> float:
        """The first submission."""
        return min((record.submitted_ms for record in self.records), default=0.0)

    @cached_property
    def end_ms(self) -> float:
        """The last answer or error, and at least a millisecond after the start."""
        ends = (record.submitted_ms + record.latency_ms for record in self.records)
        return max(max(ends, default=0.0), self.start_ms + 1.0)

    @cached_property
    def blocks(self) -> int:
        """How many blocks the model has, as far as the run shows."""
        seen = {block for peer in self.summary.peers.values() for block in peer.blocks}
        for record in self.records:
            seen.update(record.skipped)
            if record.order:
                seen.update(block for block, _ in record.order)
            if record.waves:
                seen.update(block for wave in record.waves for track in wave for block, _ in track)
        return max(seen, default=-1) + 1

    @cached_property
    def lanes(self) -> list[str]:
        """Peers in the order of the summary."""
        return list(self.summary.peers)

    @cached_property
    def engines(self) -> Engines:
        """Every block that ran for an answer."""
        lane = {name: index for index, name in enumerate(self.lanes)}
        rows = [
            (lane[span.holder], span.block, span.start, span.end, number)
            for number, record in enumerate(self.answers)
            for span in spans_of(record)
            if span.stage == "engine" and span.block is not None and span.holder in lane
        ]
        table = np.array(rows, dtype=np.float64).reshape(-1, 5)
        return Engines(
            lane=table[:, 0].astype(np.int64),
            block=table[:, 1].astype(np.int64),
            start=table[:, 2],
            end=table[:, 3],
            request=table[:, 4].astype(np.int64),
        )

    @cached_property
    def stage_means(self) -> list[tuple[str, str, int, dict[str, float]]]:
        """Rows ``(group, name, how many, mean ms by stage)``: the request, each hop, each holder.

        The first row is the mean over answers and adds up to the mean latency (to more where tracks overlap). A
        hop's mean is over the answers that had it, a holder's over the visits to it.
        """
        answers = [record for record in self.answers if record.visits]
        if not answers:
            return []
        hops: dict[int, list[float]] = defaultdict(lambda: [0.0] * 5)
        holders: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
        for record in answers:
            for number, visit in enumerate(record.visits):
                for entry in (hops[number], holders[visit.holder]):
                    entry[0] += 1
                    entry[1] += visit.wire_ms
                    entry[2] += visit.queue_ms
                    entry[3] += visit.codec_ms
                    entry[4] += visit.engine_ms
        count = len(answers)
        inside = np.array([entry[1:] for entry in holders.values()]).sum(axis=0) / count
        back = sum(record.return_wire_ms for record in answers) / count
        whole = {
            "stem": sum(record.stem_ms for record in answers) / count,
            "wire": float(inside[0]) + back,
            "queue": float(inside[1]),
            "codec": float(inside[2]),
            "engine": float(inside[3]),
            "head": sum(record.head_ms for record in answers) / count,
            "other": sum(_unexplained(record) for record in answers) / count,
        }
        rows = [("All answers", "one request", count, whole)]
        rows += [("By hop", f"hop {n + 1}", int(hops[n][0]), _means(hops[n])) for n in sorted(hops)[:MOST_HOPS]]
        rows.append(("By hop", "back to the source", count, {"wire": back}))
        place = {name: index for index, name in enumerate(self.lanes)}
        for name in sorted(holders, key=lambda name: place.get(name, len(place)))[:MOST_HOLDERS]:
            rows.append(("By holder, one visit", name, int(holders[name][0]), _means(holders[name])))
        return rows

    @cached_property
    def changes(self) -> list[PeerEvent]:
        """Events after the start, in their order; the greeting of each peer is none."""
        known: dict[str, str] = {}
        found = []
        for event in sorted(self.events, key=lambda event: event.at_ms):
            before = known.get(event.peer)
            known[event.peer] = event.what
            if before != event.what and (before is not None or event.what != "alive"):
                found.append(event)
        return found

    @cached_property
    def away(self) -> list[Away]:
        """When peers were lost, until they were alive again or the run ended."""
        since: dict[str, float] = {}
        spells = []
        for event in sorted(self.events, key=lambda event: event.at_ms):
            if event.what == "lost":
                since.setdefault(event.peer, event.at_ms)
            elif event.what == "alive" and event.peer in since:
                spells.append(Away(event.peer, since.pop(event.peer), event.at_ms))
        spells += [Away(peer, start, max(self.end_ms, start)) for peer, start in since.items()]
        return sorted(spells, key=lambda spell: spell.start)
