"""``ls-edge report``: runs, plans, simulations, profiles, benchmarks and evaluations side by side."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.core.files import check_writable
from ls_edge.device.requirements import require_report
from ls_edge.report.formatting import NOTHING, show, show_ms, show_percent
from ls_edge.report.side_by_side import SideBySide, evaluations_with_freedom, side_by_side
from ls_edge.report.terminal import PlainTable, open_console, print_table

_COLUMNS = ("", "what", ">accuracy", ">latency", ">images / s", ">energy", "of")
_PAIR_COLUMNS = ("plan", "run", "figure", ">planned", ">measured", ">ratio")


@click.command(
    cls=Command,
    examples=(
        "ls-edge report run-a.json run-b.json",
        "ls-edge report plan.json run.json orin-0.json --out compared.html",
        "ls-edge report start.json shuffle.json anyorder.json --freedom freedom.svg",
    ),
)
@click.argument("files", nargs=-1, required=True, type=options.FILE, metavar="FILE.json...")
@options.path("--out", "HTML file to write (extra report).")
@options.path("--freedom", "SVG to write: accuracy by allowed orders, from 'eval --freedom' (extra report).")
@options.JSON
def command(files: tuple[Path, ...], out: Path | None, freedom: Path | None, as_json: bool) -> None:
    """Compare runs, plans, and profiles.

    Compares accuracy, latency, throughput, and energy in the JSON of 'run', 'plan', 'simulate', 'bench', and 'eval',
    and in files of 'profile'. If a plan and a run have the same bundle, planned and measured values are paired.
    """
    if out is not None:
        require_report("--out")
        check_writable(out)
    if freedom is not None:
        require_report("--freedom")
        check_writable(freedom)
    found = side_by_side(files)
    if freedom is not None:
        from ls_edge.report.charts import write_freedom_figure

        write_freedom_figure(freedom, evaluations_with_freedom(files))
    if out is not None:
        from ls_edge.report.html import write_side_by_side

        write_side_by_side(out, rows_text(found), pairs_text(found))
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        _print(found)
        for path in (out, freedom):
            if path is not None:
                click.echo(f"written to {path}")


def rows_text(found: SideBySide) -> list[tuple[str, ...]]:
    """The cells of each document's row."""
    return [
        (row.name, row.kind, show_percent(row.accuracy), show_ms(row.latency_ms), show(row.throughput),
         NOTHING if row.energy_mj is None else f"{show(row.energy_mj)} mJ", row.about)
        for row in found.rows
    ]  # fmt: skip


def pairs_text(found: SideBySide) -> list[tuple[str, ...]]:
    """The cells of each pair of a planned and a measured figure."""
    cells: list[tuple[str, ...]] = []
    for pair in found.planned_against_measured:
        shown = show_ms if pair.figure == "latency_ms" else show
        figure = "latency" if pair.figure == "latency_ms" else "images / s"
        cells.append((pair.plan, pair.run, figure, shown(pair.planned), shown(pair.measured), f"{pair.ratio:.2f}"))
    return cells


def _print(found: SideBySide) -> None:

    console = open_console()
    for headings, rows in ((_COLUMNS, rows_text(found)), (_PAIR_COLUMNS, pairs_text(found))):
        if rows:
            table = PlainTable.of(*headings)
            for row in rows:
                table.add_row(*row)
            print_table(table, console)
