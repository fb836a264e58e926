"""The methods of the paper: orders, embedded slots, and predicted slots."""

import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.training.methods.registry import make_method
from ls_edge.training.methods.step_plan import StepPlan
from tests.training.trainings import criterion, viewed

torch.set_num_threads(1)
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 1, 2, 3, 4, 5])


def test_sequential_never_moves_a_block():
    method = make_method("sequential", {})
    assert {method.draw(Bands(5), 0, step).groups[0].order for step in range(20)} == {(0, 1, 2, 3, 4)}
    assert [a.order for a in method.validation(Bands(5), 4, 0)] == [(0, 1, 2, 3, 4)]


def test_shuffle_draws_uniform_orders_that_depend_on_seed_and_step_alone():
    method = make_method("shuffle", {})
    orders = [method.draw(Bands(3), 7, step).groups[0].order for step in range(3000)]
    counts = {order: orders.count(order) for order in set(orders)}
    assert len(counts) == 6
    assert all(400 < count < 600 for count in counts.values())
    assert orders[:50] == [make_method("shuffle", {}).draw(Bands(3), 7, step).groups[0].order for step in range(50)]
    assert orders[:50] != [method.draw(Bands(3), 8, step).groups[0].order for step in range(50)]
    assert all(type(block) is int for block in orders[0])


def test_shuffle_validates_in_other_orders_than_eval_draws():
    chosen = [a.order for a in make_method("shuffle", {}).validation(Bands(8), 4, 0)]
    assert len(set(chosen)) == 4
    assert not set(chosen) & set(Bands(8).random_orders(64, 0))


def test_layerdrop_drops_a_fifth_and_never_all():
    for name, sorted_ in (("layerdrop", True), ("layerdrop+shuffle", False)):
        method = make_method(name, {})
        orders = [method.draw(Bands(10), 0, step).groups[0].order for step in range(2000)]
        assert 7.9 < sum(map(len, orders)) / 2000 < 8.1
        assert all(list(order) == sorted(order) for order in orders) is sorted_
        assert (
            min(len(make_method(name, {"p": 0.99}).draw(Bands(3), 0, step).groups[0].order) for step in range(100)) == 1
        )


def test_shuffle_draws_every_order_that_the_bands_allow():
    bands = Bands.from_json("0/1-3/4-5")
    drawn = {make_method("shuffle", {}).draw(bands, 0, step).groups[0].order for step in range(300)}
    assert len(drawn) == bands.num_orders == 12


@pytest.mark.parametrize("embedding", ["shared", "per_block"])
def test_position_tells_each_block_its_slot(embedding):
    view = viewed().eval()
    plain = view(IMAGES, [3, 1])
    make_method("position", {"embedding": embedding}).attach(view)
    assert view.needs_slot
    names = [name for name in view.weights() if name.startswith("method.")]
    tables = [view.slots.embed] if embedding == "shared" else list(view.slots.embed)
    assert len(tables) == (1 if embedding == "shared" else 4)
    assert len(names) == 4 * 4 + len(tables)
    with torch.no_grad():
        for table in tables:
            assert not table.weight.any()  # as in the reference code
            assert table.weight.shape == (4, 32)
            table.weight.normal_()
        tokens = view.stem(IMAGES)
        assert not torch.equal(view.block(2, tokens, 0), view.block(2, tokens, 3))
        mixed = view.block(2, tokens, torch.tensor([0, 3, 3, 0, 0, 0]))
        torch.testing.assert_close(mixed[1], view.block(2, tokens, 3)[1])
        torch.testing.assert_close(mixed[0], view.block(2, tokens, 0)[0])
        # Ahead of the block stands x + GELU(Linear(LN([x; e]))).
        own = tables[0 if embedding == "shared" else 2]
        joined = torch.cat((tokens, own.weight[3].expand(*tokens.shape[:2], -1)), -1)
        embedded = tokens + torch.nn.functional.gelu(view.slots.project[2][:2](joined))
        torch.testing.assert_close(view.block(2, tokens, 3), view.blocks[2](embedded))
        assert not torch.equal(view(IMAGES, [3, 1]), plain)


def test_predict_learns_the_slot_and_changes_no_answer():
    view = viewed()
    view.eval()
    before = view(IMAGES, [2, 0])
    method = make_method("predict", {})
    method.attach(view)
    assert torch.equal(view(IMAGES, [2, 0]), before)
    assert not view.needs_slot
    plan = StepPlan.plain([2, 0, 3, 1])
    both = method.loss(view, IMAGES, TARGETS, plan, criterion)
    answer = criterion(view(IMAGES, [2, 0, 3, 1]), TARGETS)
    tokens, slots = view.stem(IMAGES), []
    for slot, block in enumerate(plan.groups[0].order):
        tokens = view.block(block, tokens)
        slots.append(torch.nn.functional.cross_entropy(view.predictor(block, tokens), torch.full((6,), slot)))
    torch.testing.assert_close(both, answer + torch.stack(slots).mean())
    both.backward()
    assert view.predictor.guess[0][1].weight.grad.abs().sum() > 0
