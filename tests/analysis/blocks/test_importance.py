import numpy as np
import pytest

from ls_edge.core.bands import Bands
from tests.analysis.models import Residual, analyzed, drawn, softmax


def test_scores_match_orders_run_one_by_one():
    model = Residual()
    images, labels = drawn(model, 20)

    def loss_and_top1(order):
        _, logits = model.run(images, order)
        loss = -np.log(softmax(logits)[np.arange(20), labels]).mean()
        return pytest.approx(loss, abs=1e-5), np.mean(logits.argmax(1) == labels)

    found = analyzed(model, "importance").importance
    assert (found.trained.loss, found.trained.top1) == loss_and_top1(range(5))
    assert [one.moved_to for one in found.blocks] == [4, 4, 4, 0, 0]
    for block, one in enumerate(found.blocks):
        without = [other for other in range(5) if other != block]
        assert (one.left_out.loss, one.left_out.top1) == loss_and_top1(without)
        assert one.importance == one.left_out.loss - found.trained.loss
        moved = without.copy()
        moved.insert(one.moved_to, block)
        assert (one.moved.loss, one.moved.top1) == loss_and_top1(moved)


def test_a_block_that_adds_nothing_costs_nothing():
    class SameEverywhere(Residual):
        def block(self, index, tokens, slot):
            return super().block(index, tokens, 0)

    found = analyzed(SameEverywhere(zeroed=[2]), "importance").importance
    assert found.blocks[2].importance == 0
    assert found.blocks[2].left_out == found.blocks[2].moved == found.trained
    assert all(one.importance for one in found.blocks if one.block != 2)


def test_a_block_moves_to_the_far_end_of_its_band_or_not_at_all():
    blocks = analyzed(Residual(), "importance", bands=Bands.from_json("0/1-3/4")).importance.blocks
    assert [one.moved_to for one in blocks] == [None, 3, 3, 1, None]
    assert [one.moved is None for one in blocks] == [True, False, False, False, True]
