"""Charts of an analysis of a trace."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from ls_edge.evaluation.analysis.trace import Answers, TraceAnalysis
from ls_edge.report.charts.specification import (
    Chart,
    Row,
    category_color,
    chart_of,
    names_axis,
    row_of,
    tooltip_of,
    wide_legend,
)
from ls_edge.report.formatting import shorten, show_percent

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
