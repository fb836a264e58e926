"""Calibration: images in two halves, and ranges of activations."""

import numpy as np
import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError, VerificationError
from ls_edge.data.datasets import open_data
from ls_edge.export.calibration import activation_ranges, read_calibration
from ls_edge.export.int8 import quantize_explicit


def test_calibration_images_are_the_models_input_and_come_in_halves(loaded):
    digits = open_data("digits", "eval")
    found = read_calibration(digits.take(60), loaded.record.image, loaded.record.classes)
    for half in (found.fit, found.held_out):
        assert half.images.shape == (30, 3, *loaded.record.image.size)
        assert half.images.dtype == np.float32
        assert set(half.labels) == set(range(10))
    assert not any((held == fit).all() for held in found.held_out.images for fit in found.fit.images)
    with pytest.raises(DataError, match=r"digits: at least 16 images are needed, 9 can be read; give a folder of more"):
        read_calibration(digits.take(9), loaded.record.image, loaded.record.classes)
    with pytest.raises(DataError, match="the model has no class"):
        read_calibration(digits, loaded.record.image, tuple("abcdefghi9"))


def test_ranges_are_the_largest_inputs_of_each_layer(traced, loaded, few_images):
    with torch.no_grad():
        tokens = loaded.view.stem(torch.from_numpy(few_images.fit.images)).numpy()
    ranges = activation_ranges(traced, tokens, Bands(3))
    assert [len(found) for found in ranges] == [4, 4, 4]
    assert all(value > 0 for found in ranges for value in found.values())
    louder = activation_ranges(traced, tokens * 2, Bands(3))
    assert louder[0].keys() == ranges[0].keys()
    norm = next(name for name in ranges[0] if name.startswith("layernormalization"))
    assert louder[0][norm] == pytest.approx(ranges[0][norm], rel=0.15)
    with pytest.raises(VerificationError, match="calibration found nan"):
        quantize_explicit(traced[0], {})
