"""Time limit of a request."""

from ls_edge.runtime.routing.state.budget import peer_end, source_end


def test_time_is_reserved_for_the_way_back_and_for_work():
    assert source_end(20.0, 1_000_000) == 18.995
    assert peer_end(20.0, 10.0, 1_000_000) == 18.995
    assert peer_end(20.0, 10.0, 60_000_000) == 17.495  # a wrong measurement does not prevent the attempt
