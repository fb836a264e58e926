"""``ls-edge analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
from ls_edge.core.errors import UsageError
from ls_edge.data.datasets import open_data
from ls_edge.evaluation.analysis import AnalysisOrders, analyze, parse_kinds
from ls_edge.report.progress import StepProgress
from ls_edge.report.tables import print_analysis

if TYPE_CHECKING:
    from ls_edge.training.models.attention import AttentionMeasure


@click.command(
    cls=Command,
    examples=(
        "ls-edge analyze run --data digits",
        "ls-edge analyze bundle --data val --what importance,agreement --json",
        "ls-edge analyze run --data val --limit 500 --report analysis.html",
    ),
)
@click.argument("run_or_bundle", type=options.FILE)
@options.text(
    "--what", "Any of importance, contribution, similarity, agreement, attention.  [default: all that apply]", "A,B"
)
@options.orders(16)
@options.choice(
    "--pool",
    ["mean", "first"],
    "Tokens for similarity: their mean, or the first one (the class token, if any).",
    default="mean",
)
@options.evaluation(batch_size=32)
@options.REPORT
def command(
    run_or_bundle: Path,
    data: str,
    what: str | None,
    orders: int,
    bands: str | None,
    pool: Literal["mean", "first"],
    limit: int | None,
    seed: int,
    batch_size: int,
    device: Device,
    precision: Precision,
    threads: int | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Show what each block contributes, and how that depends on its position.

    importance: accuracy and loss without each block, and with it at the other end of its band. contribution: norm of
    what a block adds, relative to its input, by slot. similarity: of the tokens after each step (linear CKA), and of
    what a block adds in trained and random order. agreement: how often random orders, and fewer blocks, give the class
    of the trained order. attention: its distance and entropy, for a run whose family has plain attention.

    Blocks are reordered within the bands of the model.
    """
    folders = model_folders(run_or_bundle)
    if folders != [run_or_bundle]:
        raise UsageError(f"{run_or_bundle} is a folder of runs; name one of them, such as {folders[0]}")
    kinds = parse_kinds(what)
    images = open_data(data, "eval")
    opened = open_model(run_or_bundle, device, precision, threads)
    plan = AnalysisOrders(bands_in_force(bands, opened.bands), kinds, orders, seed, pool)
    images = opened.images(images, limit)
    attention, reason = _attention(opened) if "attention" in kinds else (None, "")

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for pixels, labels in opened.batches(images, batch_size):
            if attention is not None:
                attention.add(pixels)
            yield pixels, labels

    with StepProgress("analyze") as progress:
        found = analyze(opened.blocks, batches(), plan, on_batch=lambda done: progress(done, len(images), "images"))
    chosen = {"what": list(kinds), "orders": orders, "pool": pool, "limit": limit, "seed": seed}
    found = msgspec.structs.replace(
        found,
        attention=attention.result() if attention is not None else None,
        skipped=len(opened.skipped),
        reasons={**found.reasons, "attention": reason} if reason else found.reasons,
        settings={**opened.settings(images, plan.bands), **chosen, "batch_size": batch_size},
    )
    if as_json:
        print_json(found)
    else:
        print_analysis(found)
    if report is not None:
        from ls_edge.report.html import write_analysis

        write_analysis(report, found)


def _attention(opened: OpenedModel) -> tuple[AttentionMeasure | None, str]:
    """Return a measure of attention, or the reason why there is none."""
    if is_bundle(opened.folder):
        return None, "the engines of a bundle do not show their attention; analyze the run"
    from ls_edge.training.models.attention import AttentionMeasure
    from ls_edge.training.models.torch_blocks import TorchBlocks

    assert isinstance(opened.blocks, TorchBlocks)
    measure = AttentionMeasure(opened.blocks)
    return (None, measure.reason) if measure.reason else (measure, "")
