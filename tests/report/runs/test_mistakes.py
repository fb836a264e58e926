"""Wrong answers in a report: accuracy by class, confusions, and the images themselves."""

import base64
import io

import msgspec
import numpy as np
import pytest
from PIL import Image

from ls_edge.core.errors import DataError
from ls_edge.data.datasets import ImageRef
from ls_edge.evaluation.run_summary import wilson
from ls_edge.report import charts
from ls_edge.report.html import write_report
from ls_edge.report.runs.mistakes import by_class, confusions, wrong_images
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


def images(*, unreadable=()):
    def reader(number):
        def read():
            if number in unreadable:
                raise DataError("it was removed")
            return np.full((200, 300, 3), number, np.uint8)

        return read

    return [ImageRef(f"{number}.png", number % 3, reader(number)) for number in range(60)]


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


def test_wrong_images_are_small_and_unreadable_ones_left_out(run):
    found = wrong_images(run.records, images(unreadable={9}))
    assert [one.record.id for one in found] == [0, 1, 18, 27, 36, 45, 54]
    kind, encoded = found[2].source.split(",")
    assert kind == "data:image/png;base64"
    picture = Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert picture.size == (96, 64)
    assert picture.getpixel((5, 5)) == (18, 18, 18)
    assert wrong_images(run.records, []) == []


def test_the_page_names_the_classes(run, tmp_path):
    write_report(
        tmp_path / "r.html", run.summary, run.records, run.events, classes=CLASSES, images=images(unreadable={9})
    )
    text = (tmp_path / "r.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    assert text.count('<img src="data:image/png;base64,') == 7
    assert "<b>cat</b>, not dog" in text
    assert "<b>bird</b>" not in text.replace("&lt;b&gt;bird&lt;/b&gt;", "")
    assert "Classes most often confused" in text
