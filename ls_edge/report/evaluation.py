"""Accuracy tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ls_edge.core.errors import printable
from ls_edge.core.text import bands_text, counted, format_bands, show_percent
from ls_edge.evaluation.classes import missed_line
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.spread import plus_minus
from ls_edge.report.terminal import PlainTable, print_table


def print_evaluation(result: Evaluation, console: Console) -> None:
    """Print the model and data, and a row for each group of orders."""
    s, a = result.settings, result.arbitrary
    console.print(
        f"{result.name}: {printable(s['model'])}, {printable(s['method'])}, {counted(s['blocks'], 'block')}, "
        f"{counted(result.images, 'image')} of {s['data']}{bands_text(s['bands'])}"
    )
    table = PlainTable("blocks", ">trained order", ">random order", "")
    spread = (
        f"5th percentile {show_percent(a.top1_p5)}, worst {show_percent(a.top1_worst)} of {counted(a.orders, 'order')}"
    )
    table.add_row("all", show_percent(result.sequential.top1), show_percent(a.top1_mean), _after(a.top1_std, spread))
    over = "draws" if result.models is None else "models"
    for keep, kept in result.kept.items():
        spread = "" if kept.arbitrary_std is None else f"{plus_minus(kept.arbitrary_std, show_percent)} over {over}"
        table.add_row(f"{keep} of {s['blocks']}", show_percent(kept.sequential), show_percent(kept.arbitrary), spread)
    for step in result.freedom or ():
        shown = _after(step.top1_std, f"worst {show_percent(step.top1_worst)} of {counted(step.orders, 'order')}, ")
        shown += f"{step.allowed:,.0f} allowed{', its own bands' if step.own else ''}"
        table.add_row(f"within {format_bands(step.bands)}", "", show_percent(step.top1_mean), shown)
    if result.position_accuracy is not None:
        table.add_row("own slot", "", show_percent(result.position_accuracy), "named by the blocks themselves")
    print_table(table, console)
    for group in s["shared"]:
        console.print(
            f"blocks {', '.join(map(str, group))} are steps of one block: their order makes no difference, and a "
            "step is skipped only if no peer has that block"
        )


def _after(deviation: float | None, text: str) -> str:
    """Return ``text``, preceded by the deviation unless it is None."""
    return ", ".join(filter(None, (plus_minus(deviation, show_percent), text)))


def evaluation_remarks(result: Evaluation) -> list[str]:
    """Return remarks on the models and images of an evaluation."""
    remarks = []
    if (m := result.models) is not None:
        remarks.append(
            f"means over {counted(m.count, 'model')}"
            if m.sequential_std is None or m.arbitrary_std is None
            else f"means over {counted(m.count, 'model')}; sample deviation between them "
            f"{show_percent(m.sequential_std)} in trained and {show_percent(m.arbitrary_std)} in random order"
        )
    for order, shares in (("trained", result.top1_by_class), ("random", result.arbitrary_by_class)):
        if missed := [name for name, share in shares.items() if not share]:
            remarks.append(f"{missed_line(missed, result.images)}, in {order} order")
    if result.sequential.top1 <= result.chance < 1:
        remarks.append(f"no better than guessing: always answering the largest class has {show_percent(result.chance)}")
    if result.skipped:
        remarks.append(f"images left out because they cannot be decoded: {result.skipped:,}")
    return remarks


def print_evaluations(found: Sequence[Evaluation], console: Console) -> None:
    """Print a row for each evaluation, and a column for each number of kept blocks."""
    keeps = sorted({int(keep) for item in found for keep in item.kept})
    table = PlainTable("", ">trained order", ">random order", *(f">{keep} kept" for keep in keeps))
    for item in found:
        kept = [item.kept.get(str(keep)) for keep in keeps]
        a, cells = item.arbitrary, ["" if value is None else show_percent(value.arbitrary) for value in kept]
        table.add_row(
            item.name,
            show_percent(item.sequential.top1),
            f"{show_percent(a.top1_mean)} {plus_minus(a.top1_std, show_percent)}",
            *cells,
        )
    print_table(table, console)
