"""The charts of a report as Vega-Lite specifications (Altair), and as SVG files.

Every chart is a function of the data that returns None where it has nothing to show. What a specification holds is
bounded: long runs are binned or sampled. Colours are CSS variables (:mod:`ls_edge.report.theme`), so the same
specification is light or dark, in the page and in an SVG file. Needs the extra ``report``.

Names and other texts from outside are data of a chart, or string literals of an expression, and never markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np

from ls_edge.errors import UsageError
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.run_summary import Floats, RunSummary
from ls_edge.records import PeerEvent, PeerState, RequestRecord
from ls_edge.report.files import write_whole
from ls_edge.report.formatting import NOTHING, block_ranges, counted, distinct_names, shorten, show_ms, show_percent
from ls_edge.report.statistics import RunData, Window, coverage, pack, pick_requests, pick_window, shown_lanes
from ls_edge.report.theme import STAGES, STYLE, block_colour, chart_config, colour, ink_on
from ls_edge.report.timeline import RequestTimeline, Span, timeline_of

Chart = Any
"""A chart of Altair, whose methods have no more exact type."""
Row = dict[str, Any]

VEGA_LITE = ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
"""Version of Vega-Lite that Altair writes for."""

MOST_POINTS = 1200
"""Answers that are drawn one by one; of more, quantiles of stretches of time. More make a larger, slower page."""
MOST_MARKS = 200
"""Degraded or failed requests, or events, that are drawn one by one."""
MOST_SPANS = 2000
"""Runs of a block that the detail of who served what holds: some 150 KB of a page."""
MOST_CELLS = 2000
"""Stretches of time by peer and block in the overview: some 130 KB of a page."""
FIRST_LOOK = 140
"""Runs of a block in the stretch that the detail shows first; more are too thin to be read."""
MOST_ROWS = 24
"""Rows of a request's timeline."""
ZOOM = "wheel![event.shiftKey]"
"""Zooming needs the shift key, so that a page can be scrolled over its charts."""


def spec_of(chart: Chart) -> dict[str, Any]:
    """The specification of a chart with the shared configuration, valid by Altair's schema."""
    spec: dict[str, Any] = chart.properties(autosize=alt.AutoSizeParams(type="fit-x", contains="padding")).to_dict()
    if "vconcat" in spec or "hconcat" in spec:
        del spec["autosize"]  # the parts have widths of their own
    rows = {name: json.loads(text) for name, text in spec.pop("datasets").items()}
    return {**spec, "datasets": rows, "config": chart_config()}


def latency_distribution(data: RunData) -> Chart | None:
    """Histogram of the latencies, their cumulative share, and the median, 95th and 99th percentile."""
    values = data.latency
    if not values.size:
        return None
    figures = data.summary.latency_ms
    scale = _latency_scale(values, from_zero=False)
    low, high = scale.domain
    bins = int(min(64, max(8, 2 * values.size**0.5)))
    edges = np.geomspace(low, high, bins + 1) if scale.type == "log" else np.linspace(low, high, bins + 1)
    counts, _ = np.histogram(np.clip(values, low, high), edges)
    order = np.sort(values)[np.linspace(0, len(values) - 1, min(len(values), 160)).astype(int)]
    height = 260
    x = alt.X("at:Q", scale=scale, title="latency, ms")
    bars = (
        _chart([_row(at=a, to=b, answers=int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)])
        .mark_rect(color=colour("accent"), stroke=colour("bg"), strokeWidth=1)
        .encode(
            x=x,
            x2="to:Q",
            y=alt.Y("answers:Q", title="answers", scale=alt.Scale(domain=[0, max(int(counts.max()), 4) * 1.3])),
            y2=alt.datum(0),
            tooltip=[_tip("at", "from, ms"), _tip("to", "to, ms"), alt.Tooltip("answers:Q")],
        )
    )
    steps = [_row(at=low, share=0.0)]
    steps += [_row(at=value, share=i / max(len(order) - 1, 1)) for i, value in enumerate(order)]
    steps += [_row(at=high, share=1.0)]
    shares = (
        _chart(steps)
        .mark_line(color=colour("bad"), strokeWidth=1.6)
        .encode(
            x=x,
            y=alt.Y(
                "share:Q",
                title=None,
                scale=alt.Scale(domain=[0, 1.3]),
                axis=alt.Axis(orient="right", format=".0%", values=[0.5, 1], grid=False, labelColor=colour("bad")),
            ),
        )
    )
    named = [
        (name, float(value or 0)) for name, value in (("p50", figures.p50), ("p95", figures.p95), ("p99", figures.p99))
    ]
    layers = [bars, shares]
    for level, (name, value) in enumerate(named):
        # A row for each, so that labels that stand close together do not touch.
        one = _chart([_row(at=value, text=f"{name} {show_ms(value)}")]).encode(x=x)
        left = _position(value, scale) < 0.6
        layers.append(
            one.mark_rule(color=colour("ink"), strokeDash=[3, 3]).encode(
                y=alt.value(4 + 16 * level), y2=alt.value(height)
            )
        )
        layers.append(
            _halo(one, "text:N", y=alt.value(9 + 16 * level), align="left" if left else "right", dx=5 if left else -5)
        )
    return (
        alt.layer(*layers)
        .resolve_scale(y="independent")
        .properties(
            width="container",
            height=height,
            description=f"Histogram of {counted(len(values), 'answer')}. Median {show_ms(figures.p50)}, "
            f"95th percentile {show_ms(figures.p95)}, 99th percentile {show_ms(figures.p99)}, "
            f"largest {show_ms(figures.max)}.",
        )
    )


def latency_over_time(data: RunData) -> Chart | None:
    """Latency of each answer by the time of its submission, with what happened to the peers on the way.

    Above :data:`MOST_POINTS` answers, the median and 95th percentile of equal stretches of time and their range.
    """
    if not data.records:
        return None
    failed = [record for record in data.records if record.error is not None]
    degraded = [record for record in data.answers if record.degraded]
    scale = _latency_scale(data.latency if data.latency.size else np.array([1.0]), room=1.25)
    x = alt.X(
        "t:Q",
        title="submitted, seconds since the start",
        scale=alt.Scale(domain=[data.start_ms / 1e3, data.end_ms / 1e3], nice=False),
    )
    y = alt.Y("ms:Q", title="latency, ms", scale=scale)
    tips = [alt.Tooltip("request:N"), alt.Tooltip("image:N"), _tip("ms", "latency, ms"), _tip("t", "submitted, s")]
    events = data.changes[:MOST_MARKS]
    away = [
        _row(t=spell.start / 1e3, to=spell.end / 1e3, peer=shorten(spell.peer, 60)) for spell in data.away[:MOST_MARKS]
    ]
    layers = _away_layer(away, x=x, x2="to:Q")
    if len(data.answers) <= MOST_POINTS:
        whole = [record for record in data.answers if not record.degraded]
        dots = _chart([_request_row(r) for r in whole])
        layers.append(
            dots.mark_circle(color=colour("accent"), size=22, opacity=0.6, clip=True).encode(x=x, y=y, tooltip=tips)
        )
    else:
        layers += _bands(data, x, scale)
    for records, shape, paint in ((degraded, "triangle-up", "wire"), (failed, "cross", "bad")):
        if not records:
            continue
        marks = _chart([_request_row(r) for r in _some(records)])
        layers.append(
            marks.mark_point(shape=shape, color=colour(paint), fill=colour(paint), size=42, clip=True).encode(
                x=x, y=y, tooltip=tips
            )
        )
    changes = _chart([_event_row(event, number) for number, event in enumerate(events)])
    kind = alt.Color(
        "kind:N",
        legend=None,
        scale=alt.Scale(domain=["lost", "back", "other"], range=[colour("bad"), colour("good"), colour("axis")]),
    )
    tip = [alt.Tooltip("what:N", title="peer"), _tip("t", "at, s"), alt.Tooltip("why:N")]
    layers.append(changes.mark_rule(strokeWidth=1.3, clip=True).encode(x=x, color=kind, tooltip=tip))
    if len(events) <= 8:
        for number, row in enumerate(_event_row(event, number) for number, event in enumerate(events)):
            left = (row["t"] * 1e3 - data.start_ms) / (data.end_ms - data.start_ms) < 0.75
            layers.append(
                _halo(
                    _chart([row]).encode(x=x, color=kind),
                    "what:N",
                    y=alt.value(9 + 15 * (number % 2)),
                    align="left" if left else "right",
                    dx=3 if left else -3,
                    bold=False,
                )
            )
    said = " ".join(f"{_what(event)} at {event.at_us / 1e6:.2f} s." for event in events[:20]) or "No peer changed."
    return (
        alt.layer(*layers)
        .add_params(alt.selection_interval(name="zoom", bind="scales", encodings=["x"], zoom=ZOOM))
        .properties(
            width="container",
            height=260,
            description=f"{counted(len(data.answers), 'answer')}, {len(degraded)} degraded, {len(failed)} failed. "
            f"{said}",
        )
    )


def _bands(data: RunData, x: alt.X, scale: alt.Scale) -> list[alt.Chart]:
    edges = np.linspace(data.start_ms, data.end_ms, 161)
    order = np.argsort(data.submitted, kind="stable")
    submitted, latency = data.submitted[order], data.latency[order]
    cuts = np.searchsorted(submitted, edges)
    rows = []
    for begin, first, last in zip((edges[:-1] + edges[1:]) / 2e3, cuts, cuts[1:], strict=False):
        if last > first:
            low, p50, p95, high = np.percentile(latency[first:last], (0, 50, 95, 100))
            rows.append(_row(t=begin, low=low, p50=p50, p95=p95, high=high, answers=int(last - first)))
    chart = _chart(rows)
    tips = [
        _tip("t", "at, s"),
        alt.Tooltip("answers:Q"),
        *(_tip(name, f"{name}, ms") for name in ("low", "p50", "p95", "high")),
    ]
    title = "latency, ms"
    return [
        chart.mark_area(color=colour("accent"), opacity=0.16, clip=True).encode(
            x=x, y=alt.Y("low:Q", title=title, scale=scale), y2="high:Q", tooltip=tips
        ),
        chart.mark_line(color=colour("accent"), strokeWidth=1.2, strokeDash=[4, 3], clip=True).encode(
            x=x, y=alt.Y("p95:Q", title=title, scale=scale)
        ),
        chart.mark_line(color=colour("accent"), strokeWidth=2, clip=True, tooltip=True).encode(
            x=x, y=alt.Y("p50:Q", title=title, scale=scale), tooltip=tips
        ),
    ]


def stage_breakdown(data: RunData, *, legend: bool = False) -> Chart | None:
    """Where the time goes: stacked bars of mean milliseconds, per request, for each hop and for each holder."""
    groups = data.stage_means
    if not groups:
        return None
    labels: list[str] = []
    heads: list[bool] = []
    bars: list[Row] = []
    totals: list[Row] = []
    for group, name, count, means in groups:
        if not any(head and label == group for head, label in zip(heads, labels, strict=True)):
            labels.append(group)
            heads.append(True)
        place = len(labels)
        labels.append(shorten(name, 24))
        heads.append(False)
        start, whole = 0.0, sum(means.values()) or 1.0
        for stage in STAGES:
            ms = means.get(stage.name, 0.0)
            if ms > 0:
                bars.append(
                    _row(
                        row=place,
                        start=start,
                        end=start + ms,
                        stage=stage.name,
                        mean=show_ms(ms),
                        share=show_percent(ms / whole),
                        of=f"{shorten(name, 60)}, {counted(count, 'time')}",
                    )
                )
                start += ms
        totals.append(_row(row=place, end=start, text=show_ms(start)))
    y = alt.Y(
        "row:O",
        title=None,
        scale=alt.Scale(domain=list(range(len(labels))), paddingInner=0.32),
        axis=alt.Axis(
            labelExpr=_lookup(labels, "datum.value"),
            labelFontWeight=_expr(f"{_lookup(heads, 'datum.value')} ? 600 : 400"),
            labelColor=_expr(f"{_lookup(heads, 'datum.value')} ? '{colour('ink')}' : '{colour('soft')}'"),
            labelLimit=_expr("narrow ? 125 : 180"),
        ),
    )
    longest = max(row["end"] for row in totals) or 1.0
    x = alt.X("start:Q", title="ms", scale=alt.Scale(domain=[0, longest], nice=False, rangeMax=_expr("width - 62")))
    paint = alt.Color(
        "stage:N",
        title=None,
        scale=alt.Scale(domain=[stage.name for stage in STAGES], range=[colour(stage.name) for stage in STAGES]),
        legend=alt.Legend() if legend else None,
    )
    drawn = (
        _chart(bars)
        .mark_bar(stroke=colour("bg"), strokeWidth=0.7)
        .encode(
            x=x,
            x2="end:Q",
            y=y,
            color=paint,
            tooltip=[
                alt.Tooltip("of:N", title="mean of"),
                alt.Tooltip("stage:N"),
                alt.Tooltip("mean:N"),
                alt.Tooltip("share:N"),
            ],
        )
    )
    text = (
        _chart(totals).mark_text(align="left", dx=7, color=colour("ink")).encode(x=alt.X("end:Q"), y=y, text="text:N")
    )
    parts = ", ".join(f"{name} {show_ms(ms)}" for name, ms in groups[0][3].items() if ms)
    return alt.layer(drawn, text).properties(
        width="container", height=27 * len(labels), description=f"Mean of an answered request: {parts}."
    )


def served(data: RunData, *, legend: bool = False, width: int = 720, most: int = MOST_SPANS) -> Chart | None:
    """A lane for each peer: the share of time that its engine ran which block, and every block of a brushed stretch.

    The brush of the overview sets the stretch of the detail. The detail holds at most ``most`` runs of a block,
    those around the first loss of a peer (:func:`served_window`).
    """
    engines, lanes = data.engines, shown_lanes(data)
    if not len(engines) or not lanes:
        return None
    kept, first = pick_window(data, most), pick_window(data, FIRST_LOOK)
    names = [shorten(data.lanes[lane], 18) for lane in lanes]
    busy = [f"{show_percent(data.summary.peers[data.lanes[lane]].busy)} busy" for lane in lanes]
    held = [_held(data.summary.peers[data.lanes[lane]].blocks) for lane in lanes]
    domain = [data.start_ms / 1e3, data.end_ms / 1e3]
    brush = alt.selection_interval(
        name="brush",
        encodings=["x"],
        value={"x": [first.start / 1e3, first.end / 1e3]},
        mark=alt.BrushConfig(fill=colour("ink"), fillOpacity=0.06, stroke=colour("ink"), strokeWidth=1.2),
    )
    away = [
        _row(t=s.start / 1e3, to=s.end / 1e3, y0=row, y1=row + 1 - _GAP, peer=names[row])
        for row, lane in enumerate(lanes)
        for s in data.away[:MOST_MARKS]
        if s.peer == data.lanes[lane]
    ]
    grounds = [_row(y0=row, y1=row + 1 - _GAP) for row in range(len(lanes))]
    overview = alt.layer(
        *_lanes_ground(grounds, away, _lane_axis(names, busy), domain),
        _chart(_overview_rows(data, lanes))
        .mark_rect()
        .encode(
            x=alt.X("t:Q", scale=alt.Scale(domain=domain, nice=False), title="seconds since the start"),
            x2="to:Q",
            y=_lane_axis(names, busy),
            y2="y1:Q",
            color=_block_paint(data.num_blocks, legend=legend),
            tooltip=[
                alt.Tooltip("block:O"),
                alt.Tooltip("share:Q", title="engine busy with it", format=".1%"),
                _tip("t", "from, s"),
                _tip("to", "to, s"),
            ],
        )
        .add_params(brush),
    ).properties(width=width, height=max(54 * len(lanes), 60), name="overview")
    scale = alt.Scale(domain=brush, nice=False)
    x = alt.X("t:Q", scale=scale, title="seconds since the start")
    runs = _chart(_span_rows(data, lanes, kept))
    wide = "scale('detail_x', datum.to) - scale('detail_x', datum.t)"
    inside = "(datum.t + datum.to) / 2"
    detail = (
        alt.layer(
            *_lanes_ground(grounds, away, _lane_axis(names, held), brush),
            runs.mark_rect(stroke=colour("bg"), clip=True).encode(
                x=x,
                x2="to:Q",
                y=_lane_axis(names, held),
                y2="y1:Q",
                color=_block_paint(data.num_blocks, legend=False),
                strokeWidth=alt.condition(f"{wide} > 4", alt.value(0.8), alt.value(0)),
                tooltip=[
                    alt.Tooltip("block:O"),
                    alt.Tooltip("request:N"),
                    _tip("took", "took, ms"),
                    _tip("t", "from, s"),
                ],
            ),
            runs.mark_text(fontSize=10.5, fontWeight=600, clip=True)
            .transform_calculate(middle=inside, height="(datum.y0 + datum.y1) / 2")
            .encode(
                x=alt.X("middle:Q", scale=scale),
                y=alt.Y("height:Q"),
                text="block:O",
                color=_block_paint(data.num_blocks, inks=True),
                opacity=alt.condition(f"{wide} > 13 && datum.y1 - datum.y0 > 0.3", alt.value(1), alt.value(0)),
            ),
        )
        .resolve_scale(color="independent")
        .properties(width=width, height=max(46 * len(lanes), 60), name="detail")
    )
    return (
        alt.vconcat(overview, detail, spacing=26)
        .resolve_scale(x="independent", y="independent", color="independent")
        .properties(description="; ".join(_lane_text(data, data.lanes[lane]) for lane in lanes) + ".")
    )


def served_window(data: RunData) -> Window:
    """The stretch of a run whose runs of a block the detail of :func:`served` holds."""
    return pick_window(data, MOST_SPANS)


_GAP = 0.2
"""Share of a lane's height that stays free below it."""


def _away_layer(away: list[Row], **encoding: Any) -> list[alt.Chart]:
    """Shaded stretches in which peers were lost; no layer where there are none, whose scales would have no extent."""
    tips = [alt.Tooltip("peer:N", title="lost"), _tip("t", "from, s"), _tip("to", "to, s")]
    return [_chart(away).mark_rect(color=colour("shade"), clip=True).encode(tooltip=tips, **encoding)] if away else []


def _lanes_ground(grounds: list[Row], away: list[Row], y: alt.Y, domain: Any) -> list[alt.Chart]:
    return [
        _chart(grounds).mark_rect(color=colour("panel")).encode(y=y, y2="y1:Q", x=alt.value(0), x2=alt.value("width")),
        *_away_layer(away, x=alt.X("t:Q", scale=alt.Scale(domain=domain, nice=False)), x2="to:Q", y=y, y2="y1:Q"),
    ]


def _lane_axis(names: Sequence[str], below: Sequence[str]) -> alt.Y:
    """Lanes one below the other, with a line below each name."""
    both = [[name, under] for name, under in zip(names, below, strict=True)]
    axis = alt.Axis(
        values=[row + (1 - _GAP) / 2 for row in range(len(names))],
        labelExpr=_lookup(both, "floor(datum.value)"),
        grid=False,
        labelOverlap=False,
        labelLineHeight=14,
        labelBaseline="bottom",
        labelOffset=3,
        minExtent=_expr("narrow ? 92 : 128"),
        maxExtent=_expr("narrow ? 92 : 128"),
        labelLimit=_expr("narrow ? 88 : 124"),
    )
    return alt.Y("y0:Q", title=None, axis=axis, scale=alt.Scale(domain=[0, len(names)], reverse=True, nice=False))


def _overview_rows(data: RunData, lanes: Sequence[int]) -> list[Row]:
    engines = data.engines
    pairs = {(int(lane), int(block)) for lane, block in zip(engines.lane, engines.block, strict=True)}
    bins = int(min(220, max(12, MOST_CELLS / max(len(pairs), 1))))
    edges = np.linspace(data.start_ms, data.end_ms, bins + 1)
    rows = []
    for row, lane in enumerate(lanes):
        base = np.zeros(bins)
        for block in range(data.num_blocks):
            if (lane, block) not in pairs:
                continue
            chosen = (engines.lane == lane) & (engines.block == block)
            share = np.minimum(coverage(engines.start[chosen], engines.end[chosen], edges), 1.0 - base)
            for i in np.flatnonzero(share > 0.004):
                bottom = row + (1 - _GAP) * (1 - base[i])
                rows.append(
                    _row(
                        t=edges[i] / 1e3,
                        to=edges[i + 1] / 1e3,
                        y0=bottom - (1 - _GAP) * share[i],
                        y1=bottom,
                        block=block,
                        share=share[i],
                    )
                )
            base = base + share
    return rows


def _span_rows(data: RunData, lanes: Sequence[int], window: Window) -> list[Row]:
    engines = data.engines
    inside = (engines.end > window.start) & (engines.start < window.end)
    rows = []
    for lane_row, lane in enumerate(lanes):
        packed = pack(engines, np.flatnonzero(inside & (engines.lane == lane)))
        depth = min(4, max((row for _, row in packed), default=0) + 1)
        each = (1 - _GAP) / depth
        for index, row in packed:
            top = lane_row + each * min(row, depth - 1)
            start, end = float(engines.start[index]), float(engines.end[index])
            rows.append(
                _row(
                    t=start / 1e3,
                    to=end / 1e3,
                    y0=top + 0.015,
                    y1=top + each - 0.015,
                    block=int(engines.block[index]),
                    request=data.answers[int(engines.request[index])].id,
                    took=end - start,
                    digits=6,
                )
            )
    return rows


def _held(blocks: Sequence[int]) -> str:
    return shorten(f"blocks {block_ranges(blocks)}", 18) if blocks else ""


def _lane_text(data: RunData, name: str) -> str:
    peer = data.summary.peers[name]
    return f"{shorten(name, 60)}: busy {show_percent(peer.busy)}, {counted(peer.requests, 'answer')}"


def _block_paint(num_blocks: int, *, legend: bool = False, inks: bool = False) -> alt.Color:
    colours = [block_colour(block, num_blocks) for block in range(num_blocks)]
    return alt.Color(
        "block:O",
        title="block",
        scale=alt.Scale(domain=list(range(num_blocks)), range=list(map(ink_on, colours)) if inks else colours),
        legend=alt.Legend(columns=12) if legend else None,
    )


def request_timelines(data: RunData) -> list[tuple[str, str, Chart]]:
    """A few requests worth a look: why, a few words about it, and a chart of who ran which block when.

    A request whose blocks ran one after the other is one bar. Where holders worked side by side each has a row; a dark
    line follows what the answer waited for, and what ran beside it is paler.
    """
    chosen = pick_requests(data)
    shared = shared_scale(data)
    longest = max((record.latency_us for _, record in chosen), default=0) / 1e3 or 1.0
    found = []
    for why, record in chosen:
        limit = longest if shared else record.latency_us / 1e3 or 1.0
        found.append((why, about(record), _request_chart(data, why, record, limit)))
    return found


def shared_scale(data: RunData) -> bool:
    """Whether the requests of :func:`request_timelines` are near enough to each other for one scale."""
    times = [record.latency_us for _, record in pick_requests(data)]
    return bool(times) and max(times) <= 4 * min(times)


def about(record: RequestRecord) -> str:
    """Latency, image, waves, skips and attempts of a request in a few words."""
    parts = [show_ms(record.latency_us / 1e3), shorten(record.image, 26)]
    if not record.is_plain:
        parts.append(counted(len(record.waves), "wave"))
    if record.skipped:
        parts.append(f"skipped {', '.join(map(str, record.skipped[:8]))}")
    if record.attempts > 1:
        parts.append(f"{record.attempts} attempts")
    return " · ".join(parts)


def _request_chart(data: RunData, why: str, record: RequestRecord, limit_ms: float) -> Chart:
    laid = timeline_of(record)
    several = len(laid.rows) > 1
    shown = laid.rows[:MOST_ROWS]
    spans = [span for span in laid.spans if span.row < MOST_ROWS]
    across = alt.Scale(domain=[0, limit_ms], nice=False)
    x = alt.X("ms:Q", title=None, scale=across)
    names = [name if name not in shown[:row] else "" for row, name in enumerate(shown)]
    axis = (
        alt.Axis(
            values=[row + 0.38 for row in range(len(shown))],
            labelExpr=_lookup([shorten(name, 18) for name in names], "floor(datum.value)"),
            grid=False,
            labelOverlap=False,
            labelColor=colour("ink"),
            minExtent=_expr("narrow ? 66 : 110"),
            maxExtent=_expr("narrow ? 66 : 110"),
            labelLimit=_expr("narrow ? 62 : 106"),
        )
        if several
        else None
    )
    upright: dict[str, Any] = {
        "title": None,
        "axis": axis,
        "scale": alt.Scale(domain=[0, len(shown) if several else 1.4], reverse=True, nice=False),
    }
    y = alt.Y("y0:Q", **upright)
    tips = [
        alt.Tooltip("what:N"),
        alt.Tooltip("holder:N"),
        alt.Tooltip("took:N"),
        alt.Tooltip("path:N", title="critical path"),
    ]
    rows = [_stage_row(span, record, laid) for span in spans]
    blocks = [row for row in rows if row["block"] is not None]
    stages = [row for row in rows if row["block"] is None and not row["why"]]
    gone = [row for row in rows if row["why"]]
    pale = alt.condition("datum.path == 'yes'", alt.value(1), alt.value(0.62))
    stage_paint = alt.Color(
        "what:N", legend=None, scale=alt.Scale(domain=[s.name for s in STAGES], range=[colour(s.name) for s in STAGES])
    )
    ground = [_row(y0=row, y1=row + 0.76, ms=0, to=min(record.latency_us / 1e3, limit_ms)) for row in range(len(shown))]
    wide = "scale('x', datum.to) - scale('x', datum.ms)"
    text: Any = {"middle": "(datum.ms + datum.to) / 2", "height": "(datum.y0 + datum.y1) / 2"}
    place: dict[str, Any] = {"x": alt.X("middle:Q", title=None, scale=across), "y": alt.Y("height:Q", **upright)}
    bar: dict[str, Any] = {"x": x, "x2": "to:Q", "y": y, "y2": "y1:Q"}
    layers = [
        _chart(ground).mark_rect(color=colour("panel")).encode(**bar),
        _chart(stages).mark_rect(clip=True).encode(**bar, color=stage_paint, opacity=pale, tooltip=tips),
        _chart(blocks)
        .mark_rect(stroke=colour("bg"), strokeWidth=0.7, clip=True)
        .encode(**bar, color=_block_paint(data.num_blocks), opacity=pale, tooltip=tips),
        _chart(blocks)
        .mark_text(fontSize=10.5, fontWeight=600)
        .transform_calculate(**text)
        .encode(
            **place,
            text="block:O",
            color=_block_paint(data.num_blocks, inks=True),
            opacity=alt.condition(f"{wide} > 13", alt.value(1), alt.value(0)),
        ),
        _chart(gone)
        .mark_rect(fill=None, stroke=colour("bad"), strokeDash=[4, 3], clip=True)
        .encode(**bar, tooltip=tips),
        _chart(gone).mark_text(color=colour("bad")).transform_calculate(**text).encode(**place, text="why:N"),
    ]
    if several:
        layers.append(
            _chart(_critical_path(spans, record))
            .mark_line(color=colour("ink"), strokeWidth=2.4, strokeJoin="round", strokeCap="round")
            .encode(x=x, y=y, order="order:Q")
        )
    else:
        names_below = _chart(_first_blocks(blocks, limit_ms)).mark_text(align="left", fontSize=11)
        room = alt.condition("datum.room * width > 6.5 * length(datum.text)", alt.value(1), alt.value(0))
        layers.append(names_below.encode(x=x, y=y, text="text:N", opacity=room))
    path = dict.fromkeys(span.holder for span in spans if span.critical and span.block is not None)
    said = f"{why}: request {record.id}, {show_ms(record.latency_us / 1e3)}"
    if several:
        said += f", waited for {', then '.join(shorten(name, 40) for name in list(path)[:MOST_ROWS])}"
    height = 34 * len(shown) if several else 54
    return (
        alt.layer(*layers)
        .resolve_scale(color="independent", opacity="independent")
        .properties(width="container", height=height, description=f"{said}.")
    )


def _stage_row(span: Span, record: RequestRecord, laid: RequestTimeline) -> Row:
    everywhere = len(laid.rows) > 1 and span.stage in ("stem", "head")
    inset = (
        0.0
        if span.block is not None
        else {"wire": 0.26, "other": 0.26, "wait": 0.22, "queue": 0.1}.get(span.stage, 0.02)
    )
    top, bottom = (0.0, min(len(laid.rows), MOST_ROWS) - 0.24) if everywhere else (span.row + 0.0, span.row + 0.76)
    return _row(
        ms=(span.start - record.submitted_us) / 1e3,
        to=(span.end - record.submitted_us) / 1e3,
        y0=top + inset,
        y1=bottom - inset,
        what=span.stage if span.block is None else f"block {span.block}",
        block=span.block,
        holder=shorten(span.holder, 60) if span.holder else "the source",
        took=show_ms((span.end - span.start) / 1e3),
        path="yes" if span.critical else "no",
        why=shorten(span.why, 20),
    )


def _first_blocks(blocks: Sequence[Row], limit_ms: float) -> list[Row]:
    """The first block of each visit: whose it is, and which share of the width there is for its name."""
    firsts = [
        row
        for before, row in zip([None, *blocks], blocks, strict=False)
        if not before or before["holder"] != row["holder"]
    ]
    ends = [*(row["ms"] for row in firsts[1:]), limit_ms]
    return [
        _row(ms=row["ms"], y0=1.08, text=shorten(row["holder"], 16), room=(end - row["ms"]) / limit_ms)
        for row, end in zip(firsts, ends, strict=False)
    ]


def _critical_path(spans: Sequence[Span], record: RequestRecord) -> list[Row]:
    """A line below the bars that the answer waited for, from row to row."""
    points: list[Row] = []
    for span in sorted((span for span in spans if span.critical), key=lambda span: span.start):
        for at in (span.start, span.end):
            points.append(_row(ms=(at - record.submitted_us) / 1e3, y0=span.row + 0.87, order=len(points)))
    return points


def accuracy_by_skips(data: RunData) -> Chart | None:
    """Accuracy of the answers by how many blocks they skipped, with 95 % intervals and how many there were."""
    found = data.summary.accuracy_by_skips
    if not found:
        return None
    rows = [
        _row(
            skipped="none" if one.skipped == 0 else counted(one.skipped, "block"),
            answers=f"{one.answers:,} answers",
            top1=one.top1,
            low=one.low,
            high=one.high,
            text=f"{show_percent(one.top1)} of {one.labelled:,}" if one.top1 is not None else "no labels",
            kind="whole" if one.skipped == 0 else "skipped",
        )
        for one in found
    ]
    chart = _accuracy_base(rows, "skipped:N", [row["skipped"] for row in rows], data.summary.chance)
    dots = (
        _chart(rows)
        .mark_circle(size=110, stroke=colour("bg"), strokeWidth=1.5, opacity=1)
        .encode(
            x="top1:Q",
            y=_names_axis("skipped:N", [row["skipped"] for row in rows]),
            tooltip=_ACCURACY_TIPS,
            color=alt.Color(
                "kind:N",
                legend=None,
                scale=alt.Scale(domain=["whole", "skipped"], range=[colour("accent"), colour("wire")]),
            ),
        )
    )
    said = [
        f"{row['skipped']}: {show_percent(one.top1)} of {one.labelled}" for row, one in zip(rows, found, strict=True)
    ]
    return alt.layer(*chart, dots).properties(
        width="container", height=34 * len(rows), description="; ".join(said) + "."
    )


_ACCURACY_TIPS = [
    alt.Tooltip("text:N", title="accuracy"),
    alt.Tooltip("answers:N"),
    alt.Tooltip("low:Q", title="95 % from", format=".1%"),
    alt.Tooltip("high:Q", title="to", format=".1%"),
]


_SHARES = alt.Scale(domain=[0, 1], nice=False, rangeMax=alt.ExprRef("width - 108"))
"""Accuracy, with room for figures at its right."""


def _names_axis(field: str, names: Sequence[str]) -> alt.Y:
    limit = _expr("narrow ? 130 : 230")
    return alt.Y(field, title=None, sort=list(names), axis=alt.Axis(labelLimit=limit, labelColor=colour("ink")))


def _accuracy_base(rows: list[Row], field: str, names: Sequence[str], chance: float | None) -> list[alt.Chart]:
    """A guess, intervals and figures by row; the axis of accuracy has room for the figures on its right."""
    axis = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=True)
    x = alt.X("top1:Q", title=None, scale=_SHARES, axis=axis)
    y = _names_axis(field, names)
    known = [row for row in rows if row["low"] is not None]
    layers = []
    if chance is not None:
        guess = _chart([_row(top1=chance, what=f"a guess: {show_percent(chance)}")])
        layers.append(guess.mark_rule(color=colour("axis"), strokeDash=[3, 3]).encode(x=x, tooltip="what:N"))
    interval = _chart(known).mark_rule(color=colour("ink"), strokeWidth=1.6)
    layers.append(interval.encode(x=alt.X("low:Q", scale=_SHARES), x2="high:Q", y=y))
    text = _chart(rows).mark_text(align="right", color=colour("ink"), fontWeight=600)
    layers.append(text.encode(x=alt.value("width"), y=y, text="text:N"))
    return layers


def slot_heatmap(data: RunData) -> Chart | None:
    """How often each block ran in each slot, and how often it was skipped; None where nothing ran."""
    counts, skipped = data.slots
    if not counts.any():
        return None
    answers = max(len(data.answers), 1)
    peak = max(float(counts.max()), float(skipped.max(initial=0)), 1.0) / answers
    columns = [str(slot) for slot in range(data.num_blocks)] + (["skipped"] if skipped.any() else [])
    rows = []
    for block in range(data.num_blocks):
        for column, count in zip(columns, [*counts[block], skipped[block]], strict=False):
            share = float(count) / answers
            rows.append(
                _row(
                    block=block,
                    slot=column,
                    share=share,
                    answers=show_percent(share),
                    depth=(share / peak) ** 0.7,
                    text="" if not count else f"{100 * share:.0f}" if share >= 0.01 else "<1",
                    kind="skipped" if column == "skipped" else "ran",
                )
            )
    size = 34 if data.num_blocks <= 12 else 22
    base = _chart(rows).encode(
        x=alt.X(
            "slot:O",
            sort=columns,
            title="slot: how many blocks ran before",
            axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False),
        ),
        y=alt.Y("block:O", title="block"),
        tooltip=[alt.Tooltip("block:O"), alt.Tooltip("slot:N"), alt.Tooltip("answers:N", title="of the answers")],
    )
    cells = base.mark_rect(stroke=colour("bg"), strokeWidth=1)
    paint = alt.Color(
        "kind:N", legend=None, scale=alt.Scale(domain=["ran", "skipped"], range=[colour("accent"), colour("wire")])
    )
    depth = alt.Opacity("depth:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[0, 1]))
    text = base.mark_text(fontSize=11, fontWeight=600).encode(
        text="text:N", color=alt.condition("datum.depth > 0.6", alt.value(colour("bg")), alt.value(colour("ink")))
    )
    layers = [base.mark_rect(color=colour("panel"), stroke=colour("bg")), cells.encode(color=paint, opacity=depth)]
    in_place = float(np.trace(counts)) / max(float(counts.sum()), 1.0)
    said = f"{show_percent(in_place)} of the blocks ran in their trained slot"
    return alt.layer(*layers, *([text] if size > 30 else [])).properties(
        width="container",
        height=size * data.num_blocks,
        description=f"Blocks by slots over {counted(answers, 'answer')}; {said}; skipped: "
        f"{counted(int(skipped.sum()), 'block run')}.",
    )


def accuracy_comparison(runs: Sequence[tuple[str, RunSummary]]) -> Chart | None:
    """Accuracy of several runs with 95 % intervals, and that of a guess; coloured by the training method."""
    found = [(name, run) for name, run in runs if run.top1 is not None and run.top1_interval is not None]
    if not found:
        return None
    methods = list(dict.fromkeys(shorten(run.method or "unknown", 28) for _, run in found))
    rows = []
    for number, (name, run) in enumerate(found):
        low, high = run.top1_interval or (0.0, 0.0)
        rows.append(
            _row(
                run=shorten(name, 42)
                if len({n for n, _ in found}) == len(found)
                else f"{number + 1} {shorten(name, 40)}",
                method=shorten(run.method or "unknown", 28),
                top1=run.top1,
                low=low,
                high=high,
                text=show_percent(run.top1),
                answers=f"{run.answered:,}",
            )
        )
    names = [row["run"] for row in rows]
    chance = next((run.chance for _, run in found if run.chance is not None), None)
    paints = [colour(name) for name in _COLOURS]
    legend = alt.Legend(title="trained by", orient="top") if len(methods) > 1 else None
    bars = (
        _chart(rows)
        .mark_bar(height=12)
        .encode(
            x="top1:Q",
            y=_names_axis("run:N", names),
            tooltip=[alt.Tooltip("run:N"), *_ACCURACY_TIPS],
            color=alt.Color(
                "method:N",
                legend=legend,
                scale=alt.Scale(domain=methods, range=[paints[i % len(paints)] for i in range(len(methods))]),
            ),
        )
    )
    said = "; ".join(f"{row['run']}: {row['text']}" for row in rows)
    return alt.layer(bars, *_accuracy_base(rows, "run:N", names, chance)).properties(
        width="container", height=36 * len(rows), description=f"{said}."
    )


_COLOURS = ("engine", "wire", "head", "codec", "bad", "soft", "stem", "other")
"""Colours of what is compared, in their order."""


def accuracy_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Accuracy of training methods by order of the blocks and by how many are kept, side by side.

    The counterparts of Figure 1 (b) and (c) of arXiv 2407.04513. On the left each method's accuracy in trained order
    and its mean in random order, whose line reaches from the 5th percentile of the orders to a standard deviation above
    the mean. On the right the accuracy that remains with fewer blocks, solid in random order and dashed in trained
    order. Raises :class:`UsageError` for none, and for more than there are colours.
    """
    check_figure(len(evaluations))
    names = _evaluation_names(evaluations)
    percent = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=True)
    share = alt.Scale(domain=[0, 1], nice=False)
    paint = alt.Color(
        "name:N", legend=None, scale=alt.Scale(domain=names, range=[colour(c) for c in _COLOURS[: len(names)]])
    )
    orders, kept = [], []
    for name, item in zip(names, evaluations, strict=True):
        a, depth = item.arbitrary, int(item.settings.get("blocks", 1))
        orders.append(
            _row(
                name=name,
                trained=item.sequential.top1,
                random=a.top1_mean,
                low=a.top1_p5,
                high=min(1.0, a.top1_mean + a.top1_std),
                text=show_percent(a.top1_mean),
            )
        )
        rows = [
            (int(count), value.arbitrary, value.sequential) for count, value in item.kept.items() if int(count) < depth
        ]
        for blocks, arbitrary, sequential in [*sorted(rows), (depth, a.top1_mean, item.sequential.top1)]:
            kept.append(_row(name=name, blocks=blocks, top1=arbitrary, order="random order"))
            kept.append(_row(name=name, blocks=blocks, top1=sequential, order="trained order"))
    tall = max(220, 42 * len(names))
    y = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelColor=colour("ink"), labelLimit=150))
    left = _chart(orders)
    by_order = alt.layer(
        left.mark_rule(strokeWidth=2).encode(
            x=alt.X("low:Q", title=None, axis=percent, scale=share), x2="high:Q", y=y, color=paint
        ),
        left.mark_point(size=60, fill=colour("bg"), opacity=1).encode(x="trained:Q", y=y, color=paint),
        left.mark_point(size=70, filled=True, opacity=1).encode(x="random:Q", y=y, color=paint),
        left.mark_text(dy=-12, color=colour("ink")).encode(x="random:Q", y=y, text="text:N"),
    ).properties(
        width=300,
        height=tall,
        title=_titled(
            "Accuracy by order of the blocks",
            "circle: trained order; dot and line: random orders",
        ),
    )
    right = _chart(kept)
    x = alt.X(
        "blocks:Q", title="blocks kept", axis=alt.Axis(values=sorted({row["blocks"] for row in kept}), format="d")
    )
    dash = alt.StrokeDash(
        "order:N", legend=None, scale=alt.Scale(domain=["random order", "trained order"], range=[[1, 0], [4, 3]])
    )
    ends = [
        row
        for row in kept
        if row["order"] == "random order"
        and row["blocks"] == max(r["blocks"] for r in kept if r["name"] == row["name"])
    ]
    by_kept = alt.layer(
        right.mark_line(strokeWidth=1.8).encode(
            x=x, y=alt.Y("top1:Q", title=None, axis=percent, scale=share), color=paint, strokeDash=dash
        ),
        right.mark_circle(size=36, opacity=1)
        .encode(x=x, y="top1:Q", color=paint)
        .transform_filter("datum.order == 'random order'"),
        *(
            _chart([row])
            .mark_text(align="left", dx=10, dy=dy, color=colour("ink"))
            .encode(x=x, y="top1:Q", text="name:N")
            for row, dy in zip(ends, _apart([row["top1"] for row in ends], tall), strict=True)
        ),
    ).properties(
        width=360,
        height=tall,
        title=_titled("Accuracy with fewer blocks", "solid: random order; dashed: trained order"),
    )
    said = "; ".join(
        f"{name}: {show_percent(item.sequential.top1)} in trained order, {show_percent(item.arbitrary.top1_mean)} in "
        "random order"
        for name, item in zip(names, evaluations, strict=True)
    )
    return alt.hconcat(by_order, by_kept, spacing=40).properties(description=f"{said}.")


def check_figure(count: int) -> None:
    """Raise :class:`UsageError` where :func:`accuracy_figure` cannot hold ``count`` evaluations."""
    if not 1 <= count <= len(_COLOURS):
        raise UsageError(f"a figure holds 1 to {len(_COLOURS)} runs or folders of runs, not {count}")


def _titled(text: str, below: str) -> alt.TitleParams:
    return alt.TitleParams(text, subtitle=below, subtitleColor=colour("soft"), subtitleFontSize=11)


def _apart(shares: Sequence[float], height: float) -> list[float]:
    """How far down each label is moved so that labels at these shares of ``height`` do not touch."""
    moves = [0.0] * len(shares)
    at = -1e9
    for index in sorted(range(len(shares)), key=lambda index: -shares[index]):
        wanted = (1 - shares[index]) * height
        at = max(wanted, at + 15)
        moves[index] = at - wanted
    return moves


def _evaluation_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """The methods; where two are of one, the names of the evaluations, no two alike even when shortened."""
    names = [str(item.settings.get("method", "")) for item in evaluations]
    if len(set(names)) < len(names):
        names = distinct_names([item.name or str(item.settings.get("of", "")) for item in evaluations])
    short = [shorten(name, 20) for name in names]
    return short if len(set(short)) == len(short) else [shorten(f"{n} {name}", 20) for n, name in enumerate(names, 1)]


PICTURES: dict[str, Callable[[RunData], Chart | None]] = {
    "latency": latency_distribution,
    "over-time": latency_over_time,
    "stages": lambda data: stage_breakdown(data, legend=True),
    "served": lambda data: served(data, legend=True, most=FIRST_LOOK),
    "skips": accuracy_by_skips,
    "slots": slot_heatmap,
}
"""Charts that can be files of their own."""


def write_picture(
    path: str | Path, kind: str, summary: RunSummary, records: Sequence[RequestRecord], events: Sequence[PeerEvent]
) -> None:
    """Write the chart ``kind``, a key of :data:`PICTURES`; raises :class:`UsageError` where nothing can be drawn."""
    if kind not in PICTURES:
        raise UsageError(f"no picture is called {kind!r}; there are {', '.join(PICTURES)}")
    chart = PICTURES[kind](RunData(summary, records, events))
    if chart is None:
        raise UsageError(f"the run has nothing to draw for {kind!r}; choose another picture")
    write_whole(path, svg_of(chart))


def write_figure(path: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write :func:`accuracy_figure` as an SVG file."""
    write_whole(path, svg_of(accuracy_figure(evaluations)))


def write_comparison_picture(path: str | Path, runs: Sequence[tuple[str, RunSummary]]) -> None:
    """Write the chart that compares the accuracy of ``runs``; raises :class:`UsageError` where none has labels."""
    chart = accuracy_comparison(runs)
    if chart is None:
        raise UsageError("none of the runs has labels, so there is no accuracy to draw")
    write_whole(path, svg_of(chart))


def svg_of(chart: Chart, width: int = 880) -> str:
    """The chart as an SVG document, on paper of its own; light or dark as its reader's screen is."""
    import vl_convert

    spec = with_parameters(spec_of(chart), narrow=False)
    spec["config"]["background"] = colour("bg")
    spec["config"]["padding"] = {"left": 32, "right": 24, "top": 20, "bottom": 16}
    if spec.get("width") == "container":
        spec["width"] = width
    drawing: str = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE)
    head, rest = drawing.split(">", 1)
    return f"{head}><style>{STYLE}</style>{rest}\n"


def with_parameters(spec: dict[str, Any], *, narrow: bool) -> dict[str, Any]:
    """The specification with the parameter ``narrow``, which is set where a chart has less than 520 pixels."""
    return {**spec, "params": [{"name": "narrow", "value": narrow}, *spec.get("params", [])]}


def _chart(rows: list[Row]) -> alt.Chart:
    """A chart of rows, which Altair carries as one text: it copies a chart, and all that is in it, at every step."""
    text = json.dumps(rows, allow_nan=False)
    chart: alt.Chart = alt.Chart(alt.InlineData(values=text, format=alt.JsonDataFormat(type="json")))
    return chart


def _row(*, digits: int = 4, **values: Any) -> Row:
    """A row of data: plain numbers, rounded so that a page stays small."""
    return {
        name: round(float(value), digits) if isinstance(value, (float, np.floating)) else value
        for name, value in values.items()
    }


def _expr(text: str) -> Any:
    """A Vega expression in place of a value."""
    return alt.ExprRef(text)


def _tip(field: str, title: str) -> alt.Tooltip:
    return alt.Tooltip(f"{field}:Q", title=title, format=",.4~g")


def _halo(chart: alt.Chart, text: str, *, bold: bool = True, y: Any, **options: Any) -> Any:
    mark: dict[str, Any] = {"fontWeight": 600, "color": colour("ink")} if bold else {}
    return chart.mark_text(**mark, **options).encode(y=y, text=text)


def _lookup(values: Sequence[Any], index: str) -> str:
    """An expression for one of ``values``, whose texts are string literals."""
    return f"{json.dumps(list(values))}[{index}]"


def _request_row(record: RequestRecord) -> Row:
    return _row(
        t=record.submitted_us / 1e6, ms=record.latency_us / 1e3, request=record.id, image=shorten(record.image, 40)
    )


def _event_row(event: PeerEvent, number: int) -> Row:
    kind = {PeerState.LOST: "lost", PeerState.ALIVE: "back"}.get(event.state, "other")
    return _row(t=event.at_us / 1e6, what=_what(event), kind=kind, why=shorten(event.why, 80) or NOTHING, number=number)


def _what(event: PeerEvent) -> str:
    return f"{shorten(event.peer, 18)} {'back' if event.state == PeerState.ALIVE else event.state.value}"


def _some(records: list[RequestRecord]) -> list[RequestRecord]:
    return records[:: -(-len(records) // MOST_MARKS)] if records else []


def _latency_scale(values: Floats, *, from_zero: bool = True, room: float = 1.05) -> alt.Scale:
    """By ratio where the largest is far from the median, so that one retry does not flatten everything else.

    ``room`` is how far the scale reaches above the largest.
    """
    low, high, middle = float(values.min()), float(values.max()), float(np.median(values))
    if low > 0 and high > 5 * middle:
        return alt.Scale(type="log", domain=[low / 1.12, high * max(room, 1.12)], nice=False)
    if not from_zero and low > 0.4 * high > 0:
        beside = max(high - low, 0.05 * high) * 0.12
        return alt.Scale(type="linear", domain=[low - beside, high + beside], nice=False)
    return alt.Scale(type="linear", domain=[0.0, high * room if high > 0 else 1.0], nice=False)


def _position(value: float, scale: alt.Scale) -> float:
    """Where on its axis a value stands, from 0 to 1."""
    low, high = scale.domain
    if scale.type == "log":
        return float(np.log(value / low) / np.log(high / low))
    return float((value - low) / (high - low))
