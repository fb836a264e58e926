"""Chart of the time of answers, hops and visits by stage."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt

from ls_edge.report.charts.specification import (
    Chart,
    Row,
    category_color,
    chart_of,
    expression,
    lookup_expression,
    row_of,
    wide_legend,
)
from ls_edge.report.formatting import counted, shorten, show_ms, show_percent
from ls_edge.report.statistics import RunData, StageMeans
from ls_edge.report.theme import STAGES, color


def stage_breakdown(data: RunData) -> Chart | None:
    """Draw stacked bars of mean milliseconds by stage, of a request, of each hop and of each holder."""
    groups = data.stage_means
    if not groups:
        return None
    labels, heads, bars, totals = _rows(groups)
    y = alt.Y(
        "row:O",
        title=None,
        scale=alt.Scale(domain=list(range(len(labels))), paddingInner=0.32),
        axis=alt.Axis(
            labelExpr=lookup_expression(labels, "datum.value"),
            labelFontWeight=expression(f"{lookup_expression(heads, 'datum.value')} ? 600 : 400"),
            labelColor=expression(f"{lookup_expression(heads, 'datum.value')} ? '{color('ink')}' : '{color('soft')}'"),
            labelLimit=expression("narrow ? 125 : 180"),
        ),
    )
    longest = max(row["end"] for row in totals) or 1.0
    x = alt.X(
        "start:Q", title="ms", scale=alt.Scale(domain=[0, longest], nice=False, rangeMax=expression("width - 62"))
    )
    paint = category_color("stage:N", list(STAGES), legend=wide_legend())
    drawn = (
        chart_of(bars)
        .mark_bar(stroke=color("bg"), strokeWidth=0.7)
        .encode(
            x=x,
            x2=alt.X2("end:Q"),
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
        chart_of(totals)
        .mark_text(align="left", dx=7, color=color("ink"))
        .encode(x=alt.X("end:Q"), y=y, text=alt.Text("text:N"))
    )
    parts = ", ".join(f"{name} {show_ms(ms)}" for name, ms in groups[0][3].items() if ms)
    return alt.layer(drawn, text).properties(
        width="container", height=27 * len(labels), description=f"Mean of an answered request: {parts}."
    )


def _rows(groups: Sequence[StageMeans]) -> tuple[list[str], list[bool], list[Row], list[Row]]:
    """Return the labels of all lines, whether they are headings, and the bars with their totals."""
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
            ms = means.get(stage, 0.0)
            if ms > 0:
                bars.append(
                    row_of(
                        row=place,
                        start=start,
                        end=start + ms,
                        stage=stage,
                        mean=show_ms(ms),
                        share=show_percent(ms / whole),
                        of=f"{shorten(name, 60)}, {counted(count, 'time')}",
                    )
                )
                start += ms
        totals.append(row_of(row=place, end=start, text=show_ms(start)))
    return labels, heads, bars, totals
