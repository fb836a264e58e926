"""How the tracks of each peer fared: joined, or why not, and how long they took against what was planned.

A joiner's own tracks count for it like those that it ran for others. Where a peer was given none because that would
not have paid (``no gain``), what a single block would have taken there stands against what the wave took without it.
Failed requests count too, as far as their records go.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ls_edge.records import NO_GAIN, RequestRecord, TrackSpan, Visit
from ls_edge.report.svg import shorten, show, show_ms


@dataclass
class Tracks:
    """Of one peer, over a run; times in milliseconds."""

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


def tracks_by_peer(records: Iterable[RequestRecord], waves: int = 1) -> dict[str, Tracks]:
    """The tracks of every peer that any record names; empty for a run in which no wave was ever planned.

    ``waves`` is in how many a model was to run.
    """
    found: dict[str, Tracks] = {}
    for record in records:
        size = math.ceil((len(record.steps) + len(record.skipped)) / max(1, waves))
        for visit in record.visits:
            for track in visit.tracks:
                _count(found.setdefault(track.holder, Tracks()), track, visit, size)
    return found


def _count(tracks: Tracks, track: TrackSpan, visit: Visit, size: int) -> None:
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


def table_of(tracks: dict[str, Tracks], peers: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table; ``peers`` come in their order, then others, but none that no track names."""
    head = ("Peer", "Tracks", "Own", "Blocks", "Expected", "Took", "Not summed", "Given none")
    order = [name for name in peers if name in tracks] + sorted(tracks.keys() - set(peers))
    return head, [_row(name, tracks[name]) for name in order]


def _row(name: str, of: Tracks) -> tuple[str, ...]:
    left_out = ", ".join(f"{count:,} {shorten(why, 40)}" for why, count in of.left_out.most_common())
    none = ""
    if of.single:
        without = _median([ms for ms in of.without if ms > 0])
        against = "" if without is None else f", the wave took {show_ms(without)}"
        often = "once" if len(of.single) == 1 else f"{len(of.single):,} times"
        none = f"no gain {often}: a block there {show_ms(_median(of.single))}{against}"
    return (
        shorten(name, 60), f"{of.joined:,}", f"{of.own:,}", f"{of.blocks:,}", show_ms(_median(of.expected)),
        show_ms(_median(of.took)), left_out or show(None), none or show(None),
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
