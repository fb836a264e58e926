"""Accuracy charts of runs with 95 % intervals, of blocks by slot, and of evaluations by order."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import altair as alt

from ls_edge.core.bands import Bands, windows
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import counted, shorten, show_percent
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.orders import DRAWS
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.charts.specification import (
    PERCENT,
    Row,
    accuracy_chart,
    category_color,
    chart_of,
    distinct_labels,
    row_of,
    title_with_text,
    wide_legend,
)
from ls_edge.report.runs.mistakes import by_class
from ls_edge.report.runs.statistics import RunData
from ls_edge.report.theme import Chart, color

MOST_CLASSES = 24


def accuracy_row(
    name: str,
    top1: float | None,
    interval: tuple[float | None, float | None] | None,
    answers: int,
    *,
    labeled: int | None = None,
    kind: str = "",
    paint: str = "accent",
) -> Row:
    """Return a row of :func:`accuracy_chart`; its text includes the number of ``labeled`` answers, if given."""
    low, high = interval or (None, None)
    text = "no labels" if top1 is None else show_percent(top1) + ("" if labeled is None else f" of {labeled:,}")
    count = f"{answers:,}"
    return row_of(name=name, kind=kind, top1=top1, low=low, high=high, text=text, answers=count, paint=color(paint))


def accuracy_by_skips(data: RunData) -> Chart | None:
    """Draw the accuracy of answers by number of skipped blocks."""
    rows = []
    for one in data.summary.accuracy_by_skips:
        name, paint = ("none", "accent") if one.skipped == 0 else (counted(one.skipped, "block"), "warn")
        rows.append(accuracy_row(name, one.top1, (one.low, one.high), one.answers, labeled=one.labeled, paint=paint))
    return accuracy_chart(rows, 34, chance=data.summary.chance)


def accuracy_by_class(data: RunData) -> Chart | None:
    """Draw the accuracy of each class, worst first; return None for fewer than two classes with labels."""
    found = by_class(data.records)
    names = distinct_labels([data.class_name(label) for label, _ in found], 42)[:MOST_CLASSES]
    rows = [
        accuracy_row(name, tally.top1, tally.interval, tally.answers, labeled=tally.labeled)
        for name, (_, tally) in zip(names, found, strict=False)
    ]
    return accuracy_chart(rows, 24, chance=data.summary.chance) if len(rows) > 1 else None


def accuracy_comparison(runs: Sequence[tuple[str, RunSummary]]) -> Chart | None:
    """Draw the accuracy of several runs with labels, colored by training method."""
    found = [(name, run) for name, run in runs if run.top1 is not None]
    names = distinct_labels([name for name, _ in found], 42)
    rows = [
        accuracy_row(name, run.top1, run.top1_interval, run.answered, kind=shorten(run.method or "unknown", 28))
        for name, (_, run) in zip(names, found, strict=True)
    ]
    methods = list(dict.fromkeys(row["kind"] for row in rows))
    chance = next((run.chance for _, run in found if run.chance is not None), None)
    return accuracy_chart(rows, 36, kinds=methods, chance=chance, bars=True)


_TALL = 320
_SHARES = alt.Scale(domain=[0, 1], nice=False)


def accuracy_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Draw the accuracy of training methods by order of the blocks, and by the number of kept blocks.

    The charts correspond to Figure 1 (b) and (c) of arXiv 2407.04513. On the left: the accuracy of each method in
    trained order and its mean in random order, with a line of one sample deviation to each side. On the right: the
    accuracy with fewer blocks, solid in random order and dashed in trained order.
    """
    methods = [str(item.settings.get("method", "")) for item in evaluations]
    if len(set(methods)) < len(methods):
        methods = [item.name or str(item.settings.get("of", "")) for item in evaluations]
    names = distinct_labels(methods, 20)
    paint = category_color("name:N", names, legend=wide_legend())
    orders, kept = _accuracy_rows(names, evaluations)
    tall = max(220, 42 * len(names))
    y = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelColor=color("ink"), labelLimit=150))
    left = chart_of(orders).encode(y=y, color=paint)
    by_order = alt.layer(
        left.mark_rule(strokeWidth=2).encode(
            x=alt.X("low:Q", title=None, axis=PERCENT, scale=_SHARES), x2=alt.X2("high:Q")
        ),
        left.mark_point(size=60, fill=color("bg"), opacity=1).encode(x=alt.X("trained:Q")),
        left.mark_point(size=70, filled=True, opacity=1).encode(x=alt.X("random:Q")),
        left.mark_text(dy=-12).encode(x=alt.X("random:Q"), text=alt.Text("text:N"), color=alt.ColorValue(color("ink"))),
    ).properties(
        width=300,
        height=tall,
        title=title_with_text(
            "Accuracy by order of the blocks",
            "circle: trained order; dot and line: random orders,",
            "mean ± sample deviation",
            *_measured(evaluations),
        ),
    )
    x = alt.X(
        "blocks:Q", title="blocks kept", axis=alt.Axis(values=sorted({row["blocks"] for row in kept}), format="d")
    )
    dash = alt.StrokeDash(
        "order:N", legend=None, scale=alt.Scale(domain=["random order", "trained order"], range=[[1, 0], [4, 3]])
    )
    right = chart_of(kept).encode(x=x, y=alt.Y("top1:Q", title=None, axis=PERCENT, scale=_SHARES), color=paint)
    by_kept = alt.layer(
        right.mark_line(strokeWidth=1.8).encode(strokeDash=dash),
        right.mark_circle(size=36, opacity=1).transform_filter("datum.order == 'random order'"),
    ).properties(
        width=360,
        height=tall,
        title=title_with_text(
            "Accuracy with fewer blocks",
            "solid: random order; dashed: trained order",
            f"means over {DRAWS} random subsets of the blocks",
        ),
    )
    described = "; ".join(
        f"{row['name']}: {show_percent(row['trained'])} in trained order, {row['text']} in random order"
        for row in orders
    )
    return alt.hconcat(by_order, by_kept, spacing=40).properties(description=f"{described}.")


def _accuracy_rows(names: Sequence[str], evaluations: Sequence[Evaluation]) -> tuple[list[Row], list[Row]]:
    """Return the accuracies by order, and by number of kept blocks."""
    orders, kept = [], []
    for name, item in zip(names, evaluations, strict=True):
        a, depth = item.arbitrary, int(item.settings.get("blocks", 1))
        orders.append(
            row_of(
                name=name,
                trained=item.sequential.top1,
                random=a.top1_mean,
                **_band(a.top1_mean, a.top1_std),
                text=show_percent(a.top1_mean),
            )
        )
        parts = {int(count): (one.arbitrary, one.sequential) for count, one in item.kept.items() if int(count) < depth}
        for blocks, (arbitrary, sequential) in sorted({**parts, depth: (a.top1_mean, item.sequential.top1)}.items()):
            kept.append(row_of(name=name, blocks=blocks, top1=arbitrary, order="random order"))
            kept.append(row_of(name=name, blocks=blocks, top1=sequential, order="trained order"))
    return orders, kept


def _band(mean: float, deviation: float | None) -> Row:
    """Return the ends of a mean ± a deviation, within the axis."""
    return row_of(low=max(0.0, mean - (deviation or 0)), high=min(1.0, mean + (deviation or 0)))


def _measured(evaluations: Sequence[Evaluation]) -> list[str]:
    """Return the images, data set, number of orders, and number of models in lines that fit above a narrow chart."""
    found = {
        (
            f"{counted(item.images, 'image')} of {shorten(printable(item.settings.get('data', 'unknown data')), 40)},",
            f"{counted(item.arbitrary.orders, 'random order')}, "
            f"{counted(1 if item.models is None else item.models.count, 'trained model')} each",
        )
        for item in evaluations
    }
    return [line for lines in sorted(found) for line in lines]


def freedom_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Draw the mean accuracy in random order by number of allowed orders, with one standard deviation.

    Filled points are within the model's own bands, hollow points beyond them; a dashed line joins the windows. Raise
    :class:`UsageError` for an evaluation without ``freedom``.
    """
    for item in evaluations:
        if not item.freedom:
            raise UsageError(
                f"{item.name or 'an evaluation'} has no accuracy within bands; make it with eval --freedom"
            )
    names = distinct_labels([item.name for item in evaluations], 24)
    rows, joined, places = _freedom_rows(names, evaluations)
    ticks = sorted(places)
    labels = {f"{tick:g}".replace("e+0", "e+"): [_count(tick), places[tick]] for tick in ticks}  # as Vega formats it
    scale = alt.Scale(type="log", domain=[ticks[0] / 1.4, ticks[-1] * 1.4], nice=False)
    axis = alt.Axis(
        values=ticks, labelExpr=f"{json.dumps(labels)}[format(datum.value, '.6~g')]", grid=True, labelOverlap=True
    )
    x = alt.X("allowed:Q", title="orders allowed", scale=scale, axis=axis)
    y = alt.Y("top1:Q", title=None, axis=PERCENT, scale=_SHARES)
    names_color = category_color("name:N", names, legend=wide_legend())
    dash = alt.StrokeDash("ladder:N", scale=alt.Scale(domain=["ends", "windows"], range=[[1, 0], [5, 4]]), legend=None)
    base = chart_of(rows).encode(x=x, y=y, color=names_color)
    point = {"size": 46, "opacity": 1}
    freest = {row["name"]: row for row in sorted(rows, key=lambda row: float(row["allowed"]))}
    described = "; ".join(
        f"{name}: {show_percent(row['top1'])} in {_count(row['allowed'])} orders" for name, row in freest.items()
    )
    return alt.layer(
        base.mark_rule(strokeWidth=1.2, opacity=0.45).encode(y=alt.Y("low:Q", title=None), y2=alt.Y2("high:Q")),
        chart_of(joined).mark_line(strokeWidth=1.8).encode(x=x, y=y, color=names_color, strokeDash=dash),
        base.mark_point(fill=color("bg"), strokeWidth=1.6, **point),
        base.mark_point(filled=True, **point).transform_filter("datum.within == 'own'"),
    ).properties(
        width=620,
        height=_TALL,
        title=title_with_text(
            "Accuracy in random order, by number of allowed orders",
            "vertical: ± sample deviation over orders; filled: within the model's own bands; dashed: windows between "
            "the ends",
            *_measured(evaluations),
        ),
        description=f"{described}.",
    )


def _freedom_rows(
    names: Sequence[str], evaluations: Sequence[Evaluation]
) -> tuple[list[Row], list[Row], dict[float, str]]:
    """Return the points, the points of each line, and the bands by number of allowed orders."""
    rows: list[Row] = []
    joined: list[Row] = []
    places: dict[float, str] = {}
    for name, item in zip(names, evaluations, strict=True):
        steps = [(step, Bands.from_json(step.bands)) for step in item.freedom or ()]
        own = next((bands for step, bands in steps if step.own), None)
        between = windows(steps[0][1].num_blocks)
        for step, bands in steps:
            joined += (
                row_of(name=name, allowed=step.allowed, top1=step.top1_mean, ladder=ladder)
                for ladder in _ladders(bands, between)
            )
            places.setdefault(step.allowed, "full" if bands.is_one else "fixed" if step.allowed == 1 else str(bands))
            rows.append(
                row_of(
                    name=name,
                    allowed=step.allowed,
                    top1=step.top1_mean,
                    **_band(step.top1_mean, step.top1_std),
                    bands=str(bands),
                    within="own" if own is None or own.contains(bands) else "beyond",
                )
            )
    return rows, joined, places


def _ladders(bands: Bands, between: Collection[Bands]) -> list[str]:
    """Return the lines that a step belongs to; both start at a fixed order, and windows end at fixed ends."""
    last = bands.num_blocks - 1
    if bands in between:
        return ["windows"]
    return ["ends", "windows"] if between and (bands.num_orders == 1 or bands.cuts == (1, last)) else ["ends"]


def _count(allowed: float) -> str:
    return f"{allowed:,.0f}" if allowed < 1e7 else f"{allowed:.0e}"
