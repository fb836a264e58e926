"""``ls-edge analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import numpy as np

from ls_edge.cli import options
from ls_edge.cli.block_models import (
    Device,
    OpenedModel,
    Precision,
    bands_in_force,
    is_bundle,
    model_folders,
    open_model,
)
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.order_costs import read_order_costs
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.analysis import KINDS, Analysis, AnalysisOrders, Rollout, analyze, parse_kinds
from ls_edge.evaluation.analysis.measures import Pairs
from ls_edge.evaluation.analysis.trace import TraceCounts, is_trace, read_lines
from ls_edge.report.analysis import print_analysis, print_trace_analysis
from ls_edge.report.progress import StepProgress

ATTENTION = ("attention", "rollout")
"""Kinds that need the weights of attention."""


@dataclass(frozen=True)
class AnalyzeOptions:
    """The options of the command that every model is analyzed with."""

    kinds: tuple[str, ...]
    orders: int
    bands: str | None
    pool: Literal["mean", "first"]
    block: int | None
    limit: int | None
    seed: int
    batch_size: int
    device: Device
    precision: Precision
    threads: int | None


@click.command(
    cls=Command,
    examples=(
        "ls-edge analyze run --data digits",
        "ls-edge analyze bundle --data val --what importance,agreement --json",
        "ls-edge analyze run --data val --limit 500 --report analysis.html",
        "ls-edge analyze shuffled --against start --data val --report both.html",
        "ls-edge analyze trace.jsonl --data val --report orders.html",
    ),
)
@click.argument("run_or_bundle", type=options.FILE, metavar="RUN_OR_BUNDLE_OR_TRACE")
@options.path("--against", "Run or bundle to show next to it.", metavar="RUN_OR_BUNDLE")
@options.text("--what", f"Any of {', '.join(KINDS)}.  [default: all that apply]", "A,B")
@options.orders(16)
@options.choice(
    "--pool",
    ["mean", "first"],
    "Tokens that stand for an image: their mean, or the first one (the class token, if any).",
    default="mean",
)
@options.count("--block", "Block whose outputs are mapped (umap).  [default: the middle one]", least=0, most=65_536)
@options.evaluation(batch_size=32)
@options.REPORT
def command(
    run_or_bundle: Path,
    against: Path | None,
    data: str,
    what: str | None,
    report: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show what each block contributes, and how that depends on its position.

    importance: accuracy and loss without each block, and with it at the other end of its band. contribution: norm of
    what a block adds, relative to its input, by slot. similarity: of the tokens after each step (linear CKA), and of
    what a block adds in trained and random order. agreement: how often random orders, and fewer blocks, give the class
    of the trained order. attention: its distance and entropy, and rollout: which patches it reaches, in trained and
    random order, for a run whose family has plain attention.

    slots: accuracy by slot of each block. norms: of what a block adds, by slot. probe: how well a linear classifier
    reads the slot from a block's output. umap: maps of outputs by slot and block. probe and umap need the extra
    analyze. pairs: blocks that commute, next to the order costs of a bundle.

    Blocks are reordered within the bands of the model.

    A trace of 'run --trace' instead of a model: orders and subsets that occurred, accuracy by order and by skipped
    block, and the images whose answer depends on them.
    """
    if is_trace(run_or_bundle):
        if against is not None or what is not None:
            raise UsageError(f"{run_or_bundle} is a trace, which has neither --against nor --what; leave them out")
        _analyze_trace(run_or_bundle, open_data(data, "eval"), report, as_json=as_json)
        return
    chosen = AnalyzeOptions(parse_kinds(what), **options)
    folders = [run_or_bundle, *([] if against is None else [against])]
    for folder in folders:
        if (runs := model_folders(folder)) != [folder]:
            raise UsageError(f"{folder} is a folder of runs; name one of them, such as {runs[0]}")
    images = open_data(data, "eval")
    analyses = [_analyze_one(folder, images, chosen) for folder in folders]
    if as_json:
        print_json(analyses[0] if against is None else {"analyses": analyses})
    else:
        for place, found in enumerate(analyses):
            if place:
                click.echo()
            print_analysis(found)
    if report is not None:
        from ls_edge.report.html import write_analysis

        write_analysis(report, analyses, images.images)


def _analyze_trace(path: Path, images: ImageSet, report: Path | None, *, as_json: bool) -> None:
    """Analyze a trace; the images give names of classes and pictures."""
    counts, size = TraceCounts(), path.stat().st_size
    labels = {image.name: image.label for image in images.images}
    classes: dict[int, str] = {}
    with StepProgress("analyze") as progress:
        for line, at in read_lines(path):
            counts.add(line)
            own = labels.get(line.image)
            if own is not None and line.label is not None:
                classes[line.label] = images.classes[own]
            progress(at, size, "bytes")
    found = counts.result({"of": printable(path), "data": printable(images.source)})
    if as_json:
        print_json(found)
    else:
        print_trace_analysis(found)
    if report is not None:
        from ls_edge.report.html import write_trace_analysis

        write_trace_analysis(report, found, images.images, classes)


def _analyze_one(folder: Path, images: ImageSet, options: AnalyzeOptions) -> Analysis:
    """Analyze one run or bundle."""
    opened = open_model(folder, options.device, options.precision, options.threads)
    bands = bands_in_force(options.bands, opened.bands)
    plan = AnalysisOrders(bands, options.kinds, options.orders, options.seed, options.pool, options.block)
    images = opened.images(images, options.limit)
    looks, reason = _attention(opened, plan)

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for pixels, labels in opened.batches(images, options.batch_size):
            for look in looks.values():
                look.add(pixels)
            yield pixels, labels

    with StepProgress("analyze") as progress:
        found = analyze(opened.blocks, batches(), plan, on_batch=lambda done: progress(done, len(images), "images"))
    chosen = {
        "what": list(options.kinds),
        "orders": options.orders,
        "pool": options.pool,
        "limit": options.limit,
        "seed": options.seed,
    }
    return msgspec.structs.replace(
        found,
        attention=looks["attention"].result() if "attention" in looks else None,
        rollout=_with_names(looks["rollout"].result(), images, opened.skipped) if "rollout" in looks else None,
        pairs=_with_order_costs(found, opened),
        skipped=len(opened.skipped),
        reasons={**found.reasons, **({kind: reason for kind in ATTENTION if kind in plan.kinds} if reason else {})},
        settings={**opened.settings(images, plan.bands), **chosen, "batch_size": options.batch_size},
    )


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
