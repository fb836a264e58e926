"""Charts of an analysis of the blocks of a model: lists, empty if there is nothing to draw."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import altair as alt

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
from ls_edge.evaluation.analysis.inside import (
    AttentionStatistics,
    Inversion,
    LayerScale,
    Parts,
    PatchFilters,
    PositionEmbeddings,
    TokenMixing,
)
from ls_edge.report.charts.specification import (
    Chart,
    bars_chart,
    block_color,
    chart_of,
    lines_chart,
    row_of,
    square_of,
    title_with_text,
    tooltip_of,
)
from ls_edge.report.theme import color

_RIDGE = 54
_OVERLAP = 1.6
"""Height of the highest ridge over the distance between two rows."""
_MOST_COMPONENTS = 28


@functools.singledispatch
def charts_of(measured: object) -> list[Chart]:  # noqa: ARG001
    """Return the charts of a result of an analysis: a function for the type of each; none for pictures."""
    return []


@charts_of.register
def _importance(found: Importance) -> list[Chart]:
    """Draw the increase of the loss without each block, and with it at the other end of its band."""
    trained = found.trained.loss
    rows = [
        row_of(
            block=one.block,
            what=what,
            value=score.loss - trained,
            top1=score.top1,
            slot="" if what == "left out" else str(one.moved_to),
        )
        for one in found.blocks
        for what, score in (("left out", one.left_out), ("moved", one.moved))
        if score is not None and score.loss is not None and trained is not None
    ]
    tips = [alt.Tooltip("slot:N", title="to slot"), tooltip_of("value", "added to the loss")]
    tips.append(tooltip_of("top1", "accuracy"))
    return [bars_chart(rows, ["left out", "moved"], "added to the loss, nats", tips)] if rows else []


@charts_of.register
def _contribution(found: Contribution) -> list[Chart]:
    """Draw the addition of each block by slot, relative to its input, in random orders."""
    return [square_of(found.random, _blocks(found.random), ("block", "slot"), "added over input", exponent=0.5)]


@charts_of.register
def _similarity(found: Similarity) -> list[Chart]:
    """Draw the similarity of the tokens after each two steps in trained order."""
    return [square_of(found.cka, found.steps, ("after step", "after step"), "linear CKA")]


@charts_of.register
def _agreement(found: Agreement) -> list[Chart]:
    """Draw the agreement of random orders with the trained order, by the number of blocks left out."""
    compared = (found.random, *found.left_out)
    series: dict[str, dict[int, float | None]] = {
        "same class": {one.left_out: one.same_class for one in compared},
        "same class in all orders": {one.left_out: one.all_same_class for one in compared},
        "total variation": {one.left_out: one.total_variation for one in compared},
    }
    return [lines_chart(series, "blocks left out", None, scale=alt.Scale(domain=[0, 1]), format=".0%")]


@charts_of.register
def _slots(found: SlotAccuracy) -> list[Chart]:
    """Draw the accuracy by block and slot."""
    table = [[None if value is None else 100 * value for value in row] for row in found.accuracy]
    return [square_of(table, _blocks(table), ("block", "slot"), "right answers, %", text_of="{:.0f}".format)]


@charts_of.register
def _norms(found: AddedNorms) -> list[Chart]:
    """Draw a ridge of the norms that each block adds for each of its slots, the first block on top."""
    depth = len(found.shares)
    peak = max((max(bins) for row in found.shares for bins in row if bins), default=1.0)
    rows = []
    for block, row in enumerate(found.shares):
        base = depth - 1 - block
        for slot, bins in enumerate(row):
            for place, share in enumerate(bins):
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


@charts_of.register
def _probe(found: Probe) -> list[Chart]:
    """Draw the accuracy of the probe of each block, with and without exchanged slots, and that of a guess."""
    names = ["outputs", "slots exchanged at random"]
    rows = [
        row_of(block=block, what=name, value=value, guess=found.chance[block])
        for block, values in enumerate(zip(found.accuracy, found.shuffled, strict=True))
        for name, value in zip(names, values, strict=True)
        if value is not None
    ]
    tips = [tooltip_of("value", "accuracy"), tooltip_of("guess", "guess")]
    share = {"scale": alt.Scale(domain=[0, 1]), "axis": alt.Axis(format=".0%", grid=True)}
    bars = bars_chart(rows, names, None, tips, **share)
    guess = chart_of(rows).mark_tick(color=color("ink"), thickness=1.5).encode(x="block:O", y="guess:Q")
    return [alt.layer(bars, guess).properties(width="container", height=220, description=bars.description)]


@charts_of.register(list)
def _umap(found: list[Map]) -> list[Chart]:
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


@charts_of.register
def _pairs(found: Pairs) -> list[Chart]:
    """Draw the difference that exchanging two blocks makes, and the order costs of the bundle."""
    blocks, titles = _blocks(found.difference), ("earlier block", "later block")
    drawn = [square_of(found.difference, blocks, titles, "difference over what both add")]
    if found.inverted is not None:
        known = [
            [None if value is None else cost for value, cost in zip(values, costs, strict=True)]
            for values, costs in zip(found.difference, found.inverted, strict=True)
        ]
        drawn.append(square_of(known, blocks, titles, "order cost, nats"))
    return drawn


def _blocks(rows: Sequence[Any]) -> list[str]:
    return [str(block) for block in range(len(rows))]


@charts_of.register
def _parts(found: Parts) -> list[Chart]:
    """Draw the accuracy without each part of each block, and in trained order."""
    where = [*_blocks(found.parts[0].blocks), "all"]
    series = {
        part.name: dict(zip(where, [one.top1 for one in (*part.blocks, part.everywhere)], strict=True))
        for part in found.parts
    }
    points = lines_chart(series, "block without the part", "accuracy", order=where, format=".0%", joined=False)
    rule = chart_of([row_of(value=found.trained.top1)]).mark_rule(color=color("ink"), strokeDash=[4, 3])
    layers = alt.layer(rule.encode(y="value:Q", tooltip=[tooltip_of("value", "accuracy with all parts")]), points)
    return [layers.properties(width="container", height=220, description=points.description)]


@charts_of.register
def _attention(found: AttentionStatistics) -> list[Chart]:
    """Draw the mean attention distance of each head, by block."""
    rows = [
        row_of(block=block, head=head, distance=distance, entropy=found.entropy[block][head])
        for block, heads in enumerate(found.distance)
        for head, distance in enumerate(heads)
    ]
    described = "; ".join(f"block {row['block']} head {row['head']}: {row['distance']:.2f}" for row in rows)
    return [
        chart_of(rows)
        .mark_circle(size=60, opacity=0.8, color=color("accent"))
        .encode(
            x=alt.X("block:O", title="block", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("distance:Q", title="patches", axis=alt.Axis(grid=True)),
            tooltip=[
                alt.Tooltip("block:O"),
                alt.Tooltip("head:O"),
                tooltip_of("distance", "distance in patches"),
                tooltip_of("entropy", "entropy, nats"),
            ],
        )
        .properties(width="container", height=220, description=f"{described}.")
    ]


@charts_of.register
def _positions(found: PositionEmbeddings) -> list[Chart]:
    """Draw the mean cosine of position embeddings by distance."""
    cosines = {round(apart): cosine for apart, cosine in found.by_distance}
    return [lines_chart({"cosine": cosines}, "distance in patches", "mean cosine")]


@charts_of.register
def _filters(found: PatchFilters) -> list[Chart]:
    """Draw the share of the variance of the first components."""
    shares = dict(enumerate(found.explained[:_MOST_COMPONENTS], 1))
    return [lines_chart({"variance": shares}, "component", "share of the variance")]


@charts_of.register
def _layer_scale(found: LayerScale) -> list[Chart]:
    """Draw the magnitude of LayerScale by layer."""
    series = {name: dict(zip(found.layers, values, strict=True)) for name, values in found.branches.items()}
    return [lines_chart(series, "layer", "mean magnitude", order=found.layers)]


@charts_of.register
def _mixing(found: TokenMixing) -> list[Chart]:
    """Draw the spread of the mixing weights by block."""
    spread = dict(enumerate(found.spread))
    series = {"weights": spread, "equal weights": dict.fromkeys(spread, found.uniform)}
    return [lines_chart(series, "block", "distance from the center, patches")]


@charts_of.register
def _inversion(found: Inversion) -> list[Chart]:
    """Draw the distances of noise, of the inversion and of a shifted image, by block."""
    distances = {"noise at the start": found.noise, "image with slight noise": found.shifted, "reached": found.reached}
    series = {
        name: {block: max(value, 1e-9) for block, value in zip(found.blocks, values, strict=True)}
        for name, values in distances.items()
    }
    return [lines_chart(series, "block", "distance", scale=alt.Scale(type="log"))]
