"""The way of single requests: who ran which block when, what waited for what, and the critical path through it.

A request whose blocks ran one after the other is one bar. Where holders worked side by side each has a row; a dark line
follows what the answer waited for, and what ran beside it is paler.
"""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.records import RequestRecord
from ls_edge.report.axes import time_axis
from ls_edge.report.data import RunData
from ls_edge.report.formatting import counted
from ls_edge.report.spans import Span, Way, has_tracks, way_of
from ls_edge.report.svg import Scale, Svg, shorten, show_ms, text_width
from ls_edge.report.theme import block_colour, ink_on
from ls_edge.report.timeline import edge

MOST_ROWS = 24
BAR, ROOM = 26, 9
"""Height of a bar, and between rows, where the line of the critical path runs."""


def request_ways(data: RunData, width: int = 880) -> Svg | None:
    """The way of a few requests: who ran which block when, and what it waited for."""
    chosen = pick_requests(data)
    if not chosen:
        return None
    label_height, gap = 20, 22
    laid = [(why, record, way_of(record)) for why, record in chosen]
    heights = [_height(way) for _, _, way in laid]
    longest = max(record.latency_us for _, record, _ in laid) or 1.0
    shared = shared_scale(data)
    svg = Svg(width, sum(heights) + (label_height + 14 + gap) * len(laid), "The way of single requests", _said(laid))
    left = 0 if all(len(way.rows) == 1 for _, _, way in laid) else 110 if width > 500 else 66
    y = 0.0
    for (why, record, way), height in zip(laid, heights, strict=True):
        x = Scale(0, longest if shared else record.latency_us or 1.0, left, width - 2)
        svg.text(0, y + 13, why, "tb")
        svg.text(text_width(why, 12.5) + 10, y + 13, _about(record, width))
        y += label_height
        _way(svg, data, record, way, x, y)
        y += height + 14 + gap
    if shared:
        time_axis(svg, Scale(0, longest / 1e3, left, width - 2), y - 10, "ms", width)
        svg.height = y + 14
    return svg


def _said(laid: Sequence[tuple[str, RequestRecord, Way]]) -> str:
    parts = []
    for why, record, way in laid:
        parts.append(f"{why}: request {record.id}, {show_ms(record.latency_us / 1e3)}")
        if len(way.rows) > 1:
            path = dict.fromkeys(span.holder for span in way.spans if span.critical and span.block is not None)
            parts[-1] += f", waited for {', then '.join(list(path)[:MOST_ROWS])}"
    return "; ".join(parts) + "."


def shared_scale(data: RunData) -> bool:
    """Whether the requests of :func:`request_ways` are near enough to each other for one scale."""
    times = [record.latency_us for _, record in pick_requests(data)]
    return bool(times) and max(times) <= 4 * min(times)


def _about(record: RequestRecord, width: int) -> str:
    parts = [show_ms(record.latency_us / 1e3), shorten(record.image, 26 if width > 500 else 14)]
    if not record.is_plain:
        parts.append(counted(len(record.waves), "wave"))
    if record.skipped:
        parts.append(f"skipped {', '.join(map(str, record.skipped[:8]))}")
    if record.attempts > 1:
        parts.append(f"{record.attempts} attempts")
    return " · ".join(parts if width > 500 else parts[:3])


def _height(way: Way) -> int:
    rows = min(len(way.rows), MOST_ROWS)
    return BAR if rows <= 1 else (BAR + ROOM) * rows


def _way(svg: Svg, data: RunData, record: RequestRecord, way: Way, x: Scale, y: float) -> None:
    several = len(way.rows) > 1
    for row, holder in enumerate(way.rows[:MOST_ROWS] or [""]):
        svg.rect(x.start, y + (BAR + ROOM) * row, x(record.latency_us) - x.start, BAR, "lane")
        if several and holder not in way.rows[:row]:
            limit = int((x.start - 8) / 7)
            svg.text(0, y + (BAR + ROOM) * row + 17, shorten(holder, limit), "ti")
    hidden = len(way.rows) - MOST_ROWS
    if hidden > 0:
        svg.text(x.start, y + _height(way) + 9, f"and {hidden} more", "ts")
    for span in way.spans:
        if span.row < MOST_ROWS:
            _span(svg, data, record, way, span, x, y)
    if several:
        _critical_path(svg, record, way, x, y)
    else:
        _holders_below(svg, record, way.spans, x, y + BAR + 12)


def _span(svg: Svg, data: RunData, record: RequestRecord, way: Way, span: Span, x: Scale, y: float) -> None:
    begin, end = x(span.start - record.submitted_us), x(span.end - record.submitted_us)
    everywhere = len(way.rows) > 1 and span.stage in ("stem", "head")
    top = y if everywhere else y + (BAR + ROOM) * span.row
    beside = "" if span.critical else " beside"
    tip = f"{show_ms((span.end - span.start) / 1e3)}" + (f", {span.holder}" if span.holder else "")
    if span.block is not None:
        colour = block_colour(span.block, data.blocks)
        tip = f"block {span.block} on {span.holder}, {show_ms((span.end - span.start) / 1e3)}"
        svg.rect(
            begin, top + 1, max(end - begin, 0.5), BAR - 2, edge(end - begin) + beside,
            fill=colour, tip=tip + (" (not on the critical path)" if beside else ""),
        )  # fmt: skip
        if end - begin >= text_width(str(span.block), 10.5) + 3:
            svg.text((begin + end) / 2, top + BAR / 2 + 4, span.block, ink_on(colour), anchor="middle")
    elif span.why:
        why = shorten(span.why, 20)
        svg.rect(begin, top + 2, max(end - begin, 1), BAR - 4, "hollow", tip=f"track {why}, {tip}")
        if end - begin >= text_width(why) + 4:
            svg.text((begin + end) / 2, top + BAR / 2 + 4, why, "tx", anchor="middle")
    else:
        tall = _height(way) - ROOM if everywhere else BAR
        inset = {"wire": 10, "other": 10, "wait": 8, "queue": 4}.get(span.stage, 1)
        name = f"{span.stage}{'' if span.critical or span.stage == 'wait' else ' (not on the critical path)'}"
        svg.rect(
            begin, top + inset, max(end - begin, 0.5), tall - 2 * inset, f"s-{span.stage}{beside}", tip=f"{name} {tip}"
        )  # fmt: skip


def _critical_path(svg: Svg, record: RequestRecord, way: Way, x: Scale, y: float) -> None:
    """A line below the bars that the answer waited for, from row to row."""
    points: list[tuple[float, float]] = []
    for span in sorted((span for span in way.spans if span.critical), key=lambda span: span.start):
        below = y + (BAR + ROOM) * min(span.row, MOST_ROWS - 1) + BAR + 3
        if points and points[-1][1] == below:
            points.pop()
        else:
            points.append((x(span.start - record.submitted_us), below))
        points.append((x(span.end - record.submitted_us), below))
    svg.polyline(points, "crit")


def _holders_below(svg: Svg, record: RequestRecord, spans: list[Span], x: Scale, y: float) -> None:
    free = -1.0
    before: Span | None = None
    for span in spans:
        if span.block is not None and (before is None or before.end != span.start or before.holder != span.holder):
            name = shorten(span.holder, 16)
            at = x(span.start - record.submitted_us)
            if at > free and at + text_width(name, 11) <= svg.width:
                svg.text(at, y, name, "ts")
                free = at + text_width(name, 11) + 6
        if span.block is not None:
            before = span


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
    return any(span.why for span in way_of(record).spans) if has_tracks(record) else False


def typical(records: Sequence[RequestRecord]) -> RequestRecord | None:
    """The answer of median latency among those that holders worked on side by side; None where there are none."""
    parallel = [record for record in records if record.error is None and has_tracks(record)]
    parallel.sort(key=lambda record: record.latency_us)
    return parallel[(len(parallel) - 1) // 2] if parallel else None
