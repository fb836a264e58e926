"""``ls_edge.analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np
from rich.console import Console

from ls_edge.api.models import (
    Device,
    OpenedModel,
    Precision,
    bands_in_force,
    is_bundle,
    open_model,
)
from ls_edge.core.errors import printable
from ls_edge.core.files import local_folder
from ls_edge.core.logs import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.core.order_costs import read_order_costs
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.analysis import KINDS, RUN_KINDS, Analysis, AnalysisOrders, parse_kinds
from ls_edge.evaluation.analysis import analyze as measure
from ls_edge.evaluation.analysis.measures import Pairs
from ls_edge.evaluation.analysis.trace import TraceAnalysis, TraceCounts, read_lines
from ls_edge.report.analysis import print_analysis
from ls_edge.report.shown import Shown

if TYPE_CHECKING:
    from ls_edge.training.analysis import RunAnalysis


class AnalysisResult(Shown, Analysis, frozen=True):
    """The function of each block of a model; see :class:`Analysis`."""

    def show(self, console: Console) -> None:
        """Print the verdict, a row for each block, and the agreement of answers."""
        print_analysis(self, console)

    def chart(self) -> str:
        """Return the importance of each block as an SVG; empty without it."""
        from ls_edge.report.charts import charts_of, svg_of

        drawn = charts_of(self.importance)
        return svg_of(drawn[0]) if drawn else ""


def analyze(
    model: str | Path,
    data: str | ImageSet,
    *,
    what: Sequence[str] = KINDS,
    orders: int = 16,
    bands: str | None = None,
    pool: Literal["mean", "first"] = "mean",
    block: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
    device: Device = "auto",
    precision: Precision = "fp32",
    threads: int | None = None,
    on_progress: OnProgress = ignore_progress,
    on_warning: OnWarning = warn_in_python,
) -> AnalysisResult:
    """Analyze the blocks of a run or bundle; arguments as of ``ls-edge analyze``, ``what`` are kinds of analysis."""
    kinds = parse_kinds(",".join(what))
    images = open_data(data, "eval") if isinstance(data, str) else data
    with open_model(local_folder(model), device, precision, threads, on_warning) as opened:
        plan = AnalysisOrders(bands_in_force(bands, opened.bands), kinds, orders, seed, pool, block)
        some = opened.images(images, limit)
        of_run = _run_analysis(opened, plan, on_progress)

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for pixels, labels in opened.batches(some, batch_size):
                if of_run is not None:
                    of_run.add(pixels, labels)
                yield pixels, labels

        found = measure(opened.blocks, batches(), plan, on_batch=lambda done: on_progress(done, len(some), "images"))
        if of_run is not None:
            inside, reasons = of_run.results()
        else:
            asked = set(kinds) & set(RUN_KINDS)
            inside = {}
            reasons = dict.fromkeys(asked, "an engine shows neither attention nor gradients; analyze the run")
        chosen = {"what": list(kinds), "orders": orders, "pool": pool, "limit": limit, "seed": seed}
        more = {
            **inside,
            "pairs": _with_order_costs(found, opened),
            "skipped": len(opened.skipped),
            "reasons": {**found.reasons, **reasons},
            "settings": {**opened.settings(some, plan.bands), **chosen, "batch_size": batch_size},
        }
    return AnalysisResult(**{**msgspec.structs.asdict(found), **more})


def analyze_trace(
    path: Path, images: ImageSet, *, on_progress: OnProgress = ignore_progress
) -> tuple[TraceAnalysis, dict[int, str]]:
    """Analyze a trace of ``run --trace``; also return the names of classes, by label, from the images."""
    counts, size = TraceCounts(), path.stat().st_size
    labels = {image.name: image.label for image in images.images}
    classes: dict[int, str] = {}
    for line, at in read_lines(path):
        counts.add(line)
        own = labels.get(line.image)
        if own is not None and line.label is not None:
            classes[line.label] = images.classes[own]
        on_progress(at, size, "bytes")
    return counts.result({"of": printable(path), "data": printable(images.source)}), classes


def _with_order_costs(found: Analysis, opened: OpenedModel) -> Pairs | None:
    """Return the pairs with the order costs of a bundle, if it has some."""
    if found.pairs is None or not isinstance(opened.blocks, Pipeline):
        return found.pairs
    costs = read_order_costs(opened.blocks.bundle.manifest.order_costs, opened.blocks.num_blocks)
    if costs is None:
        return found.pairs
    return msgspec.structs.replace(found.pairs, inverted=[list(row) for row in costs.inverted])


def _run_analysis(opened: OpenedModel, plan: AnalysisOrders, on_progress: OnProgress) -> RunAnalysis | None:
    """Return the analysis of those kinds that read the weights of a run; None for a bundle."""
    if is_bundle(opened.folder):
        return None
    from ls_edge.training.analysis import Inspected, RunAnalysis
    from ls_edge.training.models.torch_blocks import TorchBlocks

    assert isinstance(opened.blocks, TorchBlocks)
    inspected = Inspected(opened.blocks, plan.bands, plan.seed, opened.image, on_progress)
    return RunAnalysis(inspected, [kind for kind in RUN_KINDS if kind in plan.kinds])
