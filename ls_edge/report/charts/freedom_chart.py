"""The chart of accuracy against freedom: by how many orders of the blocks are allowed."""

from __future__ import annotations

import json
from collections.abc import Sequence

import altair as alt

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.report.charts.accuracy_charts import COLOURS, check_figure, labels_apart
from ls_edge.report.charts.specification import Chart, Row, chart_of, row_of, title_with_text
from ls_edge.report.formatting import distinct_names, shorten, show_percent
from ls_edge.report.theme import colour

_HEIGHT = 320
_LABEL_LENGTH = 24


def freedom_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Mean accuracy in random order, by how many orders are allowed, with one standard deviation; a curve a model.

    A filled point is within the model's own bands, a hollow one beyond them. Raises :class:`UsageError` for more than
    there are colours, and for evaluations without ``freedom``.
    """
    check_figure(len(evaluations))
    for item in evaluations:
        if not item.freedom:
            raise UsageError(
                f"{item.name or 'an evaluation'} has no accuracy within bands; make it with eval --freedom"
            )
    names = [shorten(name, _LABEL_LENGTH) for name in distinct_names([item.name for item in evaluations])]
    rows: list[Row] = []
    places: dict[float, str] = {}
    for name, item in zip(names, evaluations, strict=True):
        own = next((Bands.from_json(step.bands) for step in item.freedom or () if step.own), None)
        for step in item.freedom or ():
            bands = Bands.from_json(step.bands)
            places.setdefault(step.allowed, "full" if bands.is_one else "fixed" if step.allowed == 1 else str(bands))
            rows.append(
                row_of(
                    name=name, allowed=step.allowed, top1=step.top1_mean, low=step.top1_mean - step.top1_std,
                    high=min(1.0, step.top1_mean + step.top1_std), bands=str(bands),
                    within="own" if own is None or own.contains(bands) else "beyond",
                )
            )  # fmt: skip
    ticks = sorted(places)
    labels = {f"{tick:g}": [_count(tick), places[tick]] for tick in ticks}
    scale = alt.Scale(type="log", domain=[ticks[0] / 1.4, ticks[-1] * 1.4], nice=False)
    axis = alt.Axis(
        values=ticks, labelExpr=f"{json.dumps(labels)}[format(datum.value, '.6~g')]", grid=True, labelOverlap=True
    )
    x = alt.X("allowed:Q", title="orders allowed", scale=scale, axis=axis)
    y = alt.Y(
        "top1:Q", title=None, scale=alt.Scale(domain=[0, 1], nice=False),
        axis=alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=True),
    )  # fmt: skip
    paint = alt.Color(
        "name:N", legend=None, scale=alt.Scale(domain=names, range=[colour(c) for c in COLOURS[: len(names)]])
    )
    base = chart_of(rows)
    ends = [max((row for row in rows if row["name"] == name), key=lambda row: row["allowed"]) for name in names]
    moves = labels_apart([row["top1"] for row in ends], _HEIGHT)
    described = "; ".join(
        f"{row['name']}: {show_percent(row['top1'])} in {_count(row['allowed'])} orders" for row in ends
    )
    return alt.layer(
        base.mark_rule(strokeWidth=1.2, opacity=0.45).encode(
            x=x, y=alt.Y("low:Q", title=None), y2="high:Q", color=paint
        ),
        base.mark_line(strokeWidth=1.8).encode(x=x, y=y, color=paint),
        base.mark_point(size=46, fill=colour("bg"), opacity=1, strokeWidth=1.6).encode(x=x, y=y, color=paint),
        base.mark_point(size=46, filled=True, opacity=1)
        .encode(x=x, y=y, color=paint)
        .transform_filter("datum.within == 'own'"),
        *(
            chart_of([row]).mark_text(align="left", dx=12, dy=dy, color=colour("ink")).encode(x=x, y=y, text="name:N")
            for row, dy in zip(ends, moves, strict=True)
        ),
    ).properties(
        width=620,
        height=_HEIGHT,
        title=title_with_text(
            "Accuracy in random order, by how many orders are allowed",
            "line: one standard deviation over orders; filled: within the model's own bands; hollow: beyond them",
        ),
        description=f"{described}.",
    )


def _count(allowed: float) -> str:
    return f"{allowed:,.0f}" if allowed < 1e7 else f"{allowed:.0e}"
