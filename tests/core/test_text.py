"""Blocks, cores and counts as text, in both directions."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.text import (
    counted,
    format_ranges,
    name_blocks,
    parse_ranges,
    shorten,
    show,
    show_hours,
    show_ms,
    show_nines,
)


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


def test_numbers_of_one_kind_have_the_same_digits():
    assert [show_ms(v) for v in (None, 0.0, 0.424, 9.13, 131.4, 2400.0, 72000.0)] == [
        "\N{EN DASH}", "0 ms", "0.42 ms", "9.1 ms", "131 ms", "2.4 s", "72.0 s",
    ]  # fmt: skip
    assert show(123456) == "123,456"
    assert [show(v, " / s") for v in (0.2, 0.02, 0.001, -0.0123, 1e-7)] == [
        "0.20 / s", "0.02 / s", "0.001 / s", "-0.012 / s", "1e-07 / s",
    ]  # fmt: skip


def test_shares_near_one_show_two_digits_of_what_is_missing():
    assert [show_nines(share) for share in (0.5, 0.9, 0.9977, 0.999987, 0.999999998, 1.0)] == [
        "50.0 %", "90.0 %", "99.77 %", "99.9987 %", "99.99999980 %", "100 %",
    ]  # fmt: skip
    assert [show_hours(hours) for hours in (0.001, 0.5, 40)] == ["3.6 s", "30.0 min", "40.0 h"]


def test_long_text_is_shortened_in_the_middle():
    assert shorten("a" * 10 + "b" * 10, 9) == "aaaa…bbbb"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, "thread"), "1 thread"), ((2, "thread"), "2 threads"), ((0, "image"), "0 images"),
        ((1, "retry", "retries"), "1 retry"), ((3, "retry", "retries"), "3 retries"), ((1000, "run"), "1,000 runs"),
    ],
)  # fmt: skip
def test_counts_have_their_noun_in_singular_or_plural(arguments, text):
    assert counted(*arguments) == text
