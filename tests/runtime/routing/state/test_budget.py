"""Time limit of a request."""

from ls_edge.runtime.routing.state.budget import BudgetLimit


def test_time_is_reserved_for_the_way_back_and_for_work():
    limit = BudgetLimit(way_back=0.5, call=0.25)
    assert limit.source_end(20.0, 1_000_000) == 18.5
    assert limit.peer_end(20.0, 10.0, 1_000_000) == 18.5
    assert limit.peer_end(20.0, 10.0, 60_000_000) == 17.0  # a wrong measurement does not prevent the attempt
