"""HTML page of the analysis of models; it needs the extra ``report``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ls_edge.analysis import KINDS, NOT_ASKED, Analysis, overview
from ls_edge.analysis.blocks.agreement import HEADINGS
from ls_edge.core.files import write_output
from ls_edge.core.text import distinct_names
from ls_edge.report.html import render


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
    )
    write_output(path, text)
