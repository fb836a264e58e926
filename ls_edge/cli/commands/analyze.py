"""``ls-edge analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ls_edge.api.analysis import analyze, analyze_trace
from ls_edge.api.models import model_folders
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json, warn
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.files import local_folder
from ls_edge.data.datasets import ImageSet, open_data
from ls_edge.evaluation.analysis import NOT_ASKED, parse_kinds
from ls_edge.evaluation.analysis.trace import is_trace
from ls_edge.report.analysis import print_analysis, print_trace_analysis
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console


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
@options.text("--what", "Kinds of analysis, listed above.  [default: all that apply]", "A,B")
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

    Blocks are reordered within the bands of the model. The kinds for --what:

    \b
    importance       loss and accuracy without a block, and with it moved
    contribution     norm of what a block adds, relative to its input, by slot
    similarity       of tokens after each step (CKA), and of what blocks add
    agreement        share of answers that stay the same in random order
    slots            accuracy by block and slot
    norms            norm of what a block adds, by slot
    probe            accuracy of reading the slot from a block's output
    umap             maps of outputs, by slot and block
    pairs            blocks that commute, next to order costs

    These kinds need a run. Kinds that the model lacks are left out, with the reason:

    \b
    parts            accuracy without norms, attention, MLP, or residual path
    attention        distance and entropy of attention, by head
    rollout          patches that reach the answer through all blocks
    class_attention  patches that the class token attends to (CaiT)
    saliency         pixels on which the answer depends
    positions        similarity of position embeddings
    filters          principal components of the patch embedding
    layer_scale      magnitude of LayerScale
    mixing           weights by which MLP models mix tokens
    excite           images that raise a channel of a block
    inversion        images made from a block's output

    probe and umap need the extra analyze.

    With a trace of 'run --trace' instead of a model: the orders and subsets that occurred, accuracy by order and by
    skipped block, and images whose answer depends on them.
    """  # noqa: D301 - click keeps the lines of a paragraph after this character
    if is_trace(run_or_bundle):
        if against is not None or what is not None:
            raise UsageError(f"{run_or_bundle} is a trace, which has neither --against nor --what; leave them out")
        _analyze_trace(run_or_bundle, open_data(data, "eval"), report, as_json=as_json)
        return
    folders = [run_or_bundle, *([] if against is None else [against])]
    for folder in folders:
        if (runs := model_folders(folder)) != [local_folder(folder)]:
            raise UsageError(f"{folder} is a folder of runs; name one of them, such as {runs[0]}")
    images = open_data(data, "eval")
    kinds = parse_kinds(what)
    with StepProgress("analyze") as progress:
        analyses = [
            analyze(folder, images, what=kinds, **options, on_progress=progress, on_warning=warn) for folder in folders
        ]
    if as_json:
        print_json(analyses[0] if against is None else {"analyses": analyses})
    else:
        console = open_console()
        for place, found in enumerate(analyses):
            if place:
                console.print()
            print_analysis(found, console)
            for kind, why in found.reasons.items():
                if why != NOT_ASKED:
                    click.echo(f"{kind}: none, {printable(why)}", err=True)
    if report is not None:
        from ls_edge.report.html import write_analysis

        write_analysis(report, analyses)


def _analyze_trace(path: Path, images: ImageSet, report: Path | None, *, as_json: bool) -> None:
    """Analyze a trace; the images give names of classes and pictures."""
    with StepProgress("analyze") as progress:
        found, classes = analyze_trace(path, images, on_progress=progress)
    if as_json:
        print_json(found)
    else:
        print_trace_analysis(found, open_console())
    if report is not None:
        from ls_edge.report.html import write_trace_analysis

        write_trace_analysis(report, found, images.images, classes)
