"""Blocks are assigned to tracks wherever that is possible, and costs only ever make the assignment better."""

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.order_costs import VERSION, Fit, Measured, OrderCosts
from ls_edge.runtime.routing.policies.wave_planner import assign_blocks
from tests.order_costs import cost

ALL = frozenset(range(24))
FREE = st.floats(-1, 1, allow_nan=False)


def costs_of(blocks, number):
    """Costs whose entries are ``number(table, row, column)``."""

    def table(name, upper):
        return tuple(
            tuple(number(name, a, b) if (a < b if upper else a != b) else 0.0 for b in range(blocks))
            for a in range(blocks)
        )

    zero = Measured(0.0, None)
    return OrderCosts(
        VERSION, "test", 1, 1, zero, zero, table("slot", False), table("inverted", True), (0.0,) * blocks,
        Fit(1, 1.0, 0.0), beside=table("beside", True),
    )  # fmt: skip


def cost_of(costs, tracks, before, ahead):
    """The estimate for a wave after ``before`` blocks, by the definition of it."""
    waves = [(tuple(ahead[:before]),)] if before else []
    return cost(costs, Arrangement((*waves, tuple(filter(None, tracks)))), skipped=())


def possible(blocks, lengths, may):
    """Every assignment that respects ``may``, by trying all."""
    for owner in itertools.product(range(len(lengths)), repeat=len(blocks)):
        if all(owner.count(k) == n for k, n in enumerate(lengths)) and all(
            b in may[k] for b, k in zip(blocks, owner, strict=True)
        ):
            yield tuple(tuple(b for b, k in zip(blocks, owner, strict=True) if k == at) for at in range(len(lengths)))


def test_neighbors_run_side_by_side():
    assert assign_blocks(range(6), [3, 3], [ALL, ALL], before=0, costs=None) == ((0, 2, 4), (1, 3, 5))
    assert assign_blocks([3, 7, 0, 5], [2, 2], [ALL, ALL], before=4, costs=None) == ((3, 0), (7, 5))
    assert assign_blocks(range(6), [2, 2, 2], [ALL] * 3, before=0, costs=None) == ((0, 3), (1, 4), (2, 5))


def test_the_end_of_a_longer_track_runs_alone():
    assert assign_blocks(range(6), [4, 2], [ALL, ALL], before=0, costs=None) == ((0, 2, 4, 5), (1, 3))
    assert assign_blocks(range(3), [0, 3], [ALL, ALL], before=0, costs=None) == ((), (0, 1, 2))


def test_holders_run_only_what_they_have():
    assert assign_blocks(range(4), [2, 2], [ALL, {2, 3}], before=0, costs=None) == ((0, 1), (2, 3))
    assert assign_blocks(range(4), [2, 2], [ALL, {0, 1}], before=0, costs=None) == ((2, 3), (0, 1))
    with pytest.raises(ValueError, match="have no assignment"):
        assign_blocks(range(4), [2, 2], [ALL, {1}], before=0, costs=None)
    assert assign_blocks([], [], [], before=0, costs=None) == ()


def test_a_chain_of_moves_makes_room():
    """Each of the first three is first put where a later one has to go."""
    may = [{0, 1}, {1, 2}, {2, 3}, {0}]
    assert assign_blocks([0, 1, 2, 3], [1, 1, 1, 1], may, before=0, costs=None) == ((1,), (2,), (3,), (0,))


def test_blocks_that_cost_much_side_by_side_share_a_track():
    bad = {(0, 1), (2, 3), (4, 5)}
    costs = costs_of(6, lambda name, a, b: 1.0 if name == "beside" and (a, b) in bad else 0.0)
    one, _ = assign_blocks(range(6), [4, 2], [ALL, ALL], before=0, costs=costs)
    assert all((a in one) == (b in one) for a, b in bad)


def test_a_block_goes_to_the_slot_where_it_costs_least():
    costs = costs_of(4, lambda name, block, slot: 1.0 if (name, block, slot) == ("slot", 3, 1) else 0.0)
    tracks = assign_blocks(range(4), [1, 3], [ALL, ALL], before=0, costs=costs)
    assert [3] not in [list(track[1:2]) for track in tracks]
    later = costs_of(8, lambda name, block, slot: 1.0 if (name, block, slot) == ("slot", 7, 5) else 0.0)
    tracks = assign_blocks(range(4, 8), [2, 2], [ALL, ALL], before=4, costs=later)
    assert cost_of(later, tracks, 4, range(4)) == 1, "both tracks end in slot 5, and block 7 is last wherever it goes"


def test_costs_that_say_nothing_of_tracks_are_not_used():
    costs = costs_of(6, lambda name, a, b: float(a * b) if name == "slot" else 1.0)
    old = OrderCosts(1, "", 1, 1, costs.trained, costs.random, costs.slot, costs.inverted, costs.skip, costs.fit)
    assert assign_blocks(range(6), [3, 3], [ALL, ALL], before=0, costs=old) == ((0, 2, 4), (1, 3, 5))


@st.composite
def waves(draw):
    total = draw(st.integers(1, 8))
    count = draw(st.integers(1, total))
    blocks = draw(st.permutations(range(total)))
    tracks = draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=tracks - 1, max_size=tracks - 1)))
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, count])]
    may = draw(st.lists(st.sets(st.sampled_from(range(total)), min_size=total // 2), min_size=tracks, max_size=tracks))
    random = Random(draw(st.integers(0, 2**32)))  # numbers of nats, not of 1e131 that hypothesis would draw itself
    numbers = {
        key: random.gauss(0, 1) for key in itertools.product(("slot", "inverted", "beside"), range(total), range(total))
    }
    return blocks, count, lengths, may, costs_of(total, lambda *key: numbers[key])


@settings(max_examples=150, deadline=None)
@given(waves())
def test_any_deal_is_valid_found_where_there_is_one_and_no_worse_than_without_costs(wave):
    order, count, lengths, may, costs = wave
    ahead, blocks = order[count:], order[:count]
    before = len(ahead)
    everything = set(possible(blocks, lengths, may))
    if not everything:
        with pytest.raises(ValueError, match="have no assignment"):
            assign_blocks(blocks, lengths, may, before=before, costs=costs)
        return
    start = assign_blocks(blocks, lengths, may, before=before, costs=None)
    found = assign_blocks(blocks, lengths, may, before=before, costs=costs)
    assert start in everything
    assert found in everything
    assert found == assign_blocks(tuple(blocks), tuple(lengths), [tuple(m) for m in may], before=before, costs=costs)
    assert cost_of(costs, found, before, ahead) <= cost_of(costs, start, before, ahead) + 1e-9


@settings(max_examples=60, deadline=None)
@given(waves())
def test_with_time_enough_no_swap_is_left_that_pays(wave):
    order, count, lengths, may, costs = wave
    ahead, blocks = order[count:], order[:count]
    if any(possible(blocks, lengths, may)):
        found = assign_blocks(blocks, lengths, may, before=len(ahead), costs=costs, swaps=10**9)
        least = cost_of(costs, found, len(ahead), ahead) - 1e-6
        swaps = [other for other in possible(blocks, lengths, may) if _one_swap(found, other)]
        assert all(cost_of(costs, other, len(ahead), ahead) >= least for other in swaps)


def _one_swap(one, other):
    return sum(len(set(a) - set(b)) for a, b in zip(one, other, strict=True)) == 2


@pytest.mark.parametrize("tracks", [2, 3, 4])
def test_the_search_stops_however_many_blocks_there_are(tracks):
    """Costs under which every swap of the first pass pays."""
    costs = costs_of(24, lambda name, a, b: ((a * 7 + b * 13) % 11 - 5) / 10)
    lengths = [24 // tracks] * tracks
    start, found = (assign_blocks(range(24), lengths, [ALL] * tracks, before=0, costs=c) for c in (None, costs))
    assert sorted(itertools.chain(*found)) == list(range(24))
    assert cost_of(costs, found, 0, ()) < cost_of(costs, start, 0, ())
