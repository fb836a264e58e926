"""The table of a reproduced comparison."""

import csv

import pytest

from ls_edge.evaluation.evaluate import Arbitrary, Evaluation, Kept, SequentialAccuracy
from ls_edge.evaluation.spread import deviation
from ls_edge.report.reproduction import Trained, comparisons, quantities_of, table, write_tables


def row(name, values, data="digits"):
    """Return a row whose seeds have these accuracies in random order."""
    seeds = [
        Evaluation(
            SequentialAccuracy(value + 0.01),
            Arbitrary(value, 0.02, value - 0.03, value - 0.05, 64),
            {"2": Kept(value / 2, value / 4)},
            None,
            359,
            settings={"blocks": 8},
        )
        for value in values
    ]
    return Trained(name, data, seeds, 12.5, 0.25)


def test_each_quantity_has_its_mean_its_sample_deviation_and_its_seeds():
    found = quantities_of(row("shuffle", [0.499, 0.265]))
    assert found["random order"].mean == pytest.approx(0.382)
    assert found["random order"].std == pytest.approx(0.16546, abs=1e-5)
    assert found["worst order"].mean == pytest.approx(0.332)
    assert found["2 kept"].std == pytest.approx(deviation([0.499 / 4, 0.265 / 4]))
    assert {value.n for value in found.values()} == {2}
    (cells,) = table([row("shuffle", [0.5])])[1]
    assert not any("±" in cell for cell in cells)


def test_rows_are_compared_with_those_of_their_data():
    rows = [row("a", [0.5, 0.6, 0.7]), row("b", [0.4, 0.51, 0.61]), row("c", [0.1, 0.2, 0.3], data="other")]
    found = comparisons(rows)
    assert {(one.one, one.other) for one in found} == {("a", "b")}
    assert {one.quantity for one in found} == {"trained order", "random order"}
    assert all(one.difference == pytest.approx(0.28 / 3) and one.p < 0.01 for one in found)
    assert comparisons([row("a", [0.5]), row("b", [0.4])]) == []


def test_the_table_is_written_as_markdown_latex_and_csv(tmp_path):
    rows = [row("layerdrop_50%", [0.5, 0.6]), row("b", [0.4, 0.5])]
    write_tables(tmp_path / "table", ["about"], rows, comparisons(rows))
    assert "| layerdrop_50% | digits | 8 | 0.560 ± 0.071 |" in (tmp_path / "table.md").read_text()
    tex = (tmp_path / "table.tex").read_text()
    assert r"layerdrop\_50\% & digits & 8 & 0.560 $\pm$ 0.071 &" in tex
    assert len({line.count("&") for line in tex.splitlines() if line.endswith(r"\\")}) == 1
    lines = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    (mean,) = [line for line in lines if line["row"] == "b" and line["quantity"] == "random order"]
    assert (float(mean["mean"]), float(mean["std"]), mean["n"]) == (0.45, pytest.approx(0.0707, abs=1e-4), "2")
