"""Arrangements, costs and losses of the method ``anyorder``."""

import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.config import TeacherConfig
from ls_edge.training.methods.base import soft_cross_entropy
from ls_edge.training.methods.registry import make_method
from ls_edge.training.runs.teacher import TeacherCriterion
from tests.training.trainings import criterion, viewed

torch.set_num_threads(1)
IMAGES = torch.randn(7, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(7)
PLAIN = {"tracks": 0.0, "trained": 0.0, "subset": 0.0, "drop": 0.0}


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
    assert {len(wave) for item in found for wave in item.waves} == {1, 2, 3, 4}
    assert make_method("anyorder", {}).draw(Bands(8), 3, 17) == make_method("anyorder", {}).draw(Bands(8), 3, 17)


def test_each_part_of_the_recipe_can_be_switched_off():
    assert all(item.is_plain for item in drawn(PLAIN, 200))
    assert {item.order for item in drawn({**PLAIN, "trained": 1.0}, 20)} == {tuple(range(8))}
    lengths = [len(item.order) for item in drawn({**PLAIN, "subset": 1.0}, 400)]
    assert set(lengths) == set(range(2, 9))
    assert 6.2 < sum(len(item.order) for item in drawn({**PLAIN, "drop": 0.2}, 400)) / 1600 < 6.6


def test_orders_widen_from_the_trained_one_to_all_orders_of_the_bands():
    method = make_method("anyorder", {**PLAIN, "widen": 0.5, "groups": 1})

    def distances(progress):
        orders = [method.draw(Bands(8), 0, step, progress).groups[0].order for step in range(300)]
        return [max(abs(block - slot) for slot, block in enumerate(order)) for order in orders]

    assert max(distances(0.0)) == 0
    assert 0 < max(distances(0.125)) <= 2
    means = [sum(distances(progress)) / 300 for progress in (0.0, 0.125, 0.25, 0.45)]
    assert means == sorted(means)
    assert max(distances(0.5)) == 7
    assert [method.draw(Bands(8), 0, step, 0.5) for step in range(9)] == [
        method.draw(Bands(8), 0, step) for step in range(9)
    ]


def test_each_group_of_a_batch_has_its_own_order():
    view = viewed().eval()
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
    view = viewed().eval()
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
def test_invalid_settings_are_refused(settings):
    with pytest.raises(UsageError, match="method anyorder with settings"):
        make_method("anyorder", settings)


def test_waves_and_subsets_are_drawn_within_the_bands():
    bands, method = Bands.from_json("0/1-6/7"), make_method("anyorder", {"tracks": 1.0, "trained": 0.0})
    drawn = [item for step in range(50) for item in method.draw(bands, 0, step).groups]
    assert any(not item.is_plain for item in drawn)
    assert any(len(item.order) < 8 for item in drawn)
    assert any(0 not in item.order for item in drawn)
