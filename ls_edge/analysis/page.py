"""HTML pages of the analysis of models, or of the orders of a run; they need the extra ``report``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ls_edge.analysis import KINDS, NOT_ASKED, Analysis, overview
from ls_edge.analysis.blocks.agreement import HEADINGS
from ls_edge.analysis.trace import TraceAnalysis, blocks_chart, order_chart, skips_chart, trace_findings
from ls_edge.core.files import write_output
from ls_edge.core.text import distinct_names
from ls_edge.report.html import render
from ls_edge.report.runs.mistakes import pictures_of
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from ls_edge.data.datasets import ImageRef


def write_analysis(path: str | Path, analyses: Sequence[Analysis]) -> None:
    """Write a page with the analysis of a model, or of several models side by side."""
    names = distinct_names([found.settings["of"] for found in analyses]) if len(analyses) > 1 else [""]
    shown = {name: KINDS[name] for found in analyses for name, _, _ in found.measured}
    absent = [
        (name, analyses[0].finding(name))
        for name in KINDS
        if name not in shown and any(found.reasons.get(name) != NOT_ASKED for found in analyses)
    ]
    drawings = {
        name: [[] if (result := getattr(found, name)) is None else kind.charts(result) for found in analyses]
        for name, kind in shown.items()
    }
    text = render(
        "analysis.html.j2",
        drawings=drawings,
        title="Blocks of a model",
        models=list(zip(names, analyses, strict=True)),
        kinds=[(name, kind) for name, kind in KINDS.items() if name in shown],
        absent=absent,
        overview=overview,
        headings=HEADINGS,
        counterparts=_counterparts,
    )
    write_output(path, text)


def _counterparts(drawings: Sequence[Sequence[Chart]], model: int, chart: int) -> list[Chart]:
    """Return the same chart of the other models."""
    return [others[chart] for place, others in enumerate(drawings) if place != model and chart < len(others)]


def write_trace_analysis(
    path: str | Path, found: TraceAnalysis, images: Iterable[ImageRef], classes: Mapping[int, str]
) -> None:
    """Write a page with an analysis of a trace, with pictures of ``images``; ``classes`` are names by label."""
    names = dict.fromkeys([*(one.image for one in found.mistakes), *(one.image for one in found.images)])
    text = render(
        "trace.html.j2",
        title="Orders of a run",
        found=found,
        findings=trace_findings(found),
        orders=order_chart(found),
        skips=[skips_chart(found), blocks_chart(found)],
        classes=classes,
        pictures=pictures_of(names, images),
    )
    write_output(path, text)
