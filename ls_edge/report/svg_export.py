"""One chart as an SVG file of its own, for a README; light or dark as its reader's screen is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ls_edge.errors import UsageError
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.records import PeerEvent, RequestRecord
from ls_edge.report import accuracy, charts, timeline
from ls_edge.report import request_timelines as ways
from ls_edge.report.data import RunData
from ls_edge.report.html import write_whole
from ls_edge.report.svg import Svg
from ls_edge.report.theme import CHART, VARIABLES

MARGIN = 20

PICTURES: dict[str, Callable[[RunData, int], Svg | None]] = {
    "latency": charts.latency_distribution,
    "over-time": charts.latency_over_time,
    "stages": charts.stage_breakdown,
    "utilisation": timeline.utilisation,
    "served": timeline.served,
    "requests": ways.request_ways,
    "skips": accuracy.accuracy_by_skips,
    "slots": accuracy.slot_heatmap,
}


def write_picture(
    path: str | Path,
    kind: str,
    summary: RunSummary,
    records: Sequence[RequestRecord],
    events: Sequence[PeerEvent],
    *,
    width: int = 880,
) -> None:
    """Write the chart ``kind``, a key of :data:`PICTURES`; raises :class:`UsageError` where nothing can be drawn."""
    if kind not in PICTURES:
        raise UsageError(f"no picture is called {kind!r}; there are {', '.join(PICTURES)}")
    drawing = PICTURES[kind](RunData(summary, records, events), width)
    if drawing is None:
        raise UsageError(f"the run has nothing to draw for {kind!r}; choose another picture")
    write_whole(path, alone(drawing))


def write_comparison_picture(path: str | Path, runs: Sequence[tuple[str, RunSummary]], *, width: int = 880) -> None:
    """Write the chart that compares the accuracy of ``runs``; raises :class:`UsageError` where none has labels."""
    drawing = accuracy.accuracy_comparison(runs, width)
    if drawing is None:
        raise UsageError("none of the runs has labels, so there is no accuracy to draw")
    write_whole(path, alone(drawing))


def alone(drawing: Svg) -> str:
    """The drawing with its colours, on paper of its own with a margin, as an SVG document."""
    return drawing.render("picture", style=VARIABLES + CHART, margin=MARGIN) + "\n"
