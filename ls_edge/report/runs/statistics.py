"""Statistics of the records of a run: times by stage, engine use, lost peers, tracks, and slots.

Times are milliseconds since the start of the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ls_edge.core.records import NO_GAIN, PeerEvent, PeerState, RequestRecord
from ls_edge.core.text import class_name
from ls_edge.evaluation.run_summary import Floats, RunSummary
from ls_edge.report.runs.intervals import Span, has_tracks, intervals_of, joins
from ls_edge.report.theme import STAGES

MOST_HOPS = 12
MOST_HOLDERS = 24
MOST_LANES = 24


class _Sums:
    def __init__(self) -> None:
        self.count = 0
        self._us = dict.fromkeys(STAGES, 0.0)

    def add(self, parts: Iterable[tuple[str, float]]) -> None:
        self.count += 1
        for stage, us in parts:
            self._us[stage] += us

    @property
    def means(self) -> dict[str, float]:
        return {stage: us / 1e3 / self.count for stage, us in self._us.items() if us}


def _critical(spans: Iterable[Span]) -> Iterator[tuple[str, float]]:
    return ((span.stage, span.end - span.start) for span in spans if span.critical)


class Away(NamedTuple):
    """Time during which a peer could not be reached."""

    peer: str
    start: float
    end: float
    returned: bool = False


class StageMeans(NamedTuple):
    """Mean milliseconds by stage over a number of requests, hops, visits, or tracks."""

    group: str
    name: str
    number: int
    means: dict[str, float]


@dataclass(frozen=True)
class Engines:
    """Block executions as arrays ``[n]``: lane of the peer, block, start and end in ms, index of the answer."""

    lane: npt.NDArray[np.int64]
    block: npt.NDArray[np.int64]
    start: Floats
    end: Floats
    request: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lane)


@dataclass(frozen=True)
class RunData:
    """A run with the statistics that its charts and tables share."""

    summary: RunSummary
    records: Sequence[RequestRecord]
    events: Sequence[PeerEvent]
    classes: Sequence[str] = ()
    """Names of the model's classes; without them, classes are shown by number."""

    def class_name(self, index: int | None) -> str:
        """Return the name of a class, shortened."""
        return class_name(index, self.classes)

    @cached_property
    def answers(self) -> list[RequestRecord]:
        """Requests that ended with an answer."""
        return [record for record in self.records if record.error is None]

    @cached_property
    def failed(self) -> list[RequestRecord]:
        """Requests that ended with an error."""
        return [record for record in self.records if record.error is not None]

    @cached_property
    def latency(self) -> Floats:
        """Milliseconds, ``[answers]``."""
        return np.array([record.latency_us / 1e3 for record in self.answers], dtype=np.float64)

    @cached_property
    def submitted(self) -> Floats:
        """Milliseconds since the start of the run, ``[answers]``."""
        return np.array([record.submitted_us / 1e3 for record in self.answers], dtype=np.float64)

    @cached_property
    def start_ms(self) -> float:
        """Time of the first submission."""
        return min((record.submitted_us for record in self.records), default=0) / 1e3

    @cached_property
    def end_ms(self) -> float:
        """Time of the last answer or error, at least a millisecond after the start."""
        ends = (record.submitted_us + record.latency_us for record in self.records)
        return max(max(ends, default=0) / 1e3, self.start_ms + 1.0)

    @cached_property
    def num_blocks(self) -> int:
        """Number of blocks of the model, according to the run."""
        seen = {block for peer in self.summary.peers.values() for block in peer.blocks if isinstance(block, int)}
        for record in self.records:
            seen.update(record.skipped)
            seen.update(block for block, _ in record.steps)
        return max(seen, default=-1) + 1

    @cached_property
    def lanes(self) -> list[str]:
        """Peers in the order of the summary."""
        return list(self.summary.peers)

    @cached_property
    def in_tracks(self) -> bool:
        """Whether holders worked on an answer at the same time."""
        return any(map(has_tracks, self.answers))

    @property
    def engines(self) -> Engines:
        """Block executions that contributed to answers."""
        return self._work[0]

    @property
    def stage_means(self) -> list[StageMeans]:
        """Means per request, per hop, and per holder.

        The first row is the mean over all answers and adds up to the mean latency; like the rows of hops, it counts
        only the critical part of concurrent work. The mean of a hop is over the answers that have this hop. Holders
        have means over their visits, and over the tracks that they ran for others, by their own clocks.
        """
        return self._work[1]

    @cached_property
    def _work(self) -> tuple[Engines, list[StageMeans]]:
        """Engine use and stage means, computed in one pass, since the intervals of a long run do not fit in memory."""
        lane = {name: index for index, name in enumerate(self.lanes)}
        ran: list[tuple[float, ...]] = []
        whole, back = _Sums(), _Sums()
        hops, visits, tracks = (defaultdict[str, _Sums](_Sums) for _ in range(3))
        for number, record in enumerate(self.answers):
            laid = intervals_of(record)
            ran += [
                (lane[span.holder], span.block, span.start / 1e3, span.end / 1e3, number)
                for span in laid.spans
                if span.block is not None and span.holder in lane
            ]
            if not record.visits:
                continue
            whole.add(_critical(laid.spans))
            back.add([("wire", record.hop_us)])
            for hop, (visit, spans) in enumerate(zip(record.visits, laid.visits, strict=True), 1):
                hops[f"hop {hop}"].add(_critical(spans))
                own = (record.hop_us, visit.queue_us, visit.codec_us, visit.engine_us, visit.wait_us)
                visits[visit.holder].add(zip(("wire", "queue", "codec", "engine", "wait"), own, strict=True))
            for track in record.tracks_of_others:
                there = (track.transfer_us, track.queue_us, track.codec_us, track.engine_us)
                tracks[track.holder].add(zip(("wire", "queue", "codec", "engine"), there, strict=True))
        columns = np.array(ran, dtype=np.float64).reshape(-1, 5).T
        lanes, blocks, requests = (columns[row].astype(np.int64) for row in (0, 1, 4))
        engines = Engines(lanes, blocks, columns[2], columns[3], requests)
        if not whole.count:
            return engines, []
        rows = [("All answers", "one request", whole)]
        rows += [("By hop", name, sums) for name, sums in list(hops.items())[:MOST_HOPS]]
        rows.append(("By hop", "back to the source", back))
        for group, found in (("By holder, visits", visits), ("By holder, tracks", tracks)):
            names = sorted(found, key=lambda name: lane.get(name, len(lane)))[:MOST_HOLDERS]
            rows += [(group, name, found[name]) for name in names]
        return engines, [StageMeans(group, name, sums.count, sums.means) for group, name, sums in rows]

    @cached_property
    def slots(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of answers by block and slot, ``[blocks, blocks]``, and by skipped block, ``[blocks]``."""
        size = self.num_blocks
        counts = np.zeros((size, size), dtype=np.int64)
        skipped = np.zeros(size, dtype=np.int64)
        for record in self.answers:
            for block, slot in record.arrangement.steps():
                counts[block, slot] += 1
            for block in record.skipped:
                skipped[block] += 1
        return counts, skipped

    @cached_property
    def changes(self) -> list[PeerEvent]:
        """Changes of state in chronological order, without the first greeting of each peer."""
        known: dict[str, PeerState] = {}
        found = []
        for event in sorted(self.events, key=lambda event: event.at_us):
            before = known.get(event.peer)
            known[event.peer] = event.state
            if before != event.state and (before is not None or event.state != PeerState.ALIVE):
                found.append(event)
        return found

    @cached_property
    def away(self) -> list[Away]:
        """Times from the loss of a peer until its return or the end of the run."""
        since: dict[str, float] = {}
        spells = []
        for event in sorted(self.events, key=lambda event: event.at_us):
            if event.state == PeerState.LOST:
                since.setdefault(event.peer, event.at_us / 1e3)
            elif event.state == PeerState.ALIVE and event.peer in since:
                spells.append(Away(event.peer, since.pop(event.peer), event.at_us / 1e3, returned=True))
        spells += [Away(peer, start, max(self.end_ms, start)) for peer, start in since.items()]
        return sorted(spells, key=lambda spell: spell.start)

    @cached_property
    def chosen(self) -> list[tuple[str, RequestRecord]]:
        """A few requests worth a look, each listed once, with the reason."""
        drawable = sorted((record for record in self.answers if record.visits), key=lambda record: record.latency_us)
        if not drawable:
            return []
        parallel = [record for record in drawable if has_tracks(record)]
        median = drawable[(len(drawable) - 1) // 2]
        wanted: list[tuple[str, RequestRecord | None]] = [("Median", median)]
        if parallel and not has_tracks(median):
            wanted.append(("Median of those in tracks", parallel[(len(parallel) - 1) // 2]))
        in_time = sorted(drawable, key=lambda record: record.submitted_us)
        wanted += [
            ("95th percentile", drawable[round(0.95 * (len(drawable) - 1))]),
            ("Retried", next((record for record in in_time if record.attempts > 1), None)),
            ("Degraded", next((record for record in in_time if record.skipped), None)),
            ("A track did not come back", next(filter(_lost_a_track, in_time), None)),
            ("Slowest", drawable[-1]),
        ]
        once: dict[int, tuple[str, RequestRecord]] = {}
        for why, record in wanted:
            if record is not None:
                once.setdefault(id(record), (why, record))
        return list(once.values())

    @cached_property
    def one_scale(self) -> bool:
        """Whether the latencies of the chosen requests are close enough to draw them on one scale."""
        times = [record.latency_us for _, record in self.chosen]
        return bool(times) and max(times) <= 4 * min(times)


def _lost_a_track(record: RequestRecord) -> bool:
    tracks = (track for visit in record.visits if joins(visit) for track in visit.tracks)
    return any(not track.blocks and track.why != NO_GAIN for track in tracks)


class Window(NamedTuple):
    """Part of a run, in milliseconds since its start."""

    start: float
    end: float


def coverage(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Return the fraction of each bin between ``edges [n+1]`` that spans cover, ``[n]``; overlaps add up."""

    def until(times: Floats) -> Floats:
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges)
        return np.asarray(edges * count - sums[count])

    return np.maximum(np.diff(until(start) - until(end)) / np.diff(edges), 0.0)


def pick_window(data: RunData, most: int) -> Window:
    """Return a part with at most ``most`` block executions: around the first loss of a peer, else the middle."""
    engines = data.engines
    whole = Window(data.start_ms, data.end_ms)
    if len(engines) <= most:
        return whole
    anchor = next((e.at_us / 1e3 for e in data.changes if e.state == PeerState.LOST), (data.start_ms + data.end_ms) / 2)
    starts = np.append(np.sort(engines.start), whole.end)
    first = int(np.clip(np.searchsorted(starts, anchor) - most // 3, 0, len(engines) - most))
    return Window(float(starts[first]) if first else whole.start, float(starts[first + most]))


def pack(engines: Engines, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Assign overlapping spans to different rows; the consecutive blocks of a visit stay in one row."""
    free: list[float] = []
    placed = []
    for index in chosen[np.argsort(engines.start[chosen], kind="stable")]:
        start = float(engines.start[index]) + 1e-3
        row = next((i for i, until in enumerate(free) if until <= start), len(free))
        if row == len(free):
            free.append(0.0)
        free[row] = float(engines.end[index])
        placed.append((int(index), row))
    return placed


def shown_lanes(data: RunData) -> list[int]:
    """Return the lanes of the busiest peers, at most :data:`MOST_LANES`."""
    busiest = sorted(range(len(data.lanes)), key=lambda lane: -data.summary.peers[data.lanes[lane]].busy)
    return sorted(busiest[:MOST_LANES])
