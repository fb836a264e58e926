"""Wrong answers in a report: accuracy by class, and confusions."""

import msgspec
import pytest

from ls_edge.evaluation.run_summary import wilson
from ls_edge.report import charts
from ls_edge.report.html import write_report
from ls_edge.report.runs.mistakes import by_class, confusions
from ls_edge.report.runs.statistics import RunData

CLASSES = ("cat", "dog", "<b>bird</b>")


@pytest.fixture(scope="module")
def run(simulated):
    """A run over 60 images of three classes: every third cat is a dog, one dog is a bird, birds are right."""
    steady = simulated(60, lost=None)
    records = []
    for record in steady.records:
        label = record.id % 3
        prediction = 1 if label == 0 and record.id % 9 == 0 else 2 if record.id == 1 else label
        records.append(msgspec.structs.replace(record, label=label, prediction=prediction, image=f"{record.id}.png"))
    records[5] = msgspec.structs.replace(records[5], prediction=None, error="Overloaded: no credit")
    return RunData(steady.summary, records, steady.events, CLASSES)


def test_classes_are_listed_from_the_worst(run):
    cats, dogs, birds = by_class(run.records)
    assert [(label, one.answers, one.top1) for label, one in (cats, dogs, birds)] == [
        (0, 20, 13 / 20), (1, 20, 19 / 20), (2, 19, 1.0),
    ]  # fmt: skip
    assert cats[1].interval == wilson(13, 20)
    spec = charts.spec_of(charts.accuracy_by_class(run))
    rows = [row for rows in spec["datasets"].values() for row in rows if "answers" in row]
    assert list(dict.fromkeys(row["name"] for row in rows)) == ["cat", "dog", "<b>bird</b>"]


def test_confusions_count_pairs_of_classes(run):
    assert confusions(run.records) == [(0, 1, 7, 7 / 20), (1, 2, 1, 1 / 20)]
    assert confusions([]) == []


def test_the_page_names_the_classes(run, tmp_path):
    write_report(tmp_path / "r.html", run.summary, run.records, run.events, classes=CLASSES)
    text = (tmp_path / "r.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert "<b>bird</b>" not in text.replace("&lt;b&gt;bird&lt;/b&gt;", "")
    assert "Classes most often confused" in text
