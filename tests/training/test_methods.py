import pytest

from ls_edge.arrangement import random_orders
from ls_edge.errors import UsageError
from ls_edge.training.methods import METHODS, make_method


def test_sequential_never_moves_a_block():
    method = make_method("sequential", {})
    assert {method.draw(5, 0, step).order for step in range(20)} == {(0, 1, 2, 3, 4)}
    assert [a.order for a in method.validation(5, 4, 0)] == [(0, 1, 2, 3, 4)]


def test_shuffle_draws_uniform_orders_that_depend_on_seed_and_step_alone():
    method = make_method("shuffle", {})
    orders = [method.draw(3, 7, step).order for step in range(3000)]
    counts = {order: orders.count(order) for order in set(orders)}
    assert len(counts) == 6
    assert all(400 < count < 600 for count in counts.values())
    assert orders[:50] == [make_method("shuffle", {}).draw(3, 7, step).order for step in range(50)]
    assert orders[:50] != [method.draw(3, 8, step).order for step in range(50)]
    assert all(type(block) is int for block in orders[0])


def test_shuffle_is_judged_in_other_orders_than_eval_draws():
    chosen = [a.order for a in make_method("shuffle", {}).validation(8, 4, 0)]
    assert len(set(chosen)) == 4
    assert not set(chosen) & set(random_orders(8, 64, 0))


def test_unknown_names_and_settings():
    with pytest.raises(UsageError, match="unknown method 'shufle'; this version has sequential, shuffle"):
        make_method("shufle", {})
    with pytest.raises(UsageError, match="method shuffle with settings"):
        make_method("shuffle", {"p": 1})
    assert all(method.name == name for name, method in METHODS.items())
