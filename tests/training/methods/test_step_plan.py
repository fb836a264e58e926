"""The cost of a step, and blocks that are dropped."""

import random

import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.training.methods.registry import expected_cost, make_method
from ls_edge.training.methods.step_plan import StepPlan, drop_blocks
from ls_edge.training.models.flops import WorkProfile
from ls_edge.training.models.small_models import build

torch.set_num_threads(1)
TINY = {"embed_dim": 16, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0}
PLAIN = {"tracks": 0.0, "trained": 0.0, "subset": 0.0, "drop": 0.0}


def viewed(seed=0):
    torch.manual_seed(seed)
    return build("vit_digits", TINY)


def test_the_cost_counts_blocks_groups_and_a_teacher():
    assert StepPlan.plain(range(8)).cost(WorkProfile(8)) == 3
    assert StepPlan.plain(range(4)).cost(WorkProfile(8)) == 1.5
    assert StepPlan.plain(range(8)).cost(WorkProfile(8), teacher=True) == 4
    arrangement = Bands(8).equal_waves(range(8), 2, 2)
    assert StepPlan((arrangement, StepPlan.plain(range(4)).groups[0])).cost(WorkProfile(8)) == 2.25
    assert expected_cost(make_method("anyorder", {**PLAIN, "groups": 8}), WorkProfile(8)) == pytest.approx(3)


def test_drop_blocks_keeps_at_least_one():
    rng = random.Random(0)
    assert drop_blocks(range(6), 0.0, rng) == list(range(6))
    assert all(drop_blocks(range(6), 0.99, rng) for _ in range(200))


@pytest.mark.parametrize(
    ("method", "added"),
    [("shuffle", 0), ("position", 2 * 16 * (16 + 32) * 16), ("predict", 2 * 16 * 4)],
)
def test_the_modules_of_a_method_count_for_each_block(method, added):
    view = viewed()
    assert view.work.added == 0
    make_method(method, {}).attach(view)
    work = view.work
    assert work.added == added
    assert work.forward == viewed().work.forward
    order = StepPlan.plain(range(4))
    assert order.cost(work) == pytest.approx(3 * (work.forward + 4 * added) / work.forward)
    view.keep_blocks([1, 2])
    assert view.work.num_blocks == 2
