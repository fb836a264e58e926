"""Tables of a reproduced comparison as Markdown, LaTeX, and CSV, with paired tests between rows."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ls_edge.core.files import write_output
from ls_edge.evaluation.evaluate import Evaluation
from ls_edge.evaluation.spread import Paired, deviation, holm, paired, plus_minus

Cells = Sequence[Sequence[str]]
QUANTITIES: dict[str, Callable[[Evaluation], float]] = {
    "trained order": lambda found: found.sequential.top1,
    "random order": lambda found: found.arbitrary.top1_mean,
}
"""Accuracies that are compared between rows."""


class Trained(msgspec.Struct, frozen=True):
    """A row: the evaluations of its seeds, and the cost of one seed."""

    row: str
    data: str
    seeds: Sequence[Evaluation]
    tflop: float
    """Counted floating-point operations of training and evaluation, in 10^12."""
    hours: float
    """Mean time that training took here."""


class Measured(msgspec.Struct, frozen=True):
    """Mean over seeds, and sample deviation between them."""

    mean: float
    std: float | None
    n: int


class Comparison(Paired, frozen=True):
    """Paired t-test over the seeds of two rows; ``p_holm`` is corrected for all comparisons of this quantity."""

    quantity: str
    one: str
    other: str
    p_holm: float


def measured(values: Sequence[float]) -> Measured:
    """Return the mean over seeds."""
    return Measured(float(np.mean(values)), deviation(values), len(values))


def quantities_of(row: Trained) -> dict[str, Measured]:
    """Return all quantities of a row by heading."""
    found = {name: measured([of(one) for one in row.seeds]) for name, of in QUANTITIES.items()}
    spreads = [one.arbitrary.top1_std for one in row.seeds if one.arbitrary.top1_std is not None]
    if spreads:
        found["deviation over orders"] = measured(spreads)
    found["worst order"] = measured([one.arbitrary.top1_worst for one in row.seeds])
    for keep in row.seeds[0].kept:
        kept = [one.kept[keep] for one in row.seeds]
        found[f"{keep} kept"] = measured([one.arbitrary for one in kept])
        found[f"{keep} kept, trained order"] = measured([one.sequential for one in kept])
    slots = [one.position_accuracy for one in row.seeds if one.position_accuracy is not None]
    if slots:
        found["slot predicted"] = measured(slots)
    return found


def comparisons(rows: Sequence[Trained]) -> list[Comparison]:
    """Compare all pairs of rows that have the same data and at least two seeds."""
    found: list[Comparison] = []
    pairs = [(one, other) for one, other in itertools.combinations(rows, 2) if one.data == other.data]
    for name, of in QUANTITIES.items():
        tests = [
            (one.row, other.row, test)
            for one, other in pairs
            if (test := paired([of(seed) for seed in one.seeds], [of(seed) for seed in other.seeds])) is not None
        ]
        corrected = holm([test.p for *_, test in tests])
        found += [
            Comparison(**msgspec.structs.asdict(test), quantity=name, one=one, other=other, p_holm=p)
            for (one, other, test), p in zip(tests, corrected, strict=True)
        ]
    return found


def table(rows: Sequence[Trained]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells, with a line for each row of the plan."""
    quantities = [quantities_of(row) for row in rows]
    kept = [name for found in quantities for name in found if " kept" in name]
    by_number = sorted(dict.fromkeys(kept), key=lambda name: (name.endswith("order"), int(name.split()[0])))
    others = [name for name in ("slot predicted",) if any(name in found for found in quantities)]
    names = [*QUANTITIES, "deviation over orders", "worst order", *by_number, *others]
    lines = [
        [
            row.row,
            row.data,
            str(row.seeds[0].settings["blocks"]),
            *(_text(found.get(name)) for name in names),
            f"{row.tflop:,.1f}",
            f"{row.hours:.2f}",
        ]
        for row, found in zip(rows, quantities, strict=True)
    ]
    return ["row", "data", "blocks", *names, "TFLOP per seed", "hours per seed"], lines


def comparison_table(found: Sequence[Comparison]) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells, with a line for each comparison."""
    lines = [
        [
            one.quantity,
            one.one,
            one.other,
            f"{one.difference:+.3f}",
            f"{one.low:+.3f} to {one.high:+.3f}",
            f"{one.p:.3f}",
            f"{one.p_holm:.3f}",
        ]
        for one in found
    ]
    return ["quantity", "row", "minus", "difference", "95 % interval", "p", "p (Holm)"], lines


def tables(rows: Sequence[Trained], found: Sequence[Comparison]) -> list[tuple[list[str], list[list[str]]]]:
    """Return the table of the rows and, if there are comparisons, the table of these."""
    return [table(rows), comparison_table(found)] if found else [table(rows)]


def write_tables(path: Path, about: Sequence[str], rows: Sequence[Trained], found: Sequence[Comparison]) -> None:
    """Write the tables as ``.md``, ``.tex``, and ``.csv``; the first two begin with the lines ``about``."""
    main, *pairs = tables(rows, found)
    text = "\n\n".join([*about, markdown(*main)])
    for one in pairs:
        text += f"\nPaired t-tests over the seeds:\n\n{markdown(*one)}"
    write_output(path.with_suffix(".md"), text)
    write_output(path.with_suffix(".tex"), "".join(f"% {line}\n" for line in about) + latex(*main))
    write_output(path.with_suffix(".csv"), comma_separated(rows))


def _text(value: Measured | None) -> str:
    return "" if value is None else f"{value.mean:.3f} {plus_minus(value.std)}".rstrip()


def markdown(headings: Sequence[str], lines: Cells) -> str:
    """Return a table in Markdown."""
    return "".join("| " + " | ".join(cells) + " |\n" for cells in (headings, ["---"] * len(headings), *lines))


def latex(headings: Sequence[str], lines: Cells) -> str:
    """Return a LaTeX table that needs the package booktabs."""

    def line(cells: Sequence[str]) -> str:
        return " & ".join(map(_escaped, cells)) + r" \\"

    columns = "ll" + "r" * (len(headings) - 2)
    parts = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", line(headings), r"\midrule", *map(line, lines)]
    return "\n".join([*parts, r"\bottomrule", r"\end{tabular}", ""])


def _escaped(text: str) -> str:
    special: Mapping[str, str] = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    special = {**special, **{letter: f"\\{letter}" for letter in "&%$#_{}"}, "±": r"$\pm$"}
    return "".join(special.get(letter, letter) for letter in text)


def comma_separated(rows: Sequence[Trained]) -> str:
    """Return a line for each row and quantity: mean, sample deviation, and number of seeds, not rounded."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["row", "data", "blocks", "quantity", "mean", "std", "n", "tflop_per_seed", "hours_per_seed"])
    for row in rows:
        for name, value in quantities_of(row).items():
            std = "" if value.std is None else value.std
            blocks = row.seeds[0].settings["blocks"]
            writer.writerow([row.row, row.data, blocks, name, value.mean, std, value.n, row.tflop, row.hours])
    return stream.getvalue()
