"""Chart of a grid of simulated fleets."""

from __future__ import annotations

import altair as alt

from ls_edge.core.text import counted, show_nines, show_nines_range
from ls_edge.evaluation.simulation_summary import Cell, SweepDocument
from ls_edge.report.charts.specification import category_color, chart_of, row_of, wide_legend
from ls_edge.report.theme import Chart

_LEAST = 1e-6
"""Smallest share on the axis, which has no zero."""


def missed_by_value(document: SweepDocument) -> Chart | None:
    """Draw the share of requests without a whole answer, with its 95 % interval, by the values of the first option.

    A line for each combination of the others; None without cells.
    """
    if not document.cells:
        return None
    first = next(iter(document.sweep))
    names = list(dict.fromkeys(_name(cell, first) for cell in document.cells))
    rows = []
    for cell in document.cells:
        whole = cell.summary.whole_share
        low, high = (max(_LEAST, 1 - share) for share in (whole.high, whole.low))
        missed = 1 - whole.share if whole.share < 1 else None  # an interval without a point, where all were whole
        text = f"{show_nines(whole.share)}, {show_nines_range(whole.low, whole.high)}"
        rows.append(
            row_of(
                digits=9, x=cell.values[first], what=_name(cell, first), missed=missed, low=low, high=high, text=text,
                seen=counted(whole.outages, "outage"),
            )
        )  # fmt: skip
    scale = alt.Scale(type="log", clamp=True)
    x = alt.X("x:N", sort=document.sweep[first], title=first, axis=alt.Axis(labelAngle=0))
    tips = [alt.Tooltip("what:N"), alt.Tooltip("x:N", title=first), alt.Tooltip("text:N"), alt.Tooltip("seen:N")]
    legend = wide_legend() if len(names) > 1 else None
    base = chart_of(rows).encode(x=x, color=category_color("what:N", names, legend=legend), tooltip=tips)
    y = alt.Y("missed:Q", scale=scale, title="without a whole answer", axis=alt.Axis(format=".4~%"))
    band = base.mark_area(opacity=0.2).encode(y=alt.Y("low:Q", scale=scale, title=None), y2=alt.Y2("high:Q"))
    # A single value has no area.
    bars = base.mark_rule(opacity=0.5).encode(y=alt.Y("low:Q", scale=scale, title=None), y2=alt.Y2("high:Q"))
    line = base.mark_line(point=True).encode(y=y)
    described = "; ".join(f"{row['what']}, {first} {row['x']}: {row['text']}" for row in rows)
    return alt.layer(band, bars, line).properties(width="container", height=300, description=f"{described}.")


def _name(cell: Cell, first: str) -> str:
    return ", ".join(f"{key}={value}" for key, value in cell.values.items() if key != first) or "all"
