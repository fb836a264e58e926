"""Charts of the time that answers, hops, and visits spend in each stage, and of single requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from ls_edge.core.parts import part_name
from ls_edge.core.records import RequestRecord
from ls_edge.core.text import counted, shorten, show_ms, show_percent
from ls_edge.report.charts.specification import (
    Row,
    block_color,
    block_ink,
    category_color,
    chart_of,
    expression,
    lanes_axis,
    lookup_expression,
    opacity_if,
    row_of,
    wide_legend,
)
from ls_edge.report.runs.intervals import RequestIntervals, Span, intervals_of
from ls_edge.report.runs.statistics import RunData, StageMeans
from ls_edge.report.theme import STAGES, Chart, color

MOST_ROWS = 24


def stage_breakdown(data: RunData) -> Chart | None:
    """Draw stacked bars of mean milliseconds by stage for a request, each hop, and each holder."""
    groups = data.stage_means
    if not groups:
        return None
    parts = ", ".join(f"{name} {show_ms(ms)}" for name, ms in groups[0].means.items() if ms)
    return _stage_chart(groups, f"Mean of an answered request: {parts}.")


def stage_comparison(runs: Sequence[tuple[str, RunData]]) -> Chart | None:
    """Draw stacked bars of mean milliseconds by stage for each run that recorded them."""
    found = [(name, data.stage_means[0]) for name, data in runs if data.stage_means]
    rows = [StageMeans("All answers", name, mean.number, mean.means) for name, mean in found]
    described = "; ".join(f"{row.name}: {show_ms(sum(row.means.values()))}" for row in rows)
    return _stage_chart(rows, f"Mean of an answered request: {described}.") if rows else None


def _stage_chart(groups: Sequence[StageMeans], described: str) -> Chart:
    labels, heads, bars, totals = _stage_rows(groups)
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
    return alt.layer(drawn, text).properties(width="container", height=27 * len(labels), description=described)


def _stage_rows(groups: Sequence[StageMeans]) -> tuple[list[str], list[bool], list[Row], list[Row]]:
    """Return the label of each line, whether it is a heading, the bars, and their totals."""
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


def request_timelines(data: RunData) -> list[tuple[str, str, Chart]]:
    """Return the reason, a short description, and a chart over time for each of a few notable requests.

    A request whose blocks ran in sequence is one bar. If holders worked in parallel, each has a row, a dark line
    follows the critical path, and all other work is paler.
    """
    longest = max((record.latency_us for _, record in data.chosen), default=0)
    return [
        (
            why,
            about(record),
            _request_chart(data, why, record, longest if data.one_scale else record.latency_us, legend=not place),
        )
        for place, (why, record) in enumerate(data.chosen)
    ]


def about(record: RequestRecord) -> str:
    """Describe a request by latency, image, waves, skips and attempts."""
    parts = [show_ms(record.latency_us / 1e3), shorten(record.image, 26)]
    if not record.is_plain:
        parts.append(counted(len(record.waves), "wave"))
    if record.skipped:
        parts.append(f"skipped {', '.join(map(str, record.skipped[:8]))}")
    if record.attempts > 1:
        parts.append(f"{record.attempts} attempts")
    return " · ".join(parts)


def _request_chart(data: RunData, why: str, record: RequestRecord, limit_us: int, *, legend: bool) -> Chart:
    limit_ms = limit_us / 1e3 or 1.0
    laid = intervals_of(record)
    several = len(laid.rows) > 1
    shown = laid.rows[:MOST_ROWS]
    spans = [span for span in laid.spans if span.row < MOST_ROWS]
    across = alt.Scale(domain=[0, limit_ms], nice=False)
    x = alt.X("ms:Q", title=None, scale=across)
    # Each holder is named at its first row.
    names = [shorten(name, 18) if name not in shown[:row] else "" for row, name in enumerate(shown)]
    upright: dict[str, Any] = {
        "title": None,
        "axis": lanes_axis(names, 0.38, 66, 110, labelColor=color("ink")) if several else None,
        "scale": alt.Scale(domain=[0, len(shown) if several else 1.4], reverse=True, nice=False),
    }
    y = alt.Y("y0:Q", **upright)
    rows = [_stage_row(span, record, laid) for span in spans]
    blocks = [row for row in rows if row["block"] is not None]
    ground = [
        row_of(y0=row, y1=row + 0.76, ms=0, to=min(record.latency_us / 1e3, limit_ms)) for row in range(len(shown))
    ]
    place: dict[str, Any] = {"x": alt.X("middle:Q", title=None, scale=across), "y": alt.Y("height:Q", **upright)}
    bar: dict[str, Any] = {"x": x, "x2": alt.X2("to:Q"), "y": y, "y2": alt.Y2("y1:Q")}
    layers = [chart_of(ground).mark_rect(color=color("panel")).encode(**bar)]
    layers += _span_layers(rows, data.num_blocks, bar, place, legend=legend)
    if several:
        layers.append(
            chart_of(_critical_path(spans, record))
            .mark_line(color=color("ink"), strokeWidth=2.4, strokeJoin="round", strokeCap="round")
            .encode(x=x, y=y, order=alt.Order("order:Q"))
        )
    else:
        names_below = chart_of(_first_blocks(blocks, limit_ms)).mark_text(align="left", fontSize=11)
        room = opacity_if("datum.room * width > 6.5 * length(datum.text)")
        layers.append(names_below.encode(x=x, y=y, text=alt.Text("text:N"), opacity=room))
    path = dict.fromkeys(span.holder for span in spans if span.critical and span.block is not None)
    described = f"{why}: request {record.id}, {show_ms(record.latency_us / 1e3)}"
    if several:
        described += f", waited for {', then '.join(shorten(name, 40) for name in list(path)[:MOST_ROWS])}"
    height = 34 * len(shown) if several else 54
    return (
        alt.layer(*layers)
        .resolve_scale(color="independent", opacity="independent")
        .properties(width="container", height=height, description=f"{described}.")
    )


def _span_layers(
    rows: list[Row], num_blocks: int, bar: dict[str, Any], place: dict[str, Any], *, legend: bool
) -> list[alt.Chart]:
    """Draw stages, blocks, and tracks that did not return; ``place`` encodes the middle of a ``bar``."""
    tips = [
        alt.Tooltip("what:N"),
        alt.Tooltip("holder:N"),
        alt.Tooltip("took:N"),
        alt.Tooltip("path:N", title="critical path"),
    ]
    blocks = [row for row in rows if row["block"] is not None]
    stages = [row for row in rows if row["block"] is None and not row["why"]]
    gone = [row for row in rows if row["why"]]
    pale = opacity_if("datum.path == 'yes'", 0.62)
    middle: Any = {"middle": "(datum.ms + datum.to) / 2", "height": "(datum.y0 + datum.y1) / 2"}
    numbers = chart_of(blocks).mark_text(fontSize=10.5, fontWeight=600).transform_calculate(**middle)
    stages_color = category_color("what:N", list(STAGES), legend=wide_legend() if legend else None)
    wide = opacity_if("scale('x', datum.to) - scale('x', datum.ms) > 13")
    return [
        chart_of(stages).mark_rect(clip=True).encode(**bar, color=stages_color, opacity=pale, tooltip=tips),
        chart_of(blocks)
        .mark_rect(stroke=color("bg"), strokeWidth=0.7, clip=True)
        .encode(**bar, color=block_color(num_blocks), opacity=pale, tooltip=tips),
        numbers.encode(**place, text=alt.Text("block:O"), color=block_ink(num_blocks), opacity=wide),
        chart_of(gone)
        .mark_rect(fill=None, stroke=color("bad"), strokeDash=[4, 3], clip=True)
        .encode(**bar, tooltip=tips),
        chart_of(gone)
        .mark_text(color=color("bad"))
        .transform_calculate(**middle)
        .encode(**place, text=alt.Text("why:N")),
    ]


def _stage_row(span: Span, record: RequestRecord, laid: RequestIntervals) -> Row:
    everywhere = len(laid.rows) > 1 and not span.holder and span.stage in ("stem", "head")
    inset = (
        0.0
        if span.block is not None
        else {"wire": 0.26, "other": 0.26, "wait": 0.22, "queue": 0.1}.get(span.stage, 0.02)
    )
    top, bottom = (0.0, min(len(laid.rows), MOST_ROWS) - 0.24) if everywhere else (span.row + 0.0, span.row + 0.76)
    return row_of(
        ms=(span.start - record.submitted_us) / 1e3,
        to=(span.end - record.submitted_us) / 1e3,
        y0=top + inset,
        y1=bottom - inset,
        what=span.stage if span.block is None else part_name(span.block),
        block=span.block,
        holder=shorten(span.holder, 60) if span.holder else "the source",
        took=show_ms((span.end - span.start) / 1e3),
        path="yes" if span.critical else "no",
        why=shorten(span.why, 20),
    )


def _first_blocks(blocks: Sequence[Row], limit_ms: float) -> list[Row]:
    """Return the first block of each visit with its holder and the fraction of the width available for its name."""
    firsts = [
        row
        for before, row in zip([None, *blocks], blocks, strict=False)
        if not before or before["holder"] != row["holder"]
    ]
    ends = [*(row["ms"] for row in firsts[1:]), limit_ms]
    return [
        row_of(ms=row["ms"], y0=1.08, text=shorten(row["holder"], 16), room=(end - row["ms"]) / limit_ms)
        for row, end in zip(firsts, ends, strict=False)
    ]


def _critical_path(spans: Sequence[Span], record: RequestRecord) -> list[Row]:
    """Return the points of a line below the critical bars."""
    points: list[Row] = []
    for span in sorted((span for span in spans if span.critical), key=lambda span: span.start):
        for at in (span.start, span.end):
            points.append(row_of(ms=(at - record.submitted_us) / 1e3, y0=span.row + 0.87, order=len(points)))
    return points
