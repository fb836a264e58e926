"""An analysis of a model's blocks as tables."""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np
from rich.console import Console

from ls_edge.core.errors import printable
from ls_edge.evaluation.analysis import NOT_ASKED, Analysis
from ls_edge.evaluation.analysis_measures import AnswersCompared
from ls_edge.report.formatting import NOTHING, bands_text, counted
from ls_edge.report.terminal import PlainTable, print_table

AGREEMENT = ("blocks left out", "same class", "in all orders", "total variation", "orders")


def about_analysis(found: Analysis) -> str:
    """What was analysed, in a line."""
    s = found.settings
    return (
        f"{printable(s['model'])}, {printable(s['method'])}, {counted(s['blocks'], 'block')}, "
        f"{counted(found.images, 'image')} of {s['data']}{bands_text(s['bands'])}"
    )


def block_table(found: Analysis) -> tuple[list[str], list[list[str]]]:
    """Headings, and a row for each block, of the kinds that were measured."""
    headings = ["block"]
    rows = [[str(block)] for block in range(found.settings["blocks"])]
    columns: list[tuple[str, list[str]]] = []
    if found.importance is not None:
        trained, blocks = found.importance.trained, found.importance.blocks
        columns += [
            ("loss without", [_signed(one.importance) for one in blocks]),
            ("accuracy without", [_points(one.left_out.top1 - trained.top1) for one in blocks]),
            ("moved to", [NOTHING if one.moved_to is None else str(one.moved_to) for one in blocks]),
            ("accuracy moved", [NOTHING if one.moved is None else _points(one.moved.top1 - trained.top1)
                                for one in blocks]),
        ]  # fmt: skip
    if found.contribution is not None:
        ranges = [[value for value in slots if value is not None] for slots in found.contribution.random]
        columns += [
            ("adds", [_figure(value) for value in found.contribution.trained]),
            ("adds, by slot", [f"{min(r):.2f} to {max(r):.2f}" if r else NOTHING for r in ranges]),
        ]
    if found.similarity is not None:
        before = [row[step] for step, row in enumerate(found.similarity.cka[1:])]
        columns += [
            ("CKA to before", [_figure(value) for value in before]),
            ("cosine", [_figure(value) for value in found.similarity.cosine]),
        ]
    if found.attention is not None:
        columns += [
            ("attention distance", [_figure(float(np.mean(heads))) for heads in found.attention.distance]),
            ("entropy", [_figure(float(np.mean(heads))) for heads in found.attention.entropy]),
        ]
    for heading, cells in columns:
        headings.append(heading)
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return headings, rows


def agreement_rows(found: Analysis) -> list[tuple[str, ...]]:
    """Cells below :data:`AGREEMENT`."""
    if found.agreement is None:
        return []
    return [_agreement_row(one) for one in (found.agreement.random, *found.agreement.left_out)]


def print_analysis(found: Analysis, console: Console | None = None) -> None:
    """Print what was analysed, a row for each block, and the agreement of answers."""
    click.echo(f"{found.settings['of']}: {about_analysis(found)}")
    if found.importance is not None:
        trained = found.importance.trained
        click.echo(f"trained order: accuracy {trained.top1:.3f}, loss {_figure(trained.loss)}")
    headings, rows = block_table(found)
    if len(headings) > 1:
        _print_rows(headings, rows, console)
    if found.agreement is not None:
        click.echo()
        click.echo("answers in random order beside those in trained order:")
        _print_rows(AGREEMENT, agreement_rows(found), console)
    for kind, why in found.reasons.items():
        if why != NOT_ASKED:
            click.echo(f"{kind}: none, {printable(why)}", err=True)


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console | None) -> None:
    table = PlainTable()
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    print_table(table, console)


def _agreement_row(one: AnswersCompared) -> tuple[str, ...]:
    return (
        "none" if one.left_out == 0 else str(one.left_out), f"{100 * one.same_class:.1f} %",
        f"{100 * one.all_same_class:.1f} %", _figure(one.total_variation), str(one.orders),
    )  # fmt: skip


def _figure(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _signed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:+.3f}"


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"
