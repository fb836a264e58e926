"""Statistics of the records of a run: times by stage, engine use, lost peers, tracks and slots.

Times are milliseconds since the start of the run.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ls_edge.core.records import NO_GAIN, PeerEvent, PeerState, RequestRecord, TrackSpan, Visit
from ls_edge.core.text import NOTHING, class_name, shorten, show_ms
from ls_edge.evaluation.run_summary import Floats, RunSummary
from ls_edge.report.intervals import Span, has_tracks, intervals_of, joins, typical
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
    """Mean milliseconds by stage, over a number of requests, hops, visits or tracks."""

    group: str
    name: str
    number: int
    means: dict[str, float]


@dataclass(frozen=True)
class Engines:
    """Every block that ran, as arrays ``[n]``: lane of its peer, block, start and end in ms, and answer."""

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
        """Number of blocks of the model, as far as the run shows."""
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
        """Every block that ran for an answer."""
        return self._work[0]

    @property
    def stage_means(self) -> list[StageMeans]:
        """Means of the request, of each hop, and of each holder.

        The first row is the mean over answers and adds up to the mean latency: of what ran at the same time it holds
        the critical part, as the row of a hop does. The mean of a hop is over the answers that had it; that of a holder
        over the visits to it in its own times, then over the tracks that it ran for others.
        """
        return self._work[1]

    @cached_property
    def _work(self) -> tuple[Engines, list[StageMeans]]:
        """Engine use and stage means; the intervals of each request are computed once for both."""
        lane = {name: index for index, name in enumerate(self.lanes)}
        ran: list[tuple[float, ...]] = []
        whole = _Sums()
        groups: dict[str, dict[str, _Sums]] = {
            group: defaultdict(_Sums) for group in ("By hop", "By holder, visits", "By holder, tracks")
        }
        back_us = 0.0
        for number, record in enumerate(self.answers):
            laid = intervals_of(record)
            for span in laid.spans:
                if span.block is not None and span.holder in lane:
                    ran.append((lane[span.holder], span.block, span.start / 1e3, span.end / 1e3, number))
            if not record.visits:
                continue
            whole.add(_critical(laid.spans))
            back_us += record.hop_us
            for hop, (visit, spans) in enumerate(zip(record.visits, laid.visits, strict=True), 1):
                groups["By hop"][f"hop {hop}"].add(_critical(spans))
                own = (record.hop_us, visit.queue_us, visit.codec_us, visit.engine_us, visit.wait_us)
                visits = groups["By holder, visits"][visit.holder]
                visits.add(zip(("wire", "queue", "codec", "engine", "wait"), own, strict=True))
            for track in record.tracks_of_others:
                there = (track.transfer_us, track.queue_us, track.codec_us, track.engine_us)
                tracks = groups["By holder, tracks"][track.holder]
                tracks.add(zip(("wire", "queue", "codec", "engine"), there, strict=True))
        columns = np.array(ran, dtype=np.float64).reshape(-1, 5).T
        lanes, blocks, requests = (columns[row].astype(np.int64) for row in (0, 1, 4))
        engines = Engines(lanes, blocks, columns[2], columns[3], requests)
        if not whole.count:
            return engines, []
        rows = [StageMeans("All answers", "one request", whole.count, whole.means)]
        for group, found in groups.items():
            if group == "By hop":
                names = list(found)[:MOST_HOPS]
            else:
                names = sorted(found, key=lambda name: lane.get(name, len(lane)))[:MOST_HOLDERS]
            rows += [StageMeans(group, name, found[name].count, found[name].means) for name in names]
            if group == "By hop":
                back = {"wire": back_us / 1e3 / whole.count}
                rows.append(StageMeans(group, "back to the source", whole.count, back))
        return engines, rows

    @cached_property
    def slots(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Number of answers in which a block ran in a slot, ``[blocks, blocks]``, or was skipped, ``[blocks]``."""
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
        """Changes of state in their order, without the first greeting of each peer."""
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
        """A few requests worth a look, each once, with the reason."""
        drawable = sorted((record for record in self.answers if record.visits), key=lambda record: record.latency_us)
        if not drawable:
            return []
        last = len(drawable) - 1
        wanted = [("Median", drawable[last // 2])]
        parallel = typical(drawable)
        if parallel is not None and not has_tracks(drawable[last // 2]):
            wanted.append(("Median of those in tracks", parallel))
        wanted.append(("95th percentile", drawable[round(0.95 * last)]))
        for why, matches in (
            ("Retried", lambda record: record.attempts > 1),
            ("Degraded", lambda record: bool(record.skipped)),
            ("A track did not come back", _lost_a_track),
        ):
            found = min(filter(matches, drawable), key=lambda record: record.submitted_us, default=None)
            if found is not None:
                wanted.append((why, found))
        wanted.append(("Slowest", drawable[-1]))
        once: dict[int, tuple[str, RequestRecord]] = {}
        for why, record in wanted:
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
    """Return the part around the first loss of a peer, else the middle, with at most ``most`` runs of a block."""
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
    """Assign rows to spans that overlap; the blocks of a visit, which touch, stay in one row."""
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
    """Return the lanes to draw: those of the busiest peers."""
    busiest = sorted(range(len(data.lanes)), key=lambda lane: -data.summary.peers[data.lanes[lane]].busy)
    return sorted(busiest[:MOST_LANES])


class PlannedTrack(NamedTuple):
    """A track, or a holder that was assigned none, with its wave."""

    track: TrackSpan
    visit: Visit
    size: int


def tracks_by_peer(records: Iterable[RequestRecord], waves: int = 1) -> dict[str, list[PlannedTrack]]:
    """Return the tracks of every peer that a record names, those of failed requests and of its own waves included.

    ``waves`` is the planned number of waves per request.
    """
    found: dict[str, list[PlannedTrack]] = defaultdict(list)
    for record in records:
        size = math.ceil((len(record.steps) + len(record.skipped)) / max(1, waves))
        for visit in record.visits:
            for track in visit.tracks:
                found[track.holder].append(PlannedTrack(track, visit, size))
    return found


def _wave_ms(unused: PlannedTrack) -> float:
    """Return the duration of a wave in which a holder was assigned no track.

    A wave that was not split left no track. Its duration is then the engine's time for its blocks, or for all blocks
    that the joiner ran outside of tracks if there are fewer.
    """
    visit = unused.visit
    wave = [track for track in visit.tracks if track.wave == unused.track.wave and track.why != NO_GAIN]
    if wave:
        return (max(track.end_us for track in wave) - min(track.begin_us for track in wave)) / 1e3
    own = [track for track in visit.tracks if track.holder == visit.holder]
    blocks = len(visit.blocks) - sum(len(track.blocks) for track in own)
    engine = (visit.engine_us - sum(track.engine_us for track in own)) / 1e3
    return max(0.0, engine / blocks * min(unused.size, blocks)) if blocks > 0 else 0.0


def track_table(
    tracks: dict[str, list[PlannedTrack]], peers: Sequence[str]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings, and a row for each peer with tracks: first ``peers`` in their order, then any others."""
    head = ("Peer", "Tracks", "Own", "Blocks", "Expected", "Took", "Not summed", "Given none")
    order = [name for name in peers if name in tracks] + sorted(tracks.keys() - set(peers))
    return head, [_track_row(name, tracks[name]) for name in order]


def _track_row(name: str, planned: Sequence[PlannedTrack]) -> tuple[str, ...]:
    given = [one for one in planned if one.track.why != NO_GAIN]
    joined = [one.track for one in given if one.track.blocks]
    lost = Counter(one.track.why or "lost" for one in given if not one.track.blocks)
    unused = [one for one in planned if one.track.why == NO_GAIN]
    none = NOTHING
    if unused:
        without = _median([ms for ms in map(_wave_ms, unused) if ms > 0])
        against = "" if without is None else f", the wave took {show_ms(without)}"
        often = "once" if len(unused) == 1 else f"{len(unused):,} times"
        single = show_ms(_median([one.track.expected_us / 1e3 for one in unused]))
        none = f"no gain {often}: a block there {single}{against}"
    return (
        shorten(name, 60),
        f"{len(joined):,}",
        f"{sum(one.track.holder == one.visit.holder for one in given if one.track.blocks):,}",
        f"{sum(len(track.blocks) for track in joined):,}",
        show_ms(_median([track.expected_us / 1e3 for track in joined])),
        show_ms(_median([(track.end_us - track.begin_us) / 1e3 for track in joined])),
        ", ".join(f"{count:,} {shorten(why, 40)}" for why, count in lost.most_common()) or NOTHING,
        none,
    )


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
