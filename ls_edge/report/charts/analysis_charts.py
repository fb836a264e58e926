"""Charts of an analysis of the blocks of a model, and of a trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from ls_edge.core.text import shorten, show_percent
from ls_edge.evaluation.analysis import (
    AddedNorms,
    Agreement,
    Contribution,
    Importance,
    Map,
    Pairs,
    Probe,
    Similarity,
    SlotAccuracy,
)
from ls_edge.evaluation.analysis.trace import Answers, TraceAnalysis
from ls_edge.report.charts.specification import (
    Chart,
    Row,
    block_color,
    category_color,
    chart_of,
    names_axis,
    row_of,
    square_of,
    title_with_text,
    tooltip_of,
    wide_legend,
)
from ls_edge.report.theme import color

_HEIGHT = 240


def importance_chart(found: Importance) -> Chart | None:
    """Draw the increase of the loss without each block, and with it at the other end of its band."""
    if found.trained.loss is None:
        return None
    trained = found.trained
    rows = []
    for one in found.blocks:
        for what, score in (("left out", one.left_out), ("moved", one.moved)):
            if score is not None and score.loss is not None and trained.loss is not None:
                rows.append(
                    row_of(
                        block=one.block,
                        what=what,
                        loss=score.loss - trained.loss,
                        top1=score.top1,
                        slot="" if what == "left out" else str(one.moved_to),
                    )
                )
    if not rows:
        return None
    described = "; ".join(f"block {row['block']} {row['what']}: {row['loss']:+.3f}" for row in rows)
    return (
        chart_of(rows)
        .mark_bar()
        .encode(
            x=_blocks_axis("block:O", "block"),
            xOffset=alt.XOffset("what:N", sort=["left out", "moved"]),
            y=alt.Y("loss:Q", title="added to the loss, nats", axis=alt.Axis(grid=True)),
            color=category_color("what:N", ["left out", "moved"], legend=alt.Legend()),
            tooltip=[
                alt.Tooltip("block:O"),
                alt.Tooltip("what:N"),
                alt.Tooltip("slot:N", title="to slot"),
                tooltip_of("loss", "added to the loss"),
                tooltip_of("top1", "accuracy"),
            ],
        )
        .properties(width="container", height=_HEIGHT, description=f"{described}.")
    )


def contribution_chart(found: Contribution) -> Chart:
    """Draw the addition of each block by slot, relative to its input, in random orders."""
    blocks = [str(block) for block in range(len(found.random))]
    return square_of(found.random, blocks, ("block", "slot"), "added over input", exponent=0.5)


def similarity_chart(found: Similarity) -> Chart:
    """Draw the similarity of the tokens after each two steps in trained order."""
    steps = found.steps
    return square_of(found.cka, steps, ("after step", "after step"), "linear CKA")


def agreement_chart(found: Agreement) -> Chart:
    """Draw the agreement of random orders with the trained order, by the number of blocks left out."""
    names = ["same class", "same class in all orders", "total variation"]
    rows = []
    for one in (found.random, *found.left_out):
        for name, value in zip(names, (one.same_class, one.all_same_class, one.total_variation), strict=True):
            if value is not None:
                rows.append(row_of(left_out=one.left_out, what=name, value=value, text=show_percent(value)))
    described = "; ".join(f"{row['what']} with {row['left_out']} left out: {row['text']}" for row in rows)
    x = alt.X("left_out:O", title="blocks left out", axis=alt.Axis(labelAngle=0))
    return (
        chart_of(rows)
        .mark_line(point=True)
        .encode(
            x=x,
            y=alt.Y("value:Q", title=None, scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format=".0%", grid=True)),
            color=category_color("what:N", names, legend=wide_legend(3, 1)),
            tooltip=[alt.Tooltip("what:N"), alt.Tooltip("left_out:O", title="left out"), alt.Tooltip("text:N")],
        )
        .properties(width="container", height=_HEIGHT, description=f"{described}.")
    )


def _blocks_axis(field: str, title: str) -> alt.X:
    return alt.X(field, title=title, axis=alt.Axis(labelAngle=0))


_RIDGE = 54
_OVERLAP = 1.6
"""Height of the highest ridge over the distance between two rows."""


def slots_chart(found: SlotAccuracy) -> list[Chart]:
    """Draw the accuracy by block and slot."""
    blocks = [str(block) for block in range(len(found.accuracy))]
    table = [[None if value is None else 100 * value for value in row] for row in found.accuracy]
    return [square_of(table, blocks, ("block", "slot"), "right answers, %", digits=0)]


def norms_chart(found: AddedNorms) -> list[Chart]:
    """Draw a ridge of the norms that each block adds for each of its slots, the first block on top."""
    shares = found.shares
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
        for block, row in enumerate(found.mean)
    )
    return [
        alt.layer(
            ridges.mark_area(opacity=0.3, interpolate="monotone").encode(y2=alt.Y2("base:Q"), tooltip=tips),
            ridges.mark_line(strokeWidth=1.2, interpolate="monotone"),
        ).properties(width="container", height=_RIDGE * depth, description=f"Means by slot. {described}.")
    ]


def probe_chart(found: Probe) -> list[Chart]:
    """Draw the accuracy of the probe of each block, with and without exchanged slots, and that of a guess."""
    names = ["outputs", "slots exchanged at random"]
    rows = []
    for block, values in enumerate(zip(found.accuracy, found.shuffled, strict=True)):
        for name, value in zip(names, values, strict=True):
            if value is not None:
                rows.append(row_of(block=block, what=name, value=value, guess=found.chance[block]))
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


def umap_charts(found: Sequence[Map]) -> list[Chart]:
    """Draw each map with the color of the slots, and the one of all blocks also with that of the blocks."""
    depth = 1 + max(max(one.blocks + one.slots) for one in found)
    drawn = [_map(one, "slot", depth) for one in found]
    return drawn + [_map(one, "block", depth) for one in found if len(set(one.blocks)) > 1]


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


def pairs_charts(found: Pairs) -> list[Chart]:
    """Draw the difference that exchanging two blocks makes, and the order costs of the bundle."""
    blocks = [str(block) for block in range(len(found.difference))]
    titles = ("earlier block", "later block")
    drawn = [square_of(found.difference, blocks, titles, "difference over what both add")]
    if found.inverted is not None:
        known = [
            [None if value is None else cost for value, cost in zip(values, costs, strict=True)]
            for values, costs in zip(found.difference, found.inverted, strict=True)
        ]
        drawn.append(square_of(known, blocks, titles, "order cost, nats"))
    return drawn


_ROW = 22


def order_chart(found: TraceAnalysis) -> Chart | None:
    """Draw the accuracy of the most frequent orders, with 95 % intervals."""
    return _intervals([(shorten(one.of, 60), "answers", one) for one in found.by_order], ["answers"])


def skips_chart(found: TraceAnalysis) -> Chart | None:
    """Draw the accuracy by number of skipped blocks."""
    rows = [(f"{one.of} skipped", "answers", one) for one in found.by_skips]
    return _intervals(rows, ["answers"]) if len(rows) > 1 else None


def blocks_chart(found: TraceAnalysis) -> Chart | None:
    """Draw the accuracy of the answers without and with each block."""
    kinds = ["without the block", "with it"]
    rows = []
    for one in found.by_block:
        rows += [(f"block {one.block}", kinds[0], one.without), (f"block {one.block}", kinds[1], one.with_it)]
    return _intervals(rows, kinds)


def _intervals(given: Sequence[tuple[str, str, Answers]], kinds: Sequence[str]) -> Chart | None:
    """Draw a point and an interval for each name and kind that has labels."""
    rows: list[Row] = [
        row_of(name=name, kind=kind, top1=one.top1, low=one.interval[0], high=one.interval[1], answers=one.answers)
        for name, kind, one in given
        if one.top1 is not None and one.interval is not None
    ]
    if not rows:
        return None
    names = list(dict.fromkeys(row["name"] for row in rows))
    described = "; ".join(f"{row['name']}, {row['kind']}: {show_percent(row['top1'])}" for row in rows)
    legend = wide_legend(2, 1) if len(kinds) > 1 else None
    numbers = [tooltip_of("top1", "accuracy"), tooltip_of("answers", "answers")]
    base = chart_of(rows).encode(
        y=names_axis("name:N", names),
        yOffset=alt.YOffset("kind:N", sort=list(kinds)),
        color=category_color("kind:N", list(kinds), legend=legend),
        tooltip=[alt.Tooltip("name:N"), alt.Tooltip("kind:N"), *numbers],
    )
    axis = alt.Axis(format=".0%", grid=True)
    x = alt.X("low:Q", title="right answers", scale=alt.Scale(domain=[0, 1]), axis=axis)
    return alt.layer(
        base.mark_rule(strokeWidth=2, opacity=0.6).encode(x=x, x2=alt.X2("high:Q")),
        base.mark_circle(size=46, opacity=1).encode(x=alt.X("top1:Q")),
    ).properties(width="container", height=_ROW * len(names) * len(kinds), description=f"{described}.")
