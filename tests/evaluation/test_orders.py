from ls_edge.evaluation.orders import (
    default_keep,
)


def test_a_quarter_half_and_three_quarters_of_the_blocks_are_kept_by_default():
    assert default_keep(12) == [3, 6, 9]
    assert default_keep(8) == [2, 4, 6]
    assert default_keep(1) == []
