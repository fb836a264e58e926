"""Charts of accuracy: of runs by skipped blocks and classes, of blocks by slot, and of evaluations by order."""

from __future__ import annotations

import json
from collections.abc import Sequence

import altair as alt
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.core.text import counted, distinct_names, shorten, show_percent
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.charts.specification import (
    Chart,
    Row,
    at,
    category_color,
    chart_of,
    heat_map,
    names_axis,
    row_of,
    title_with_text,
)
from ls_edge.report.mistakes import by_class
from ls_edge.report.statistics import RunData
from ls_edge.report.theme import MOST_CATEGORIES, color

_TIPS = [
    alt.Tooltip("text:N", title="accuracy"),
    alt.Tooltip("answers:N"),
    alt.Tooltip("low:Q", title="95 % from", format=".1%"),
    alt.Tooltip("high:Q", title="to", format=".1%"),
]
MOST_CLASSES = 24
PERCENT = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=True)


def accuracy_by_skips(data: RunData) -> Chart | None:
    """Draw the accuracy of the answers by their number of skipped blocks, with 95 % intervals."""
    found = data.summary.accuracy_by_skips
    if not found:
        return None
    rows = [
        row_of(
            skipped="none" if one.skipped == 0 else counted(one.skipped, "block"),
            answers=f"{one.answers:,} answers",
            top1=one.top1,
            low=one.low,
            high=one.high,
            text="no labels" if one.top1 is None else f"{show_percent(one.top1)} of {one.labelled:,}",
            paint=color("warn" if one.skipped else "accent"),
        )
        for one in found
    ]
    dots = chart_of(rows).mark_circle(size=110, stroke=color("bg"), strokeWidth=1.5, opacity=1)
    paint = alt.Color("paint:N", scale=None, legend=None)
    described = "; ".join(
        f"{row['skipped']}: {show_percent(one.top1)} of {one.labelled}" for row, one in zip(rows, found, strict=True)
    )
    return _accuracy_chart(rows, "skipped", data.summary.chance, 34, described, above=(dots.encode(color=paint),))


def accuracy_by_class(data: RunData) -> Chart | None:
    """Draw the accuracy of each class, the worst ones first; None for less than two classes with labels."""
    found = by_class(data.records)
    if len(found) < 2:
        return None
    names = distinct_labels([data.class_name(one.label) for one in found], 42)[:MOST_CLASSES]
    rows = [
        row_of(
            label=name,
            answers=f"{one.answers:,} answers",
            top1=one.top1,
            low=one.low,
            high=one.high,
            text=f"{show_percent(one.top1)} of {one.answers:,}",
        )
        for name, one in zip(names, found, strict=False)
    ]
    dots = chart_of(rows).mark_circle(size=90, stroke=color("bg"), strokeWidth=1.5, opacity=1, color=color("accent"))
    described = "; ".join(f"{row['label']}: {row['text']}" for row in rows)
    return _accuracy_chart(rows, "label", data.summary.chance, 24, described, above=(dots,))


def accuracy_comparison(runs: Sequence[tuple[str, RunSummary]]) -> Chart | None:
    """Draw the accuracy of several runs with 95 % intervals, colored by training method, and that of a guess."""
    found = [(name, run) for name, run in runs if run.top1 is not None and run.top1_interval is not None]
    if not found:
        return None
    rows = []
    for name, (_, run) in zip(distinct_labels([name for name, _ in found], 42), found, strict=True):
        low, high = run.top1_interval or (0.0, 0.0)
        rows.append(
            row_of(
                run=name,
                method=shorten(run.method or "unknown", 28),
                top1=run.top1,
                low=low,
                high=high,
                text=show_percent(run.top1),
                answers=f"{run.answered:,}",
            )
        )
    methods = list(dict.fromkeys(row["method"] for row in rows))
    legend = alt.Legend(title="trained by", orient="top") if len(methods) > 1 else None
    bars = chart_of(rows).mark_bar(height=12).encode(color=category_color("method:N", methods, legend=legend))
    described = "; ".join(f"{row['run']}: {row['text']}" for row in rows)
    chance = next((run.chance for _, run in found if run.chance is not None), None)
    return _accuracy_chart(rows, "run", chance, 36, described, below=(bars,))


def _accuracy_chart(
    rows: list[Row],
    field: str,
    chance: float | None,
    height: int,
    described: str,
    *,
    below: Sequence[alt.Chart] = (),
    above: Sequence[alt.Chart] = (),
) -> Chart:
    """Draw marks by row with their intervals and numbers, and a guess."""
    room = 8 * max(len(row["text"]) for row in rows)
    scale = alt.Scale(domain=[0, 1], nice=False, rangeMax=alt.ExprRef(f"width - {room}"))
    x = alt.X("top1:Q", title=None, scale=scale, axis=PERCENT)
    y = names_axis(f"{field}:N", [row[field] for row in rows])
    tips = [alt.Tooltip(f"{field}:N"), *_TIPS]
    marks = [[mark.encode(x=x, y=y, tooltip=tips) for mark in some] for some in (below, above)]
    layers = []
    if chance is not None:
        guess = chart_of([row_of(top1=chance, what=f"a guess: {show_percent(chance)}")])
        layers.append(
            guess.mark_rule(color=color("axis"), strokeDash=[3, 3]).encode(x=x, tooltip=alt.Tooltip("what:N"))
        )
    interval = chart_of([row for row in rows if row["low"] is not None]).mark_rule(color=color("ink"), strokeWidth=1.6)
    layers.append(interval.encode(x=alt.X("low:Q", scale=scale), x2=alt.X2("high:Q"), y=y))
    text = chart_of(rows).mark_text(align="right", color=color("ink"), fontWeight=600)
    layers.append(text.encode(x=at("x", "width"), y=y, text=alt.Text("text:N")))
    return alt.layer(*marks[0], *layers, *marks[1]).properties(
        width="container", height=height * len(rows), description=f"{described}."
    )


def distinct_labels(names: Sequence[str], limit: int) -> list[str]:
    """Return names of at most ``limit`` characters, no two alike: numbered if they would be."""
    if len(set(names)) < len(names):
        names = distinct_names(names)
    short = [shorten(name, limit) for name in names]
    if len(set(short)) < len(short):
        short = [shorten(f"{number} {name}", limit) for number, name in enumerate(names, 1)]
    return short


def slot_heatmap(data: RunData) -> Chart | None:
    """Draw how often each block ran in each slot, and how often it was skipped; None if nothing ran."""
    counts, skipped = data.slots
    if not counts.any():
        return None
    answers = max(len(data.answers), 1)
    peak = max(float(counts.max()), float(skipped.max(initial=0)), 1.0) / answers
    columns = [str(slot) for slot in range(data.num_blocks)] + (["skipped"] if skipped.any() else [])
    rows = []
    for block in range(data.num_blocks):
        for column, count in zip(columns, [*counts[block], skipped[block]], strict=False):
            share = float(count) / answers
            rows.append(
                row_of(
                    block=block,
                    slot=column,
                    share=share,
                    depth=(share / peak) ** 0.7,
                    text="" if not count else f"{100 * share:.0f}" if share >= 0.01 else "<1",
                    paint=color("warn" if column == "skipped" else "accent"),
                )
            )
    size = 34 if data.num_blocks <= 12 else 22
    tips = [
        alt.Tooltip("block:O"),
        alt.Tooltip("slot:N"),
        alt.Tooltip("share:Q", title="of the answers", format=".1%"),
    ]
    in_place = float(np.trace(counts)) / max(float(counts.sum()), 1.0)
    chart = heat_map(
        rows, ("block", "block"), ("slot", "slot: number of blocks that ran before"), columns, size=size, tips=tips
    )
    return chart.properties(
        height=size * data.num_blocks,
        description=f"Blocks by slots over {counted(answers, 'answer')}; {show_percent(in_place)} of the blocks ran in "
        f"their trained slot; skipped: {counted(int(skipped.sum()), 'block run')}.",
    )


_TALL = 320
_SHARES = alt.Scale(domain=[0, 1], nice=False)


def check_figure(count: int) -> None:
    """Raise :class:`UsageError` if a figure cannot hold ``count`` evaluations."""
    if not 1 <= count <= MOST_CATEGORIES:
        raise UsageError(f"a figure holds 1 to {MOST_CATEGORIES} runs or folders of runs, not {count}")


def accuracy_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Draw the accuracy of training methods by order of the blocks, and by the number of kept blocks.

    Counterparts of Figure 1 (b) and (c) of arXiv 2407.04513. On the left, the accuracy of each method in trained order
    and its mean in random order, with a line from the 5th percentile of the orders to a standard deviation above the
    mean. On the right, the accuracy with fewer blocks, solid in random order and dashed in trained order. Raises
    :class:`UsageError` as :func:`check_figure`.
    """
    check_figure(len(evaluations))
    methods = [str(item.settings.get("method", "")) for item in evaluations]
    if len(set(methods)) < len(methods):
        methods = [item.name or str(item.settings.get("of", "")) for item in evaluations]
    names = distinct_labels(methods, 20)
    paint = category_color("name:N", names)
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
        title=title_with_text("Accuracy by order of the blocks", "circle: trained order; dot and line: random orders"),
    )
    x = alt.X(
        "blocks:Q", title="blocks kept", axis=alt.Axis(values=sorted({row["blocks"] for row in kept}), format="d")
    )
    dash = alt.StrokeDash(
        "order:N", legend=None, scale=alt.Scale(domain=["random order", "trained order"], range=[[1, 0], [4, 3]])
    )
    right = chart_of(kept).encode(x=x, y=alt.Y("top1:Q", title=None, axis=PERCENT, scale=_SHARES), color=paint)
    in_random_order = [row for row in kept if row["order"] == "random order"]
    by_kept = alt.layer(
        right.mark_line(strokeWidth=1.8).encode(strokeDash=dash),
        right.mark_circle(size=36, opacity=1).transform_filter("datum.order == 'random order'"),
        *_end_labels(in_random_order, "blocks", x, tall),
    ).properties(
        width=360,
        height=tall,
        title=title_with_text("Accuracy with fewer blocks", "solid: random order; dashed: trained order"),
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
                low=a.top1_p5,
                high=min(1.0, a.top1_mean + a.top1_std),
                text=show_percent(a.top1_mean),
            )
        )
        parts = {int(count): (one.arbitrary, one.sequential) for count, one in item.kept.items() if int(count) < depth}
        for blocks, (arbitrary, sequential) in sorted({**parts, depth: (a.top1_mean, item.sequential.top1)}.items()):
            kept.append(row_of(name=name, blocks=blocks, top1=arbitrary, order="random order"))
            kept.append(row_of(name=name, blocks=blocks, top1=sequential, order="trained order"))
    return orders, kept


def freedom_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Draw the mean accuracy in random order by the number of allowed orders, with one standard deviation.

    A filled point is within the model's own bands, a hollow one beyond them. Raises :class:`UsageError` as
    :func:`check_figure`, and for evaluations without ``freedom``.
    """
    check_figure(len(evaluations))
    for item in evaluations:
        if not item.freedom:
            raise UsageError(
                f"{item.name or 'an evaluation'} has no accuracy within bands; make it with eval --freedom"
            )
    names = distinct_labels([item.name for item in evaluations], 24)
    rows: list[Row] = []
    places: dict[float, str] = {}
    for name, item in zip(names, evaluations, strict=True):
        steps = [(step, Bands.from_json(step.bands)) for step in item.freedom or ()]
        own = next((bands for step, bands in steps if step.own), None)
        for step, bands in steps:
            places.setdefault(step.allowed, "full" if bands.is_one else "fixed" if step.allowed == 1 else str(bands))
            rows.append(
                row_of(
                    name=name,
                    allowed=step.allowed,
                    top1=step.top1_mean,
                    low=step.top1_mean - step.top1_std,
                    high=min(1.0, step.top1_mean + step.top1_std),
                    bands=str(bands),
                    within="own" if own is None or own.contains(bands) else "beyond",
                )
            )
    ticks = sorted(places)
    labels = {f"{tick:g}": [_count(tick), places[tick]] for tick in ticks}
    scale = alt.Scale(type="log", domain=[ticks[0] / 1.4, ticks[-1] * 1.4], nice=False)
    axis = alt.Axis(
        values=ticks, labelExpr=f"{json.dumps(labels)}[format(datum.value, '.6~g')]", grid=True, labelOverlap=True
    )
    x = alt.X("allowed:Q", title="orders allowed", scale=scale, axis=axis)
    y = alt.Y("top1:Q", title=None, axis=PERCENT, scale=_SHARES)
    base = chart_of(rows).encode(x=x, y=y, color=category_color("name:N", names))
    point = {"size": 46, "opacity": 1}
    described = "; ".join(
        f"{row['name']}: {show_percent(row['top1'])} in {_count(row['allowed'])} orders"
        for row in _ends(rows, "allowed")
    )
    return alt.layer(
        base.mark_rule(strokeWidth=1.2, opacity=0.45).encode(y=alt.Y("low:Q", title=None), y2=alt.Y2("high:Q")),
        base.mark_line(strokeWidth=1.8),
        base.mark_point(fill=color("bg"), strokeWidth=1.6, **point),
        base.mark_point(filled=True, **point).transform_filter("datum.within == 'own'"),
        *_end_labels(rows, "allowed", x, _TALL),
    ).properties(
        width=620,
        height=_TALL,
        title=title_with_text(
            "Accuracy in random order, by number of allowed orders",
            "line: one standard deviation over orders; filled: within the model's own bands; hollow: beyond them",
        ),
        description=f"{described}.",
    )


def labels_apart(shares: Sequence[float], height: float) -> list[float]:
    """Return offsets that move labels at these fractions of ``height`` down until they do not touch."""
    moves = [0.0] * len(shares)
    at = -1e9
    for index in sorted(range(len(shares)), key=lambda index: -shares[index]):
        wanted = (1 - shares[index]) * height
        at = max(wanted, at + 15)
        moves[index] = at - wanted
    return moves


def _ends(rows: Sequence[Row], field: str) -> list[Row]:
    """Return the row with the largest ``field`` of each name."""
    return list({row["name"]: row for row in sorted(rows, key=lambda row: float(row[field]))}.values())


def _end_labels(rows: Sequence[Row], field: str, x: alt.X, height: float) -> list[alt.Chart]:
    """Return the name of each line at its right end."""
    ends = _ends(rows, field)
    return [
        chart_of([row])
        .mark_text(align="left", dx=12, dy=dy, color=color("ink"))
        .encode(x=x, y=alt.Y("top1:Q"), text=alt.Text("name:N"))
        for row, dy in zip(ends, labels_apart([row["top1"] for row in ends], height), strict=True)
    ]


def _count(allowed: float) -> str:
    return f"{allowed:,.0f}" if allowed < 1e7 else f"{allowed:.0e}"
