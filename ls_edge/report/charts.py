"""Charts of latency: how it is distributed, how it went over the run, and what it is made of.

Every chart is a function of the data and a width in pixels and returns None where the data has nothing to
show. A page shows a wide and a narrow drawing of each, so that text keeps its size on a phone.
"""

from __future__ import annotations

import numpy as np

from ls_edge.errors import printable
from ls_edge.evaluation.run_summary import Floats, Quantiles
from ls_edge.records import PeerEvent, PeerState, RequestRecord
from ls_edge.report.axes import time_axis, value_axis
from ls_edge.report.data import RunData
from ls_edge.report.formatting import counted
from ls_edge.report.svg import Scale, Svg, shorten, show_ms, show_percent, text_width
from ls_edge.report.theme import STAGES

LEFT, RIGHT = 54, 14
MOST_POINTS = 1200
MOST_LABELS = 14
BOLD = 13.6
"""Size at which a regular text is as wide as a bold one of 12 pixels."""


def latency_distribution(data: RunData, width: int = 880) -> Svg | None:
    """Histogram of the latencies, their cumulative share, and the median, 95th and 99th percentile."""
    values = data.latency
    if not values.size:
        return None
    figures = data.summary.latency_ms
    height, top, bottom = 310, 56, 34
    right = width - 48
    x = _latency_scale(values, LEFT, right, from_zero=False)
    bins = int(min(72 if width > 500 else 36, max(8, 2 * values.size**0.5)))
    edges = np.geomspace(x.low, x.high, bins + 1) if x.log else np.linspace(x.low, x.high, bins + 1)
    counts, _ = np.histogram(np.clip(values, x.low, x.high), edges)
    y = Scale(0, max(int(counts.max()), 4) * 1.06, height - bottom, top)
    svg = Svg(
        width,
        height,
        "Latency distribution",
        f"Histogram of {counted(len(values), 'answer')}. Median {show_ms(figures.p50)}, "
        f"95th percentile {show_ms(figures.p95)}, 99th percentile {show_ms(figures.p99)}, "
        f"largest {show_ms(figures.max)}.",
    )
    value_axis(svg, y, LEFT, right, "", 4)
    svg.boxes(
        [
            (x(edges[i]) + 0.5, y(count), max(x(edges[i + 1]) - x(edges[i]) - 1, 0.6), y(0) - y(count))
            for i, count in enumerate(counts)
            if count
        ],
        "bar",
    )
    shares = Scale(0, 1, height - bottom, top)
    order = np.sort(values)[np.linspace(0, len(values) - 1, min(len(values), 160)).astype(int)]
    points = [(x(value), shares(i / max(len(order) - 1, 1))) for i, value in enumerate(order)]
    svg.polyline([(x(x.low), shares(0)), *points, (x(x.high), shares(1))], "cum")
    for share in (0.5, 1.0):
        svg.text(right + 8, shares(share) + 4, f"{100 * share:.0f} %", "tx")
    time_axis(svg, x, height - bottom, "ms", width)
    _percentile_labels(svg, x, height - bottom, right, figures)
    return svg


def _percentile_labels(svg: Svg, x: Scale, bottom: float, right: float, figures: Quantiles) -> None:
    """A dashed line and a label for each percentile; a label that would touch another goes a row further down."""
    taken: list[list[tuple[float, float]]] = [[], [], []]
    for name, value in (("p50", figures.p50), ("p95", figures.p95), ("p99", figures.p99)):
        assert value is not None
        label = f"{name} {show_ms(value)}"
        at, room = x(value), text_width(label, BOLD)
        fits = at + room + 5 < right
        begin, end = (at + 5, at + 5 + room) if fits else (at - 5 - room, at - 5)
        level = next(
            (n for n, row in enumerate(taken) if all(end + 6 < low or high + 6 < begin for low, high in row)), 2
        )
        taken[level].append((begin, end))
        svg.line(at, 16 + 14 * level, at, bottom, "mark")
        svg.text(begin if fits else end, 16 + 14 * level, label, "tb halo", anchor="" if fits else "end")


def latency_over_time(data: RunData, width: int = 880) -> Svg | None:
    """Latency of each answer by the time of its submission, with what happened to the peers on the way.

    Above :data:`MOST_POINTS` answers, the median and 95th percentile of equal stretches of time and their range.
    """
    if not data.records:
        return None
    values = data.latency if data.latency.size else np.array([1.0])
    failed = [record for record in data.records if record.error is not None]
    degraded = [record for record in data.answers if record.degraded]
    marks = data.changes
    rows = min(3, len(marks)) if len(marks) <= MOST_LABELS else 0
    height, bottom, top = 300 + 14 * rows, 34, 14 + 16 * rows
    x = Scale(data.start_ms / 1000, data.end_ms / 1000, LEFT, width - RIGHT)
    y = _latency_scale(values, height - bottom, top)
    svg = Svg(
        width,
        height,
        "Latency over the run",
        f"{counted(len(data.answers), 'answer')}, {len(degraded)} degraded, {len(failed)} failed. "
        + (" ".join(f"{_say(event)} at {event.at_us / 1e6:.2f} s." for event in marks[:20]) or "No peer changed."),
    )
    for spell in data.away:
        svg.rect(x(spell.start / 1000), top, x(spell.end / 1000) - x(spell.start / 1000), height - bottom - top, "gone")
    value_axis(svg, y, LEFT, width - RIGHT, "ms", 6)
    most = 600 if len(data.answers) <= MOST_POINTS else 160
    if len(data.answers) <= MOST_POINTS:
        whole = [record for record in data.answers if not record.degraded]
        svg.dots([(x(r.submitted_us / 1e6), y(r.latency_us / 1e3)) for r in whole], "dot")
    else:
        _bands(svg, data, x, y, 180 if width > 500 else 80)
    svg.path("".join(_triangle(x(r.submitted_us / 1e6), y(r.latency_us / 1e3)) for r in _some(degraded, most)), "dotw")
    svg.path("".join(_cross(x(r.submitted_us / 1e6), y(r.latency_us / 1e3)) for r in _some(failed, most)), "dotx")
    _event_lines(svg, marks, x, top, height - bottom, rows)
    time_axis(svg, x, height - bottom, "s", width)
    return svg


def _bands(svg: Svg, data: RunData, x: Scale, y: Scale, bins: int) -> None:
    edges = np.linspace(data.start_ms, data.end_ms, bins + 1)
    order = np.argsort(data.submitted, kind="stable")
    submitted, latency = data.submitted[order], data.latency[order]
    cuts = np.searchsorted(submitted, edges)
    middle: list[tuple[float, float, float, float, float]] = []
    for i in range(bins):
        part = latency[cuts[i] : cuts[i + 1]]
        if part.size:
            low, p50, p95, high = np.percentile(part, (0, 50, 95, 100))
            middle.append((x((edges[i] + edges[i + 1]) / 2000), y(low), y(p50), y(p95), y(high)))
    upper = [(at, high) for at, _, _, _, high in middle]
    lower = [(at, low) for at, low, _, _, _ in reversed(middle)]
    outline = "L".join(f"{px:.1f} {py:.1f}" for px, py in upper + lower)
    svg.path(f"M{outline}z" if outline else "", "env")
    svg.polyline([(at, p95) for at, _, _, p95, _ in middle], "p95")
    svg.polyline([(at, p50) for at, _, p50, _, _ in middle], "p50")


def _event_lines(svg: Svg, marks: list[PeerEvent], x: Scale, top: float, bottom: float, rows: int) -> None:
    """Vertical lines, labelled in up to ``rows`` rows where labels do not run into each other."""
    taken = [-1e9] * rows
    for event in marks[:200]:
        at = x(event.at_us / 1e6)
        css = {PeerState.LOST: "evl", PeerState.ALIVE: "evb"}.get(event.state, "evo")
        label = _say(event)
        width = text_width(label, 11.5)
        left = min(at + 4, svg.width - width)
        row = next((i for i in range(rows) if taken[i] < left), None)
        svg.line(at, top if row is None else 8 + 15 * row, at, bottom, css)
        if row is not None:
            svg.text(
                left,
                15 + 15 * row,
                label,
                {PeerState.LOST: "tx halo", PeerState.ALIVE: "tg halo"}.get(event.state, "t halo"),
            )
            taken[row] = left + width + 8


def _say(event: PeerEvent) -> str:
    return f"{shorten(event.peer, 18)} {'back' if event.state == PeerState.ALIVE else event.state}"


def stage_breakdown(data: RunData, width: int = 880) -> Svg | None:
    """Where the time goes: stacked bars of mean milliseconds, per request, for each hop and for each holder."""
    groups = data.stage_means
    if not groups:
        return None
    left = 190 if width > 500 else 112
    right = 62
    row_height, gap = 22, 12
    heads = len({group for group, _, _, _ in groups})
    height = len(groups) * (row_height + gap) + heads * 26 + 30
    longest = max(sum(means.values()) for _, _, _, means in groups)
    x = Scale(0, longest or 1.0, left, width - right)
    whole = groups[0][3]
    svg = Svg(
        width,
        height,
        "Where the time goes",
        "Mean of an answered request: " + ", ".join(f"{name} {show_ms(ms)}" for name, ms in whole.items() if ms) + ".",
    )
    svg.line(left, 12, left, height - 38, "ax")
    y = 0.0
    last = ""
    for group, name, count, means in groups:
        if group != last:
            y += 26
            svg.text(0, y - 8, group, "tb halo")
            last = group
        svg.text(0, y + 15, shorten(name, 26 if width > 500 else 15), "ti")
        if width > 500:
            svg.text(left - 12, y + 15, f"{count:,}", anchor="end")
        start = 0.0
        for stage in STAGES:
            ms = means.get(stage.name, 0.0)
            if ms > 0:
                tip = f"{printable(name)}: {stage.name} {show_ms(ms)}, {show_percent(ms / (sum(means.values()) or 1))}"
                svg.rect(x(start), y, max(x(start + ms) - x(start) - 0.7, 0.4), row_height, stage.css, tip=tip)
                start += ms
        svg.text(x(start) + 8, y + 15, show_ms(start), "ti")
        y += row_height + gap
    svg.height = y + 4
    return svg


def _latency_scale(values: Floats, start: float, end: float, *, from_zero: bool = True) -> Scale:
    """By ratio where the largest is far from the median, so that one retry does not flatten everything else."""
    low, high, middle = float(values.min()), float(values.max()), float(np.median(values))
    if low > 0 and high > 5 * middle:
        return Scale(low / 1.12, high * 1.12, start, end, log=True)
    if not from_zero and low > 0.4 * high > 0:
        room = max(high - low, 0.05 * high) * 0.12
        return Scale(low - room, high + room, start, end)
    return Scale(0.0, high * 1.05 if high > 0 else 1.0, start, end)


def _some(records: list[RequestRecord], most: int) -> list[RequestRecord]:
    return records[:: -(-len(records) // most)] if records else []


def _triangle(x: float, y: float) -> str:
    return f"M{x - 3.4:.1f} {y + 2.6:.1f}h6.8l-3.4 -6z"


def _cross(x: float, y: float) -> str:
    return f"M{x - 3:.1f} {y - 3:.1f}l6 6m0 -6l-6 6"


def caption_over_time(data: RunData) -> str:
    """What stands for what in :func:`latency_over_time`."""
    if len(data.answers) > MOST_POINTS:
        return "The line is the median, the dashed one the 95th percentile, the band reaches from least to most."
    if len(data.answers) == 1:
        return "The dot is the one answer."
    return f"Each dot is one of {len(data.answers):,} answers."
