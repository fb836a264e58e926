"""Work on a request in each process, on a time axis.

Times are microseconds on the source's clock since the start of the run. Holders report durations, not times, so each
visit starts where the previous one ends and consists of wire, queue, codec, and engine time, one after the other. The
blocks of a visit or track share its engine time equally. A track of another holder begins and ends when its joiner
says; time that its holder does not account for is on the wire, half of it there and half back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ls_edge.core.parts import ENDS
from ls_edge.core.peer_reports import TrackSpan, Visit
from ls_edge.core.records import RequestRecord

SOURCE = ""
"""Holder of the source's work; empty because a peer may be called "source"."""
_Part = tuple[str, int | None, float]
"""Stage, block (for ``engine``), and duration."""


class Span(NamedTuple):
    """An interval of a request, in microseconds since the start of the run."""

    stage: str
    """``stem``, ``wire``, ``queue``, ``codec``, ``engine``, ``wait`` or ``head``."""
    start: float
    end: float
    block: int | None = None


class Work(NamedTuple):
    """Consecutive spans of a request in one process."""

    holder: str
    spans: list[Span]
    why: str = ""
    """Reason why a track was not summed."""


def work_of(record: RequestRecord) -> Iterator[Work]:
    """Yield the work on a request: of the source, of each visit with the tracks of other holders, of the source."""
    lengths = [_length(visit) for visit in record.visits]
    hop = max(0.0, record.latency_us - record.stem_us - record.head_us - sum(lengths)) / (len(lengths) + 1)
    clock = float(record.submitted_us)
    yield Work(SOURCE, _lay([("stem", None, record.stem_us)], clock))
    clock += record.stem_us
    for visit, length in zip(record.visits, lengths, strict=True):
        own = [*_parts(visit), ("wait", None, visit.wait_us)]
        yield Work(visit.holder, _lay([("wire", None, hop), *own], clock))
        clock += hop
        for track in visit.tracks:
            if track.holder != visit.holder:
                trip = ("wire", None, track.transfer_us / 2)
                yield Work(track.holder, _lay([trip, *_parts(track), trip], clock + track.begin_us), track.why)
        clock += length
    back = hop if record.visits else 0.0
    yield Work(SOURCE, _lay([("wire", None, back), ("head", None, record.head_us)], clock))


def _length(visit: Visit) -> int:
    return max(visit.total_us, *(track.end_us for track in visit.tracks_of_others), 0)


def _parts(work: Visit | TrackSpan) -> list[_Part]:
    each = work.engine_us / max(1, len(work.blocks))
    engine: list[_Part] = [(ENDS.get(part, "engine"), None if part in ENDS else part, each) for part in work.blocks]
    return [("queue", None, work.queue_us), ("codec", None, work.codec_us), *engine]


def _lay(parts: Iterable[_Part], start: float) -> list[Span]:
    """Return the spans of parts one after the other, without those that take no time."""
    spans = []
    for stage, block, duration in parts:
        if duration > 0 or block is not None:
            spans.append(Span(stage, start, start + duration, block))
        start += duration
    return spans
