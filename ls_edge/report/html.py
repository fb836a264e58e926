"""Reports as self-contained HTML files.

Charts are Vega-Lite specifications (:mod:`ls_edge.report.charts`) that the file draws with the Vega libraries that it
contains. A content security policy allows these scripts by their digests and nothing else: no connection, and no code
made from text, since Vega's interpreter runs the expressions. Jinja2 escapes everything from outside (names of images
and peers, texts of errors). Long runs are binned, so a file stays below 3 MB for 100,000 requests.

Needs the extra ``report``.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ls_edge.core.errors import printable
from ls_edge.core.files import write_output
from ls_edge.core.records import PeerEvent, PeerState, RequestRecord
from ls_edge.core.text import (
    NOTHING,
    counted,
    distinct_names,
    engine_name,
    format_bands,
    format_ranges,
    shorten,
    show,
    show_ms,
    show_percent,
)
from ls_edge.evaluation.analysis import NOT_ASKED, Analysis
from ls_edge.evaluation.analysis.inside import Picture
from ls_edge.evaluation.analysis.trace import TraceAnalysis
from ls_edge.evaluation.run_summary import RunSummary, error_type
from ls_edge.evaluation.simulation_summary import FAILED, SimulationSummary, SiteOutcome
from ls_edge.report import charts
from ls_edge.report.analysis import (
    AGREEMENT,
    about_analysis,
    agreement_rows,
    block_table,
    empty_cells,
    finding,
    trace_findings,
    verdict,
)
from ls_edge.report.mistakes import confusions, pictures_of, wrong_images
from ls_edge.report.statistics import RunData, track_table, tracks_by_peer
from ls_edge.report.theme import STAGES, STYLE
from ls_edge.version import __version__

if TYPE_CHECKING:
    from ls_edge.data.datasets import ImageRef

MOST_TABLE_ROWS = 60

Run = tuple[str, RunSummary, Sequence[RequestRecord], Sequence[PeerEvent]]

_Text = TypeVar("_Text", bound=str)


def write_report(
    path: str | Path,
    summary: RunSummary,
    records: Sequence[RequestRecord],
    events: Sequence[PeerEvent],
    *,
    title: str = "A run through the peers",
    classes: Sequence[str] = (),
    images: Iterable[ImageRef] = (),
) -> None:
    """Write the report of one run; raise :class:`UsageError` if ``path`` cannot be written.

    With the ``images`` of the run, it shows some of those that were answered wrong.
    """
    run = _run("", RunData(summary, records, events, classes), images)
    write_output(path, _render("report.html.j2", title=title, runs=[run], compared=None, lede=""))


def write_comparison(path: str | Path, runs: Sequence[Run], *, title: str = "Runs compared", lede: str = "") -> None:
    """Write one file with a comparison of ``runs`` before the report of each."""
    data = [(name, RunData(summary, records, events)) for name, summary, records, events in runs]
    summaries = [(name, summary) for name, summary, _, _ in runs]
    compared = {
        "accuracy": charts.accuracy_comparison(summaries),
        "latency": charts.latency_comparison(summaries),
        "stages": charts.stage_comparison(data),
    }
    each = [_run(name, one) for name, one in data]
    write_output(path, _render("report.html.j2", title=title, lede=lede, compared=compared, runs=each))


def write_simulation(path: str | Path, summary: SimulationSummary, outcomes: Sequence[SiteOutcome]) -> None:
    """Write the report of a simulated fleet."""
    latency = np.concatenate([outcome.latency_s[outcome.states != FAILED] for outcome in outcomes]) * 1e3
    text = _render(
        "simulation.html.j2",
        title="A simulated fleet",
        summary=summary,
        latency=charts.latency_histogram(latency, summary.latency_ms),
        over_time=charts.outcomes_over_time(outcomes),
    )
    write_output(path, text)


def write_side_by_side(
    path: str | Path,
    rows: Sequence[Sequence[str]],
    pairs: Sequence[Sequence[str]],
    apart: Sequence[Sequence[str]] = (),
    alone: Sequence[Sequence[str]] = (),
) -> None:
    """Write a page with a row for each document, and tables of pairs.

    ``pairs`` are planned and measured values, ``apart`` plans and runs that differ, ``alone`` a fleet and one device.
    """
    tables = {"rows": rows, "pairs": pairs, "apart": apart, "alone": alone}
    write_output(path, _render("side_by_side.html.j2", scripts=[], title="Side by side", **tables))


SECTIONS: dict[str, tuple[Callable[[Any], Any] | None, str]] = {
    "importance": (
        charts.importance_chart,
        "Increase of the loss, in nats, without a block, and with the block at the other end of its band.",
    ),
    "contribution": (
        charts.contribution_chart,
        "Norm of what a block adds to a token over the norm of the token, by the slot of the block: means over images, "
        "tokens and random orders.",
    ),
    "similarity": (
        charts.similarity_chart,
        "Linear centered kernel alignment of the pooled tokens after each two steps in trained order: 1 means equal "
        "except for rotation and scale.",
    ),
    "agreement": (
        charts.agreement_chart,
        "Answers in random order compared with those in trained order. Total variation is half the sum of the "
        "differences of the probabilities.",
    ),
    "slots": (
        charts.slots_chart,
        "Accuracy, in percent, over the images whose random order had the block in that slot.",
    ),
    "norms": (
        charts.norms_chart,
        "Norm of what a block adds to the pooled token of an image, by slot: the height is the fraction of the images.",
    ),
    "probe": (
        charts.probe_chart,
        "Accuracy of a linear classifier of the slot from the pooled output of a block, on images left out of its fit. "
        "The line on a bar is a guess.",
    ),
    "umap": (
        charts.umap_charts,
        "UMAP of the whole output of a block, of the logits if the model ended after it, and of the outputs of all "
        "blocks. Each point is an image in an order of its own; UMAP does not know slots and blocks.",
    ),
    "pairs": (
        charts.pairs_charts,
        "Difference between both orders of two blocks, from the tokens before the earlier one, over what both add: 0 "
        "for a pair that commutes.",
    ),
    "parts": (
        charts.parts_chart,
        "Accuracy in trained order without a part of one block, and of all blocks: norms as identity, the layer of a "
        "residual branch as zero, and only what the block adds passed on (residual). The dashed line is the accuracy "
        "with all parts.",
    ),
    "attention": (
        charts.attention_chart,
        "Mean distance, in patches, between patches that attend to each other, for each head in trained order.",
    ),
    "rollout": (
        None,
        "Attention averaged over heads, plus the identity, multiplied through the blocks: an image, the patches that "
        "reach its answer in trained order, and in a random order; white is most.",
    ),
    "class_attention": (
        None,
        "Attention of the class token to the patches: an image, and maps in trained and in random order of the patch "
        "blocks, one row for each layer and one column for each head; white is most.",
    ),
    "saliency": (
        None,
        "Gradient of the answer's logit by pixel, the largest of its colors: an image, its map in trained order, and "
        "the map of the same class in a random order.",
    ),
    "positions": (
        charts.positions_chart,
        "Cosine similarity of the position embeddings of patches, by their distance, and for some patches with all "
        "others.",
    ),
    "filters": (
        charts.filters_chart,
        "Principal components of the filters of the patch embedding, the largest variance first; gray is 0.",
    ),
    "layer_scale": (
        charts.layer_scale_chart,
        "Mean magnitude of LayerScale, the learned factor of each residual branch, by depth.",
    ),
    "mixing": (
        charts.mixing_chart,
        "Weights by which a block mixes tokens: a tile has the weights of one output over the patches, gray is 0. The "
        "chart has their distance from their center.",
    ),
    "excite": (
        None,
        "Images that gradient ascent makes from noise for the channel that varies most in what a block adds, with blur "
        "and shifts against noise.",
    ),
    "inversion": (
        charts.inversion_chart,
        "Images that gradient descent makes from noise until their tokens after a block are those of an image: the "
        "less of it returns, the more the blocks have thrown away. Distances are relative to the norm of the tokens.",
    ),
}
"""Charts of each kind of analysis, and what they show."""


def write_analysis(path: str | Path, analyses: Sequence[Analysis], *, title: str = "Blocks of a model") -> None:
    """Write a page with the analysis of a model, or of several side by side."""
    names = distinct_names([found.settings["of"] for found in analyses]) if len(analyses) > 1 else [""]
    models = [
        {
            "name": name,
            "about": about_analysis(found),
            "verdict": verdict(found),
            "empty_cells": empty_cells(found),
            "blocks": block_table(found),
            "agreement": agreement_rows(found),
            "found": found,
        }
        for name, found in zip(names, analyses, strict=True)
    ]
    sections, absent = [], {}
    for kind, (draw, why) in SECTIONS.items():
        if any(getattr(found, kind) is not None for found in analyses):
            sections.append((kind, why, [_part(found, kind, draw) for found in analyses]))
        elif any(found.reasons.get(kind) != NOT_ASKED for found in analyses):
            absent[kind] = finding(analyses[0], kind)
    text = _render("analysis.html.j2", title=title, models=models, sections=sections, absent=absent, headings=AGREEMENT)
    write_output(path, text)


def _part(
    found: Analysis, kind: str, draw: Callable[[Any], Any] | None
) -> tuple[str, list[charts.Chart], list[Picture]]:
    measured = getattr(found, kind)
    drawn = None if measured is None or draw is None else draw(measured)
    shown = drawn if isinstance(drawn, list) else [drawn] if drawn is not None else []
    return finding(found, kind), shown, getattr(measured, "pictures", [])


def write_trace_analysis(
    path: str | Path, found: TraceAnalysis, images: Iterable[ImageRef] = (), classes: Mapping[int, str] | None = None
) -> None:
    """Write a page with an analysis of a trace, with pictures of ``images``; ``classes`` are names by label."""
    drawn = [
        [charts.order_chart(found)],
        [charts.skips_chart(found), charts.blocks_chart(found)],
        [],
        [],
    ]
    reasons = [
        "Accuracy of the most frequent orders and subsets, with 95 % intervals. A + separates tracks that ran in "
        "parallel, a / waves.",
        "Accuracy by number of skipped blocks, and of the answers without and with each block that was skipped.",
        "Images that were answered wrong with blocks missing; those that were right with all blocks come first.",
        "Answers of the same image in different orders, and how often each came.",
    ]
    findings = trace_findings(found).items()
    sections = [(head, why, said, each) for (head, said), why, each in zip(findings, reasons, drawn, strict=True)]
    names = [*(one.image for one in found.mistakes), *(one.image for one in found.images)]
    text = _render(
        "trace.html.j2",
        title="Orders of a run",
        found=found,
        sections=sections,
        classes=classes or {},
        pictures=pictures_of(dict.fromkeys(names), images),
    )
    write_output(path, text)


class Figure(NamedTuple):
    """Place of a chart in a page."""

    ident: str
    spec: dict[str, Any]
    columns: int
    """Columns of a grid of squares; 0 for other charts."""


def _run(name: str, data: RunData, images: Iterable[ImageRef] = ()) -> dict[str, Any]:
    """Return the values that the templates show of a run."""
    summary = data.summary
    waves = summary.settings.get("waves")
    tracks = tracks_by_peer(data.records, waves if isinstance(waves, int) else 1)
    settings = {
        "model": summary.model,
        "training method": summary.method,
        "bundle": summary.bundle_id,
        "policy": summary.policy,
        "seed": summary.seed,
        "preprocessing, median": show_ms(summary.preprocess_ms.p50),
        **summary.settings,
        **{f"engine of {name}": engine_name(peer.engine) for name, peer in summary.peers.items()},
    }
    return {
        "name": name,
        "data": data,
        "summary": summary,
        "latency": charts.latency_distribution(data),
        "over_time": charts.latency_over_time(data),
        "stages": charts.stage_breakdown(data),
        "served": charts.served(data),
        "served_window": charts.served_window(data),
        "requests": charts.request_timelines(data),
        "skips": charts.accuracy_by_skips(data),
        "by_class": charts.accuracy_by_class(data),
        "confusions": confusions(data.records),
        "wrong_images": wrong_images(data.records, images),
        "slots": charts.slot_heatmap(data),
        "tracks": track_table(tracks, data.lanes),
        "settings": {key: value for key, value in settings.items() if value not in (None, "", NOTHING)},
    }


def _render(template: str, *, scripts: Sequence[str] | None = None, **values: Any) -> str:
    count = 0

    def figure(chart: charts.Chart, columns: int = 0) -> Figure:
        nonlocal count
        count += 1
        return Figure(f"chart-{count}", charts.with_parameters(charts.spec_of(chart), narrow=False), columns)

    scripts = [library(), _asset("report.js")] if scripts is None else scripts
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    own = [Markup(text) for text in (digests, STYLE + _asset("report.css"), *scripts)]  # noqa: S704  our own files
    template_values = {"figure": figure, "digests": own[0], "style": own[1], "scripts": own[2:], "version": __version__}
    return environment().get_template(template).render(**template_values, **values)


@functools.cache
def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed with their dependencies as one script, for Altair's Vega-Lite."""
    import vl_convert

    bundle: Any = vl_convert.javascript_bundle  # its stub requires a snippet, which is optional
    text: str = bundle(vl_version=charts.VEGA_LITE)
    return text.replace("</script", "<\\/script").replace("\r", "")


@functools.cache
def environment() -> Environment:
    """Return the environment of all templates."""
    made = Environment(
        loader=PackageLoader("ls_edge.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    made.filters |= {
        "ms": show_ms,
        "number": show,
        "percent": show_percent,
        "short": shorten,
        "counted": counted,
        "ranges": format_ranges,
        "error_type": error_type,
        "tight": _tight,
        "plain": _plain,
    }
    made.globals |= {
        "NOTHING": NOTHING,
        "STAGES": STAGES,
        "MOST_POINTS": charts.MOST_POINTS,
        "MOST_ROWS": MOST_TABLE_ROWS,
        "LOST": PeerState.LOST,
    }
    return made


def _printable(value: Any) -> Any:
    """Make text from outside printable; Jinja2 escapes it afterwards."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _plain(value: Any) -> Any:
    """Show a setting as a user would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, (list, tuple)):
        return value
    return format_bands(value) if any(isinstance(one, list) for one in value) else ", ".join(map(str, value)) or NOTHING


def _asset(name: str) -> str:
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _tight(text: _Text) -> _Text:
    """Keep a number and its unit on one line."""
    return type(text)(re.sub(r"(\d) (%|ms|s)(?![a-z])", "\\1\u00a0\\2", text))
