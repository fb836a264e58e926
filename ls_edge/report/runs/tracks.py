"""Table of each peer's tracks: number, durations, and reasons why tracks were not summed or not assigned."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ls_edge.core.records import NO_GAIN, RequestRecord, TrackSpan, Visit
from ls_edge.core.text import NOTHING, shorten, show_ms


class TrackInWave(NamedTuple):
    """A track, or a holder that was not assigned one, with the visit and the size of its wave."""

    track: TrackSpan
    visit: Visit
    size: int

    @property
    def wave_ms(self) -> float:
        """Duration of the wave in which a holder was not assigned a track.

        A wave that was not split has no tracks. Its duration is then the engine time of its blocks, or of all blocks
        that the joiner ran outside of tracks if these are fewer.
        """
        visit = self.visit
        wave = [track for track in visit.tracks if track.wave == self.track.wave and track.why != NO_GAIN]
        if wave:
            return (max(track.end_us for track in wave) - min(track.begin_us for track in wave)) / 1e3
        own = [track for track in visit.tracks if track.holder == visit.holder]
        blocks = len(visit.blocks) - sum(len(track.blocks) for track in own)
        engine = (visit.engine_us - sum(track.engine_us for track in own)) / 1e3
        return max(0.0, engine / blocks * min(self.size, blocks)) if blocks > 0 else 0.0


def track_table(
    records: Iterable[RequestRecord], peers: Sequence[str], waves: int = 1
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return headings and a row for each peer with tracks: first ``peers`` in their order, then all others.

    Tracks of failed requests and of a peer's own waves are included. ``waves`` is the planned number of waves per
    request.
    """
    found: dict[str, list[TrackInWave]] = defaultdict(list)
    for record in records:
        size = math.ceil((len(record.steps) + len(record.skipped)) / max(1, waves))
        for visit in record.visits:
            for track in visit.tracks:
                found[track.holder].append(TrackInWave(track, visit, size))
    head = ("Peer", "Tracks", "Own", "Blocks", "Expected", "Took", "Not summed", "Given none")
    order = [name for name in peers if name in found] + sorted(found.keys() - set(peers))
    return head, [_row(name, found[name]) for name in order]


def _row(name: str, planned: Sequence[TrackInWave]) -> tuple[str, ...]:
    given = [one for one in planned if one.track.why != NO_GAIN]
    joined = [one.track for one in given if one.track.blocks]
    lost = Counter(one.track.why or "lost" for one in given if not one.track.blocks)
    unused = [one for one in planned if one.track.why == NO_GAIN]
    none = NOTHING
    if unused:
        often = "once" if len(unused) == 1 else f"{len(unused):,} times"
        none = f"no gain {often}: a block there {_median_ms([one.track.expected_us / 1e3 for one in unused])}"
        if known := [one.wave_ms for one in unused if one.wave_ms > 0]:
            none += f", the wave took {_median_ms(known)}"
    return (
        shorten(name, 60),
        f"{len(joined):,}",
        f"{sum(one.track.holder == one.visit.holder for one in given if one.track.blocks):,}",
        f"{sum(len(track.blocks) for track in joined):,}",
        _median_ms([track.expected_us / 1e3 for track in joined]),
        _median_ms([(track.end_us - track.begin_us) / 1e3 for track in joined]),
        ", ".join(f"{count:,} {shorten(why, 40)}" for why, count in lost.most_common()) or NOTHING,
        none,
    )


def _median_ms(values: Sequence[float]) -> str:
    return show_ms(float(np.median(values)) if values else None)
