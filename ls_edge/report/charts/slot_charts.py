"""Charts of the outputs of blocks by slot, and of pairs of blocks."""

from __future__ import annotations

from typing import Any

import altair as alt

from ls_edge.evaluation.analysis import Analysis
from ls_edge.evaluation.analysis.slots import Map
from ls_edge.report.charts.specification import (
    Chart,
    block_color,
    category_color,
    chart_of,
    row_of,
    square_of,
    title_with_text,
    tooltip_of,
    wide_legend,
)
from ls_edge.report.formatting import show_percent
from ls_edge.report.theme import color

_RIDGE = 54
_OVERLAP = 1.6
"""Height of the highest ridge over the distance between two rows."""


def slots_chart(found: Analysis) -> list[Chart]:
    """Draw the accuracy by block and slot."""
    if found.slots is None:
        return []
    blocks = [str(block) for block in range(len(found.slots.accuracy))]
    table = [[None if value is None else 100 * value for value in row] for row in found.slots.accuracy]
    return [square_of(table, blocks, ("block", "slot"), "right answers, %", digits=0)]


def norms_chart(found: Analysis) -> list[Chart]:
    """Draw a ridge of the norms that each block adds for each of its slots, the first block on top."""
    if found.norms is None:
        return []
    shares = found.norms.shares
    depth = len(shares)
    peak = max((max(bins) for row in shares for bins in row if bins), default=1.0)
    rows = []
    for block, row in enumerate(shares):
        for slot, bins in enumerate(row):
            for place, share in enumerate(bins):
                base = depth - 1 - block
                top = base + _OVERLAP * share / peak
                rows.append(row_of(block=block, slot=slot, x=(place + 0.5) / len(bins), base=base, top=top))
    x = alt.X("x:Q", title="norm of what the block adds, over its largest", scale=alt.Scale(domain=[0, 1]))
    scale = alt.Scale(domain=[0, depth - 1 + _OVERLAP], nice=False)
    axis = alt.Axis(values=list(range(depth)), labelExpr=f"{depth - 1} - datum.value", grid=True, labelOverlap=False)
    y = alt.Y("top:Q", title="block", scale=scale, axis=axis)
    paint = block_color(depth, legend=True, field="slot")
    ridges = chart_of(rows).encode(x=x, y=y, color=paint, detail=alt.Detail("block:O"))
    tips = [alt.Tooltip("block:O"), alt.Tooltip("slot:O")]
    described = "; ".join(
        f"block {block}: " + ", ".join("-" if value is None else f"{value:.2f}" for value in row)
        for block, row in enumerate(found.norms.mean)
    )
    return [
        alt.layer(
            ridges.mark_area(opacity=0.3, interpolate="monotone").encode(y2=alt.Y2("base:Q"), tooltip=tips),
            ridges.mark_line(strokeWidth=1.2, interpolate="monotone"),
        ).properties(width="container", height=_RIDGE * depth, description=f"Means by slot. {described}.")
    ]


def probe_chart(found: Analysis) -> list[Chart]:
    """Draw the accuracy of the probe of each block, with and without exchanged slots, and that of a guess."""
    if found.probe is None:
        return []
    names = ["outputs", "slots exchanged at random"]
    rows = []
    for block, values in enumerate(zip(found.probe.accuracy, found.probe.shuffled, strict=True)):
        for name, value in zip(names, values, strict=True):
            if value is not None:
                rows.append(row_of(block=block, what=name, value=value, guess=found.probe.chance[block]))
    described = "; ".join(f"block {row['block']}, {row['what']}: {show_percent(row['value'])}" for row in rows)
    base = chart_of(rows).encode(x=alt.X("block:O", title="block", axis=alt.Axis(labelAngle=0)))
    y = alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", grid=True))
    tips = [tooltip_of("value", "accuracy"), tooltip_of("guess", "guess")]
    return [
        alt.layer(
            base.mark_bar().encode(
                y=y,
                xOffset=alt.XOffset("what:N", sort=names),
                color=category_color("what:N", names, legend=wide_legend(2, 1)),
                tooltip=[alt.Tooltip("block:O"), alt.Tooltip("what:N"), *tips],
            ),
            base.mark_tick(color=color("ink"), thickness=1.5).encode(y=alt.Y("guess:Q")),
        ).properties(width="container", height=220, description=f"{described}.")
    ]


def umap_charts(found: Analysis) -> list[Chart]:
    """Draw each map with the color of the slots, and the one of all blocks also with that of the blocks."""
    depth = int(found.settings["blocks"])
    drawn = [_map(one, "slot", depth) for one in found.umap or ()]
    return drawn + [_map(one, "block", depth) for one in found.umap or () if len(set(one.blocks)) > 1]


def _map(found: Map, by: str, depth: int) -> Chart:
    rows = [
        row_of(x=x, y=y, block=block, slot=slot)
        for (x, y), block, slot in zip(found.points, found.blocks, found.slots, strict=True)
    ]
    plain: dict[str, Any] = {"title": None, "axis": None, "scale": alt.Scale(zero=False, nice=True)}
    return (
        chart_of(rows)
        .mark_circle(size=18, opacity=0.75)
        .encode(
            x=alt.X("x:Q", **plain),
            y=alt.Y("y:Q", **plain),
            color=block_color(depth, legend=True, field=by),
            tooltip=[alt.Tooltip("block:O"), alt.Tooltip("slot:O")],
        )
        .properties(
            width="container",
            height=300,
            title=title_with_text(f"{found.of[:1].upper()}{found.of[1:]}", f"colored by {by}"),
            description=f"UMAP of {found.of}: {len(rows)} points.",
        )
    )


def pairs_charts(found: Analysis) -> list[Chart]:
    """Draw the difference that exchanging two blocks makes, and the order costs of the bundle."""
    if found.pairs is None:
        return []
    blocks = [str(block) for block in range(len(found.pairs.difference))]
    titles = ("earlier block", "later block")
    drawn = [square_of(found.pairs.difference, blocks, titles, "difference over what both add")]
    if found.pairs.inverted is not None:
        known = [
            [None if value is None else cost for value, cost in zip(values, costs, strict=True)]
            for values, costs in zip(found.pairs.difference, found.pairs.inverted, strict=True)
        ]
        drawn.append(square_of(known, blocks, titles, "order cost, nats"))
    return drawn
