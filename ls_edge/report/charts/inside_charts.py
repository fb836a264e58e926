"""Charts of the kinds of analysis that read weights, attention or gradients of a run."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

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
    Row,
    category_color,
    chart_of,
    row_of,
    tooltip_of,
    wide_legend,
)
from ls_edge.report.theme import color

_HEIGHT = 220
_MOST_COMPONENTS = 28


def positions_chart(found: PositionEmbeddings) -> list[Chart]:
    """Draw the mean cosine of position embeddings by distance."""
    rows = [row_of(x=round(apart), what="cosine", value=cosine) for apart, cosine in found.by_distance]
    return [_lines(rows, ["cosine"], "distance in patches", "mean cosine")]


def filters_chart(found: PatchFilters) -> list[Chart]:
    """Draw the share of the variance of the first components."""
    shares = enumerate(found.explained[:_MOST_COMPONENTS], 1)
    rows = [row_of(x=number, what="variance", value=share) for number, share in shares]
    return [_lines(rows, ["variance"], "component", "share of the variance")]


def layer_scale_chart(found: LayerScale) -> list[Chart]:
    """Draw the magnitude of LayerScale by layer."""
    rows = [
        row_of(digits=9, x=layer, what=name, value=value)
        for name, values in found.branches.items()
        for layer, value in zip(found.layers, values, strict=True)
    ]
    return [_lines(rows, list(found.branches), "layer", "mean magnitude", found.layers)]


def mixing_chart(found: TokenMixing) -> list[Chart]:
    """Draw the spread of the mixing weights by block."""
    rows = [row_of(x=block, what="weights", value=value) for block, value in enumerate(found.spread)]
    rows += [row_of(x=block, what="equal weights", value=found.uniform) for block in range(len(found.spread))]
    return [_lines(rows, ["weights", "equal weights"], "block", "distance from the center, patches")]


def inversion_chart(found: Inversion) -> list[Chart]:
    """Draw the distances of noise, of the inversion and of a shifted image, by block."""
    names = ["noise at the start", "image with slight noise", "reached"]
    values = zip(names, (found.noise, found.shifted, found.reached), strict=True)
    rows = [
        row_of(digits=9, x=block, what=name, value=max(value, 1e-9))
        for name, each in values
        for block, value in zip(found.blocks, each, strict=True)
    ]
    return [_lines(rows, names, "block", "distance", scale=alt.Scale(type="log"))]


def parts_chart(found: Parts) -> list[Chart]:
    """Draw the accuracy without each part of each block, and in trained order."""
    names = [part.name for part in found.parts]
    blocks = [str(block) for block in range(len(found.parts[0].blocks))]
    rows = [
        row_of(x=where, what=part.name, value=score.top1)
        for part in found.parts
        for where, score in zip((*blocks, "all"), (*part.blocks, part.everywhere), strict=True)
    ]
    base = _lines(rows, names, "block without the part", "accuracy", [*blocks, "all"], format=".0%", joined=False)
    rule = chart_of([row_of(value=found.trained.top1)]).mark_rule(color=color("ink"), strokeDash=[4, 3])
    drawn = alt.layer(rule.encode(y="value:Q", tooltip=[tooltip_of("value", "accuracy with all parts")]), base)
    return [drawn.properties(width="container", height=_HEIGHT, description=base.description)]


def attention_chart(found: AttentionStatistics) -> Chart:
    """Draw the mean attention distance of each head, by block."""
    rows = [
        row_of(block=block, head=head, distance=distance, entropy=found.entropy[block][head])
        for block, heads in enumerate(found.distance)
        for head, distance in enumerate(heads)
    ]
    described = "; ".join(f"block {row['block']} head {row['head']}: {row['distance']:.2f}" for row in rows)
    return (
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
        .properties(width="container", height=_HEIGHT, description=f"{described}.")
    )


def _lines(
    rows: list[Row],
    names: Sequence[str],
    title: str,
    value: str,
    order: Sequence[str] | None = None,
    *,
    scale: alt.Scale | None = None,
    format: str | None = None,  # noqa: A002 - Altair's name
    joined: bool = True,
) -> Chart:
    """Draw ``value`` over ``x``, a line or a row of points for each of ``names``."""
    described = "; ".join(f"{row['what']}, {title} {row['x']}: {row['value']:.3g}" for row in rows)
    chart = chart_of(rows)
    marked = chart.mark_line(point=True) if joined else chart.mark_point(filled=True, size=70, opacity=0.8)
    axis = alt.Axis(grid=True) if format is None else alt.Axis(grid=True, format=format)
    return marked.encode(
        x=alt.X("x:O", title=title, sort=None if order is None else list(order), axis=alt.Axis(labelAngle=0)),
        y=alt.Y("value:Q", title=value, scale=scale or alt.Scale(), axis=axis),
        color=category_color("what:N", names, legend=wide_legend(4, 2) if len(names) > 1 else None),
        tooltip=[alt.Tooltip("what:N"), alt.Tooltip("x:O", title=title), tooltip_of("value", value)],
    ).properties(width="container", height=_HEIGHT, description=f"{described}.")
