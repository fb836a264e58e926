"""``ls-edge report``: compare runs, plans, simulations, profiles, benchmarks and evaluations."""

from __future__ import annotations

from pathlib import Path

import click

from ls_edge.api.comparison import SideBySide, evaluations_with_freedom, side_by_side
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.text import show, show_ms, show_percent
from ls_edge.report.terminal import PlainTable, print_table

_COLUMNS = ("", "what", ">accuracy", ">latency", ">images / s", ">energy", "of")
_PAIR_COLUMNS = ("plan", "run", "value", ">planned", ">measured", ">ratio")
_ALONE_COLUMNS = ("run", "alone", "value", ">fleet", ">alone", ">ratio")


@click.command(
    cls=Command,
    examples=(
        "ls-edge report run-a.json run-b.json",
        "ls-edge report plan.json run.json orin-0.json --out compared.html",
        "ls-edge report start.json shuffle.json anyorder.json --freedom freedom.svg",
    ),
)
@click.argument("files", nargs=-1, required=True, type=options.FILE, metavar="FILE.json...")
@options.output("--out", "HTML file to write (extra report).", draws=True, ours=options.HTML)
@options.output(
    "--freedom",
    "SVG to write: accuracy by allowed orders, from 'eval --freedom' (extra report).",
    draws=True,
    ours=options.SVG,
)
@options.JSON
def command(files: tuple[Path, ...], out: Path | None, freedom: Path | None, as_json: bool) -> None:
    """Compare runs, plans, and profiles.

    Compares accuracy, latency, throughput, and energy in the JSON of 'run', 'plan', 'simulate', 'bench', and 'eval',
    and in files of 'profile'. If a plan and a run have the same bundle and placement, planned and measured values are
    paired.
    """
    found = side_by_side(files)
    if freedom is not None:
        from ls_edge.report.charts import freedom_figure, write_svg

        write_svg(freedom, freedom_figure(evaluations_with_freedom(files)))
    if out is not None:
        from ls_edge.report.html import write_side_by_side

        reasons = [(one.document, one.run, one.reason) for one in found.not_compared]
        write_side_by_side(out, rows_text(found), pairs_text(found), reasons, alone_text(found))
    if as_json:
        print_json(found)
        return
    pairs, alone = pairs_text(found), alone_text(found)
    for headings, rows in ((_COLUMNS, rows_text(found)), (_PAIR_COLUMNS, pairs), (_ALONE_COLUMNS, alone)):
        if rows:
            print_table(PlainTable.of(*headings, rows=rows))
    for one in found.not_compared:
        click.echo(f"{one.document} and {one.run} are not compared: {one.reason}")
    for path in (out, freedom):
        if path is not None:
            click.echo(f"written to {path}")


def rows_text(found: SideBySide) -> list[tuple[str, ...]]:
    """Return the cells of each document's row."""
    cells: list[tuple[str, ...]] = []
    for row in found.rows:
        numbers = (
            show_percent(row.accuracy),
            show_ms(row.latency_ms),
            show(row.throughput),
            show(row.energy_mj, " mJ"),
        )
        cells.append((row.name, row.kind, *numbers, row.about))
    return cells


def pairs_text(found: SideBySide) -> list[tuple[str, ...]]:
    """Return the cells of each pair of a planned and a measured value."""
    return [
        (pair.plan, pair.run, *_pair_text(pair.figure, pair.planned, pair.measured, pair.ratio))
        for pair in found.planned_against_measured
    ]


def alone_text(found: SideBySide) -> list[tuple[str, ...]]:
    """Return the cells of each pair of a run through a fleet and one device alone."""
    return [
        (pair.run, pair.alone, *_pair_text(pair.figure, pair.fleet, pair.one, pair.ratio))
        for pair in found.fleet_against_alone
    ]


def _pair_text(figure: str, one: float, other: float, ratio: float) -> tuple[str, ...]:
    shown, name = (show_ms, "latency") if figure == "latency_ms" else (show, "images / s")
    return name, shown(one), shown(other), f"{ratio:.2f}"
