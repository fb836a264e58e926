"""Who gets which track: by measured times, and nobody for whom it does not pay."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.policies.wave_planner import WAVE_GAIN, best_joiner, plan_wave
from ls_edge.runtime.routing.state.candidates import LocalNode
from tests.runtime.routing.driver import Candidate

ALL = frozenset(range(12))


def asked(waves=1, remaining=tuple(range(12)), **more):
    return Itinerary("laptop", "parallel", tuple(remaining), 3, waves_wanted=waves, **more)


def peer(name, blocks=ALL, block_us=5000, trip_us=1000, wait_us=0, free=4):
    return Candidate(name, frozenset(blocks), frozenset(), free, wait_us, block_us, trip_us // 2, trip_us)


def own(blocks=ALL, block_us=5000, wait_us=0):
    return LocalNode(frozenset(blocks), wait_us, block_us)


def lengths(tracks):
    return {track.holder: len(track.blocks) for track in tracks}


def end_us(tracks):
    return max(track.expected_us for track in tracks)


def test_equal_devices_get_equal_tracks_and_neighbors_run_side_by_side():
    tracks = plan_wave(asked(), "a", own(), [peer("b")])
    assert [(t.holder, t.blocks) for t in tracks] == [("a", (0, 2, 4, 6, 8, 10)), ("b", (1, 3, 5, 7, 9, 11))]
    assert end_us(tracks) == 6 * 5000 + 1000


@pytest.mark.parametrize(("waves", "first"), [(1, 12), (2, 6), (3, 4), (4, 4), (6, 2), (12, 2)])
def test_waves_share_the_blocks_out_and_are_filled_up_evenly(waves, first):
    assert sum(lengths(plan_wave(asked(waves), "a", own(), [peer("b")])).values()) == first


def test_a_slower_device_gets_a_shorter_track():
    assert lengths(plan_wave(asked(), "a", own(), [peer("b", block_us=10_000)])) == {"a": 8, "b": 4}
    assert lengths(plan_wave(asked(), "a", own(), [peer("b", wait_us=20_000)])) == {"a": 8, "b": 4}
    assert lengths(plan_wave(asked(), "a", own(), [peer("b"), peer("c")])) == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize("far", [{"trip_us": 100_000}, {"wait_us": 80_000}, {"block_us": 70_000}])
def test_a_holder_that_is_not_worth_the_transfer_gets_nothing(far):
    tracks = plan_wave(asked(), "a", own(), [peer("b", **far)])
    assert lengths(tracks) == {"a": 12}


def test_fewer_tracks_where_only_some_pay():
    tracks = plan_wave(asked(), "a", own(), [peer("b"), peer("c", trip_us=60_000)])
    assert lengths(tracks) == {"a": 6, "b": 6}


def test_blocks_go_only_to_holders_and_to_those_with_a_credit():
    tracks = plan_wave(asked(), "a", own(range(6)), [peer("b", range(6, 12)), peer("c", free=0)])
    assert {t.holder: t.blocks for t in tracks} == {"a": tuple(range(6)), "b": tuple(range(6, 12))}
    assert plan_wave(asked(remaining=(7, 8)), "a", own(range(6)), [peer("b")]) == []


def test_the_joiner_is_whoever_is_done_first():
    assert best_joiner(asked(), own(()), [peer("a", block_us=9000), peer("b"), peer("c", range(3))], 0).name == "b"
    equal = [peer("a"), peer("b")]
    assert {best_joiner(asked(), own(()), equal, tie_break).name for tie_break in range(2)} == {"a", "b"}
    assert best_joiner(asked(), own(()), [peer("a", free=0)], 0) is None
    assert best_joiner(asked(remaining=(5,)), own(()), [peer("a", (1,))], 0) is None


times = st.integers(0, 10**6)


@given(
    remaining=st.lists(st.integers(0, 11), unique=True, min_size=1),
    waves=st.integers(1, 14),
    held=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=4),
    block_us=st.lists(times, min_size=4, max_size=4),
    wait_us=st.lists(times, min_size=4, max_size=4),
    trip_us=st.lists(times, min_size=4, max_size=4),
)
def test_whatever_was_measured_a_plan_can_be_run(remaining, waves, held, block_us, wait_us, trip_us):
    others = [
        peer("bcd"[i], blocks, block_us[i + 1], trip_us[i + 1], wait_us[i + 1]) for i, blocks in enumerate(held[1:])
    ]
    tracks = plan_wave(asked(waves, remaining), "a", own(held[0], block_us[0], wait_us[0]), others)
    if held[0].isdisjoint(remaining):
        assert tracks == []
        return
    placed = [block for track in tracks for block in track.blocks]
    assert placed
    assert len(set(placed)) == len(placed)
    assert set(placed) <= set(remaining)
    may = {"a": held[0], **{c.name: c.blocks for c in others}}
    assert all(set(track.blocks) <= may[track.holder] and track.blocks for track in tracks)
    assert tracks[0].holder == "a"
    if len(tracks) > 1 and len(held[0].intersection(remaining)) >= len(placed):
        assert end_us(tracks) <= WAVE_GAIN * (wait_us[0] + len(placed) * block_us[0])
