"""Order costs: sums over arrangements, and manifests with invalid tables."""

import msgspec
import pytest

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import BundleError, SchemaMismatch
from ls_edge.core.order_costs import Fit, Measured, OrderCosts, read_order_costs
from tests.arrangements import arrangement_of
from tests.order_costs import cost

COSTS = OrderCosts(
    version=2, source="here", images=4, orders=6, trained=Measured(0.1, 0.9), random=Measured(2.0, 0.2),
    slot=((0.0, 1.0, 2.0), (3.0, 0.0, 4.0), (5.0, 6.0, 0.0)),
    inverted=((0.0, 10.0, 20.0), (0.0, 0.0, 40.0), (0.0, 0.0, 0.0)),
    skip=(100.0, 200.0, 400.0), fit=Fit(2, 0.9, 0.1),
    beside=((0.0, 0.1, 0.2), (0.0, 0.0, 0.4), (0.0, 0.0, 0.0)), fit_tracks=Fit(1, 0.0, 0.1), arrangements=3,
)  # fmt: skip


def test_an_order_costs_the_sum_of_its_differences_from_the_trained_order():
    assert cost(COSTS, [0, 1, 2]) == 0
    assert cost(COSTS, [1, 0, 2]) == 3 + 1 + 10
    assert cost(COSTS, [2, 1, 0]) == 5 + 2 + 10 + 20 + 40
    assert cost(COSTS, [2, 0]) == 5 + 1 + 20 + 200
    assert cost(COSTS, [2, 0], skipped=()) == 5 + 1 + 20
    assert cost(COSTS, []) == 700


def test_tracks_cost_parallel_and_earlier_blocks():
    assert cost(COSTS, arrangement_of([1, 0, 2])) == cost(COSTS, [1, 0, 2])
    assert cost(COSTS, Arrangement((((0, 2), (1,)),))) == pytest.approx(6 + 3 + 0.1 + 0.4)
    assert cost(COSTS, Arrangement((((1,), (0, 2)),))) == pytest.approx(6 + 3 + 0.1 + 0.4)
    assert cost(COSTS, Arrangement((((2, 0), (1,)),))) == pytest.approx(5 + 1 + 3 + 20 + 0.1 + 0.4)
    assert cost(COSTS, Arrangement((((2,),), ((0,), (1,))))) == pytest.approx(5 + 1 + 0 + 20 + 40 + 0.1)
    assert cost(COSTS, Arrangement((((0,), (2,)),))) == pytest.approx(5 + 0.2 + 200)
    assert cost(COSTS, Arrangement((((0,), (2,)),)), skipped=()) == pytest.approx(5 + 0.2)


def test_order_costs_survive_a_manifest():
    assert read_order_costs({}, 3) is None
    plain = msgspec.json.decode(msgspec.json.encode(COSTS))
    assert read_order_costs(plain, 3) == COSTS


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"version": 3}, SchemaMismatch, "has version 3, this ls-edge reads 2"),
        ({"version": None}, SchemaMismatch, "None"),
        ({"skip": [1.0, 2.0]}, BundleError, r"tables of \[2, 3\] blocks, the bundle has 3"),
        ({"slot": [[0.0, 1.0, 2.0]]}, BundleError, "tables of"),
        ({"skip": ["much", 1, 2]}, BundleError, "is invalid for version 2"),
        ({"more": 1}, BundleError, "is invalid for version 2"),
        ({"version": 1}, SchemaMismatch, "has version 1"),
        ({"beside": [[0.0, 1.0, 2.0]]}, BundleError, "tables of"),
        ({"beside": [[0.0, 1.0, 2.0]] * 2 + [[0.0, float("inf"), 0.0]]}, BundleError, "is invalid for version 2"),
    ],
)
def test_invalid_order_costs_are_refused(change, kind, words):
    plain = {**msgspec.to_builtins(COSTS), **change}
    with pytest.raises(kind, match=words):
        read_order_costs(plain, 3)
    with pytest.raises(BundleError, match="the bundle has 4"):
        read_order_costs(msgspec.to_builtins(COSTS), 4)
    with pytest.raises(BundleError, match="is invalid for version 2"):
        read_order_costs({**msgspec.to_builtins(COSTS), "skip": [float("nan"), 0.0, 0.0]}, 3)
