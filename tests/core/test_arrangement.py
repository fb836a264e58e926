"""Arrangements: validity, notation, slots, and the results of apply."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.arrangement import (
    Arrangement,
    apply,
    random_order,
)
from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from tests.arrangements import arrangement_of


@st.composite
def arrangements(draw, most=10):
    """Any arrangement of some of the blocks 0 to ``most - 1``."""
    blocks = draw(st.lists(st.integers(0, most - 1), unique=True, max_size=most))
    tracks = _cut(blocks, draw)
    return Arrangement(tuple(tuple(wave) for wave in _cut([tuple(track) for track in tracks], draw)))


def _cut(items, draw):
    """Cut a list into pieces that are not empty."""
    if not items:
        return []
    cuts = draw(st.lists(st.booleans(), min_size=len(items) - 1, max_size=len(items) - 1))
    pieces = [[items[0]]]
    for item, cut in zip(items[1:], cuts, strict=True):
        if cut:
            pieces.append([item])
        else:
            pieces[-1].append(item)
    return pieces


def steps_of(arrangement):
    """Blocks and slots, as :func:`apply` runs them."""
    calls = []
    apply(arrangement, np.zeros(2), lambda block, tokens, slot: calls.append((block, slot)) or tokens)
    return calls


@given(arrangements())
def test_an_arrangement_survives_json(arrangement):
    again = arrangement_of(json.loads(json.dumps(arrangement.to_json())))
    assert steps_of(again) == steps_of(arrangement)
    assert again == (Arrangement.plain(arrangement.order) if arrangement.is_plain else arrangement)


@given(arrangements())
def test_slots_count_the_blocks_before_on_the_same_path(arrangement):
    steps = steps_of(arrangement)
    assert tuple(block for block, _ in steps) == arrangement.order
    slots = dict(steps)
    earlier = 0
    for wave in arrangement.waves:
        for track in wave:
            assert [slots[block] for block in track] == list(range(earlier, earlier + len(track)))
        earlier += sum(map(len, wave))
    if arrangement.is_plain:
        assert [slot for _, slot in steps] == list(range(len(steps)))


@given(st.permutations(range(6)))
def test_apply_of_a_plain_order_is_a_fold(order):
    def run(block, tokens, slot):
        return tokens * (block + 2) + slot

    expected = np.arange(3.0)
    for slot, block in enumerate(order):
        expected = run(block, expected, slot)
    assert np.array_equal(apply(Arrangement.plain(order), np.arange(3.0), run), expected)


def test_apply_sums_the_additions_of_tracks():
    # t + (10 t - t) + ((t + 7) * 3 - t), both tracks from the same t
    def run(block, tokens, slot):
        return {0: tokens * 10, 1: tokens + 7, 2: tokens * 3}[block]

    tokens = np.asarray([1.0, 2.0])
    found = apply(Arrangement((((0,), (1, 2)),)), tokens, run)
    assert np.array_equal(found, tokens + 9 * tokens + (tokens + 7) * 3 - tokens)
    assert np.array_equal(apply(Arrangement(()), tokens, run), tokens)


def test_apply_sums_in_track_order():
    """Replay adds the same numbers in the same order, and float32 shows a difference."""
    additions = {0: np.float32(1e8), 1: np.float32(-1e8), 2: np.float32(1.0)}

    def run(block, tokens, slot):
        return tokens + additions[block]

    found = {
        order: float(apply(Arrangement((tuple((block,) for block in order),)), np.float32(0), run))
        for order in itertools.permutations(range(3))
    }
    assert found[0, 1, 2] == 1.0
    assert found[0, 2, 1] == 0.0


@pytest.mark.parametrize(
    ("value", "what"),
    [
        ([0, 0], "block 0 runs twice"),
        ([-1, 2], "block -1 is negative"),
        ([[[0], [1]], [[1]]], "block 1 runs twice"),
        ([[[0], []]], "a wave or track is empty"),
        ([[[0]], []], "a wave or track is empty"),
    ],
)
def test_invalid_arrangements_are_refused(value, what):
    with pytest.raises(UsageError, match=what):
        arrangement_of(value)


def test_nested_lists_are_waves_of_tracks():
    assert arrangement_of([]).waves == ()
    assert Arrangement.plain([2, 0]).to_json() == [2, 0]
    assert arrangement_of([2, 0]) == Arrangement.plain((2, 0))
    nested = [[[3, 7], [0, 5]], [[1, 2], [4, 6]]]
    arrangement = arrangement_of(nested)
    assert arrangement.to_json() == nested
    assert not arrangement.is_plain
    assert arrangement.order == (3, 7, 0, 5, 1, 2, 4, 6)
    assert steps_of(arrangement) == [(3, 0), (7, 1), (0, 0), (5, 1), (1, 4), (2, 5), (4, 4), (6, 5)]


def test_random_orders_are_the_same_everywhere():
    assert random_order(8, seed=0, index=0) == (4, 1, 5, 2, 0, 3, 7, 6)
    assert random_order(12, seed=7, index=3) == (10, 4, 5, 11, 7, 8, 3, 2, 6, 1, 9, 0)
    orders = [random_order(6, seed=3, index=index) for index in range(200)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    assert len(set(orders)) > 150
    assert orders == [random_order(6, 3, index) for index in range(200)]
    assert orders != [random_order(6, 4, index) for index in range(200)]
    assert orders[17] == random_order(6, 3, 17)


def test_random_orders_are_uniform():
    firsts = [order[0] for order in (random_order(4, 1, index) for index in range(4000))]
    assert all(abs(firsts.count(block) - 1000) < 150 for block in range(4))


def test_random_subsets_have_the_requested_size_and_order():
    for index in range(20):
        shuffled = Bands(12).random_subset_order(5, seed=9, index=index, shuffled=True)
        kept = Bands(12).random_subset_order(5, seed=9, index=index, shuffled=False)
        assert kept == tuple(sorted(shuffled))
        assert len(set(kept)) == 5
    assert len({Bands(12).random_subset_order(5, 9, index, shuffled=False) for index in range(20)}) > 10


def test_orders_are_cut_into_waves():
    rng = random.Random(0)
    for _ in range(200):
        order = rng.sample(range(9), 9)
        found = Bands(12).random_waves(order, rng)
        assert found.order == tuple(order)
        assert {len(wave) for wave in found.waves} <= {1, 2, 3, 4}
        assert all(len({len(track) for track in wave}) == 1 for wave in found.waves)
    assert Bands(12).random_waves([], rng).to_json() == []
