"""Counts of operations."""

import pytest
import torch

from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.small_models import build


def test_operations_of_stem_blocks_and_head_are_counted():
    view = build("vit_cifar", {})
    modes = [module.training for module in view.modules()]
    statistics = {name: value.clone() for name, value in view.model.named_buffers()}
    work = view.work
    # Block of width 192 on 16 tokens: qkv and proj 4 D^2, MLP of ratio two 4 D^2, attention 2 N D, two operations each.
    assert work.block == 2 * 16 * (8 * 192**2 + 2 * 16 * 192)
    convolutions = ((3, 64, 16), (64, 128, 8), (128, 128, 8), (128, 192, 4))
    stem = sum(2 * 9 * before * after * side**2 for before, after, side in convolutions) + 2 * 16 * 192**2
    assert work.stem == stem
    assert 3.8 < work.stem / work.block < 4.0
    assert (work.head, work.added, work.num_blocks) == (2 * 192 * 10, 0, 8)
    assert StepPlan.plain(range(8)).cost(work) == pytest.approx(3)
    fewer = StepPlan.plain(range(4)).cost(work)
    assert fewer == pytest.approx(3 * (stem + 4 * work.block + work.head) / (stem + 8 * work.block + work.head))
    assert [module.training for module in view.modules()] == modes
    assert all(torch.equal(value, statistics[name]) for name, value in view.model.named_buffers())
