"""Data sets of timm's factory, which torchvision reads from files."""

import struct
import sys

import msgspec
import numpy as np
import pytest

from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError, UsageError
from ls_edge.data.datasets import is_timm_name, open_data
from ls_edge.data.preprocess import Preprocessor
from tests.data.folders import write_every_mode, write_folder, write_images

timm_data = pytest.importorskip("timm.data")
SPEC = ImageSpec(size=(16, 16), mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4), crop_pct=0.9)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Folder in which timm's factory looks for the files of ``torch/...`` sets."""
    monkeypatch.setenv("LS_EDGE_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_only_names_with_a_prefix_of_the_factory_are_timms(tmp_path, monkeypatch):
    assert all(map(is_timm_name, ("torch/cifar100", "hfds/food101", "tfds/mnist")))
    assert not any(map(is_timm_name, ("digits", "torchy/x", "/torch/x")))
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "torch" / "mine")
    assert not is_timm_name("torch/mine")
    assert open_data("torch/mine", "eval").classes == ("cat", "dog")


def test_without_timm_the_error_says_how_to_install_it(monkeypatch):
    for name in ("timm", "timm.data"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=r"^'torch/cifar100', a data set of timm's factory, needs timm"):
        open_data("torch/cifar100", "eval")


def test_sets_that_do_not_open_or_can_only_be_streamed_are_refused(root):
    with pytest.raises(DataError, match=r"torch/no_such could not be opened \("):
        open_data("torch/no_such", "train")
    with pytest.raises(UsageError, match="can only be streamed"):
        open_data("wds/some", "train")


def test_the_splits_of_a_set_become_images(root):
    write_images(root / "train", 3)
    write_images(root / "validation", 2)
    assert len(open_data("torch/image_folder", "train")) == 6
    found = open_data("torch/image_folder", "eval")
    assert found.classes == ("cat", "dog")
    assert [(image.name, image.label) for image in found.images] == [
        ("cat/0000000", 0), ("cat/0000001", 0), ("dog/0000002", 1), ("dog/0000003", 1),
    ]  # fmt: skip
    assert found.images[2].read() == (root / "validation" / "dog" / "0.png").read_bytes()


@pytest.mark.parametrize("upright", [False, True])
def test_a_folder_of_torchvision_is_decoded_like_a_plain_folder(root, upright):
    """torchvision's own loader would clip 16-bit images."""
    write_every_mode(root / "train")
    spec = msgspec.structs.replace(SPEC, exif_orientation=upright)
    found = open_data("torch/image_folder", "train")
    assert found.classes == ("cat", "dog")
    assert [image.label for image in found.images] == [0] * 12 + [1] * 12
    plain = open_data(str(root / "train"), "train")
    for image, file in zip(found.images, plain.images, strict=True):
        assert np.array_equal(Preprocessor(spec)(image.read()), Preprocessor(spec)(file.read())), file.name


def test_a_set_without_files_gives_images(root):
    """MNIST as torchvision keeps it: arrays in IDX files."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (4, 28, 28), dtype=np.uint8), np.array([3, 0, 9, 3], np.uint8)
    for name in ("train", "t10k"):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 4, 28, 28) + pixels.tobytes())
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, 4) + labels.tobytes())
    found = open_data("torch/mnist", "eval")
    assert [image.label for image in found.images] == [0, 3, 3, 9]
    assert found.classes[0] == "0 - zero"
    for image, row in zip(found.images, (1, 0, 3, 2), strict=True):
        gray = np.repeat(pixels[row][..., None], 3, axis=2)
        assert np.array_equal(Preprocessor(SPEC)(image.read()), Preprocessor(SPEC)(gray))
