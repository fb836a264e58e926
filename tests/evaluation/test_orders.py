import pytest

from ls_edge.evaluation.orders import (
    default_keep,
    kendall_tau,
)


def test_a_quarter_half_and_three_quarters_of_the_blocks_are_kept_by_default():
    assert default_keep(12) == [3, 6, 9]
    assert default_keep(8) == [2, 4, 6]
    assert default_keep(1) == []


def test_kendall_tau_is_1_for_the_trained_order_and_minus_1_for_the_reversed_one():
    assert kendall_tau([0, 1, 2, 3]) == 1.0
    assert kendall_tau([3, 2, 1, 0]) == -1.0
    assert kendall_tau([1, 0, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([0]) == 1.0
