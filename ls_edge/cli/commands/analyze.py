"""``ls-edge analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec
import numpy as np

from ls_edge.cli import options
from ls_edge.cli.block_models import OpenedModel, bands_in_force, labelled_images, model_folders, open_model
from ls_edge.cli.command import Command
from ls_edge.core.bundle import shared_groups
from ls_edge.core.errors import DataError, UsageError, printable
from ls_edge.core.files import check_writable
from ls_edge.data.datasets import ImageRef, open_data
from ls_edge.data.preprocess import Preprocessor, iterate_batches
from ls_edge.device.requirements import require_report
from ls_edge.evaluation.analysis import Analysis, AnalysisOrders, analyze, parse_kinds
from ls_edge.report.progress import StepProgress
from ls_edge.report.tables import print_analysis
from ls_edge.report.terminal import open_console

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
@options.DATA
@click.option(
    "--what",
    metavar="A,B",
    help="Any of importance, contribution, similarity, agreement, attention.  [default: all that apply]",
)
@options.count("--orders", "Random orders of all blocks.", most=100_000, default=16, show_default=True)
@options.bands("the model's own")
@options.choice(
    "--pool",
    ["mean", "first"],
    "Tokens for similarity: their mean, or the first one (the class token, if any).",
    default="mean",
    show_default=True,
)
@options.LIMIT
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of orders and subsets."
)
@options.batch_size(32)
@options.DEVICE
@options.PRECISION
@options.threads("Threads of the engines or of torch.  [default: their own]")
@options.REPORT
@options.JSON
def command(
    run_or_bundle: Path, data: str, what: str | None, orders: int, bands: str | None, pool: Literal["mean", "first"],
    limit: int | None, seed: int, batch_size: int, device: Literal["auto", "cpu", "cuda"],
    precision: Literal["fp32", "bf16", "fp16"], threads: int | None, report: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Show what each block contributes, and how that depends on its position.

    importance: accuracy and loss without each block, and with it at the other end of its band. contribution: norm of
    what a block adds, relative to its input, by slot. similarity: of the tokens after each step (linear CKA), and of
    what a block adds in trained and random order. agreement: how often random orders, and fewer blocks, give the class
    of the trained order. attention: its distance and entropy, for a run whose family has plain attention.

    Blocks are reordered within the bands of the model.
    """
    folder = _folder(run_or_bundle)

    kinds = parse_kinds(what)
    if report is not None:
        check_writable(report)
        require_report("--report")
    images = open_data(data, "eval")
    console = open_console(stderr=True)
    opened = open_model(folder, device=device, precision=precision, threads=threads)
    plan = AnalysisOrders(bands_in_force(bands, opened.bands), kinds, orders, seed, pool)
    images = labelled_images(images, opened, limit, console)
    attention, reason = _attention(opened, folder) if "attention" in kinds else (None, "")
    skipped: list[str] = []

    def on_skip(image: ImageRef, error: DataError) -> None:
        skipped.append(image.name)
        console.print(f"left out: {error}")

    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for pixels, labels in iterate_batches(images, Preprocessor(opened.image), batch_size, on_skip):
            if attention is not None:
                attention.add(pixels)
            yield pixels, labels

    with StepProgress("analyse") as progress:
        found = analyze(
            opened.blocks, batches(), plan, on_batch=lambda done: progress(done, len(images), "images")
        )  # fmt: skip
    settings = {
        "of": printable(folder), "data": printable(images.source), "part": images.part, "model": opened.model,
        "method": opened.method, "engine": opened.engine, "blocks": opened.blocks.num_blocks,
        "bands": plan.bands.to_json(), "shared": shared_groups(opened.owners), "what": list(kinds),
        "orders": orders, "pool": pool, "limit": limit, "seed": seed, "batch_size": batch_size,
    }  # fmt: skip
    reasons = {**found.reasons, "attention": reason} if reason else found.reasons
    result = attention.result() if attention is not None else None
    found = msgspec.structs.replace(
        found, attention=result, skipped=len(skipped), reasons=reasons, settings=settings
    )  # fmt: skip
    _show(found, report, as_json=as_json)


def _show(found: Analysis, report: Path | None, *, as_json: bool) -> None:

    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        print_analysis(found)
    if report is not None:
        from ls_edge.report.html import write_analysis

        write_analysis(report, found)


def _folder(given: Path) -> Path:
    """Return the run or bundle; raise an error for anything else, including a folder of several runs."""
    found = model_folders(given)
    if found != [given]:
        raise UsageError(f"{given} is a folder of runs; name one of them, such as {found[0]}")
    return given


def _attention(opened: OpenedModel, folder: Path) -> tuple[AttentionMeasure | None, str]:
    """Return a measure of attention, or the reason why there is none."""
    if (folder / "manifest.json").is_file():
        return None, "the engines of a bundle do not show their attention; analyse the run"
    from ls_edge.training.models.attention import AttentionMeasure
    from ls_edge.training.models.torch_blocks import TorchBlocks

    assert isinstance(opened.blocks, TorchBlocks)
    measure = AttentionMeasure(opened.blocks)
    return (None, measure.reason) if measure.reason else (measure, "")
