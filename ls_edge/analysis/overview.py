"""Analysis of a model in words and tables, for terminals and pages."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from ls_edge.analysis import Analysis
from ls_edge.analysis.blocks.agreement import HEADINGS
from ls_edge.analysis.kind import number_text, sentence
from ls_edge.core.errors import printable
from ls_edge.core.text import bands_text, counted, show_percent
from ls_edge.evaluation.run_summary import wilson
from ls_edge.report.terminal import PlainTable, print_table


def about_analysis(found: Analysis) -> str:
    """Describe the model and the data of an analysis in one line."""
    s = found.settings
    return (
        f"{printable(s['model'])}, {printable(s['method'])}, {counted(s['blocks'], 'block')}, "
        f"{counted(found.images, 'image')} of {s['data']}{bands_text(s['bands'])}"
    )


def verdict(found: Analysis) -> str:
    """Return a verdict in one sentence, or an empty string if neither agreement nor importance was measured."""
    said = []
    fixed = len(found.settings["bands"]) == found.settings["blocks"]
    if found.agreement is not None and not fixed:
        share = found.agreement.random.same_class
        low, high = wilson(round(share * found.images), found.images) or (0.0, 1.0)
        if low >= 0.95:
            how = "block order hardly matters"
        elif high < 0.8 or (low >= 0.8 and high < 0.95):
            how = f"block order matters{'' if high < 0.8 else ' little'}"
        else:
            how = f"cannot tell with {counted(found.images, 'image')} how much block order matters"
        said.append(
            f"{how}: {show_percent(share)} of the answers (95 % CI {show_percent(low)} to {show_percent(high)}) "
            "stay the same in random order"
        )
    if found.importance is not None and found.importance.costs:
        said.append(found.importance.costs)
    return sentence("; ".join(said))


def block_table(found: Analysis) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return headings, and a row for each block with the columns of the measured kinds."""
    columns = {"block": [str(block) for block in range(found.settings["blocks"])]}
    for _, kind, result in found.measured:
        columns |= kind.columns(result)
    return list(columns), list(zip(*columns.values(), strict=True))


def print_analysis(found: Analysis, console: Console) -> None:
    """Print the model, a row for each block, the agreement of answers, and the findings without columns."""
    console.print(f"{found.settings['of']}: {about_analysis(found)}")
    if said := verdict(found):
        console.print(said)
    if found.importance is not None:
        trained = found.importance.trained
        console.print(f"trained order: accuracy {trained.top1:.3f}, loss {number_text(trained.loss)}")
    headings, rows = block_table(found)
    if len(headings) > 1:
        print_rows(headings, rows, console)
    if found.agreement is not None:
        console.print("\nanswers in random order, compared with trained order:")
        print_rows(HEADINGS, found.agreement.rows, console)
    for name, kind, _ in found.measured:
        if kind.in_terminal:
            console.print(f"{name}: {found.finding(name)}")


def print_rows(headings: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> None:
    """Print a table of numbers."""
    print_table(PlainTable(*(f">{heading}" for heading in headings), rows=rows), console)
