"""Measurements and pauses of a neighbour, as numbers: routing depends on them."""

import dataclasses

import msgspec
import pytest

from ls_edge.runtime.protocol.messages import Hello, State
from ls_edge.runtime.routing.neighbours import MOST_BLOCK_US, MOST_WAIT_US, Limits, Neighbour, Neighbours


def neighbour(at=0.0, **state):
    base = {"warm": True, "draining": False, "stuck": False, "credits": 9, "queue": 0, "calls": 0, "block_us": 1000}
    n = Neighbour(Hello("b", "peer", 1, 0, "model", "bundle", (0, 1)))
    n.state, n.state_at, n.reported_credits = State(**(base | state)), at, 9
    return n


def test_before_its_first_state_a_neighbour_is_expected_to_begin_immediately():
    n = Neighbour(Hello("b", "peer", 1, 0, "model", "bundle"))
    n.offers = 3
    assert n.expected_wait_us(99.0) == 0


def test_the_work_of_a_neighbour_decreases_as_time_passes():
    n = neighbour(at=10.0, wait_us=200_000)
    assert n.expected_wait_us(10.0) == 200_000
    assert n.expected_wait_us(10.05) == 150_000
    assert n.expected_wait_us(10.3) == 0


def test_transfers_on_their_way_to_it_come_first():
    n = neighbour(wait_us=5000, block_us=2000)
    n.offers = 3
    assert n.expected_wait_us(0.0) == 5000 + 3 * 2000
    n.link_us, n.link_at = 7000.0, 0.0
    assert n.expected_wait_us(0.0) == 5000 + 3 * 2000  # as it was measured for this moment already
    assert n.expected_wait_us(0.001) == 4000 + 3 * 7000


def test_one_under_suspicion_that_is_silent_counts_as_busier_by_each_second():
    neighbours = Neighbours(Limits())
    n = neighbours.by_name["b"] = neighbour(at=1.0)
    neighbours.suspect("b", 5.0)
    assert n.expected_wait_us(7.0) == 2_000_000
    neighbours.update("b", n.state, 7.0)
    assert n.expected_wait_us(7.0) == 0


def test_what_it_announces_counts_within_bounds():
    n = neighbour(wait_us=2**32 - 1, block_us=2**32 - 1)
    assert n.expected_wait_us(0.0) == MOST_WAIT_US
    n.offers = 1
    assert n.expected_wait_us(0.0) == MOST_WAIT_US + MOST_BLOCK_US


def test_a_pause_doubles_to_its_limit_and_ends_with_progress():
    limits = Limits()
    n = neighbour()
    pauses = []
    for _ in range(9):
        n.back_off(100.0, limits)
        pauses.append(round(n.backoff_until - 100.0, 3))
    assert pauses == [0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.0, 2.0, 2.0]
    assert n.credits(101.9, limits) == 0
    assert n.credits(102.0, limits) > 0
    n.reset_back_off()
    assert n.credits(100.0, limits) > 0
    n.back_off(200.0, limits)
    assert n.backoff_until == pytest.approx(200.04)


def test_a_state_ends_a_refusal_and_no_pause():
    neighbours = Neighbours(Limits())
    n = neighbours.by_name["b"] = neighbour()
    n.refused_until = 5.0
    n.back_off(1.0, neighbours.limits)
    neighbours.update("b", n.state, 1.0)
    assert (n.refused_until, n.backoffs) == (0.0, 1)
    assert n.credits(1.0, neighbours.limits) == 0


def test_an_idle_neighbour_is_made_a_candidate_once():
    neighbours = Neighbours(Limits())
    neighbours.by_name["b"] = neighbour()
    assert neighbours.candidate("b", 1.0) is neighbours.candidate("b", 30.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda n: setattr(n, "offers", 1),
        lambda n: setattr(n, "reported_credits", 1),
        lambda n: setattr(n, "refused_until", 9.0),
        lambda n: setattr(n, "hello", msgspec.structs.replace(n.hello, blocks=(5,))),
        lambda n: setattr(n, "state", msgspec.structs.replace(n.state, wait_us=70, reach_blocks=(4,))),
        lambda n: setattr(n, "state", msgspec.structs.replace(n.state, draining=True)),
        lambda n: n.back_off(1.0, Limits()),
        lambda n: n.accepted_after(0.02, 1.0),
        lambda n: n.track_took(0.02, 100, 1.0),
        lambda n: setattr(n, "suspected_until", 9.0),
    ],
)
def test_every_change_of_an_idle_neighbour_changes_the_candidate(change):
    neighbours, fresh = Neighbours(Limits()), Neighbours(Limits())
    neighbours.by_name["b"] = n = neighbour()
    before = neighbours.candidate("b", 1.0)
    change(n)
    after = neighbours.candidate("b", 1.001)
    fresh.by_name["b"] = dataclasses.replace(n, quiet=None)
    assert after == fresh.candidate("b", 1.001) != before
    assert neighbours.candidate("b", 1.001) == after
