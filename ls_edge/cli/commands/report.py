"""``ls-edge report``: compare runs, plans, simulations, profiles, benchmarks and evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from ls_edge.api.comparison import ComparedDocument, Comparison, SideBySide, evaluations_with_freedom, side_by_side
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.text import show, show_ms, show_percent
from ls_edge.report.terminal import PlainTable, print_table

_QUANTITIES: dict[str, tuple[str, str, int, Callable[[float], str]]] = {
    "accuracy": ("accuracy", "Highest", -1, show_percent),
    "latency_ms": ("latency", "Lowest", 1, show_ms),
    "throughput": ("images per second", "Most", -1, show),
    "energy_mj": ("energy per image", "Least", 1, lambda value: show(value, " mJ")),
}
"""Name, word for the best, direction of a sort by it, and text of each quantity."""
_NAMES = {"latency_ms": "latency", "throughput": "throughput"}
_COLUMNS = ("", "what", ">accuracy", ">latency", ">images / s", ">energy", "of")
_PAIR_COLUMNS = ("run", "plan", "value", ">measured", ">planned", ">ratio")
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
    free = [] if freedom is None else evaluations_with_freedom(files)
    pairs, alone = ([*map(_cells, each)] for each in (found.planned_against_measured, found.fleet_against_alone))
    try:
        if freedom is not None:
            from ls_edge.report.charts import freedom_figure, write_svg

            write_svg(freedom, freedom_figure(free))
        if out is not None:
            from ls_edge.report.html import write_side_by_side

            reasons = [(one.document, one.run, one.reason) for one in found.not_compared]
            tables = rows_text(found), pairs, reasons, alone
            write_side_by_side(out, *tables, answer=answer_text(found), values=_values(found))
    finally:
        if as_json:
            print_json(found)
        else:
            click.echo(answer_text(found))
            for headings, rows in ((_COLUMNS, rows_text(found)), (_PAIR_COLUMNS, pairs), (_ALONE_COLUMNS, alone)):
                if rows:
                    print_table(PlainTable.of(*headings, rows=rows))
            for one in found.not_compared:
                click.echo(f"{one.document} and {one.run} are not compared: {one.reason}")
    for path in (out, freedom):
        if path is not None and not as_json:
            click.echo(f"written to {path}")


def answer_text(found: SideBySide) -> str:
    """Summarize the documents in a sentence for each pair, or for each quantity that can be compared."""
    sentences = [
        f"{pair.run} has {pair.ratio:.2f} times the {_NAMES[pair.figure]} of {pair.other}, one device."
        for pair in found.fleet_against_alone
    ]
    sentences += [
        f"{pair.run} has {pair.ratio:.2f} times the {_NAMES[pair.figure]} that {pair.other} expects."
        for pair in found.planned_against_measured
    ]
    if sentences:
        return " ".join(sentences)
    for figure, (name, best, order, _) in _QUANTITIES.items():
        alike: dict[tuple[object, ...], list[ComparedDocument]] = {}
        for row in found.rows:
            if getattr(row, figure) is not None:
                load = () if figure == "accuracy" else (row.kind, row.at_once)
                alike.setdefault(load, []).append(row)
        for rows in alike.values():
            first, *others = sorted(rows, key=lambda row: order * getattr(row, figure))
            if others:
                values = [f"{row.name} {_QUANTITIES[figure][3](getattr(row, figure))}" for row in (first, *others)]
                remark = (
                    ", on different images" if figure == "accuracy" and len({row.images for row in rows}) > 1 else ""
                )
                sentences.append(f"{best} {name}{remark}: {', '.join(values)}.")
    return " ".join(sentences) or "No two of these documents have a value that can be compared."


def _values(found: SideBySide) -> dict[str, list[tuple[str, float, str]]]:
    """Return name, value and text of the documents, by each quantity that several have."""
    shown = {}
    for figure, (name, _, _, text) in _QUANTITIES.items():
        known = [(row.name, getattr(row, figure)) for row in found.rows]
        rows = [(document, value, text(value)) for document, value in known if value is not None]
        if len(rows) > 1:
            shown[{"latency_ms": "latency, ms", "energy_mj": "energy per image, mJ"}.get(figure, name)] = rows
    return shown


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
        cells.append((row.name, row.kind, *numbers, ", ".join(filter(None, (row.about, row.images)))))
    return cells


def _cells(pair: Comparison) -> tuple[str, ...]:
    shown, name = (show_ms, "latency") if pair.figure == "latency_ms" else (show, "images / s")
    return pair.run, pair.other, name, shown(pair.measured), shown(pair.value), f"{pair.ratio:.2f}"
