"""Charts as SVG files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.charts.accuracy_charts import (
    accuracy_by_skips,
    accuracy_comparison,
    accuracy_figure,
    freedom_figure,
    slot_heatmap,
)
from ls_edge.report.charts.latency_charts import latency_distribution, latency_over_time
from ls_edge.report.charts.request_charts import stage_breakdown
from ls_edge.report.charts.served_chart import FIRST_LOOK, served
from ls_edge.report.charts.specification import Chart, svg_of
from ls_edge.report.statistics import RunData

PICTURES: dict[str, Callable[[RunData], Chart | None]] = {
    "latency": latency_distribution,
    "over-time": latency_over_time,
    "stages": stage_breakdown,
    "served": lambda data: served(data, most=FIRST_LOOK),
    "skips": accuracy_by_skips,
    "slots": slot_heatmap,
}


def write_picture(
    path: str | Path, kind: str, summary: RunSummary, records: Sequence[RequestRecord], events: Sequence[PeerEvent]
) -> None:
    """Write the chart ``kind``, a key of :data:`PICTURES`; raise :class:`UsageError` if there is nothing to draw."""
    if kind not in PICTURES:
        raise UsageError(f"no picture is called {kind!r}; there are {', '.join(PICTURES)}")
    chart = PICTURES[kind](RunData(summary, records, events))
    if chart is None:
        raise UsageError(f"the run has nothing to draw for {kind!r}; choose another picture")
    write_output(path, svg_of(chart))


def write_figure(path: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write :func:`accuracy_figure` as an SVG file."""
    write_output(path, svg_of(accuracy_figure(evaluations)))


def write_freedom_figure(path: str | Path, evaluations: Sequence[Evaluation]) -> None:
    """Write :func:`freedom_figure` as an SVG file."""
    write_output(path, svg_of(freedom_figure(evaluations)))


def write_comparison_picture(path: str | Path, runs: Sequence[tuple[str, RunSummary]]) -> None:
    """Write the chart that compares the accuracy of ``runs``; raise :class:`UsageError` if no run has labels."""
    chart = accuracy_comparison(runs)
    if chart is None:
        raise UsageError("no run has labels, so there is no accuracy to draw; give labeled images")
    write_output(path, svg_of(chart))
