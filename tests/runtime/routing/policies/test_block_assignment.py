"""Blocks of a wave are dealt to tracks in turn."""

from ls_edge.runtime.routing.policies.wave_planner import deal


def test_neighbors_run_side_by_side():
    assert deal(range(6), [3, 3]) == [(0, 2, 4), (1, 3, 5)]
    assert deal([3, 7, 0, 5], [2, 2]) == [(3, 0), (7, 5)]
    assert deal(range(6), [2, 2, 2]) == [(0, 3), (1, 4), (2, 5)]


def test_the_end_of_a_longer_track_runs_alone():
    assert deal(range(6), [4, 2]) == [(0, 2, 4, 5), (1, 3)]
    assert deal(range(3), [0, 3]) == [(), (0, 1, 2)]
    assert deal([], []) == []
