import pytest
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.methods.registry import METHODS, expected_cost, make_method
from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.flops import WorkProfile
from ls_edge.training.models.small_models import build

torch.set_num_threads(1)
TINY = {"embed_dim": 16, "depth": 4, "num_heads": 2, "mlp_ratio": 2.0}
IMAGES = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(1))
TARGETS = torch.tensor([0, 1, 2, 3, 4, 5])


def viewed(seed=0):
    torch.manual_seed(seed)
    return build("vit_digits", TINY)


def criterion(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)


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


def test_shuffle_is_judged_in_other_orders_than_eval_draws():
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
        assert expected_cost(method, WorkProfile(10)) == pytest.approx(2.4, abs=0.05)


@pytest.mark.parametrize("name", list(METHODS))
@pytest.mark.parametrize("bands", ["0/1-4/5-6/7", "0-7", "0/1/2/3/4/5/6/7"])
def test_every_method_draws_within_the_bands(name, bands):
    bands, method = Bands.from_json(bands), make_method(name, {})
    free = make_method(name, {})
    for step in range(200):
        for item in method.draw(bands, 3, step).groups:
            bands.check(item)
        blocks = [sorted(item.order) for item in method.draw(bands, 3, step).groups]
        assert blocks == [sorted(item.order) for item in free.draw(Bands(8), 3, step).groups] or name == "anyorder"
    for item in method.validation(bands, 4, 0):
        bands.check(item)
        assert sorted(item.order) == list(range(8))


def test_shuffle_draws_every_order_that_the_bands_allow():
    bands = Bands.from_json("0/1-3/4-5")
    drawn = {make_method("shuffle", {}).draw(bands, 0, step).groups[0].order for step in range(300)}
    assert len(drawn) == bands.num_orders == 12


def test_waves_and_subsets_of_anyorder_are_drawn_in_bands_too():
    bands, method = Bands.from_json("0/1-6/7"), make_method("anyorder", {"tracks": 1.0, "trained": 0.0})
    drawn = [item for step in range(50) for item in method.draw(bands, 0, step).groups]
    assert any(not item.is_plain for item in drawn)
    assert any(len(item.order) < 8 for item in drawn)
    assert any(0 not in item.order for item in drawn)


def test_unknown_names_and_settings():
    with pytest.raises(UsageError, match="unknown method 'shufle'; choose one of sequential, shuffle"):
        make_method("shufle", {})
    with pytest.raises(UsageError, match="method shuffle with settings"):
        make_method("shuffle", {"p": 1})
    with pytest.raises(UsageError, match=r"p is 1\.0; it has to be a number from 0 below 1"):
        make_method("layerdrop", {"p": 1.0})
    with pytest.raises(UsageError, match="its settings are groups, tracks"):
        make_method("anyorder", {"group": 3})


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


def test_a_methods_weights_are_part_of_the_runs():
    one, other = viewed(), viewed(1)
    make_method("position", {}).attach(one)
    make_method("position", {}).attach(other)
    other.load_weights(one.weights())
    assert all(torch.equal(a, b) for a, b in zip(one.weights().values(), other.weights().values(), strict=True))
    plain = viewed()
    assert not plain.take_method(one.weights())
    make_method("predict", {}).attach(plain)
    assert not plain.take_method(one.weights())


def test_cost_counts_stem_head_and_a_methods_modules():
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


@pytest.mark.parametrize(
    ("method", "added"),
    [("shuffle", 0), ("position", 2 * 16 * (16 + 32) * 16), ("predict", 2 * 16 * 4)],
)
def test_a_methods_modules_are_counted_for_each_block(method, added):
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
