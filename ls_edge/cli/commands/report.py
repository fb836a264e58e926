"""``ls-edge report``: compare runs."""

from __future__ import annotations

from pathlib import Path

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.core.errors import DataError
from ls_edge.core.text import distinct_names
from ls_edge.core.validation import InvalidDocument, read_json
from ls_edge.evaluation.run_summary import RunSummary
from ls_edge.report.tables import comparison_table
from ls_edge.report.terminal import print_table


@click.command(cls=Command, examples=("ls-edge report nearest.json random.json --out compared.html",))
@click.argument("files", nargs=-1, required=True, type=options.FILE, metavar="RUN.json...")
@options.output("--out", "HTML file to write (extra report).", draws=True, ours=options.HTML)
def command(files: tuple[Path, ...], out: Path | None) -> None:
    """Compare runs, from the JSON of 'run --json'.

    Shows accuracy, answers, latency and throughput of each.
    """
    runs = [(name, read_run(path)) for name, path in zip(distinct_names(files), files, strict=True)]
    print_table(comparison_table(runs))
    if out is not None:
        from ls_edge.report.html import write_comparison

        write_comparison(out, [(name, summary, (), ()) for name, summary in runs])
        click.echo(f"written to {out}")


def read_run(path: Path) -> RunSummary:
    """Read a document of ``run --json``; raise :class:`DataError` for any other file."""
    try:
        return read_json(path, RunSummary)
    except InvalidDocument as error:
        raise DataError(f"{path} is not a run{error}; give the output of run --json") from None
