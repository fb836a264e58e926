import pytest

from ls_edge.core.bands import Bands
from ls_edge.evaluation.orders import (
    default_keep,
    default_shapes,
    kendall_tau,
)


def test_a_quarter_half_and_three_quarters_of_the_blocks_are_kept_by_default():
    assert default_keep(12) == [3, 6, 9]
    assert default_keep(8) == [2, 4, 6]
    assert default_keep(1) == []


def test_shapes_fit_into_the_largest_band():
    assert default_shapes(12) == [(2, 1), (2, 2), (2, 6), (4, 1), (12, 1)]
    assert default_shapes(1) == []
    assert default_shapes(3) == [(2, 1), (3, 1)]
    assert Bands(5).equal_waves([4, 0, 2, 1, 3], 2, 2).to_json() == [[[4, 0], [2, 1]], [[3]]]


def test_kendall_tau_is_1_for_the_trained_order_and_minus_1_for_the_reversed_one():
    assert kendall_tau([0, 1, 2, 3]) == 1.0
    assert kendall_tau([3, 2, 1, 0]) == -1.0
    assert kendall_tau([1, 0, 2]) == pytest.approx(1 / 3)
    assert kendall_tau([0]) == 1.0
