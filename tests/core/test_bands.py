"""Bands: partitions, permitted blocks, and draws that stay within them."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.core.arrangement import Arrangement, random_order
from ls_edge.core.bands import Bands, windows
from ls_edge.core.errors import UsageError


@st.composite
def all_bands(draw, most=9):
    """Any bands of up to ``most`` blocks."""
    blocks = draw(st.integers(1, most))
    return Bands(blocks, tuple(cut for cut in range(1, blocks) if draw(st.booleans())))


def holds(bands, arrangement):
    """Whether an arrangement is within the bands, told from their definition alone."""
    groups = bands.to_json()
    of = {block: at for at, group in enumerate(groups) for block in group}
    done, before = [], []
    for wave in arrangement.waves:
        for track in wave:
            for place, block in enumerate(track):
                ahead = [*done, *track[:place], *(b for other in wave if other is not track for b in other)]
                before.append((block, ahead))
        done += [block for track in wave for block in track]
    runs = set(done)
    for block, ahead in before:
        if any(of[other] > of[block] for other in ahead):
            return False
        if any(of[other] < of[block] and other in runs and other not in ahead for other in runs):
            return False
    return all(len({of[b] for track in wave for b in track}) == 1 for wave in arrangement.waves if len(wave) > 1)


@given(all_bands())
def test_bands_are_a_partition_and_survive_json_and_text(bands):
    assert [block for group in bands.to_json() for block in group] == list(range(bands.num_blocks))
    assert Bands.from_json(bands.to_json(), bands.num_blocks) == bands
    assert Bands.from_json([group[::-1] for group in bands.to_json()]) == bands
    assert Bands.from_json(str(bands)) == bands
    assert all(block in bands.groups[bands.band_of(block)] for block in range(bands.num_blocks))


def test_one_band_allows_all_orders_and_one_per_block_a_single_order():
    assert Bands.from_json(None, 3) == Bands(3)
    assert Bands(3).to_json() == [[0, 1, 2]]
    assert Bands(3).is_one
    assert Bands(3).num_orders == 6
    assert Bands.ladder(3)[0].to_json() == [[0], [1], [2]]
    assert Bands.ladder(3)[0].num_orders == 1
    assert Bands.from_json("0/1-6/7").num_orders == math.factorial(6)
    assert str(Bands.from_json([[0], [3, 1, 2], [4]])) == "0/1-3/4"
    assert Bands(3).name(0) == ""
    assert Bands.from_json("0/1-6/7").name(1) == "band [1-6] (2 of 3)"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ([], "bands [] are not lists of blocks; write [[0], [1, 2, 3], [4]] in a file"),
        ([[0], []], "are not lists of blocks"),
        ([0, 1], "are not lists of blocks"),
        ([[0], [True]], "are not lists of blocks"),
        (7, "bands 7 are not lists of blocks"),
        (
            [[0], [0, 1]],
            "bands [[0], [0, 1]]: expected block 1, found block 0; list each block once, with bands in ascending order",
        ),
        ([[0], [2]], "expected block 1, found block 2"),
        ([[-1], [0]], "expected block 0, found block -1"),
        ([[0, 2], [1, 3]], "expected block 1, found block 2"),
        ([[1], [0]], "expected block 0, found block 1"),
        ([[0], [1, 2]], "bands [[0], [1, 2]] have blocks 0 to 2, the model has 0 to 7"),
        ("0/1-x", "bands '0/1-x' are not lists of blocks; write"),
        ("0//1", "bands '0//1' are not"),
        ("", "bands '' are not"),
        ("3-1", "bands '3-1' are not"),
    ],
)
def test_anything_but_a_partition_is_refused_in_one_line(value, why):
    with pytest.raises(UsageError) as error:
        Bands.from_json(value, 8)
    assert why in str(error.value)
    assert "\n" not in str(error.value)


@given(all_bands(), st.data())
def test_a_block_may_run_when_the_bands_before_it_have_ended(bands, data):
    ended = data.draw(st.sets(st.integers(0, bands.num_blocks - 1)))
    expected = {
        block
        for block in set(range(bands.num_blocks)) - ended
        if all(other in ended for other in range(bands.num_blocks) if bands.band_of(other) < bands.band_of(block))
    }
    remaining = [block for block in range(bands.num_blocks) if block not in ended]
    assert set(bands.permitted(remaining)) == expected
    remaining = data.draw(st.permutations(sorted(set(range(bands.num_blocks)) - ended)))
    permitted = bands.permitted(remaining)
    assert set(permitted) == expected
    assert list(permitted) == [block for block in remaining if block in expected]
    assert bool(permitted) == bool(remaining)


@given(all_bands(), st.data())
def test_in_one_go_returns_the_blocks_that_one_holder_can_run_without_another(bands, data):
    remaining = data.draw(st.permutations(range(bands.num_blocks)))
    held = data.draw(st.sets(st.integers(0, bands.num_blocks - 1)))
    ran, left = [], list(remaining)
    while runs := [block for block in bands.permitted(left) if block in held]:
        ran.append(runs[0])
        left.remove(runs[0])
    assert sorted(bands.in_one_go(remaining, held)) == sorted(ran)


@given(all_bands(most=6), st.data())
def test_an_order_is_within_the_bands_exactly_if_its_definition_says_so(bands, data):
    order = data.draw(st.permutations(range(bands.num_blocks)))
    some = tuple(order[: data.draw(st.integers(0, bands.num_blocks))])
    for arrangement in (
        Arrangement.plain(some),
        bands.random_waves(some, random.Random(1)),
        Arrangement(tuple(((block,),) for block in some)),
        Arrangement((tuple((block,) for block in some),) if some else ()),
    ):
        assert (not bands.fault(arrangement)) == holds(bands, arrangement)


def test_num_orders_counts_exactly_the_allowed_orders():
    bands = Bands.from_json("0-1/2-3/4")
    allowed = [order for order in itertools.permutations(range(5)) if not bands.fault(Arrangement.plain(order))]
    assert len(allowed) == bands.num_orders == 4
    assert {bands.random_order(0, index) for index in range(100)} == set(allowed)


def test_a_fault_names_block_and_bands():
    bands = Bands.from_json("0/1-6/7")
    assert bands.fault(Arrangement.plain([1, 0, 2])) == "block 0 of band [0] runs after band [1-6]"
    assert bands.fault(Arrangement((((0,), (1,)),))) == "band [0] and band [1-6] run in parallel"
    assert bands.fault(Arrangement.plain([1]), [2, 7]) == ""
    assert bands.fault(Arrangement.plain([1]), [0, 7]) == "block 0 of band [0] remains behind band [1-6]"
    assert bands.fault(Arrangement.plain([0]), [7, 1]) == "block 1 of band [1-6] remains behind band [7]"
    assert not bands.fault(Arrangement.plain([3, 1, 7]))


@given(all_bands(), st.integers(0, 99), st.integers(0, 99))
def test_everything_drawn_stays_within_the_bands(bands, seed, index):
    n = bands.num_blocks
    order = bands.random_order(seed, index)
    assert sorted(order) == list(range(n))
    rng = random.Random(seed)
    drawn = [Arrangement.plain(order), bands.random_waves(order, rng)]
    for item in drawn:
        assert sorted(item.order) == list(range(n))
        assert holds(bands, item)
    for keep in (1, n):
        for shuffled in (False, True):
            subset = bands.random_subset_order(keep, seed, index, shuffled=shuffled)
            assert len(set(subset)) == keep
            assert holds(bands, Arrangement.plain(subset))


def test_orders_within_a_band_are_uniform():
    counts = dict.fromkeys(itertools.permutations((1, 2, 3)), 0)
    for order in Bands.from_json("0/1-3/4").random_orders(6000, seed=5):
        assert (order[0], order[4]) == (0, 4)
        counts[order[1:4]] += 1
    assert all(850 < count < 1150 for count in counts.values())


def test_one_band_draws_the_same_orders_as_no_bands():
    assert Bands(7).random_orders(20, 3) == [random_order(7, 3, index) for index in range(20)]


@given(all_bands(), st.data())
def test_a_model_that_keeps_some_blocks_keeps_their_bands(bands, data):
    kept = sorted(data.draw(st.sets(st.integers(0, bands.num_blocks - 1), min_size=1)))
    smaller = bands.keep(kept)
    assert smaller.num_blocks == len(kept)
    for one, two in itertools.combinations(range(len(kept)), 2):
        assert (smaller.band_of(one) == smaller.band_of(two)) == (bands.band_of(kept[one]) == bands.band_of(kept[two]))


@pytest.mark.parametrize(
    ("blocks", "steps"),
    [
        (1, ["0"]), (2, ["0/1", "0-1"]), (3, ["0/1/2", "0/1-2", "0-2"]), (4, ["0/1/2/3", "0/1-2/3", "0/1-3", "0-3"]),
        (8, ["0/1/2/3/4/5/6/7", "0/1/2/3-6/7", "0/1/2-6/7", "0/1-6/7", "0/1-7", "0-7"]),
    ],
)  # fmt: skip
def test_the_ladder_leads_from_a_fixed_order_to_full_freedom(blocks, steps):
    ladder = Bands.ladder(blocks)
    assert list(map(str, ladder)) == steps
    for one, more in itertools.pairwise(ladder):
        assert more.contains(one)
        assert more.num_orders > one.num_orders


@pytest.mark.parametrize(
    ("blocks", "steps"),
    [
        (4, []), (5, ["0/1-2/3/4"]), (8, ["0/1-2/3-4/5-6/7", "0/1-3/4-6/7", "0/1-4/5-6/7"]),
        (12, ["0/1-2/3-4/5-6/7-8/9-10/11", "0/1-3/4-6/7-9/10/11", "0/1-4/5-8/9-10/11", "0/1-6/7-10/11"]),
    ],
)  # fmt: skip
def test_windows_lie_between_a_fixed_order_and_the_ends_in_place(blocks, steps):
    between = windows(blocks)
    assert list(map(str, between)) == steps
    assert all(Bands(blocks, (1, blocks - 1)).contains(bands) for bands in between)


def test_few_orders_are_listed_and_many_are_drawn():
    few = Bands.from_json("0/1-3/4-5").some_orders(12, 0)
    assert len(set(few)) == len(few) == 12
    assert all(not Bands.from_json("0/1-3/4-5").fault(Arrangement.plain(order)) for order in few)
    assert Bands(6).some_orders(12, 5) == Bands(6).random_orders(12, 5)


def test_bands_contain_those_that_fix_more():
    assert Bands(8).contains(Bands.from_json("0/1-7"))
    assert Bands.from_json("0/1-7").contains(Bands.ladder(8)[0])
    assert not Bands.from_json("0/1-7").contains(Bands(8))
    assert not Bands(8).contains(Bands(7))
