"""Statistics of a run's records: what ran when, means by stage, when peers were away, how tracks and slots fared.

Times are milliseconds from the start of the run, as charts and tables show them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ls_edge.core.records import NO_GAIN, PeerEvent, PeerState, RequestRecord, TrackSpan, Visit
from ls_edge.evaluation.run_summary import Floats, RunSummary
from ls_edge.report.formatting import NOTHING, shorten, show_ms
from ls_edge.report.theme import STAGES
from ls_edge.report.timeline import Span, has_tracks, spans_of, timeline_of, typical

MOST_HOPS = 12
MOST_HOLDERS = 24
MOST_LANES = 24
"""Peers that a chart shows."""


class _Sums(dict[str, float]):
    """Milliseconds by stage, over ``count`` things."""

    count = 0

    def add(self, parts: Iterable[tuple[str, float]]) -> None:
        self.count += 1
        for stage, ms in parts:
            self[stage] = self.get(stage, 0.0) + ms

    @property
    def means(self) -> dict[str, float]:
        return {stage.name: self[stage.name] / self.count for stage in STAGES if self.get(stage.name)}


def _critical(spans: Iterable[Span]) -> Iterator[tuple[str, float]]:
    return ((span.stage, (span.end - span.start) / 1e3) for span in spans if span.critical)


def _ms_of(stages: Iterable[str], us: Iterable[float]) -> Iterator[tuple[str, float]]:
    return ((stage, value / 1e3) for stage, value in zip(stages, us, strict=True))


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
        return np.array([record.latency_us / 1e3 for record in self.answers], dtype=np.float64)

    @cached_property
    def submitted(self) -> Floats:
        """Milliseconds since the start of the run, ``[answers]``."""
        return np.array([record.submitted_us / 1e3 for record in self.answers], dtype=np.float64)

    @cached_property
    def start_ms(self) -> float:
        """The first submission."""
        return min((record.submitted_us for record in self.records), default=0) / 1e3

    @cached_property
    def end_ms(self) -> float:
        """The last answer or error, and at least a millisecond after the start."""
        ends = (record.submitted_us + record.latency_us for record in self.records)
        return max(max(ends, default=0) / 1e3, self.start_ms + 1.0)

    @cached_property
    def num_blocks(self) -> int:
        """How many blocks the model has, as far as the run shows."""
        seen = {block for peer in self.summary.peers.values() for block in peer.blocks}
        for record in self.records:
            seen.update(record.skipped)
            seen.update(block for block, _ in record.steps)
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
            (lane[span.holder], span.block, span.start / 1e3, span.end / 1e3, number)
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

        The first row is the mean over answers and adds up to the mean latency: of what ran side by side it holds the
        critical part, as a hop's row does. A hop's mean is over the answers that had it. A holder's is over the visits
        to it, in its own times, then over the tracks that it ran for others.
        """
        answers = [record for record in self.answers if record.visits]
        if not answers:
            return []
        whole = _Sums()
        hops: dict[int, _Sums] = defaultdict(_Sums)
        holders: dict[str, _Sums] = defaultdict(_Sums)
        tracks: dict[str, _Sums] = defaultdict(_Sums)
        for record in answers:
            laid = timeline_of(record)
            whole.add(_critical(laid.spans))
            for number, (visit, spans) in enumerate(zip(record.visits, laid.visits, strict=True)):
                hops[number].add(_critical(spans))
                own = (record.hop_us, visit.queue_us, visit.codec_us, visit.engine_us, visit.wait_us)
                holders[visit.holder].add(_ms_of(("wire", "queue", "codec", "engine", "wait"), own))
            for track in record.tracks_of_others:
                there = (track.transfer_us, track.queue_us, track.codec_us, track.engine_us)
                tracks[track.holder].add(_ms_of(("wire", "queue", "codec", "engine"), there))
        count = len(answers)
        back = sum(record.hop_us for record in answers) / 1e3 / count
        rows = [("All answers", "one request", count, whole.means)]
        rows += [("By hop", f"hop {n + 1}", hops[n].count, hops[n].means) for n in sorted(hops)[:MOST_HOPS]]
        rows.append(("By hop", "back to the source", count, {"wire": back}))
        place = {name: index for index, name in enumerate(self.lanes)}
        for group, found in (("By holder, visits", holders), ("By holder, tracks", tracks)):
            for name in sorted(found, key=lambda name: place.get(name, len(place)))[:MOST_HOLDERS]:
                rows.append((group, name, found[name].count, found[name].means))
        return rows

    @cached_property
    def slots(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Answers in which block ran in slot, ``[blocks, blocks]``, and in which it was skipped, ``[blocks]``."""
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
        """Events after the start, in their order; the greeting of each peer is none."""
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
        """When peers were lost, until they were alive again or the run ended."""
        since: dict[str, float] = {}
        spells = []
        for event in sorted(self.events, key=lambda event: event.at_us):
            if event.state == PeerState.LOST:
                since.setdefault(event.peer, event.at_us / 1e3)
            elif event.state == PeerState.ALIVE and event.peer in since:
                spells.append(Away(event.peer, since.pop(event.peer), event.at_us / 1e3))
        spells += [Away(peer, start, max(self.end_ms, start)) for peer, start in since.items()]
        return sorted(spells, key=lambda spell: spell.start)


class Window(NamedTuple):
    """A stretch of the run, in milliseconds since its start."""

    start: float
    end: float


def coverage(start: Floats, end: Floats, edges: Floats) -> Floats:
    """Share of each bin between ``edges [n+1]`` that the spans ``start``..``end`` cover, ``[n]``; overlaps add up."""

    def until(times: Floats) -> Floats:
        ordered = np.sort(times)
        sums = np.concatenate([[0.0], np.cumsum(ordered)])
        count = np.searchsorted(ordered, edges)
        return np.asarray(edges * count - sums[count])

    return np.maximum(np.diff(until(start) - until(end)) / np.diff(edges), 0.0)


def pick_window(data: RunData, most: int) -> Window:
    """The stretch around the first loss of a peer (else the middle) with at most ``most`` runs of a block in it."""
    engines = data.engines
    whole = Window(data.start_ms, data.end_ms)
    if len(engines) <= most:
        return whole
    anchor = next((e.at_us / 1e3 for e in data.changes if e.state == PeerState.LOST), (data.start_ms + data.end_ms) / 2)
    starts = np.sort(engines.start)
    low, high = 0.0, data.end_ms - data.start_ms
    for _ in range(40):
        middle = (low + high) / 2
        begin, end = np.searchsorted(starts, (anchor - middle / 3, anchor + middle * 2 / 3))
        low, high = (middle, high) if end - begin <= most else (low, middle)
    return Window(max(whole.start, anchor - low / 3), min(whole.end, anchor + low * 2 / 3))


def pack(engines: Engines, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int]]:
    """Rows for spans that overlap; a visit's blocks, which touch, stay in one row."""
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
    """Lanes that are drawn: all, or those of the busiest peers."""
    count = len(data.lanes)
    if count <= MOST_LANES:
        return list(range(count))
    busiest = sorted(range(count), key=lambda lane: -data.summary.peers[data.lanes[lane]].busy)[:MOST_LANES]
    return sorted(busiest)


def pick_requests(data: RunData) -> list[tuple[str, RequestRecord]]:
    """A few requests worth a look, each once, with the reason: typical, slow, slowest, retried, degraded, in tracks."""
    drawable = [record for record in data.answers if record.visits]
    if not drawable:
        return []
    ordered = sorted(drawable, key=lambda record: record.latency_us)
    last = len(ordered) - 1
    wanted = [("Median", ordered[last // 2])]
    parallel = typical(drawable)
    if parallel is not None and not has_tracks(ordered[last // 2]):
        wanted.append(("Median of those in tracks", parallel))
    wanted.append(("95th percentile", ordered[round(0.95 * last)]))
    for why, matches in (
        ("Retried", lambda record: record.attempts > 1),
        ("Degraded", lambda record: bool(record.skipped)),
        ("A track did not come back", _lost_a_track),
    ):
        found = next(filter(matches, drawable), None)
        if found is not None:
            wanted.append((why, found))
    wanted.append(("Slowest", ordered[-1]))
    once: dict[int, tuple[str, RequestRecord]] = {}
    for why, record in wanted:
        once.setdefault(id(record), (why, record))
    return list(once.values())


def _lost_a_track(record: RequestRecord) -> bool:
    return any(span.why for span in timeline_of(record).spans) if has_tracks(record) else False


@dataclass
class TrackStatistics:
    """How the tracks of one peer fared over a run; times in milliseconds.

    A joiner's own tracks count for it like those that it ran for others, and failed requests count as far as their
    records go.
    """

    joined: int = 0
    own: int = 0
    """How many of them it joined itself."""
    blocks: int = 0
    expected: list[float] = field(default_factory=list)
    """As planned, of the joined ones; so too ``took``."""
    took: list[float] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Tracks that it was given and that were not summed, by the reason."""
    single: list[float] = field(default_factory=list)
    """Where it was given none: what a block would have taken there."""
    without: list[float] = field(default_factory=list)
    """Where it was given none: what the wave took."""


def tracks_by_peer(records: Iterable[RequestRecord], waves: int = 1) -> dict[str, TrackStatistics]:
    """The tracks of every peer that any record names; empty for a run in which no wave was ever planned.

    ``waves`` is in how many a model was to run.
    """
    found: dict[str, TrackStatistics] = {}
    for record in records:
        size = math.ceil((len(record.steps) + len(record.skipped)) / max(1, waves))
        for visit in record.visits:
            for track in visit.tracks:
                _count_track(found.setdefault(track.holder, TrackStatistics()), track, visit, size)
    return found


def _count_track(tracks: TrackStatistics, track: TrackSpan, visit: Visit, size: int) -> None:
    if track.why == NO_GAIN:
        tracks.single.append(track.expected_us / 1e3)
        tracks.without.append(_wave_ms(visit, track, size))
    elif track.blocks:
        tracks.joined += 1
        tracks.own += track.holder == visit.holder
        tracks.blocks += len(track.blocks)
        tracks.expected.append(track.expected_us / 1e3)
        tracks.took.append((track.end_us - track.begin_us) / 1e3)
    else:
        tracks.left_out[track.why or "lost"] += 1


def _wave_ms(visit: Visit, unused: TrackSpan, size: int) -> float:
    """What the wave took in which a holder was given nothing.

    One that was not split left no track: then it is the engine's time for the ``size`` blocks of a wave, at most those
    that the joiner ran outside of tracks.
    """
    wave = [track for track in visit.tracks if track.wave == unused.wave and track.why != NO_GAIN]
    if wave:
        return (max(track.end_us for track in wave) - min(track.begin_us for track in wave)) / 1e3
    own = [track for track in visit.tracks if track.holder == visit.holder]
    blocks = len(visit.blocks) - sum(len(track.blocks) for track in own)
    engine = (visit.engine_us - sum(track.engine_us for track in own)) / 1e3
    return max(0.0, engine / blocks * min(size, blocks)) if blocks > 0 else 0.0


def track_table(
    tracks: dict[str, TrackStatistics], peers: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A row for each peer; ``peers`` come in their order, then others, but none that no track names."""
    head = ("Peer", "Tracks", "Own", "Blocks", "Expected", "Took", "Not summed", "Given none")
    order = [name for name in peers if name in tracks] + sorted(tracks.keys() - set(peers))
    return head, [_track_row(name, tracks[name]) for name in order]


def _track_row(name: str, of: TrackStatistics) -> tuple[str, ...]:
    left_out = ", ".join(f"{count:,} {shorten(why, 40)}" for why, count in of.left_out.most_common())
    none = ""
    if of.single:
        without = _median([ms for ms in of.without if ms > 0])
        against = "" if without is None else f", the wave took {show_ms(without)}"
        often = "once" if len(of.single) == 1 else f"{len(of.single):,} times"
        none = f"no gain {often}: a block there {show_ms(_median(of.single))}{against}"
    return (
        shorten(name, 60), f"{of.joined:,}", f"{of.own:,}", f"{of.blocks:,}", show_ms(_median(of.expected)),
        show_ms(_median(of.took)), left_out or NOTHING, none or NOTHING,
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
