"""Balanced orders: counted, for even and odd numbers of blocks."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.bands import Bands
from ls_edge.training.methods.base import make_method
from ls_edge.training.methods.williams import balanced_orders, williams_square

PLAIN = {"tracks": 0.0, "trained": 0.0, "subset": 0.0, "drop": 0.0, "balanced": True}


@pytest.mark.parametrize("size", range(1, 14))
def test_each_slot_and_each_neighbour_equally_often(size):
    rows = williams_square(size)
    times = 1 if size % 2 == 0 or size == 1 else 2
    assert len(rows) == times * size
    assert all(sorted(row) == list(range(size)) for row in rows)
    slots = Counter((slot, number) for row in rows for slot, number in enumerate(row))
    assert slots == dict.fromkeys(itertools.product(range(size), repeat=2), times)
    behind = Counter(pair for row in rows for pair in itertools.pairwise(row))
    assert behind == dict.fromkeys(itertools.permutations(range(size), 2), times)


@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=4), squares=st.integers(1, 3), seed=st.integers(0, 2**32))
def test_within_bands_over_whole_squares(sizes, squares, seed):
    ends = list(itertools.accumulate(sizes, initial=0))
    bands = Bands(ends[-1], tuple(ends[1:-1]))
    for group in bands.groups:
        length = squares * len(williams_square(len(group)))
        orders = balanced_orders(bands.groups, length, random.Random(seed))
        assert all(bands.sort(order) == order for order in orders)
        assert all(sorted(order) == list(range(bands.num_blocks)) for order in orders)
        parts = [order[group.start : group.stop] for order in orders]
        slots = Counter((slot, block) for part in parts for slot, block in enumerate(part))
        assert set(slots.values()) == {length // len(group)}
        behind = Counter(pair for part in parts for pair in itertools.pairwise(part))
        assert len(behind) == len(group) * (len(group) - 1)
        assert len(set(behind.values())) <= 1


def test_a_single_order_is_uniform():
    found = Counter(balanced_orders([range(4)], 1, random.Random(seed))[0] for seed in range(4800))
    assert len(found) == 24
    assert all(130 < count < 270 for count in found.values())  # 200 each, deviation 14


def test_a_setting_of_anyorder():
    method = make_method("anyorder", {**PLAIN, "groups": 8})
    for step in range(5):
        orders = [item.order for item in method.draw(Bands(8), 0, step).groups]
        assert Counter(pair for order in orders for pair in itertools.pairwise(order)) == dict.fromkeys(
            itertools.permutations(range(8), 2), 1
        )
    assert method.draw(Bands(8), 3, 4) == method.draw(Bands(8), 3, 4)
    assert method.draw(Bands(8), 3, 4) != method.draw(Bands(8), 3, 5)
    bands = Bands.from_json("0/1-6/7")
    fewer = make_method("anyorder", {**PLAIN, "groups": 6, "drop": 0.3, "tracks": 0.3})
    for step in range(20):
        for item in fewer.draw(bands, 0, step).groups:
            assert not bands.fault(item)
    independent = make_method("anyorder", {**PLAIN, "groups": 8, "balanced": False})
    assert max(len({item.order[0] for item in independent.draw(Bands(8), 0, step).groups}) for step in range(20)) < 8
