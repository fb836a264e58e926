"""``ls_edge.analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

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
from ls_edge.core.callbacks import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.core.errors import printable
from ls_edge.core.hub import local_folder
from ls_edge.core.order_costs import read_order_costs
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.analysis import KINDS, Analysis, AnalysisOrders, Rollout, parse_kinds
from ls_edge.evaluation.analysis import analyze as measure
from ls_edge.evaluation.analysis.measures import Pairs
from ls_edge.evaluation.analysis.trace import TraceAnalysis, TraceCounts, read_lines
from ls_edge.report.analysis import print_analysis
from ls_edge.report.shown import Shown, svg_or_nothing

ATTENTION = ("attention", "rollout")
"""Kinds that need the weights of attention."""


class AnalysisResult(Shown, Analysis, frozen=True):
    """The function of each block of a model; see :class:`Analysis`."""

    def show(self, console: Console) -> None:
        """Print the verdict, a row for each block, and the agreement of answers."""
        print_analysis(self, console)

    def chart(self) -> str:
        """Return the importance of each block as an SVG; empty without it, or without the extra ``report``."""

        def draw() -> str:
            from ls_edge.report.charts import importance_chart, svg_of

            drawn = None if self.importance is None else importance_chart(self.importance)
            return "" if drawn is None else svg_of(drawn)

        return svg_or_nothing(draw)


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
        looks, reason = _attention(opened, plan)

        def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
            for pixels, labels in opened.batches(some, batch_size):
                for look in looks.values():
                    look.add(pixels)
                yield pixels, labels

        found = measure(opened.blocks, batches(), plan, on_batch=lambda done: on_progress(done, len(some), "images"))
        chosen = {"what": list(kinds), "orders": orders, "pool": pool, "limit": limit, "seed": seed}
        more = {
            "attention": looks["attention"].result() if "attention" in looks else None,
            "rollout": _with_names(looks["rollout"].result(), some, opened.skipped) if "rollout" in looks else None,
            "pairs": _with_order_costs(found, opened),
            "skipped": len(opened.skipped),
            "reasons": {**found.reasons, **({kind: reason for kind in ATTENTION if kind in kinds} if reason else {})},
            "settings": {**opened.settings(some, plan.bands), **chosen, "batch_size": batch_size},
        }
    return AnalysisResult(**{**{name: getattr(found, name) for name in Analysis.__struct_fields__}, **more})


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


def _attention(opened: OpenedModel, plan: AnalysisOrders) -> tuple[dict[str, Any], str]:
    """Return the measures of attention by kind, or the reason why there is none."""
    asked = [kind for kind in ATTENTION if kind in plan.kinds]
    if not asked:
        return {}, ""
    if is_bundle(opened.folder):
        return {}, "the engines of a bundle do not show their attention; analyze the run"
    from ls_edge.training.models.attention import AttentionMeasure, RolloutMeasure
    from ls_edge.training.models.torch_blocks import TorchBlocks

    assert isinstance(opened.blocks, TorchBlocks)
    made: dict[str, Any] = {
        "attention": AttentionMeasure(opened.blocks),
        "rollout": RolloutMeasure(opened.blocks, plan.bands, plan.seed),
    }
    reason = made["attention"].reason
    return ({}, reason) if reason else ({kind: made[kind] for kind in asked}, "")


def _with_names(found: Rollout | None, images: ImageSet, skipped: Sequence[str]) -> Rollout | None:
    """Return a rollout with the names of its images."""
    if found is None:
        return None
    names = [image.name for image in images.images[: len(found.trained) + len(skipped)] if image.name not in skipped]
    return msgspec.structs.replace(found, names=names[: len(found.trained)])
