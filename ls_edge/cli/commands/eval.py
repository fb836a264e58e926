"""``ls-edge eval``: accuracy of a run or a bundle in trained order, in any order and with blocks missing.

A bundle is evaluated by the engines of this machine and needs no torch; a run needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.block_models import bands_in_force, labelled_images, model_folders, open_model
from ls_edge.cli.command import Command
from ls_edge.core.bundle import Bundle, shared_groups
from ls_edge.core.errors import DataError, UsageError, printable
from ls_edge.core.files import check_writable
from ls_edge.core.text import format_bands
from ls_edge.data.datasets import ImageRef, ImageSet, open_data, require_labels
from ls_edge.data.preprocess import Preprocessor, iterate_batches
from ls_edge.device.requirements import require_report
from ls_edge.evaluation.evaluate import Evaluation, aggregate, evaluate
from ls_edge.evaluation.measure import blocks_to_run
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.report.formatting import bands_text, counted, distinct_names
from ls_edge.report.terminal import PlainTable, open_console, print_table


@dataclass(frozen=True)
class EvalOptions:
    """The options of the command that every run or bundle is evaluated with."""

    orders: int
    keep: tuple[int, ...] | None
    arrangements: bool
    kendall: bool
    limit: int | None
    seed: int
    batch_size: int
    device: Literal["auto", "cpu", "cuda"]
    precision: Literal["fp32", "bf16", "fp16"]
    threads: int | None
    freedom: bool = False
    bands: str | None = None
    """Other bands than the model's own."""


def _counts(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    try:
        return None if value is None else tuple(int(item) for item in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of numbers such as 3,6,9") from None


@click.command(
    cls=Command,
    examples=(
        "ls-edge eval run --data digits",
        "ls-edge eval bundle --data val --orders 16 --keep 3,6,9 --json",
        "ls-edge eval run-a run-b --data val --figure orders.svg",
    ),
)
@click.argument("run_or_bundle", type=options.FILE, nargs=-1, required=True)
@options.DATA
@options.count("--orders", "Random orders of all blocks.", most=100_000, default=64, show_default=True)
@options.bands("the model's own")
@click.option("--keep", callback=_counts, metavar="N,N", help="Numbers of blocks to keep.  [default: quarters]")
@click.option("--arrangements", is_flag=True, help="Also blocks in parallel, in waves of tracks.")
@click.option("--kendall", is_flag=True, help="Also orders at graded distances from the trained one.")
@click.option("--freedom", is_flag=True, help="Also within bands, from a fixed order to full freedom.")
@options.path("--figure", "SVG of accuracy by order and blocks kept, or by allowed orders with --freedom.")
@options.LIMIT
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, metavar="N", help="Seed of orders and subsets."
)
@options.batch_size(100)
@options.DEVICE
@options.PRECISION
@options.threads("Threads of the engines or of torch.  [default: their own]")
@options.JSON
def command(run_or_bundle: tuple[Path, ...], data: str, figure: Path | None, as_json: bool, **options: Any) -> None:
    """Measure accuracy in trained order, in random orders, and with blocks missing.

    Reports the mean, deviation, 5th percentile, and worst of the random orders. Subsets of blocks run in trained and
    in random order (means over eight draws). Blocks are reordered within the bands of the model.

    A folder of runs, such as one made by 'train --seeds', is evaluated as one: means over its models, deviation over
    models and orders. Several RUN_OR_BUNDLE are evaluated in turn and compared in one table.
    """
    members = [model_folders(given) for given in run_or_bundle]

    if figure is not None:
        require_report("--figure")
        from ls_edge.report.charts import check_figure

        check_figure(len(run_or_bundle))
        check_writable(figure)
    chosen = EvalOptions(**options)
    names = [printable(name) for name in distinct_names(run_or_bundle)]
    images = open_data(data, "eval")
    for path in (path for paths in members for path in paths if (path / "manifest.json").is_file()):
        _check_bundle(path, images, chosen)  # a fault of the last one is not found after an hour
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
        document = found[0] if len(found) == 1 else {"evaluations": found}
        click.echo(msgspec.json.format(msgspec.json.encode(document), indent=1).decode())
    elif len(found) > 1:
        click.echo()
        _print_comparison(found)
    if figure is not None:
        from ls_edge.report.charts import write_figure, write_freedom_figure

        draw = write_freedom_figure if options["freedom"] else write_figure
        draw(figure, found)


def _check_bundle(path: Path, images: ImageSet, options: EvalOptions) -> None:

    bundle = Bundle.open(path)
    EvaluationOrders.make(bands_in_force(options.bands, bundle.bands), options.orders, options.keep)
    require_labels(images, bundle.manifest.classes)


def evaluate_one(path: Path, images: ImageSet, options: EvalOptions, *, like: Evaluation | None) -> Evaluation:
    """Evaluate one run or bundle; ``like`` is an evaluation that it will be averaged with."""
    console = open_console(stderr=True)
    opened = open_model(path, device=options.device, precision=options.precision, threads=options.threads)
    model = opened.blocks
    if like is not None and like.settings["blocks"] != model.num_blocks:
        raise UsageError(
            f"{path} has {counted(model.num_blocks, 'block')} and {like.settings['of']} has {like.settings['blocks']}, "
            "so there are no means over them; name the runs themselves instead of their folder"
        )
    data = printable(images.source)
    bands = bands_in_force(options.bands, opened.bands)
    if like is not None and like.settings["bands"] != bands.to_json():
        raise UsageError(
            f"{path} has the bands {bands} and {like.settings['of']} others, so there are no means over them; name the "
            "runs themselves instead of their folder, or give --bands"
        )
    orders = EvaluationOrders.make(
        bands, options.orders, options.keep, options.seed, arrangements=options.arrangements,
        kendall=options.kendall, freedom=opened.bands if options.freedom else None,
    )  # fmt: skip
    if like is not None and [step.bands for step in like.freedom or ()] != [b.to_json() for b in orders.freedom]:
        raise UsageError(
            f"{path} has the bands {opened.bands} and {like.settings['of']} others, so there are no means over them; "
            "name the runs themselves instead of their folder"
        )
    images = labelled_images(images, opened, options.limit, console)
    skipped: list[str] = []

    def on_skip(image: ImageRef, error: DataError) -> None:
        skipped.append(image.name)
        console.print(Text.assemble(("left out: ", "yellow"), str(error)))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"evaluate {counted(len(orders.all_orders()), 'order')}", total=len(images))
        result = evaluate(
            model, iterate_batches(images, Preprocessor(opened.image), options.batch_size, on_skip), orders,
            on_batch=lambda done: progress.update(task, completed=done),
        )  # fmt: skip
    settings = {
        "of": printable(path), "data": data, "part": images.part, "model": opened.model,
        "method": opened.method, "engine": opened.engine, "blocks": model.num_blocks, "bands": bands.to_json(),
        "shared": shared_groups(opened.owners), "orders": options.orders, "keep": list(orders.keep),
        "limit": options.limit, "seed": options.seed, "batch_size": options.batch_size,
        "block_runs": blocks_to_run(orders.all_orders()),
    }  # fmt: skip
    return msgspec.structs.replace(result, skipped=len(skipped), settings=settings)


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
            "step is left out only where nobody has that block"
        )
    if result.models is not None:
        m = result.models
        click.echo(
            f"means over {counted(m.count, 'model')}; between them ± {m.sequential_std:.3f} in trained and "
            f"± {m.arbitrary_std:.3f} in random order", err=True,
        )  # fmt: skip
    if result.skipped:
        was = "was" if result.skipped == 1 else "were"
        click.echo(f"{counted(result.skipped, 'image')} could not be decoded and {was} left out", err=True)


def _print_comparison(found: list[Evaluation]) -> None:
    """A row for each of several evaluations, and a column for each number of blocks that any of them kept."""
    keeps = sorted({int(keep) for item in found for keep in item.kept})
    table = PlainTable.of("", ">trained order", ">random order", *(f">{keep} kept" for keep in keeps))
    for item in found:
        kept = [item.kept.get(str(keep)) for keep in keeps]
        table.add_row(
            item.name, f"{item.sequential.top1:.3f}", f"{item.arbitrary.top1_mean:.3f} ± {item.arbitrary.top1_std:.3f}",
            *("" if value is None else f"{value.arbitrary:.3f}" for value in kept),
        )  # fmt: skip
    print_table(table)
