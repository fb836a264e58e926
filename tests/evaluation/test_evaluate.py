import msgspec
import numpy as np
import pytest

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.evaluation.evaluate import aggregate, evaluate
from ls_edge.evaluation.orders import (
    DRAWS,
)
from tests.evaluation.models import Digits, images, plan_of


def test_a_model_that_knows_only_the_trained_order_fails_in_others():
    plan = plan_of(Bands(4), orders=50, keep=[2, 4], seed=3)
    found = evaluate(Digits(4, lambda order: order == (0, 1, 2, 3)), images(2), plan)
    right = sum(order == (0, 1, 2, 3) for order in Bands(4).random_orders(50, 3)) / 50
    assert found.sequential.top1 == 1.0
    assert found.arbitrary.top1_mean == pytest.approx(right)
    assert found.arbitrary.top1_worst == 0.0
    assert found.kept["2"].sequential == found.kept["2"].arbitrary == 0.0
    assert found.kept["4"].sequential == 1.0
    assert found.images == 8


def test_statistics_are_over_orders_and_draws():
    starts = {order: order[0] == 1 for order in Bands(3).random_orders(20, 0)}
    found = evaluate(Digits(3, lambda order: order[:1] == (1,)), images(), plan_of(Bands(3), orders=20, keep=[1, 2]))
    values = np.array([starts[order] for order in Bands(3).random_orders(20, 0)], float)
    assert found.arbitrary.top1_mean == pytest.approx(values.mean())
    assert found.arbitrary.top1_std == pytest.approx(values.std(ddof=1))
    assert found.arbitrary.top1_p5 == pytest.approx(np.percentile(values, 5))
    one = [Bands(3).random_subset_order(1, 0, i, shuffled=True) == (1,) for i in range(DRAWS)]
    assert found.kept["1"].sequential == found.kept["1"].arbitrary == pytest.approx(np.mean(one))
    two = [Bands(3).random_subset_order(2, 0, i, shuffled=False)[0] == 1 for i in range(DRAWS)]
    assert found.kept["2"].sequential == pytest.approx(np.mean(two))


def test_the_document_has_the_keys_of_the_contract():
    document = msgspec.to_builtins(evaluate(Digits(4, lambda order: True), images(), plan_of(Bands(4))))
    assert set(document) >= {"sequential", "arbitrary", "kept", "position_accuracy", "images"}
    assert set(document["arbitrary"]) == {"top1_mean", "top1_std", "top1_p5", "top1_worst", "orders"}
    assert document["arbitrary"]["orders"] == 64
    assert document["kept"].keys() == {"1", "2", "3"}
    assert document["position_accuracy"] is None
    assert document["sequential"] == {"top1": 1.0}


def test_no_order_leaves_the_bands():
    bands = Bands.from_json("0/1-4/5")

    class Watched(Digits):
        def head(self, tokens):
            assert not bands.fault(Arrangement.plain(tokens))
            return super().head(tokens)

    plan = plan_of(bands, orders=40, seed=2)
    assert any(len(order) < 6 for order in plan.all_orders())
    evaluate(Watched(6, lambda order: True), images(), plan)
    fixed = plan_of(Bands.ladder(4)[0], orders=3, keep=[2])
    assert all(list(order) == sorted(order) for order in fixed.all_orders())


def test_predicted_slots_are_compared_with_actual_slots():
    class Tells(Digits):
        owners = (0, 1, 1, 1)

        def slots_of(self, index, tokens):
            return np.full(4, len(tokens) - 1 if index else 7)

    assert evaluate(
        Tells(4, lambda order: True), images(2), plan_of(Bands(4), orders=10)
    ).position_accuracy == pytest.approx(0.75)


def test_several_models_have_means_and_pooled_deviations():
    plan = plan_of(Bands(4), orders=10)
    good, bad = (evaluate(Digits(4, right), images(), plan) for right in (lambda o: True, lambda o: o == (0, 1, 2, 3)))
    both = aggregate([good, bad])
    assert both.sequential.top1 == 1.0
    assert both.arbitrary.top1_mean == pytest.approx((1 + bad.arbitrary.top1_mean) / 2)
    values = [1.0] * 10 + [float(order == (0, 1, 2, 3)) for order in Bands(4).random_orders(10, 0)]
    assert both.arbitrary.top1_std == pytest.approx(np.std(values, ddof=1))
    assert (both.models.count, both.models.sequential_std) == (2, 0.0)
    assert both.models.arbitrary_std == pytest.approx(np.std([1.0, bad.arbitrary.top1_mean], ddof=1))
    assert both.kept["2"].arbitrary == 0.5


def test_bands_are_evaluated_from_a_fixed_order_to_full_freedom():
    """A model that fails as soon as block 0 does not come first, or 3 comes before 2."""
    own = Bands.from_json("0-1/2-3")
    plan = plan_of(own, bands="0-3", orders=30, keep=[], freedom=True)
    model = Digits(4, lambda order: order[0] == 0 and order.index(2) < order.index(3))
    found = evaluate(model, images(), plan).freedom
    assert [(str(Bands.from_json(step.bands)), step.allowed, step.orders) for step in found] == [
        ("0/1/2/3", 1, 1), ("0/1-2/3", 2, 2), ("0-1/2-3", 4, 4), ("0/1-3", 6, 6), ("0-3", 24, 24),
    ]  # fmt: skip
    assert [step.top1_mean for step in found] == pytest.approx([1.0, 1.0, 0.25, 0.5, 3 / 24])
    assert [step.top1_worst for step in found] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert [step.own for step in found] == [False, False, True, False, False]
    assert found[3].top1_std == pytest.approx(np.std([1, 1, 1, 0, 0, 0], ddof=1))
    assert found[0].top1_std is None  # one order
    assert evaluate(model, images(), plan_of(Bands(4), keep=[])).freedom is None
    assert len(plan_of(Bands(24), freedom=True).freedom) == 10
    msgspec.json.encode(
        evaluate(Digits(24, lambda order: True), images(), plan_of(Bands(24), orders=1, keep=[], freedom=True))
    )
