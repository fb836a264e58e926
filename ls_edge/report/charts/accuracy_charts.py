"""Charts of the accuracy of runs: by skipped blocks, and of several runs; and of blocks by slot."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np

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
)
from ls_edge.report.formatting import counted, distinct_names, shorten, show_percent
from ls_edge.report.mistakes import by_class
from ls_edge.report.statistics import RunData
from ls_edge.report.theme import color

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
