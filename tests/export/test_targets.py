"""The parts that an export writes: groups of blocks, and ends that stem and head take in."""

import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Folded
from ls_edge.core.errors import UsageError
from ls_edge.export.targets import ends_of, prepare_for_export
from ls_edge.export.trace_onnx import trace_blocks


def test_exporting_does_not_change_the_view(loaded):
    before = {name: value.clone() for name, value in loaded.view.state_dict().items()}
    view = prepare_for_export(loaded.view)
    list(trace_blocks(view))
    after = loaded.view.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(before[name], value) for name, value in view.state_dict().items())


@pytest.mark.parametrize(
    ("bands", "found"),
    [("0/1-6/7", (1, 1)), ("0-1/2-7", (2, 0)), ("0-5/6", (0, 1)), ("0/1/2-6/7", (1, 1)), ("0-1/2-3/4", (0, 1))],
)
def test_ends_are_bands_that_are_smaller_than_the_largest(bands, found):
    assert ends_of(Bands.from_json(bands)) == Folded(*found)


@pytest.mark.parametrize("bands", ["0-7", "0/1/2", "0-3/4-7"])
def test_bands_without_smaller_ends_cannot_be_folded(bands):
    with pytest.raises(UsageError, match=f"smaller than the largest, and the bands are {bands}"):
        ends_of(Bands.from_json(bands))
