"""Chart of a grid of simulated fleets."""

from __future__ import annotations

import math

import altair as alt

from ls_edge.core.text import counted, show_nines, show_nines_range
from ls_edge.evaluation.simulation_summary import Cell, SweepDocument
from ls_edge.report.charts.specification import category_color, chart_of, row_of, wide_legend
from ls_edge.report.theme import Chart


def missed_by_value(document: SweepDocument) -> Chart | None:
    """Draw the share of requests without a whole answer, with its 95 % interval, by the values of the first option.

    Each combination of the other options has a color. If all answers were whole, a triangle shows the end of the
    interval. Return None without cells.
    """
    if not document.cells:
        return None
    first = next(iter(document.sweep))
    names = list(dict.fromkeys(_name(cell, first) for cell in document.cells))
    wholes = [(cell, cell.summary.whole_share) for cell in document.cells]
    most = [1 - (whole.share if whole.share < 1 else whole.low) for _, whole in wholes]
    decades = math.ceil(0.5 - math.log10(min((share for share in most if share > 0), default=0.1)))
    floor = 10.0**-decades
    rows = [
        row_of(
            digits=9, x=cell.values[first], what=_name(cell, first), at=max(floor, share), known=whole.share < 1,
            low=max(floor, 1 - whole.high), high=max(floor, 1 - whole.low), seen=counted(whole.outages, "outage"),
            text=f"{show_nines(whole.share)}, {show_nines_range(whole.low, whole.high)}",
        )
        for (cell, whole), share in zip(wholes, most, strict=True)
    ]  # fmt: skip
    title = "requests without a whole answer"
    scale = alt.Scale(type="log", domain=[floor, 1])
    steps = (1, 2, 5) if decades <= 2 else (1,)
    marks = [step * 10.0**-power for power in range(decades + 1) for step in steps if step * 10.0**-power <= 1]
    axis = alt.Axis(labelExpr="format(100 * datum.value, '.6~f') + ' %'", values=marks, tickCount=len(marks))
    tips = [alt.Tooltip("what:N"), alt.Tooltip("x:N", title=first), alt.Tooltip("text:N"), alt.Tooltip("seen:N")]
    base = chart_of(rows).encode(
        x=alt.X("x:N", sort=document.sweep[first], title=first, axis=alt.Axis(labelAngle=0)),
        xOffset=alt.XOffset("what:N", sort=names),
        color=category_color("what:N", names, legend=wide_legend() if len(names) > 1 else None),
        tooltip=tips,
    )
    interval = base.transform_filter("datum.known").mark_rule(strokeWidth=2, opacity=0.6)
    points = base.mark_point(filled=True, size=60, opacity=1).encode(
        y=alt.Y("at:Q", scale=scale, title=title, axis=axis),
        shape=alt.condition("datum.known", alt.value("circle"), alt.value("triangle-down")),
    )
    described = "; ".join(f"{row['what']}, {first} {row['x']}: {row['text']}" for row in rows)
    return alt.layer(
        interval.encode(y=alt.Y("low:Q", scale=scale, title=title, axis=axis), y2=alt.Y2("high:Q")), points
    ).properties(width="container", height=300, description=f"{described}.")


def _name(cell: Cell, first: str) -> str:
    return ", ".join(f"{key}={value}" for key, value in cell.values.items() if key != first) or "all"
