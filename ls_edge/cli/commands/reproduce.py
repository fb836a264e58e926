"""``ls-edge reproduce``: train and evaluate a whole comparison, with a table and a figure."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.console import Console

from ls_edge.api.evaluation import evaluate
from ls_edge.api.training import other_setting
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.commands.train import train_with_bars
from ls_edge.cli.output import print_json, warn, write_json
from ls_edge.core.errors import DataError, UsageError, printable
from ls_edge.core.files import write_output
from ls_edge.core.text import counted
from ls_edge.data.datasets import ImageSet, is_timm_name, open_data
from ls_edge.device.hardware import cpu_name
from ls_edge.device.requirements import require, require_import
from ls_edge.evaluation.evaluate import Evaluation, aggregate
from ls_edge.evaluation.settings import Device
from ls_edge.report import reproduction
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.version import __version__

if TYPE_CHECKING:
    from ls_edge.training.reproduction import Plan, RowCost

CONFIGS, EVALUATION, RESULTS, TABLE = "configs", "eval.json", "results.json", "table"


@dataclass(frozen=True)
class Options:
    """Options of the command that apply to every row."""

    seeds: int
    epochs: int | None
    orders: int
    limit: int | None
    device: Device
    threads: int | None
    set: tuple[str, ...]
    """Changes of settings, ``NAME=VALUE``."""

    @property
    def overridden(self) -> dict[str, Any]:
        """Options that change the plan, or that determine its results besides it."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in (None, ())}


@dataclass(frozen=True)
class Training:
    """One training of a plan."""

    name: str
    data: str
    """Name of the data set in the plan."""
    seed: int
    config: Path
    """File that repeats it: ``ls-edge train --config FILE --out RUN``."""
    run: Path
    start: Path | None
    """Run that it starts from."""

    def settings(self, plan: Plan, options: Options) -> str:
        """Return the content of :attr:`config`."""
        start = None if self.start is None else str(self.start)
        flags = {"data": plan.data[self.data].source, "seed": self.seed, "init": start, "epochs": options.epochs}
        return plan.config_of(self.name, {**flags, "device": options.device, "threads": options.threads}, options.set)


@click.command(
    cls=Command,
    examples=(
        "ls-edge reproduce digits --out reproduced",
        "ls-edge reproduce digits --out quick --seeds 2 --epochs 1 --only shuffle --only sequential",
        "ls-edge reproduce paper --data imagenet=/path/to/imagenet --out reproduced",
        "ls-edge reproduce paper --dry-run --tflops 100",
        "ls-edge reproduce digits --out reproduced --list-jobs",
    ),
)
@click.argument("plan")
@options.output_folder("Folder of runs and results.")
@options.names(
    "--data", "Location of a data set of the plan; NAME is optional if the plan has only one.", "[NAME=]DATA"
)
@options.names("--only", "Row or data set to select; may be repeated.")
@options.count("--seeds", "Number of seeds for each row: 0, 1, ...", most=10_000, default=5)
@options.count("--epochs", "Epochs of each training instead of the plan's, for a trial.", most=10**9)
@options.SET
@options.count("--orders", "Random orders of all blocks.", most=100_000, default=64)
@options.count("--limit", "Images to evaluate on.")
@options.DEVICE
@options.threads("Torch threads on the CPU.")
@options.flag("--list-jobs", "Print the trainings as commands for a cluster, and train nothing.")
@options.flag("--dry-run", "Count the floating-point operations and train nothing.")
@options.number("--tflops", "Sustained TFLOP per second, to estimate hours with --dry-run.", "X", above=True)
@options.JSON
def command(
    plan: str,
    out: Path | None,
    data: tuple[str, ...],
    only: tuple[str, ...],
    list_jobs: bool,
    dry_run: bool,
    tflops: float | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train and evaluate a whole comparison, with a table and a figure.

    PLAN is digits, cifar10, paper, or a YAML file. Every row is trained and evaluated with every seed. Finished parts
    in DIR are kept, so the same command continues after a kill. DIR holds a run folder for each training,
    configs/NAME/seed-N.yaml to repeat it with 'ls-edge train --config FILE --out RUN', results.json, the table as
    table.md, table.tex and table.csv, and figure.svg (one for each data set). Every deviation is the sample deviation
    between seeds. All pairs of rows are compared by paired t-tests over the seeds, with Holm's correction.

    --list-jobs writes configs/ and prints one 'ls-edge train' command per line; commands after an empty line start from
    runs of those before it. When all runs are in DIR, the same command without --list-jobs writes the table.
    """
    from ls_edge.training.reproduction import find_plan, read_plan

    chosen = Options(**options)
    found = read_plan(find_plan(plan)).only(only)
    found = found.with_data(_named(data, found))
    require_import("reproduce", ("ls_edge.training.loop",), "train")
    if dry_run:
        _estimate(found, chosen, tflops, as_json=as_json)
        return
    if tflops is not None:
        raise UsageError("--tflops is for --dry-run; leave it out, or add --dry-run")
    if out is None:
        raise UsageError("there is no folder to write to; give --out DIR")
    _check(found)
    if list_jobs:
        _list_jobs(found, out, chosen)
        return
    results = _execute(found, out, chosen)
    _finish(found, out, chosen, results, as_json=as_json)


def _named(data: tuple[str, ...], plan: Plan) -> dict[str, str]:
    """Return the location of each named data set."""
    found = {}
    for text in data:
        name, _, source = text.rpartition("=")
        if not name and len(plan.data) > 1:
            raise UsageError(f"--data {source}: the plan has {', '.join(plan.data)}; write --data NAME=DATA")
        found[name or next(iter(plan.data))] = source
    return found


def _check(plan: Plan) -> None:
    """Find errors now that would otherwise end the command after hours."""
    from ls_edge.report.charts import check_figure

    require("reproduce", "report")
    for name, item in plan.data.items():
        if not item.source:
            raise UsageError(f"the plan needs the data set {name}: give --data {name}=DATA, or choose rows with --only")
        if drawn := sum(row.figure for row in plan.rows.values() if row.data == name):
            check_figure(drawn)


def _trainings(plan: Plan, out: Path, seeds: int) -> Iterator[Training]:
    """Yield the trainings of a plan, those without a start first."""
    from ls_edge.training.reproduction import START

    starts = {data: f"{START}-{data}" for data in plan.start}
    named = [*((name, data) for data, name in starts.items()), *((name, row.data) for name, row in plan.rows.items())]
    for seed, (name, data) in itertools.product(range(seeds), named):
        start = out / starts[data] / f"seed-{seed}" if name in plan.rows and data in starts else None
        file = out / CONFIGS / name / f"seed-{seed}.yaml"
        yield Training(name, data, seed, file, out / name / f"seed-{seed}", start)


def _list_jobs(plan: Plan, out: Path, options: Options) -> None:
    """Print the command of each training that :func:`_execute` would run."""
    starts: list[str] = []
    others: list[str] = []
    for job in _trainings(plan, out, options.seeds):
        write_output(job.config, job.settings(plan, options))
        words = ["ls-edge", "train", "--config", job.config, "--out", job.run]
        (others if job.name in plan.rows else starts).append(shlex.join(map(str, words)))
    click.echo("\n".join([*starts, *([""] if starts else []), *others]))


def _execute(plan: Plan, out: Path, options: Options) -> dict[str, list[Evaluation]]:
    """Run the missing trainings and evaluations; return the evaluations of every row, one per seed."""
    console = open_console(stderr=True)
    images = {name: open_data(item.source, "eval") for name, item in plan.data.items()}
    results: dict[str, list[Evaluation]] = {name: [] for name in plan.rows}
    for job in _trainings(plan, out, options.seeds):
        console.print(f"{job.name}, seed {job.seed} of 0 to {options.seeds - 1}")
        _train(job, job.settings(plan, options), console)
        if job.name in results:
            results[job.name].append(_evaluate(job.run, images[job.data], plan, options))
    return results


def _train(job: Training, text: str, console: Console) -> None:
    """Train or continue one run, unless it is finished; its settings must match the plan."""
    from ls_edge.training.config import read_config

    there = (job.run / "config.yaml").is_file()
    with tempfile.TemporaryDirectory() as folder:  # the file of a finished run stays as it is
        path = Path(folder) / job.config.name if there else job.config
        write_output(path, text)
        settings, named = read_config(path, {})
    if there:
        other = other_setting(job.run, settings, named - {"device", "threads"})
        if other:
            raise UsageError(
                f"{job.run} was trained with other settings: {other}; give another --out, or remove that folder"
            )
        named = frozenset()
    else:
        (job.run / EVALUATION).unlink(missing_ok=True)
    train_with_bars(job.run, settings, named, console, resume=there, overwrite=not there)


def _evaluate(run: Path, images: ImageSet, plan: Plan, options: Options) -> Evaluation:
    """Evaluate a run, or read the result of an earlier evaluation in the same orders on the same images."""
    from ls_edge.training.runs.checkpoint import read_record

    blocks = len(read_record(run)[1].kept)
    keep = None if plan.keep is None else tuple(sorted({count for count in plan.keep if count <= blocks}))
    asked: dict[str, Any] = {"orders": options.orders, "limit": options.limit, "data": printable(images.source)}
    asked |= {} if keep is None else {"keep": list(keep)}
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        found = msgspec.json.decode((run / EVALUATION).read_bytes(), type=Evaluation)
        if all(found.settings.get(name) == value for name, value in asked.items()):
            return found
    with StepProgress("evaluate") as progress:
        result = evaluate(
            run,
            images,
            orders=options.orders,
            keep=keep,
            limit=options.limit,
            device=options.device,
            threads=options.threads,
            on_progress=progress,
            on_warning=warn,
        )
    write_json(run / EVALUATION, result)
    return result


def _finish(plan: Plan, out: Path, options: Options, results: dict[str, list[Evaluation]], *, as_json: bool) -> None:
    """Write the results, the tables and the figures, and print the tables."""
    from ls_edge.report.charts import accuracy_figure, write_svg

    rows = {name: _average(name, found) for name, found in results.items()}
    costs = {cost.name: cost for cost in _costs(plan, options)}
    trained = [
        reproduction.Trained(name, plan.rows[name].data, found, costs[name].flops / 1e12, _hours(out / name, options))
        for name, found in results.items()
    ]
    document: dict[str, Any] = {
        "title": plan.title,
        "seeds": options.seeds,
        "epochs": options.epochs,
        "data": {name: item.source for name, item in plan.data.items()},
        "rows": [{"row": name, "data": plan.rows[name].data, "evaluation": found} for name, found in rows.items()],
        "quantities": {one.row: reproduction.quantities_of(one) for one in trained},
        "cost": {one.row: {"tflop_per_seed": one.tflop, "hours_per_seed": one.hours} for one in trained},
        "comparisons": reproduction.comparisons(trained),
        "overridden": options.overridden,
        "made_with": _made_with(),
    }
    about = [
        f"{plan.title}; mean ± sample deviation between {counted(options.seeds, 'seed')}",
        "; ".join(f"{name} {value}" for name, value in document["made_with"].items()),
        "options: " + "; ".join(f"{name} {value}" for name, value in options.overridden.items()),
    ]
    try:
        write_json(out / RESULTS, document)
        reproduction.write_tables(out / TABLE, about, trained, document["comparisons"])
        for data in plan.data:
            if drawn := [rows[name] for name, row in plan.rows.items() if row.data == data and row.figure]:
                path = out / ("figure.svg" if len(plan.data) == 1 else f"figure-{data}.svg")
                write_svg(path, accuracy_figure(drawn))
    finally:
        if as_json:
            print_json(document)
        else:
            for headings, lines in reproduction.tables(trained, document["comparisons"]):
                print_table(PlainTable.of(*headings[:2], *(f">{heading}" for heading in headings[2:]), rows=lines))
    if not as_json:
        click.echo(f"{printable(out)}: {RESULTS}, {TABLE}.md, {TABLE}.tex, {TABLE}.csv, and the figure")


def _hours(row: Path, options: Options) -> float:
    """Return the mean time that a seed of a row was trained."""
    from ls_edge.training.runs.checkpoint import METRICS

    files = [row / f"seed-{seed}" / METRICS for seed in range(options.seeds)]
    lines = [msgspec.json.decode(line) for file in files for line in file.read_bytes().splitlines()]
    return sum(float(line["seconds"]) for line in lines) / options.seeds / 3600


def _made_with() -> dict[str, str]:
    """Return the versions and the machine that made the results."""
    import timm
    import torch

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    return {"ls-edge": __version__, "torch": str(torch.__version__), "timm": timm.__version__, "machine": machine}


def _average(name: str, found: list[Evaluation]) -> Evaluation:
    """Return the mean over the seeds of a row."""
    ones = [
        msgspec.structs.replace(one, settings={**one.settings, "of": f"{name}/seed-{seed}"})
        for seed, one in enumerate(found)
    ]
    return msgspec.structs.replace(aggregate(ones), name=name, settings={**ones[0].settings, "of": name})


def _estimate(plan: Plan, options: Options, tflops: float | None, *, as_json: bool) -> None:
    """Print the operations of every training and evaluation."""
    costs = _costs(plan, options)
    total = options.seeds * sum(cost.flops for cost in costs)
    hours = None if tflops is None else total / (tflops * 1e12) / 3600
    if as_json:
        document = {"title": plan.title, "seeds": options.seeds, "rows": costs, "total_flops": total, "hours": hours}
        print_json(document)
        return
    columns = ("one seed of", ">training images", ">training TFLOP", ">evaluation TFLOP")
    table = PlainTable.of(*columns, title=plan.title)
    for cost in costs:
        flops = (f"{count / 1e12:,.1f}" for count in (cost.training_flops, cost.evaluation_flops))
        table.add_row(cost.name, f"{cost.trained_images:,}", *flops)
    print_table(table)
    at = f", {hours:,.1f} hours at {tflops:g} TFLOP/s sustained" if hours is not None else ""
    click.echo(
        f"{counted(options.seeds, 'seed')}: {total / 1e12:,.1f} TFLOP{at}; counted from the models without running them"
    )


def _costs(plan: Plan, options: Options) -> list[RowCost]:
    """Count the operations of one seed of every training and evaluation from the models."""
    from ls_edge.training.config import read_config
    from ls_edge.training.reproduction import cost_of

    costs: list[RowCost] = []
    sizes = {name: _sizes(plan, name) for name in plan.data}
    with tempfile.TemporaryDirectory() as folder:
        for job in _trainings(plan, Path(folder), seeds=1):
            write_output(job.config, job.settings(plan, options))
            config, _ = read_config(job.config, {})
            train, test, classes = sizes[job.data]
            test = 0 if job.name not in plan.rows else test if options.limit is None else options.limit
            size = {"images": train, "test_images": test, "classes": classes}
            costs.append(cost_of(job.name, config, **size, keep=plan.keep, orders=options.orders))
    return costs


def _sizes(plan: Plan, name: str) -> tuple[int, int, int]:
    """Return the numbers of training images, test images and classes: from the data if present, else from the plan."""
    item = plan.data[name]
    known = (item.images, item.test_images, item.classes)
    if item.source and not (is_timm_name(item.source) and None not in known):
        train, test = open_data(item.source, "train"), open_data(item.source, "eval")
        return len(train), len(test), len(train.classes)
    if item.images is None or item.test_images is None or item.classes is None:
        raise DataError(f"the size of the data set {name} is unknown; give --data {name}=DATA, or add it to the plan")
    return item.images, item.test_images, item.classes
