"""Charts of the accuracy: by skipped blocks, by slot, of several runs, and of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

import altair as alt
import numpy as np

from ls_edge.core.errors import UsageError
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.charts.specification import Chart, Row, chart_of, names_axis, row_of, title_with_text
from ls_edge.report.formatting import counted, distinct_names, shorten, show_percent
from ls_edge.report.statistics import RunData
from ls_edge.report.theme import colour


def accuracy_by_skips(data: RunData) -> Chart | None:
    """Accuracy of the answers by how many blocks they skipped, with 95 % intervals and how many there were."""
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
            text=f"{show_percent(one.top1)} of {one.labelled:,}" if one.top1 is not None else "no labels",
            kind="whole" if one.skipped == 0 else "skipped",
        )
        for one in found
    ]
    chart = _accuracy_base(rows, "skipped:N", [row["skipped"] for row in rows], data.summary.chance)
    dots = (
        chart_of(rows)
        .mark_circle(size=110, stroke=colour("bg"), strokeWidth=1.5, opacity=1)
        .encode(
            x="top1:Q",
            y=names_axis("skipped:N", [row["skipped"] for row in rows]),
            tooltip=_ACCURACY_TIPS,
            color=alt.Color(
                "kind:N",
                legend=None,
                scale=alt.Scale(domain=["whole", "skipped"], range=[colour("accent"), colour("wire")]),
            ),
        )
    )
    described = [
        f"{row['skipped']}: {show_percent(one.top1)} of {one.labelled}" for row, one in zip(rows, found, strict=True)
    ]
    return alt.layer(*chart, dots).properties(
        width="container", height=34 * len(rows), description="; ".join(described) + "."
    )


_ACCURACY_TIPS = [
    alt.Tooltip("text:N", title="accuracy"),
    alt.Tooltip("answers:N"),
    alt.Tooltip("low:Q", title="95 % from", format=".1%"),
    alt.Tooltip("high:Q", title="to", format=".1%"),
]

_SHARES = alt.Scale(domain=[0, 1], nice=False, rangeMax=alt.ExprRef("width - 108"))
"""Accuracy, with room for figures at its right."""


def _accuracy_base(rows: list[Row], field: str, names: Sequence[str], chance: float | None) -> list[alt.Chart]:
    """A guess, intervals and figures by row; the axis of accuracy has room for the figures on its right."""
    axis = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=True)
    x = alt.X("top1:Q", title=None, scale=_SHARES, axis=axis)
    y = names_axis(field, names)
    known = [row for row in rows if row["low"] is not None]
    layers = []
    if chance is not None:
        guess = chart_of([row_of(top1=chance, what=f"a guess: {show_percent(chance)}")])
        layers.append(guess.mark_rule(color=colour("axis"), strokeDash=[3, 3]).encode(x=x, tooltip="what:N"))
    interval = chart_of(known).mark_rule(color=colour("ink"), strokeWidth=1.6)
    layers.append(interval.encode(x=alt.X("low:Q", scale=_SHARES), x2="high:Q", y=y))
    text = chart_of(rows).mark_text(align="right", color=colour("ink"), fontWeight=600)
    layers.append(text.encode(x=alt.value("width"), y=y, text="text:N"))
    return layers


def slot_heatmap(data: RunData) -> Chart | None:
    """How often each block ran in each slot, and how often it was skipped; None where nothing ran."""
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
                    answers=show_percent(share),
                    depth=(share / peak) ** 0.7,
                    text="" if not count else f"{100 * share:.0f}" if share >= 0.01 else "<1",
                    kind="skipped" if column == "skipped" else "ran",
                )
            )
    size = 34 if data.num_blocks <= 12 else 22
    base = chart_of(rows).encode(
        x=alt.X(
            "slot:O",
            sort=columns,
            title="slot: how many blocks ran before",
            axis=alt.Axis(orient="top", labelAngle=0, domain=False, ticks=False),
        ),
        y=alt.Y("block:O", title="block"),
        tooltip=[alt.Tooltip("block:O"), alt.Tooltip("slot:N"), alt.Tooltip("answers:N", title="of the answers")],
    )
    cells = base.mark_rect(stroke=colour("bg"), strokeWidth=1)
    paint = alt.Color(
        "kind:N", legend=None, scale=alt.Scale(domain=["ran", "skipped"], range=[colour("accent"), colour("wire")])
    )
    depth = alt.Opacity("depth:Q", legend=None, scale=alt.Scale(domain=[0, 1], range=[0, 1]))
    text = base.mark_text(fontSize=11, fontWeight=600).encode(
        text="text:N", color=alt.condition("datum.depth > 0.6", alt.value(colour("bg")), alt.value(colour("ink")))
    )
    layers = [base.mark_rect(color=colour("panel"), stroke=colour("bg")), cells.encode(color=paint, opacity=depth)]
    in_place = float(np.trace(counts)) / max(float(counts.sum()), 1.0)
    described = f"{show_percent(in_place)} of the blocks ran in their trained slot"
    return alt.layer(*layers, *([text] if size > 30 else [])).properties(
        width="container",
        height=size * data.num_blocks,
        description=f"Blocks by slots over {counted(answers, 'answer')}; {described}; skipped: "
        f"{counted(int(skipped.sum()), 'block run')}.",
    )


def accuracy_comparison(runs: Sequence[tuple[str, RunSummary]]) -> Chart | None:
    """Accuracy of several runs with 95 % intervals, and that of a guess; coloured by the training method."""
    found = [(name, run) for name, run in runs if run.top1 is not None and run.top1_interval is not None]
    if not found:
        return None
    methods = list(dict.fromkeys(shorten(run.method or "unknown", 28) for _, run in found))
    rows = []
    for number, (name, run) in enumerate(found):
        low, high = run.top1_interval or (0.0, 0.0)
        rows.append(
            row_of(
                run=shorten(name, 42)
                if len({n for n, _ in found}) == len(found)
                else f"{number + 1} {shorten(name, 40)}",
                method=shorten(run.method or "unknown", 28),
                top1=run.top1,
                low=low,
                high=high,
                text=show_percent(run.top1),
                answers=f"{run.answered:,}",
            )
        )
    names = [row["run"] for row in rows]
    chance = next((run.chance for _, run in found if run.chance is not None), None)
    paints = [colour(name) for name in COLOURS]
    legend = alt.Legend(title="trained by", orient="top") if len(methods) > 1 else None
    bars = (
        chart_of(rows)
        .mark_bar(height=12)
        .encode(
            x="top1:Q",
            y=names_axis("run:N", names),
            tooltip=[alt.Tooltip("run:N"), *_ACCURACY_TIPS],
            color=alt.Color(
                "method:N",
                legend=legend,
                scale=alt.Scale(domain=methods, range=[paints[i % len(paints)] for i in range(len(methods))]),
            ),
        )
    )
    described = "; ".join(f"{row['run']}: {row['text']}" for row in rows)
    return alt.layer(bars, *_accuracy_base(rows, "run:N", names, chance)).properties(
        width="container", height=36 * len(rows), description=f"{described}."
    )


COLOURS = ("engine", "wire", "head", "codec", "bad", "soft", "stem", "other")
"""Colours of what is compared, in their order."""


def accuracy_figure(evaluations: Sequence[Evaluation]) -> Chart:
    """Accuracy of training methods by order of the blocks and by how many are kept, side by side.

    The counterparts of Figure 1 (b) and (c) of arXiv 2407.04513. On the left each method's accuracy in trained order
    and its mean in random order, whose line reaches from the 5th percentile of the orders to a standard deviation above
    the mean. On the right the accuracy that remains with fewer blocks, solid in random order and dashed in trained
    order. Raises :class:`UsageError` for none, and for more than there are colours.
    """
    check_figure(len(evaluations))
    names = _evaluation_names(evaluations)
    percent = alt.Axis(format=".0%", values=[0, 0.25, 0.5, 0.75, 1], grid=True)
    share = alt.Scale(domain=[0, 1], nice=False)
    paint = alt.Color(
        "name:N", legend=None, scale=alt.Scale(domain=names, range=[colour(c) for c in COLOURS[: len(names)]])
    )
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
        rows = [
            (int(count), value.arbitrary, value.sequential) for count, value in item.kept.items() if int(count) < depth
        ]
        for blocks, arbitrary, sequential in [*sorted(rows), (depth, a.top1_mean, item.sequential.top1)]:
            kept.append(row_of(name=name, blocks=blocks, top1=arbitrary, order="random order"))
            kept.append(row_of(name=name, blocks=blocks, top1=sequential, order="trained order"))
    tall = max(220, 42 * len(names))
    y = alt.Y("name:N", title=None, sort=names, axis=alt.Axis(labelColor=colour("ink"), labelLimit=150))
    left = chart_of(orders)
    by_order = alt.layer(
        left.mark_rule(strokeWidth=2).encode(
            x=alt.X("low:Q", title=None, axis=percent, scale=share), x2="high:Q", y=y, color=paint
        ),
        left.mark_point(size=60, fill=colour("bg"), opacity=1).encode(x="trained:Q", y=y, color=paint),
        left.mark_point(size=70, filled=True, opacity=1).encode(x="random:Q", y=y, color=paint),
        left.mark_text(dy=-12, color=colour("ink")).encode(x="random:Q", y=y, text="text:N"),
    ).properties(
        width=300,
        height=tall,
        title=title_with_text(
            "Accuracy by order of the blocks",
            "circle: trained order; dot and line: random orders",
        ),
    )
    right = chart_of(kept)
    x = alt.X(
        "blocks:Q", title="blocks kept", axis=alt.Axis(values=sorted({row["blocks"] for row in kept}), format="d")
    )
    dash = alt.StrokeDash(
        "order:N", legend=None, scale=alt.Scale(domain=["random order", "trained order"], range=[[1, 0], [4, 3]])
    )
    ends = [
        row
        for row in kept
        if row["order"] == "random order"
        and row["blocks"] == max(r["blocks"] for r in kept if r["name"] == row["name"])
    ]
    by_kept = alt.layer(
        right.mark_line(strokeWidth=1.8).encode(
            x=x, y=alt.Y("top1:Q", title=None, axis=percent, scale=share), color=paint, strokeDash=dash
        ),
        right.mark_circle(size=36, opacity=1)
        .encode(x=x, y="top1:Q", color=paint)
        .transform_filter("datum.order == 'random order'"),
        *(
            chart_of([row])
            .mark_text(align="left", dx=10, dy=dy, color=colour("ink"))
            .encode(x=x, y="top1:Q", text="name:N")
            for row, dy in zip(ends, labels_apart([row["top1"] for row in ends], tall), strict=True)
        ),
    ).properties(
        width=360,
        height=tall,
        title=title_with_text("Accuracy with fewer blocks", "solid: random order; dashed: trained order"),
    )
    described = "; ".join(
        f"{name}: {show_percent(item.sequential.top1)} in trained order, {show_percent(item.arbitrary.top1_mean)} in "
        "random order"
        for name, item in zip(names, evaluations, strict=True)
    )
    return alt.hconcat(by_order, by_kept, spacing=40).properties(description=f"{described}.")


def check_figure(count: int) -> None:
    """Raise :class:`UsageError` where :func:`accuracy_figure` cannot hold ``count`` evaluations."""
    if not 1 <= count <= len(COLOURS):
        raise UsageError(f"a figure holds 1 to {len(COLOURS)} runs or folders of runs, not {count}")


def labels_apart(shares: Sequence[float], height: float) -> list[float]:
    """How far down each label is moved so that labels at these shares of ``height`` do not touch."""
    moves = [0.0] * len(shares)
    at = -1e9
    for index in sorted(range(len(shares)), key=lambda index: -shares[index]):
        wanted = (1 - shares[index]) * height
        at = max(wanted, at + 15)
        moves[index] = at - wanted
    return moves


def _evaluation_names(evaluations: Sequence[Evaluation]) -> list[str]:
    """The methods; where two are of one, the names of the evaluations, no two alike even when shortened."""
    names = [str(item.settings.get("method", "")) for item in evaluations]
    if len(set(names)) < len(names):
        names = distinct_names([item.name or str(item.settings.get("of", "")) for item in evaluations])
    short = [shorten(name, 20) for name in names]
    return short if len(set(short)) == len(short) else [shorten(f"{n} {name}", 20) for n, name in enumerate(names, 1)]
