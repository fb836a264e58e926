"""Arrangements, costs and losses of the method ``anyorder``."""

import random

import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.config import TeacherConfig
from ls_edge.training.methods.base import soft_cross_entropy
from ls_edge.training.methods.registry import expected_cost, make_method
from ls_edge.training.methods.step_plan import StepPlan, drop_blocks
from ls_edge.training.models.flops import WorkProfile
from ls_edge.training.models.small_models import build
from ls_edge.training.runs.teacher import TeacherCriterion

torch.set_num_threads(1)
TINY = {"embed_dim": 16, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0}
IMAGES = torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(7)
PLAIN = {"tracks": 0.0, "trained": 0.0, "subset": 0.0, "drop": 0.0}


def viewed(seed=0):
    torch.manual_seed(seed)
    return build("vit_digits", TINY).eval()


def criterion(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)


def drawn(settings, count=1500, blocks=8):
    method = make_method("anyorder", settings)
    return [item for step in range(count) for item in method.draw(Bands(blocks), 0, step).groups]


def test_the_default_draws_orders_most_often_and_tracks_and_the_trained_order():
    found = drawn({})
    plain = [item for item in found if item.is_plain]
    assert 0.68 < len(plain) / len(found) < 0.88
    assert 0.08 < sum(item.order == tuple(range(8)) for item in plain) / len(found) < 0.12
    whole = sum(len(item.order) == 8 for item in found) / len(found)
    assert 0.18 < whole < 0.26
    assert {len(item.order) for item in found} == set(range(1, 9))
    assert 2.2 < expected_cost(make_method("anyorder", {}), WorkProfile(8)) < 2.3
    assert {len(wave) for item in found for wave in item.waves} == {1, 2, 3, 4}
    assert make_method("anyorder", {}).draw(Bands(8), 3, 17) == make_method("anyorder", {}).draw(Bands(8), 3, 17)


def test_parts_are_switches():
    assert all(item.is_plain for item in drawn(PLAIN, 200))
    assert {item.order for item in drawn({**PLAIN, "trained": 1.0}, 20)} == {tuple(range(8))}
    lengths = [len(item.order) for item in drawn({**PLAIN, "subset": 1.0}, 400)]
    assert set(lengths) == set(range(2, 9))
    assert 6.2 < sum(len(item.order) for item in drawn({**PLAIN, "drop": 0.2}, 400)) / 1600 < 6.6


def test_costs_are_counted_in_one_place():
    assert StepPlan.plain(range(8)).cost(WorkProfile(8)) == 3
    assert StepPlan.plain(range(4)).cost(WorkProfile(8)) == 1.5
    assert StepPlan.plain(range(8)).cost(WorkProfile(8), teacher=True) == 4
    arrangement = Bands(8).equal_waves(range(8), 2, 2)
    assert StepPlan((arrangement, StepPlan.plain(range(4)).groups[0])).cost(WorkProfile(8)) == 2.25
    assert expected_cost(make_method("anyorder", {**PLAIN, "groups": 8}), WorkProfile(8)) == pytest.approx(3)


def test_pieces_of_draws():
    rng = random.Random(0)
    assert drop_blocks(range(6), 0.0, rng) == list(range(6))
    assert all(drop_blocks(range(6), 0.99, rng) for _ in range(200))


def test_groups_of_a_batch_have_an_order_each():
    view = viewed()
    method = make_method("anyorder", {**PLAIN, "groups": 3})
    plan = method.draw(Bands(4), 0, 0)
    found = method.loss(view, IMAGES, TARGETS, plan, criterion)
    each = [
        criterion(view(IMAGES[rows], item), TARGETS[rows]) * len(rows) / 7
        for rows, item in zip([[0, 3, 6], [1, 4], [2, 5]], plan.groups, strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(each).sum())
    alone = method.loss(view, IMAGES[:1], TARGETS[:1], plan, criterion)
    assert alone.isfinite()


def test_each_group_learns_from_its_share_of_the_teachers_answers():
    view = viewed()
    method = make_method("anyorder", {**PLAIN, "groups": 2})
    plan = method.draw(Bands(4), 0, 0)
    answers = torch.randn(7, 10, generator=torch.Generator().manual_seed(2))
    targets = torch.cat((TARGETS[:, None].float(), answers), dim=1)
    both = TeacherCriterion(torch.nn.CrossEntropyLoss(), TeacherConfig(kind="soft", weight=0.25))
    found = method.loss(view, IMAGES, targets, plan, both)
    expected = 0.0
    for rows, item in zip([[0, 2, 4, 6], [1, 3, 5]], plan.groups, strict=True):
        logits = view(IMAGES[rows], item)
        soft = soft_cross_entropy(logits, answers[rows], 2.0)
        expected += (0.75 * criterion(logits, TARGETS[rows]) + 0.25 * soft) * len(rows) / 7
    torch.testing.assert_close(found, expected)
    assert soft_cross_entropy(answers, answers, 2.0) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    "settings",
    [{"groups": 0}, {"tracks": 1.5}, {"sandwich": True}, {"teacher": {"use": "on"}}, {"drop": 1.0}],
)
def test_settings_that_cannot_be(settings):
    with pytest.raises(UsageError, match="method anyorder with settings"):
        make_method("anyorder", settings)
