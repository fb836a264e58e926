"""Measurements and pauses of a neighbor, as numbers: routing depends on them."""

import pytest

from ls_edge.runtime.protocol.messages import Hello, State
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import Neighbors
from ls_edge.runtime.routing.state.pause import PauseReason


def neighbor(at=0.0, **state):
    base = {"warm": True, "draining": False, "stuck": False, "credits": 9, "queue": 0, "calls": 0, "block_us": 1000}
    n = Neighbors(Limits()).add(Hello("b", "peer", 1, 0, "model", "bundle", (0, 1)))
    n.reported(State(**(base | state)), at)
    return n


def at(n, now):
    """The neighbor, as it is at a time."""
    n.all.now = now
    return n


def test_before_its_first_state_a_neighbor_is_expected_to_begin_immediately():
    n = Neighbors(Limits()).add(Hello("b", "peer", 1, 0, "model", "bundle"))
    n.offers = 3
    assert at(n, 99.0).wait_us == 0


def test_the_work_of_a_neighbor_decreases_as_time_passes():
    n = neighbor(at=10.0, wait_us=200_000)
    assert at(n, 10.0).wait_us == 200_000
    assert at(n, 10.05).wait_us == 150_000
    assert at(n, 10.3).wait_us == 0


def test_transfers_on_their_way_to_it_come_first():
    n = neighbor(wait_us=5000, block_us=2000)
    n.offers = 3
    assert at(n, 0.0).wait_us == 5000 + 3 * 2000
    n.link.usual_us = 7000.0
    assert at(n, 0.001).wait_us == 4000 + 3 * 7000


def test_one_that_is_silent_counts_as_busier_by_each_second():
    n = neighbor(at=1.0)
    at(n, 5.0).hold_off(PauseReason.SILENT)
    assert at(n, 7.0).wait_us == 2_000_000
    n.all.update("b", n.state)
    assert n.wait_us == 0


@pytest.mark.parametrize(("link_us", "offers"), [(10_000, 10), (60_000, 2), (400_000, 2), (600_000, 1)])
def test_a_slow_link_has_only_a_few_transfers_in_flight(link_us, offers):
    """As many as take ``WINDOW`` of 0.1 s; two where that is fewer, one beyond five times the window."""
    n = at(neighbor(credits=50), 1.0)
    n.accepted_after(link_us / 1e6)
    assert (n.window_left, n.credits) == (offers, offers)
    n.offers = 1
    assert (n.window_left, n.credits) == (offers - 1, offers - 1)
