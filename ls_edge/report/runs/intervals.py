"""Intervals of a request on a time axis, with their holders, and the critical path.

Times are microseconds on the source's clock since the start of the run. Holders report durations, not times, so each
visit starts where the previous one ends and consists of wire, queue, codec, and engine time. The blocks of a visit or
track share its engine time equally.

A visit that joined tracks of other holders is laid out by the times of the tracks on the joiner's clock. In each wave,
the track that ended last is critical; if it did not return, its time counts as ``wait``. Between critical tracks, the
joiner queues, encodes, and runs blocks itself; the rest is ``other``. The critical spans of a request are therefore
consecutive and add up to its latency, whatever else ran at the same time. Track time that its holder does not account
for is split equally between the transfers there and back. If tracks exceed the durations of the visit, the time on the
wire is shortened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ls_edge.core.parts import ENDS, STEM
from ls_edge.core.records import NO_GAIN, RequestRecord, TrackSpan, Visit

_Part = tuple[str, int | None, float]
"""Stage, block (for ``engine``), and duration."""


class Span(NamedTuple):
    """An interval of a request, in microseconds since the start of the run."""

    stage: str
    """``stem``, ``wire``, ``queue``, ``codec``, ``engine``, ``wait``, ``head`` or ``other``."""
    start: float
    end: float
    holder: str = ""
    """Process that did the work; empty for the source."""
    block: int | None = None
    row: int = 0
    """Index into :attr:`RequestIntervals.rows`."""
    critical: bool = True
    """Whether the answer depended on it."""
    why: str = ""
    """Reason why the joiner waited for a track but did not sum it."""


class _Gap(NamedTuple):
    """Time between critical tracks of a visit, in microseconds since its tokens arrived."""

    begin: float
    end: float
    blocks: Sequence[int]
    """Blocks that the joiner ran during the gap, outside of all tracks."""


class RequestIntervals(NamedTuple):
    """Spans of a request, in rows to draw below each other."""

    spans: list[Span]
    rows: list[str]
    """Holder of each row; a single empty name if all work was sequential."""
    visits: list[list[Span]]
    """Spans of each visit, including the hop to it."""


def joins(visit: Visit) -> bool:
    """Return whether the visit waited for tracks of other holders."""
    return any(track.holder != visit.holder and track.why != NO_GAIN for track in visit.tracks)


def has_tracks(record: RequestRecord) -> bool:
    """Return whether holders worked on the request at the same time."""
    return any(map(joins, record.visits))


def intervals_of(record: RequestRecord) -> RequestIntervals:
    """Lay out a request, with a row for each holder if several worked at the same time."""
    rows = _Rows() if has_tracks(record) else None
    lengths = [_length(visit) for visit in record.visits]
    hop = max(0.0, record.latency_us - record.stem_us - record.head_us - sum(lengths)) / (len(lengths) + 1)
    clock = float(record.submitted_us + record.stem_us)
    spans = [Span("stem", float(record.submitted_us), clock)]
    visits = []
    for visit, length in zip(record.visits, lengths, strict=True):
        came = clock + hop
        row = 0 if rows is None else rows.take(visit.holder, clock, came + length)
        laid = _lay([("wire", None, hop)], clock, visit.holder, row)
        if rows is not None and joins(visit):
            laid += _joined(record, visit, came, rows, row)
        else:
            laid += _lay(_own_parts(visit), came, visit.holder, row)
        clock = came + length
        visits.append(laid)
    back = clock + (hop if visits else 0.0)
    row = visits[-1][0].row if visits else 0
    after = [Span("wire", clock, back, row=row), Span("head", back, back + record.head_us, row=row)]
    names = [""] if rows is None else rows.sort(visits, after)
    spans += [span for each in visits for span in each] + after
    return RequestIntervals([span for span in spans if span.end > span.start], names, visits)


class _Rows:
    """Rows of holders; a holder that does two things at the same time has two rows."""

    def __init__(self) -> None:
        self._holders: list[str] = []
        self._free: list[float] = []

    def take(self, holder: str, start: float, end: float) -> int:
        """Return a row of ``holder`` that is free at ``start``, and occupy it until ``end``."""
        for row, (name, free) in enumerate(zip(self._holders, self._free, strict=True)):
            if name == holder and free <= start + 1e-6:
                self._free[row] = end
                return row
        self._holders.append(holder)
        self._free.append(end)
        return len(self._free) - 1

    def sort(self, visits: list[list[Span]], after: list[Span]) -> list[str]:
        """Reorder the rows so that the rows of a holder are adjacent; return the holder of each row."""
        order = sorted(range(len(self._holders)), key=lambda row: (self._holders.index(self._holders[row]), row))
        place = [order.index(row) for row in range(len(order))]
        for spans in (*visits, after):
            spans[:] = [span._replace(row=place[span.row]) for span in spans]
        return [self._holders[row] for row in order]


def _length(visit: Visit) -> int:
    if not joins(visit):
        return visit.total_us
    return max(visit.total_us, *(track.end_us for track in visit.tracks if track.why != NO_GAIN))


def _lay(parts: Sequence[_Part], start: float, holder: str, row: int = 0, critical: bool = True) -> list[Span]:
    spans = []
    for stage, block, duration in parts:
        spans.append(Span(stage, start, start + duration, holder, block, row, critical))
        start += duration
    return spans


def _engine(blocks: Sequence[int], duration: float) -> list[_Part]:
    each = duration / len(blocks) if blocks else 0.0
    return [(ENDS[part], None, each) if part in ENDS else ("engine", part, each) for part in blocks]


def _own_parts(visit: Visit) -> list[_Part]:
    engine = _engine(visit.blocks, visit.engine_us) or [("other", None, visit.engine_us)]
    return [("queue", None, visit.queue_us), ("codec", None, visit.codec_us), *engine, ("wait", None, visit.wait_us)]


def _joined(record: RequestRecord, visit: Visit, start: float, rows: _Rows, home: int) -> list[Span]:
    """Return the spans of a visit whose tokens arrived at ``start``; ``home`` is the joiner's row."""
    spans: list[Span] = []
    gaps: list[_Gap] = []
    cursor = 0.0
    *ahead, after = _between(record, visit)
    for wave, blocks in zip(_waves_of(visit), ahead, strict=True):
        path = _critical(wave, cursor, visit.holder)
        for track in wave:
            begin, end = path.get(id(track), (min(track.begin_us, track.end_us), track.end_us))
            own = track.holder == visit.holder
            row = home if own else rows.take(track.holder, start + begin, start + end)
            parts = _parts(track, own, end - begin)
            laid = _lay(parts, start + begin, track.holder, row, id(track) in path)
            spans += laid if track.blocks else [span._replace(why=track.why or "lost") for span in laid]
        for begin, end in sorted(path.values()):
            gaps.append(_Gap(cursor, begin, blocks))
            cursor, blocks = end, []
        idle = max((track.end_us for track in wave if track.holder == visit.holder), default=cursor)
        if idle < cursor:
            spans.append(Span("wait", start + idle, start + cursor, visit.holder, None, home, critical=False))
    gaps.append(_Gap(cursor, _length(visit), after))
    filled = zip(gaps, _fill(gaps, visit), strict=True)
    return [span for gap, parts in filled for span in _lay(parts, start + gap.begin, visit.holder, home)] + spans


def _critical(wave: Sequence[TrackSpan], cursor: float, joiner: str) -> dict[int, tuple[float, float]]:
    """Return begin and end of the critical tracks after ``cursor``, by ``id``.

    These are the track that ended last, the track that ended last before that one began, and so on.
    """
    path: dict[int, tuple[float, float]] = {}
    limit = max(cursor, *(track.end_us for track in wave))
    left = list(wave)
    while left:
        last = max(left, key=lambda track: (track.end_us, bool(track.blocks), track.holder != joiner))
        end = last.end_us if path else limit
        limit = min(max(cursor, last.begin_us), end)
        path[id(last)] = limit, end
        left = [track for track in wave if cursor < track.end_us <= limit and id(track) not in path]
    return path


def _waves_of(visit: Visit) -> list[list[TrackSpan]]:
    """Return the tracks of each wave, without planned tracks that were never assigned."""
    waves: dict[int, list[TrackSpan]] = {}
    for track in visit.tracks:
        if track.why != NO_GAIN:
            waves.setdefault(track.wave, []).append(track)
    return [waves[number] for number in sorted(waves)]


def _parts(track: TrackSpan, own: bool, length: float) -> list[_Part]:
    """Split the ``length`` of a track into stages."""
    if not track.blocks:
        return [("wait", None, length)]
    known = track.queue_us + track.codec_us + track.engine_us
    scale = min(1.0, length / known) if known > 0 else 0.0
    rest = max(0.0, length - known * scale)
    inside: list[_Part] = [("queue", None, track.queue_us * scale), ("codec", None, track.codec_us * scale)]
    inside += _engine(track.blocks, track.engine_us * scale)
    trip: _Part = ("wire", None, rest / 2)
    return [*inside, ("other", None, rest)] if own else [trip, *inside, trip]


def _fill(gaps: Sequence[_Gap], visit: Visit) -> Iterator[list[_Part]]:
    """Distribute the remaining durations of the joiner, and its blocks outside of tracks, over the gaps."""
    own = [track for track in visit.tracks if track.holder == visit.holder]
    queue = max(0.0, visit.queue_us - sum(track.queue_us for track in own))
    codec = max(0.0, visit.codec_us - sum(track.codec_us for track in own))
    engine = max(0.0, visit.engine_us - sum(track.engine_us for track in own))
    count = sum(len(gap.blocks) for gap in gaps) or 1
    for gap in gaps:
        room = gap.end - gap.begin
        busy = min(engine * len(gap.blocks) / count, room)
        waited = min(queue, room - busy)
        coded = min(codec, room - busy - waited)
        queue, codec = queue - waited, codec - coded
        rest = max(0.0, room - busy - waited - coded)
        yield [("queue", None, waited), ("codec", None, coded), *_engine(gap.blocks, busy), ("other", None, rest)]


def _between(record: RequestRecord, visit: Visit) -> list[list[int]]:
    """Return the blocks that the joiner ran outside of its tracks: before each wave, and after the last one."""
    place = {block: n for n, wave in enumerate(record.waves or ()) for track in wave for block, _ in track}
    place[STEM] = -1
    waves = [[block for track in wave for block in track.blocks] for wave in _waves_of(visit)]
    joined = {block for wave in waves for block in wave}
    numbers = [min((place.get(block, -1) for block in wave), default=-1) for wave in waves]
    found: list[list[int]] = [[] for _ in range(len(waves) + 1)]
    for block in visit.blocks:
        if block not in joined:
            found[sum(number < place.get(block, len(place)) for number in numbers)].append(block)
    return found
