import msgspec
import numpy as np
import pytest

from ls_edge.accuracy import DRAWS, Plan, blocks_to_run, default_keep, evaluate, logits_of
from ls_edge.arrangement import random_orders, random_subset_order
from ls_edge.errors import DataError, UsageError


class Digits:
    """Block i appends its number to the tokens; the answer is 1 where ``right`` says so of what ran, else 0."""

    def __init__(self, blocks, right):
        self.blocks = blocks
        self.right = right
        self.runs = 0

    def stem(self, images):
        return ()

    def block(self, index, tokens, slot):
        assert slot == len(tokens)
        self.runs += 1
        return (*tokens, index)

    def head(self, tokens):
        answer = int(self.right(tokens))
        return np.tile(np.eye(2)[answer], (4, 1))


def images(count=1):
    return [(np.zeros((4, 3, 2, 2), np.float32), np.ones(4, np.int64))] * count


def test_a_model_that_only_knows_the_trained_order():
    plan = Plan.make(4, orders=50, keep=[2, 4], seed=3)
    found = evaluate(Digits(4, lambda order: order == (0, 1, 2, 3)), images(2), plan)
    right = sum(order == (0, 1, 2, 3) for order in random_orders(4, 50, 3)) / 50
    assert found.sequential.top1 == 1.0
    assert found.arbitrary.top1_mean == pytest.approx(right)
    assert found.arbitrary.top1_worst == 0.0
    assert found.kept["2"].sequential == found.kept["2"].arbitrary == 0.0
    assert found.kept["4"].sequential == 1.0
    assert found.images == 8


def test_figures_are_over_orders_and_draws():
    starts = {order: order[0] == 1 for order in random_orders(3, 20, 0)}
    found = evaluate(Digits(3, lambda order: order[:1] == (1,)), images(), Plan.make(3, orders=20, keep=[1, 2]))
    values = np.array([starts[order] for order in random_orders(3, 20, 0)], float)
    assert found.arbitrary.top1_mean == pytest.approx(values.mean())
    assert found.arbitrary.top1_std == pytest.approx(values.std())
    assert found.arbitrary.top1_p5 == pytest.approx(np.percentile(values, 5))
    one = [random_subset_order(3, 1, 0, i, shuffled=True) == (1,) for i in range(DRAWS)]
    assert found.kept["1"].sequential == found.kept["1"].arbitrary == pytest.approx(np.mean(one))
    two = [random_subset_order(3, 2, 0, i, shuffled=False)[0] == 1 for i in range(DRAWS)]
    assert found.kept["2"].sequential == pytest.approx(np.mean(two))


def test_common_starts_run_once():
    model = Digits(5, lambda order: True)
    orders = Plan.make(5, orders=30).all_orders()
    seen = dict(logits_of(model, np.zeros((4, 3, 2, 2)), orders))
    assert set(seen) == set(orders)
    assert model.runs == blocks_to_run(orders) < sum(map(len, orders))


def test_the_document():
    document = msgspec.to_builtins(evaluate(Digits(4, lambda order: True), images(), Plan.make(4)))
    assert set(document) >= {"sequential", "arbitrary", "kept", "position_accuracy", "images"}
    assert set(document["arbitrary"]) == {"top1_mean", "top1_std", "top1_p5", "top1_worst", "orders"}
    assert document["arbitrary"]["orders"] == 64
    assert document["kept"].keys() == {"1", "2", "3"}
    assert document["position_accuracy"] is None
    assert document["sequential"] == {"top1": 1.0}


def test_default_keep_is_quarters():
    assert default_keep(12) == [3, 6, 9]
    assert default_keep(8) == [2, 4, 6]
    assert default_keep(1) == []


def test_errors():
    with pytest.raises(UsageError, match="keep 5 is not possible: the model has 4 blocks"):
        Plan.make(4, keep=[5])
    with pytest.raises(UsageError, match="orders is 0"):
        Plan.make(4, orders=0)
    with pytest.raises(DataError, match="no images"):
        evaluate(Digits(2, lambda order: True), [], Plan.make(2))
