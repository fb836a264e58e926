"""A source reads images of every kind for its stem, and refuses values that the stem cannot take."""

import io

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.runtime.source.images import reader_of

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)


@pytest.fixture
def read(tiny_bundle):
    _, read = reader_of(Bundle.open(tiny_bundle).manifest.image)
    return read


def test_all_kinds_of_an_image_give_the_same_input(read, tmp_path):
    encoded = io.BytesIO()
    Image.fromarray(PIXELS).save(encoded, "PNG")
    (tmp_path / "photo.png").write_bytes(encoded.getvalue())
    kinds = [PIXELS, Image.fromarray(PIXELS), encoded.getvalue(), tmp_path / "photo.png", str(tmp_path / "photo.png")]
    first, *others = [read(kind, "photo") for kind in kinds]
    assert (first.shape, first.dtype) == ((3, 16, 16), np.float32)
    for other in others:
        np.testing.assert_array_equal(other, first)
    assert read(first, "photo") is first


def test_an_array_of_another_shape_is_a_usage_error(read):
    with pytest.raises(UsageError, match=r"image has shape \(3, 8, 8\), the model takes \(3, 16, 16\)"):
        read(np.zeros((3, 8, 8), np.float32), "photo")


def test_other_objects_are_a_usage_error(read):
    with pytest.raises(UsageError, match=r"image must be an array, a Pillow image, .*, not float"):
        read(3.0, "photo")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_a_data_error(read, bad):
    image = np.zeros((3, 16, 16), np.float32)
    image[1, 2, 3] = bad
    with pytest.raises(DataError, match="photo contains NaN or infinity"):
        read(image, "photo")


def test_a_missing_file_is_a_data_error(read, tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*gone\.png"):
        read(tmp_path / "gone.png", "")
