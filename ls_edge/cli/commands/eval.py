"""``ls-edge eval``: accuracy of a run or a bundle in trained order, in random orders, and with blocks missing.

A bundle is evaluated by the engines of this machine and needs no torch; a run needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ls_edge.api.evaluation import EvaluationResult, evaluate
from ls_edge.api.models import is_bundle, model_folders
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import note_account, print_json, warn
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import printable
from ls_edge.core.text import distinct_names
from ls_edge.data.datasets import open_data, require_labels
from ls_edge.evaluation.evaluate import Evaluations
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.settings import EvaluationSettings
from ls_edge.report.evaluation import evaluation_remarks, print_evaluation, print_evaluations
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console


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
@options.output(
    "--figure",
    "SVG of accuracy by order and blocks kept, or by allowed orders with --freedom.",
    draws=True,
    ours=options.SVG,
)
@options.settings(EvaluationSettings)
@options.JSON
def command(run_or_bundle: tuple[Path, ...], data: str, figure: Path | None, as_json: bool, **settings: Any) -> None:
    """Measure accuracy in trained order, in random orders, and with blocks missing.

    Reports mean, sample standard deviation, 5th percentile, and worst accuracy over random orders, and the accuracy of
    random subsets of the blocks in trained and in random order (means over eight draws). Blocks are reordered within
    the bands of the model.

    A folder of runs, such as one made by 'train --seeds', is evaluated as one: means over its models,
    standard deviation over models and orders. Several RUN_OR_BUNDLE are evaluated in turn and compared in one table.
    """
    members = [model_folders(given) for given in run_or_bundle]
    names = [printable(name) for name in distinct_names(run_or_bundle)]
    images = open_data(data, "eval")
    for path in (path for paths in members for path in paths if is_bundle(path)):
        bundle = Bundle.open(path)  # finds faults of the last one before the first one has run for an hour
        EvaluationOrders(EvaluationSettings.of(settings), bundle.bands)
        require_labels(images, bundle.manifest.classes)
    console = open_console()
    found: list[EvaluationResult] = []
    for given, name in zip(run_or_bundle, names, strict=True):
        with StepProgress("evaluate") as progress:
            result = evaluate(given, images, **settings, on_progress=progress, on_warning=warn)
        if not found:
            note_account(result.settings["account"])
        found.append(msgspec.structs.replace(result, name=name))
        if not as_json:
            if len(found) > 1:
                console.print()
            print_evaluation(found[-1], console)
            for remark in evaluation_remarks(found[-1]):
                click.echo(remark, err=True)
    if as_json:
        print_json(found[0] if len(found) == 1 else Evaluations(found))
    elif len(found) > 1:
        console.print()
        print_evaluations(found, console)
    if figure is not None:
        from ls_edge.report.charts import accuracy_figure, freedom_figure, write_svg

        write_svg(figure, freedom_figure(found) if settings["freedom"] else accuracy_figure(found))
