"""The parts that an export writes, and the ends that stem and head take in."""

import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Folded
from ls_edge.core.errors import UsageError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.export.targets import PartsView, ends_of, prepare_for_export
from ls_edge.export.trace_onnx import trace_blocks


def test_exporting_does_not_change_the_view(loaded):
    before = {name: value.clone() for name, value in loaded.view.state_dict().items()}
    view = prepare_for_export(loaded.view)
    list(trace_blocks(view))
    after = loaded.view.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(before[name], value) for name, value in view.state_dict().items())


def test_a_part_shares_its_weights_and_has_no_other_blocks(loaded):
    view = loaded.view
    parts = PartsView(view, folded=Folded(1, 0))
    tokens = torch.randn(2, view.token_spec.count, view.token_spec.dim)
    alone = parts.alone(1)
    with torch.no_grad():
        assert torch.allclose(alone.block(1, tokens), parts.block(1, tokens), atol=1e-6)
    addresses = {weight.data_ptr() for weight in view.parameters()}
    assert {weight.data_ptr() for weight in alone.view.parameters()} < addresses
    assert [len(list(block.parameters())) > 0 for block in alone.view.blocks] == [
        index == 2 for index in range(view.num_blocks)
    ]
    assert len(list(parts.alone(STEM).view.blocks[0].parameters())) > 0
    assert not any(list(block.parameters()) for block in parts.alone(HEAD).view.blocks)


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
