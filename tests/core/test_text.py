"""Blocks and cores as text, in both directions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.text import format_ranges, name_blocks, parse_ranges


@pytest.mark.parametrize(
    ("numbers", "text"), [((), ""), ((3,), "3"), ((0, 1, 2, 3, 7), "0-3, 7"), ((5, 4, 9, 10, 4), "4-5, 9-10")]
)
def test_consecutive_numbers_are_ranges(numbers, text):
    assert format_ranges(numbers) == text


@given(st.sets(st.integers(0, 9999), min_size=1))
def test_written_ranges_are_read_again(numbers):
    assert parse_ranges(format_ranges(numbers)) == tuple(sorted(numbers))


@pytest.mark.parametrize(
    ("text", "part"),
    [("", ""), ("a", "a"), ("3-1", "3-1"), ("1-", "1-"), ("2,-1", "-1"), ("1,,2", ""), ("0-99999", "0-99999"),
     ("1.5", "1.5"), ("9" * 5000, "9" * 5000)],
)  # fmt: skip
def test_text_that_is_not_a_list_of_ranges_is_refused(text, part):
    with pytest.raises(ValueError, match=f"^{re.escape(part)}$"):
        parse_ranges(text)


def test_blocks_are_named_in_the_singular_and_plural():
    assert [name_blocks(blocks) for blocks in ([3], {0, 1, 7})] == ["block 3", "blocks 0-1, 7"]
