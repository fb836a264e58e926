"""Tables and sentences of an analysis of the blocks of a model, for terminals and pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from ls_edge.core.errors import printable
from ls_edge.core.text import NOTHING, bands_text, counted, show_percent
from ls_edge.evaluation.analysis import RUN_KINDS, Agreement, Analysis
from ls_edge.evaluation.analysis.trace import TraceAnalysis
from ls_edge.report.analysis.findings import costs_of, finding, sentence
from ls_edge.report.analysis.trace import trace_findings
from ls_edge.report.terminal import PlainTable, print_table

__all__ = [
    "AGREEMENT",
    "about_analysis",
    "agreement_rows",
    "block_table",
    "empty_cells",
    "finding",
    "print_analysis",
    "print_trace_analysis",
    "trace_findings",
    "verdict",
]

AGREEMENT = ("blocks left out", "same class", "in all orders", "total variation", "orders")
SHOWN_ORDERS = 8
_IN_WORDS = ("slots", "norms", "probe", "umap", "pairs", *(kind for kind in RUN_KINDS if kind != "attention"))
"""Kinds that a terminal shows as their finding alone."""


def about_analysis(found: Analysis) -> str:
    """Return the model and data of an analysis, in one line."""
    s = found.settings
    return (
        f"{printable(s['model'])}, {printable(s['method'])}, {counted(s['blocks'], 'block')}, "
        f"{counted(found.images, 'image')} of {s['data']}{bands_text(s['bands'])}"
    )


def verdict(found: Analysis) -> str:
    """Return the result of an analysis in one sentence; empty if neither agreement nor importance was measured."""
    said = []
    fixed = len(found.settings["bands"]) == found.settings["blocks"]
    if found.agreement is not None and not fixed:
        share = found.agreement.random.same_class
        how = "hardly matters" if share >= 0.95 else "matters little" if share >= 0.8 else "matters"
        said.append(f"block order {how}: {show_percent(share)} of the answers stay the same in random order")
    if found.importance is not None and (costs := costs_of(found.importance)):
        said.append(costs)
    return sentence("; ".join(said))


def empty_cells(found: Analysis) -> list[str]:
    """Return the reasons for the empty cells of tables and charts."""
    said = []
    if found.importance is not None and any(one.moved is None for one in found.importance.blocks):
        said.append(f"{NOTHING} under moved to: the band of the block has no other slot")
    if found.contribution is not None and any(None in slots for slots in found.contribution.random):
        orders = counted(found.contribution.orders, "random order")
        why = f"none of {orders} ran the block in that slot; raise --orders"
        if len(found.settings["bands"]) > 1:
            why = f"the band of the block excludes that slot, or {why}"
        said.append(f"An empty cell of contribution: {why}")
    if found.similarity is not None and (
        None in found.similarity.cosine or any(None in row for row in found.similarity.cka)
    ):
        said.append("An empty cell of similarity: the block adds nothing, or all images have the same tokens")
    return said


def block_table(found: Analysis) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return headings, and a row for each block, of the kinds that were measured."""
    columns = {"block": [str(block) for block in range(found.settings["blocks"])]}
    if found.importance is not None:
        top1, blocks = found.importance.trained.top1, found.importance.blocks
        columns["loss without"] = [_number(one.importance, "+.3f") for one in blocks]
        columns["accuracy without"] = [_points(one.left_out.top1 - top1) for one in blocks]
        columns["moved to"] = [NOTHING if one.moved_to is None else str(one.moved_to) for one in blocks]
        moved = [None if one.moved is None else one.moved.top1 - top1 for one in blocks]
        columns["accuracy moved"] = [NOTHING if change is None else _points(change) for change in moved]
    if found.contribution is not None:
        ranges = [[value for value in slots if value is not None] for slots in found.contribution.random]
        columns["adds"] = [_number(value) for value in found.contribution.trained]
        columns["adds, by slot"] = [f"{min(r):.2f} to {max(r):.2f}" if r else NOTHING for r in ranges]
    if found.similarity is not None:
        columns["CKA to before"] = [_number(row[step]) for step, row in enumerate(found.similarity.cka[1:])]
        columns["cosine"] = [_number(value) for value in found.similarity.cosine]
    if found.probe is not None:
        columns["slot read"] = [_number(value) for value in found.probe.accuracy]
    if found.attention is not None:
        columns["attention distance"] = [_number(float(np.mean(heads))) for heads in found.attention.distance]
        columns["entropy"] = [_number(float(np.mean(heads))) for heads in found.attention.entropy]
    return list(columns), list(zip(*columns.values(), strict=True))


def agreement_rows(found: Agreement) -> list[tuple[str, ...]]:
    """Return the rows below :data:`AGREEMENT`."""
    return [
        (
            "none" if one.left_out == 0 else str(one.left_out),
            show_percent(one.same_class),
            show_percent(one.all_same_class),
            _number(one.total_variation),
            str(one.orders),
        )
        for one in (found.random, *found.left_out)
    ]


def print_analysis(found: Analysis, console: Console) -> None:
    """Print the model, a row for each block, and the agreement of answers."""
    console.print(f"{found.settings['of']}: {about_analysis(found)}")
    if said := verdict(found):
        console.print(said)
    if found.importance is not None:
        trained = found.importance.trained
        console.print(f"trained order: accuracy {trained.top1:.3f}, loss {_number(trained.loss)}")
    headings, rows = block_table(found)
    if len(headings) > 1:
        _print_rows(headings, rows, console)
    if found.agreement is not None:
        console.print("\nanswers in random order, compared with trained order:")
        _print_rows(AGREEMENT, agreement_rows(found.agreement), console)
    for line in empty_cells(found):
        console.print(line)
    for kind in _IN_WORDS:
        if getattr(found, kind) is not None:
            console.print(f"{kind}: {finding(found, kind)}")


def _print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    print_table(PlainTable.of(*(f">{heading}" for heading in headings), rows=rows), console)


def _number(value: float | None, form: str = ".3f") -> str:
    return NOTHING if value is None else format(value, form)


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def print_trace_analysis(found: TraceAnalysis, console: Console) -> None:
    """Print the finding of each section, and the most frequent orders."""
    console.print(f"{found.settings['of']}: {counted(found.requests, 'request')}, {found.failed:,} failed")
    for heading, text in trace_findings(found).items():
        console.print(f"{heading}: {printable(text)}")
    rows = [(one.of, f"{one.answers:,}", show_percent(one.top1)) for one in found.by_order[:SHOWN_ORDERS]]
    _print_rows(("order", "answers", "accuracy"), rows, console)
