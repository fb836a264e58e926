"""Blocks are assigned to tracks wherever that is possible."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_edge.runtime.routing.policies.wave_planner import assign_blocks

ALL = frozenset(range(24))


def possible(blocks, lengths, may):
    """Every assignment that respects ``may``, by trying all."""
    for owner in itertools.product(range(len(lengths)), repeat=len(blocks)):
        if all(owner.count(k) == n for k, n in enumerate(lengths)) and all(
            b in may[k] for b, k in zip(blocks, owner, strict=True)
        ):
            yield tuple(tuple(b for b, k in zip(blocks, owner, strict=True) if k == at) for at in range(len(lengths)))


def test_neighbors_run_side_by_side():
    assert assign_blocks(range(6), [3, 3], [ALL, ALL]) == ((0, 2, 4), (1, 3, 5))
    assert assign_blocks([3, 7, 0, 5], [2, 2], [ALL, ALL]) == ((3, 0), (7, 5))
    assert assign_blocks(range(6), [2, 2, 2], [ALL] * 3) == ((0, 3), (1, 4), (2, 5))


def test_the_end_of_a_longer_track_runs_alone():
    assert assign_blocks(range(6), [4, 2], [ALL, ALL]) == ((0, 2, 4, 5), (1, 3))
    assert assign_blocks(range(3), [0, 3], [ALL, ALL]) == ((), (0, 1, 2))


def test_holders_run_only_what_they_have():
    assert assign_blocks(range(4), [2, 2], [ALL, {2, 3}]) == ((0, 1), (2, 3))
    assert assign_blocks(range(4), [2, 2], [ALL, {0, 1}]) == ((2, 3), (0, 1))
    with pytest.raises(ValueError, match="have no assignment"):
        assign_blocks(range(4), [2, 2], [ALL, {1}])
    assert assign_blocks([], [], []) == ()


def test_a_chain_of_moves_makes_room():
    """Each of the first three is first put where a later one has to go."""
    may = [{0, 1}, {1, 2}, {2, 3}, {0}]
    assert assign_blocks([0, 1, 2, 3], [1, 1, 1, 1], may) == ((1,), (2,), (3,), (0,))


@st.composite
def waves(draw):
    blocks = draw(st.permutations(range(draw(st.integers(1, 8)))))
    count, tracks = draw(st.integers(1, len(blocks))), draw(st.integers(1, 3))
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=tracks - 1, max_size=tracks - 1)))
    lengths = [b - a for a, b in itertools.pairwise([0, *cuts, count])]
    some = st.sets(st.sampled_from(range(len(blocks))), min_size=len(blocks) // 2)
    return blocks[:count], lengths, draw(st.lists(some, min_size=tracks, max_size=tracks))


@settings(max_examples=150, deadline=None)
@given(waves())
def test_an_assignment_is_found_wherever_there_is_one(wave):
    blocks, lengths, may = wave
    everything = set(possible(blocks, lengths, may))
    if everything:
        assert assign_blocks(blocks, lengths, may) in everything
    else:
        with pytest.raises(ValueError, match="have no assignment"):
            assign_blocks(blocks, lengths, may)
