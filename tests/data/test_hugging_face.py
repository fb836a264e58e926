"""Data sets of Hugging Face: parquet files made here, read by the real library ``datasets``."""

import io
import re
import sys

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.datasets import open_data, require_labels
from ls_edge.data.preprocess import Preprocessor, iterate
from tests.data.corpus import corpus

datasets = pytest.importorskip("datasets")
pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
SPEC = ImageSpec(size=(16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), exif_orientation=True)


def png(value):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value // 2, 255 - value)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Write the splits of a data set, ``made(train=[(content, label), ...])``, and return its name."""
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)  # its thread would remain
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    folder.mkdir()

    def write(label=None, image="image", **splits):
        for split, rows in splits.items():
            table = [{image: content and {"bytes": content, "path": None}, "label": one} for content, one in rows]
            schema = None
            if label is not None:
                schema = datasets.Features({image: datasets.Image(), "label": label}).arrow_schema
            parquet.write_table(pyarrow.Table.from_pylist(table, schema=schema), folder / f"{split}-0.parquet")
        return f"hfds/{folder}"

    return write


def found(images):
    return [(image.name, image.label, image.read()) for image in images.images]


def test_files_go_through_our_decoder_with_their_own_labels(made):
    files = corpus()
    labels = datasets.ClassLabel(names=["odd/one", "even"])
    source = made(labels, train=[(content, number % 2) for number, content in enumerate(files.values())])
    images = open_data(source, "train")
    assert (images.classes, len(images), images.part) == (("odd_one", "even"), len(files), "all")
    rows = dict(enumerate(files.values()))
    for image in images.images:
        row = int(image.name.split("/")[1])
        assert (image.label, image.name.split("/")[0]) == (row % 2, images.classes[row % 2])
        assert np.array_equal(Preprocessor(SPEC)(image.read()), Preprocessor(SPEC)(rows[row]))


def test_a_damaged_row_is_left_out_and_no_other_takes_its_place(made):
    labels = datasets.ClassLabel(names=["a", "b", "c"])
    source = made(labels, validation=[(png(0), 0), (b"damaged", 1), (png(200), 2), (None, 1)], train=[(png(1), 0)])
    skipped = []
    images = open_data(source, "eval")
    used = list(iterate(images, Preprocessor(SPEC), lambda image, error: skipped.append((image.name, str(error)))))
    assert [(image.name, image.label) for _, image, _ in used] == [("a/0000000", 0), ("c/0000002", 2)]
    assert np.array_equal(used[1][2], Preprocessor(SPEC)(png(200)))
    assert [name for name, _ in skipped] == ["b/0000001", "b/0000003"]
    assert "row 3 has no image" in skipped[1][1]


def test_hidden_labels_are_not_the_last_class(made):
    labels = datasets.ClassLabel(names=["a", "b"])
    source = made(labels, train=[(png(0), 0), (png(1), -1), (png(2), 1), (png(3), None)], test=[(png(4), -1)] * 3)
    train = open_data(source, "train")
    assert [(image.name, image.label) for image in train.images] == [("a/0000000", 0), ("b/0000002", 1)]
    assert train.account()["ignored"] == {"no label": 2}
    test = open_data(source, "eval")
    assert (test.part, test.classes, [image.label for image in test.images]) == ("val", (), [None] * 3)
    with pytest.raises(DataError, match="has images but no class folders, so there is no accuracy"):
        require_labels(test, ("a", "b"))


@pytest.mark.parametrize(
    ("values", "classes", "labels"),
    [
        (["cat", "dog", "cat"], ("cat", "dog"), [0, 0, 1]),
        ([10, 2, 10], ("2", "10"), [1, 1, 0]),
        ([True, False, True], ("False", "True"), [0, 1, 1]),
        ([-1, 1, -1], ("-1", "1"), [0, 0, 1]),
    ],
)
def test_labels_without_names_are_classes(made, values, classes, labels):
    images = open_data(made(train=[(png(value), one) for value, one in enumerate(values)]), "train")
    assert images.classes == classes
    assert [image.label for image in images.images] == labels
    for image in images.images:
        assert str(values[int(image.name[-7:])]) == classes[image.label]
        assert image.read() == png(int(image.name[-7:]))


@pytest.mark.parametrize("wrong", [1.5, [1, 2]])
def test_labels_that_are_no_classes_are_refused(made, wrong):
    source = made(train=[(png(0), wrong), (png(1), wrong)])
    with pytest.raises(DataError, match=rf"^hfds/\S+ has the label {re.escape(str(wrong))}; expected a text"):
        open_data(source, "train")


def test_the_split_is_chosen_like_that_of_a_folder(made):
    labels = datasets.ClassLabel(names=["a", "b"])
    rows = {"train": [(png(0), 0)], "validation": [(png(1), 1)], "test": [(png(2), 0)]}
    source = made(labels, image="img", **rows)
    assert [row[2] for row in found(open_data(source, "train"))] == [png(0)]
    assert [row[2] for row in found(open_data(source, "eval"))] == [png(1)]


def test_a_set_that_is_not_there_is_refused_in_one_line(tmp_path):
    with pytest.raises(DataError, match=r"^hfds/\S*nothing could not be opened \(.*\); check the name") as caught:
        open_data(f"hfds/{tmp_path / 'nothing'}", "train")
    assert "\n" not in str(caught.value)


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"^'hfds/food101', a data set of Hugging Face, needs datasets"):
        open_data("hfds/food101", "eval")
