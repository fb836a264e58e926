"""Who did what for a request, whether blocks ran one after the other or in waves of tracks.

A joiner's visit holds its own times, those of its own tracks included; what others ran for it stands in the visit's
tracks and nowhere else. Everything that counts work goes through here, so that nothing is counted twice or forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ls_edge.records import BlockAt, RequestRecord, TrackSpan

NO_GAIN = "no gain"
"""Why a holder was given no track: it was not worth its transfer."""


class Stay(NamedTuple):
    """What an answer cost one holder: a visit, or a track that it ran for another's wave; in milliseconds."""

    holder: str
    queue_ms: float
    engine_ms: float
    codec_ms: float


def stays_of(record: RequestRecord) -> Iterator[Stay]:
    """Each visit, then each track that another holder ran for it; a joiner's own tracks are part of its visit."""
    for visit in record.visits:
        yield Stay(visit.holder, visit.queue_ms, visit.engine_ms, visit.codec_ms)
    for track in tracks_of_others(record):
        yield Stay(track.holder, track.queue_ms, track.engine_ms, track.codec_ms)


def tracks_of_others(record: RequestRecord) -> list[TrackSpan]:
    """Tracks that came back to a joiner from other holders."""
    return [track for visit in record.visits for track in visit.tracks if track.blocks and track.holder != visit.holder]


def transfer_ms(track: TrackSpan) -> float:
    """What remains of a track's duration after its holder's own times: the way there and back."""
    return max(0.0, track.end_ms - track.begin_ms - track.queue_ms - track.engine_ms - track.codec_ms)


def steps_of(record: RequestRecord) -> Iterator[BlockAt]:
    """Every block that ran for the answer, with its holder."""
    if record.waves is not None:
        yield from (step for wave in record.waves for track in wave for step in track)
    else:
        yield from record.order or ()


def holders_of(record: RequestRecord) -> set[str]:
    """Every process that ran a block of the answer."""
    return {holder for _, holder in steps_of(record)}


def hops_of(record: RequestRecord) -> int:
    """Transfers of tokens that the answer took: the one back to the source, and two a track of others, included."""
    if record.visits:
        return len(record.visits) + 1 + 2 * len(tracks_of_others(record))
    holders = [holder for _, holder in record.order or ()]
    return 1 + sum(a != b for a, b in zip([None, *holders], holders, strict=False)) if holders else 0
