"""Charts of an analysis of the blocks of a model."""

from __future__ import annotations

import altair as alt

from ls_edge.evaluation.analysis import Analysis
from ls_edge.report.charts.specification import (
    Chart,
    category_color,
    chart_of,
    row_of,
    square_of,
    tooltip_of,
    wide_legend,
)
from ls_edge.report.formatting import show_percent
from ls_edge.report.theme import color

_HEIGHT = 240


def importance_chart(found: Analysis) -> Chart | None:
    """Draw the increase of the loss without each block, and with it at the other end of its band."""
    if found.importance is None or found.importance.trained.loss is None:
        return None
    trained = found.importance.trained
    rows = []
    for one in found.importance.blocks:
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


def contribution_chart(found: Analysis) -> Chart | None:
    """Draw the addition of each block by slot, relative to its input, in random orders."""
    if found.contribution is None:
        return None
    blocks = [str(block) for block in range(len(found.contribution.random))]
    return square_of(found.contribution.random, blocks, ("block", "slot"), "added over input", exponent=0.5)


def similarity_chart(found: Analysis) -> Chart | None:
    """Draw the similarity of the tokens after each two steps in trained order."""
    if found.similarity is None:
        return None
    steps = found.similarity.steps
    return square_of(found.similarity.cka, steps, ("after step", "after step"), "linear CKA")


def agreement_chart(found: Analysis) -> Chart | None:
    """Draw the agreement of random orders with the trained order, by the number of blocks left out."""
    if found.agreement is None:
        return None
    names = ["same class", "same class in all orders", "total variation"]
    rows = []
    for one in (found.agreement.random, *found.agreement.left_out):
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


def attention_chart(found: Analysis) -> Chart | None:
    """Draw the mean attention distance of each head, by block."""
    if found.attention is None:
        return None
    rows = [
        row_of(block=block, head=head, distance=distance, entropy=found.attention.entropy[block][head])
        for block, heads in enumerate(found.attention.distance)
        for head, distance in enumerate(heads)
    ]
    described = "; ".join(f"block {row['block']} head {row['head']}: {row['distance']:.2f}" for row in rows)
    return (
        chart_of(rows)
        .mark_circle(size=60, opacity=0.8, color=color("accent"))
        .encode(
            x=_blocks_axis("block:O", "block"),
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


def _blocks_axis(field: str, title: str) -> alt.X:
    return alt.X(field, title=title, axis=alt.Axis(labelAngle=0))
