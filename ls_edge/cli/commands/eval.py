"""``ls-edge eval``: accuracy of a run or a bundle in trained order, in random orders, and with blocks missing.

A bundle is evaluated by the engines of this machine and needs no torch; a run needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import msgspec

from ls_edge.cli import options
from ls_edge.cli.block_models import Device, Precision, bands_in_force, is_bundle, model_folders, open_model
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import bands_text, counted, distinct_names, format_bands
from ls_edge.data.datasets import ImageSet, open_data, require_labels
from ls_edge.evaluation.evaluate import Evaluation, aggregate, evaluate
from ls_edge.evaluation.measure import blocks_to_run
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, print_table


@dataclass(frozen=True)
class EvalOptions:
    """The options of the command that every run or bundle is evaluated with."""

    orders: int
    keep: tuple[int, ...] | None
    limit: int | None
    device: Device
    threads: int | None
    arrangements: bool = False
    kendall: bool = False
    freedom: bool = False
    seed: int = 0
    batch_size: int = 100
    precision: Precision = "fp32"
    bands: str | None = None
    """Other bands than the model's own."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge eval run --data digits",
        "ls-edge eval bundle --data val --orders 16 --keep 3,6,9 --json",
        "ls-edge eval run-a run-b --data val --figure orders.svg",
    ),
)
@click.argument("run_or_bundle", type=options.FILE, nargs=-1, required=True)
@options.orders(64)
@options.text("--keep", "Numbers of blocks to keep.  [default: quarters]", "N,N", type=options.counts(10_000))
@options.flag("--arrangements", "Also blocks in parallel, in waves of tracks.")
@options.flag("--kendall", "Also orders at graded distances from the trained one.")
@options.flag("--freedom", "Also within bands, from a fixed order to full freedom.")
@options.output(
    "--figure",
    "SVG of accuracy by order and blocks kept, or by allowed orders with --freedom.",
    draws=True,
    ours=options.SVG,
)
@options.evaluation(batch_size=100)
def command(run_or_bundle: tuple[Path, ...], data: str, figure: Path | None, as_json: bool, **options: Any) -> None:
    """Measure accuracy in trained order, in random orders, and with blocks missing.

    Reports the mean, deviation, 5th percentile, and worst of the random orders. Subsets of blocks run in trained and
    in random order (means over eight draws). Blocks are reordered within the bands of the model.

    A folder of runs, such as one made by 'train --seeds', is evaluated as one: means over its models, deviation over
    models and orders. Several RUN_OR_BUNDLE are evaluated in turn and compared in one table.
    """
    members = [model_folders(given) for given in run_or_bundle]
    if figure is not None:
        from ls_edge.report.charts import check_figure

        check_figure(len(run_or_bundle))
    chosen = EvalOptions(**options)
    names = [printable(name) for name in distinct_names(run_or_bundle)]
    images = open_data(data, "eval")
    for path in (path for paths in members for path in paths if is_bundle(path)):
        bundle = Bundle.open(path)  # so that a fault of the last one is not found after an hour
        EvaluationOrders.make(bands_in_force(chosen.bands, bundle.bands), chosen.orders, chosen.keep)
        require_labels(images, bundle.manifest.classes)
    found: list[Evaluation] = []
    for given, name, paths in zip(run_or_bundle, names, members, strict=True):
        results: list[Evaluation] = []
        for path in paths:
            results.append(evaluate_one(path, images, chosen, like=results[0] if results else None))
        result = results[0] if len(results) == 1 else aggregate(results)
        settings = {**result.settings, "of": printable(given)}
        found.append(msgspec.structs.replace(result, name=name, settings=settings))
        if not as_json:
            if len(found) > 1:
                click.echo()
            _print(found[-1])
    if as_json:
        print_json(found[0] if len(found) == 1 else {"evaluations": found})
    elif len(found) > 1:
        click.echo()
        _print_comparison(found)
    if figure is not None:
        from ls_edge.report.charts import accuracy_figure, freedom_figure, write_svg

        write_svg(figure, freedom_figure(found) if chosen.freedom else accuracy_figure(found))


def evaluate_one(path: Path, images: ImageSet, options: EvalOptions, *, like: Evaluation | None = None) -> Evaluation:
    """Evaluate one run or bundle; ``like`` is an evaluation that it will be averaged with."""
    opened = open_model(path, options.device, options.precision, options.threads)
    model, bands = opened.blocks, bands_in_force(options.bands, opened.bands)
    orders = EvaluationOrders.make(
        bands,
        options.orders,
        options.keep,
        options.seed,
        arrangements=options.arrangements,
        kendall=options.kendall,
        freedom=opened.bands if options.freedom else None,
    )
    if like is not None:
        s = like.settings
        freedom = [step.bands for step in like.freedom or ()] == [each.to_json() for each in orders.freedom]
        if s["blocks"] != model.num_blocks or s["bands"] != bands.to_json() or not freedom:
            raise UsageError(
                f"{path} has {counted(model.num_blocks, 'block')} in the bands {opened.bands}, and {s['of']} has "
                f"{s['blocks']} in the bands {format_bands(s['bands'])}, so there is no mean over them; name the runs "
                "instead of their folder"
            )
    images = opened.images(images, options.limit)
    with StepProgress("evaluate") as progress:
        what = counted(len(orders.all_orders()), "order")
        batches = opened.batches(images, options.batch_size)
        result = evaluate(model, batches, orders, on_batch=lambda done: progress(done, len(images), what))
    settings = {
        **opened.settings(images, bands),
        "orders": options.orders,
        "keep": list(orders.keep),
        "limit": options.limit,
        "seed": options.seed,
        "batch_size": options.batch_size,
        "block_runs": blocks_to_run(orders.all_orders()),
    }
    return msgspec.structs.replace(result, skipped=len(opened.skipped), settings=settings)


def _print(result: Evaluation) -> None:
    s, a = result.settings, result.arbitrary
    click.echo(
        f"{result.name}: {printable(s['model'])}, {printable(s['method'])}, {counted(s['blocks'], 'block')}, "
        f"{counted(result.images, 'image')} of {s['data']}{bands_text(s['bands'])}"
    )
    table = PlainTable.of("blocks", ">trained order", ">random order", "")
    spread = (
        f"± {a.top1_std:.3f}, 5th percentile {a.top1_p5:.3f}, worst {a.top1_worst:.3f} of {counted(a.orders, 'order')}"
    )
    table.add_row("all", f"{result.sequential.top1:.3f}", f"{a.top1_mean:.3f}", spread)
    for keep, kept in result.kept.items():
        table.add_row(f"{keep} of {s['blocks']}", f"{kept.sequential:.3f}", f"{kept.arbitrary:.3f}", "")
    for item in result.arrangements or ():
        shape = f"{counted(item.tracks, 'track')} of {item.blocks}"
        table.add_row(shape, f"{item.trained:.3f}", f"{item.arbitrary:.3f}", f"± {item.arbitrary_std:.3f} over draws")
    for distance in result.kendall or ():
        table.add_row(f"tau {distance.tau:+.2f}", "", f"{distance.top1:.3f}", counted(distance.orders, "order"))
    for step in result.freedom or ():
        shown = f"± {step.top1_std:.3f}, worst {step.top1_worst:.3f} of {counted(step.orders, 'order')}, "
        shown += f"{step.allowed:,.0f} allowed{', its own bands' if step.own else ''}"
        table.add_row(f"within {format_bands(step.bands)}", "", f"{step.top1_mean:.3f}", shown)
    if result.position_accuracy is not None:
        table.add_row("own slot", "", f"{result.position_accuracy:.3f}", "named by the blocks themselves")
    print_table(table)
    for group in s["shared"]:
        click.echo(
            f"blocks {', '.join(map(str, group))} are steps of one block: their order makes no difference, and a "
            "step is skipped only where no peer has that block"
        )
    if result.models is not None:
        m = result.models
        click.echo(
            f"means over {counted(m.count, 'model')}; between them ± {m.sequential_std:.3f} in trained and "
            f"± {m.arbitrary_std:.3f} in random order",
            err=True,
        )
    if result.skipped:
        click.echo(f"images left out because they cannot be decoded: {result.skipped:,}", err=True)


def _print_comparison(found: list[Evaluation]) -> None:
    """Print a row for each evaluation, and a column for each number of blocks that any of them kept."""
    keeps = sorted({int(keep) for item in found for keep in item.kept})
    table = PlainTable.of("", ">trained order", ">random order", *(f">{keep} kept" for keep in keeps))
    for item in found:
        kept = [item.kept.get(str(keep)) for keep in keeps]
        a, cells = item.arbitrary, ["" if value is None else f"{value.arbitrary:.3f}" for value in kept]
        table.add_row(item.name, f"{item.sequential.top1:.3f}", f"{a.top1_mean:.3f} ± {a.top1_std:.3f}", *cells)
    print_table(table)
