"""Ended requests of a source that runs for months."""

from ls_edge.runtime.routing.source.ended_requests import MAX_REMEMBERED, EndedRequests
from ls_edge.runtime.routing.state.held_request import HeldRequest
from tests.runtime.routing.driver import run_of, transfer


def test_only_the_latest_requests_are_remembered_to_count_late_answers():
    ended = EndedRequests()
    for number in range(MAX_REMEMBERED + 1):
        run = run_of(transfer(number))
        ended.add(HeldRequest(run.transfer, run.itinerary, (), 1.0, None, 0.0), 0.0, soon=True)
        ended.pop_cancels(0.0)
    assert len(ended.remembered) == MAX_REMEMBERED
    assert transfer(0).request not in ended.remembered
