import numpy as np
import pytest

from ls_edge.core.bands import Bands
from tests.analysis.models import Layers, analyzed, drawn


def test_differences_compare_both_orders_of_a_pair():
    model = Layers(zeroed=[2])
    images, _ = drawn(model, 120)
    tokens = model.block(0, images, 0)
    trained = model.block(3, model.block(1, tokens, 1), 2)
    swapped = model.block(1, model.block(3, tokens, 1), 2)
    apart = np.linalg.norm(trained - swapped, axis=2) / np.linalg.norm(trained - tokens, axis=2)
    assert analyzed(model, "pairs", count=120).pairs.difference[1][3] == pytest.approx(apart.mean())


def test_a_block_commutes_with_one_that_adds_nothing_and_not_with_others():
    found = analyzed(Layers(zeroed=[2]), "pairs", count=120).pairs
    for one in range(4):
        for other in range(4):
            value = found.difference[one][other]
            if other <= one:
                assert value is None
            elif 2 in (one, other):
                assert value == pytest.approx(0, abs=1e-12)
            else:
                assert value > 0.05


def test_blocks_of_different_bands_are_not_paired():
    found = analyzed(Layers(), "pairs", bands=Bands.from_json("0/1-3")).pairs
    assert found.difference[0] == [None] * 4
