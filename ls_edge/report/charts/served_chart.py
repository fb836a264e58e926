"""Chart of the blocks that each holder served over time: an overview and a selectable detail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np

from ls_edge.core.text import counted, format_ranges, shorten, show_percent
from ls_edge.report.charts.specification import (
    MOST_MARKS,
    Row,
    at,
    block_color,
    block_ink,
    chart_of,
    lanes_axis,
    opacity_if,
    row_of,
    tooltip_of,
)
from ls_edge.report.runs.statistics import RunData, Window, coverage, pack, pick_window, shown_lanes
from ls_edge.report.theme import Chart, color

MOST_SPANS = 2000
"""Maximum block executions in the detail: about 150 KB of a page."""

MOST_CELLS = 2000
"""Maximum bins by peer and block in the overview: about 130 KB of a page."""

FIRST_LOOK = 140
"""Block executions in the initial detail; with more, they are too narrow to read."""


def served(data: RunData, *, most: int = MOST_SPANS) -> Chart | None:
    """Draw a lane for each peer: an overview of the time that its engine ran each block, and single executions.

    The brush in the overview selects the part that the detail shows. The detail contains at most ``most`` block
    executions, those around the first loss of a peer (:func:`served_window`).
    """
    engines, lanes = data.engines, shown_lanes(data)
    if not len(engines) or not lanes:
        return None
    kept, first = pick_window(data, most), pick_window(data, FIRST_LOOK)
    peers = [(data.lanes[lane], data.summary.peers[data.lanes[lane]]) for lane in lanes]
    names = [shorten(name, 18) for name, _ in peers]
    busy = [f"{show_percent(peer.busy)} busy" for _, peer in peers]
    held = [shorten(f"blocks {format_ranges(peer.blocks)}", 18) if peer.blocks else "" for _, peer in peers]
    described = "; ".join(
        f"{shorten(name, 60)}: busy {show_percent(peer.busy)}, {counted(peer.requests, 'answer')}"
        for name, peer in peers
    )
    domain = [data.start_ms / 1e3, data.end_ms / 1e3]
    brush = alt.selection_interval(
        name="brush",
        encodings=["x"],
        value={"x": [first.start / 1e3, first.end / 1e3]},
        mark=alt.BrushConfig(fill=color("ink"), fillOpacity=0.06, stroke=color("ink"), strokeWidth=1.2),
    )
    away = [
        row_of(t=s.start / 1e3, to=s.end / 1e3, y0=row, y1=row + 1 - _GAP, peer=names[row])
        for row, lane in enumerate(lanes)
        for s in data.away[:MOST_MARKS]
        if s.peer == data.lanes[lane]
    ]
    grounds = [row_of(y0=row, y1=row + 1 - _GAP) for row in range(len(lanes))]
    overview = alt.layer(
        *_lanes_ground(grounds, away, _lane_axis(names, busy), domain),
        _overview(data, lanes, _lane_axis(names, busy), domain).add_params(brush),
    ).properties(width=720, height=max(54 * len(lanes), 60), name="overview")
    detail = (
        alt.layer(
            *_lanes_ground(grounds, away, _lane_axis(names, held), brush),
            *_detail(data, lanes, kept, _lane_axis(names, held), alt.Scale(domain=brush, nice=False)),
        )
        .resolve_scale(color="independent")
        .properties(width=720, height=max(46 * len(lanes), 60), name="detail")
    )
    return (
        alt.vconcat(overview, detail, spacing=26)
        .resolve_scale(x="independent", y="independent", color="independent")
        .properties(description=f"{described}.")
    )


def _overview(data: RunData, lanes: Sequence[int], y: alt.Y, domain: Sequence[float]) -> Chart:
    """Draw the fraction of time that each engine ran each block."""
    tips = [
        alt.Tooltip("block:O"),
        alt.Tooltip("share:Q", title="engine busy with it", format=".1%"),
        tooltip_of("t", "from, s"),
        tooltip_of("to", "to, s"),
    ]
    x = alt.X("t:Q", scale=alt.Scale(domain=domain, nice=False), title="seconds since the start")
    paint = block_color(data.num_blocks, legend=True)
    place: dict[str, Any] = {"x": x, "x2": alt.X2("to:Q"), "y": y, "y2": alt.Y2("y1:Q")}
    return chart_of(_overview_rows(data, lanes)).mark_rect().encode(**place, color=paint, tooltip=tips)


def _detail(data: RunData, lanes: Sequence[int], kept: Window, y: alt.Y, scale: alt.Scale) -> list[alt.Chart]:
    """Draw every block execution in a part of the run, with the block's number if there is room."""
    runs = chart_of(_span_rows(data, lanes, kept))
    wide = "scale('detail_x', datum.to) - scale('detail_x', datum.t)"
    tips = [
        alt.Tooltip("block:O"),
        alt.Tooltip("request:N"),
        tooltip_of("took", "took, ms"),
        tooltip_of("t", "from, s"),
    ]
    numbers = runs.mark_text(fontSize=10.5, fontWeight=600, clip=True).transform_calculate(
        middle="(datum.t + datum.to) / 2", height="(datum.y0 + datum.y1) / 2"
    )
    return [
        runs.mark_rect(stroke=color("bg"), clip=True).encode(
            x=alt.X("t:Q", scale=scale, title="seconds since the start"),
            x2=alt.X2("to:Q"),
            y=y,
            y2=alt.Y2("y1:Q"),
            color=block_color(data.num_blocks),
            strokeWidth=alt.StrokeWidthValue(0, condition={"test": f"{wide} > 4", "value": 0.8}),
            tooltip=tips,
        ),
        numbers.encode(
            x=alt.X("middle:Q", scale=scale),
            y=alt.Y("height:Q"),
            text=alt.Text("block:O"),
            color=block_ink(data.num_blocks),
            opacity=opacity_if(f"{wide} > 13 && datum.y1 - datum.y0 > 0.3"),
        ),
    ]


def served_window(data: RunData) -> Window:
    """Return the part of a run that the detail of :func:`served` contains."""
    return pick_window(data, MOST_SPANS)


_GAP = 0.2
"""Fraction of a lane's height that remains empty below it."""


def away_layer(away: list[Row], **encoding: Any) -> list[alt.Chart]:
    """Return a layer that shades the times of lost peers, or no layer: without data, its scales have no extent."""
    tips = [alt.Tooltip("peer:N", title="lost"), tooltip_of("t", "from, s"), tooltip_of("to", "to, s")]
    return [chart_of(away).mark_rect(color=color("shade"), clip=True).encode(tooltip=tips, **encoding)] if away else []


def _lanes_ground(grounds: list[Row], away: list[Row], y: alt.Y, domain: Any) -> list[alt.Chart]:
    lanes: dict[str, Any] = {"y": y, "y2": alt.Y2("y1:Q")}
    x = alt.X("t:Q", scale=alt.Scale(domain=domain, nice=False))
    return [
        chart_of(grounds).mark_rect(color=color("panel")).encode(x=at("x", 0), x2=at("x2", "width"), **lanes),
        *away_layer(away, x=x, x2=alt.X2("to:Q"), **lanes),
    ]


def _lane_axis(names: Sequence[str], below: Sequence[str]) -> alt.Y:
    """Return an axis of lanes, with a line of text below each name."""
    both = [[name, under] for name, under in zip(names, below, strict=True)]
    look = {"labelLineHeight": 14, "labelBaseline": "bottom", "labelOffset": 3}
    axis = lanes_axis(both, (1 - _GAP) / 2, 92, 128, **look)
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
                    row_of(
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
                row_of(
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
