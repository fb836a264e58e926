"""A run's records made ready for drawing: what ran when as arrays, means by stage, when peers were away."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ls_edge.evaluation.run_summary import Floats, RunSummary
from ls_edge.records import PeerEvent, PeerState, RequestRecord
from ls_edge.report.spans import Span, spans_of, way_of
from ls_edge.report.theme import STAGES

MOST_HOPS = 12
MOST_HOLDERS = 24


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
    def blocks(self) -> int:
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
            way = way_of(record)
            whole.add(_critical(way.spans))
            for number, (visit, spans) in enumerate(zip(record.visits, way.visits, strict=True)):
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
        for group, found in (("By holder, one visit", holders), ("By holder, a track for another", tracks)):
            for name in sorted(found, key=lambda name: place.get(name, len(place)))[:MOST_HOLDERS]:
                rows.append((group, name, found[name].count, found[name].means))
        return rows

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
