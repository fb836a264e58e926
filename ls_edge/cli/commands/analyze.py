"""``ls-edge analyze``: the contribution of each block, and its dependence on position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ls_edge.analysis import KINDS, NOT_ASKED
from ls_edge.analysis.overview import print_analysis
from ls_edge.analysis.plan import AnalysisSettings
from ls_edge.api.analysis import analyze
from ls_edge.api.models import model_folders
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import note_account, print_json, warn
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.files import local_folder
from ls_edge.data.datasets import open_data
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import open_console


def _listed(needs_run: bool) -> str:
    """Return a line for each kind that needs a run, or for each of the others."""
    return "\n".join(f"{name:17}{kind.summary}" for name, kind in KINDS.items() if kind.needs_run == needs_run)


_HELP = f"""Show what each block contributes, and how that depends on its position.

Blocks are reordered within the bands of the model. The kinds for --what:

\b
{_listed(needs_run=False)}

These kinds need a run. Kinds that the model lacks are left out, with the reason:

\b
{_listed(needs_run=True)}

probe and umap need the extra analyze.
"""


@click.command(
    cls=Command,
    help=_HELP,
    examples=(
        "ls-edge analyze run --data digits",
        "ls-edge analyze bundle --data val --what importance,agreement --json",
        "ls-edge analyze run --data val --limit 500 --report analysis.html",
        "ls-edge analyze shuffled start --data val --report both.html",
    ),
)
@click.argument("models", type=options.FILE, nargs=-1, required=True, metavar="RUN_OR_BUNDLE...")
@options.DATA
@options.settings(AnalysisSettings)
@options.JSON
@options.REPORT
def command(
    models: tuple[Path, ...],
    data: str,
    report: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Analyze one model, or or two next to each other."""
    if len(models) > 2:
        raise UsageError(f"{len(models)} models; name one, or two to show next to each other")
    for folder in models:
        if (runs := model_folders(folder)) != [local_folder(folder)]:
            raise UsageError(f"{folder} is a folder of runs; name one of them, such as {runs[0]}")
    images = open_data(data, "eval")
    with StepProgress("analyze") as progress:
        analyses = [analyze(folder, images, **settings, on_progress=progress, on_warning=warn) for folder in models]
    note_account(analyses[0].settings["account"])
    if as_json:
        print_json(analyses[0] if len(models) == 1 else {"analyses": analyses})
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
        from ls_edge.analysis.page import write_analysis

        write_analysis(report, analyses)
