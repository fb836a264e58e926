"""Simulated time, and the arrival of messages."""

import pytest

from ls_edge.runtime.simulator.network import Clock, Network


def test_actions_run_at_their_time_and_the_oldest_first():
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append(("late", clock.now)))
    clock.at(1.0, lambda: (seen.append(("one", clock.now)), clock.at(0.0, lambda: seen.append(("now", clock.now)))))
    clock.at(1.0, lambda: seen.append(("two", clock.now)))
    clock.run(1.5)
    assert seen == [("one", 1.0), ("two", 1.0), ("now", 1.0)]
    assert clock.now == 1.5
    clock.run(1.0)
    assert seen[-1] == ("late", 2.0)


def test_without_transfers_every_message_takes_the_latency():
    network = Network(0.5, None, {})
    assert [network.arrival(now, "a", "b", size) for now, size in ((0, 1.0), (0, 0.0), (2, 1.0))] == [0.5, 0.5, 2.5]


def test_messages_do_not_overtake_tokens_to_the_same_process():
    network = Network(0.1, lambda _sender, _to: 3.0, {})
    assert network.arrival(0.0, "a", "b", 1.0) == 3.0
    assert network.arrival(1.0, "a", "b", 0.0) == 3.0
    assert network.arrival(1.0, "a", "c", 0.0) == 1.1
    assert network.arrival(1.0, "b", "a", 0.0) == 1.1


def test_tokens_wait_for_the_links_of_both_ends():
    """A transfer of 3 s, of which tokens occupy a link for 2 s; each direction of a link separately."""
    network = Network(0.1, lambda _sender, _to: 3.0, dict.fromkeys("abcd", 2.0))
    assert network.arrival(0.0, "a", "b", 1.0) == 3.0
    assert network.arrival(0.0, "a", "c", 1.0) == 5.0, "a sends for two seconds"
    assert network.arrival(0.0, "d", "b", 1.0) == 5.0, "b receives for two seconds"
    assert network.arrival(0.0, "b", "a", 1.0) == 3.0, "b sends nothing else"


@pytest.mark.parametrize(("size", "arrives"), [(1.0, 3.0), (0.5, 2.0), (0.01, 1.02)])
def test_a_small_payload_takes_less_of_the_link_and_the_same_latency(size, arrives):
    network = Network(0.1, lambda _sender, _to: 3.0, dict.fromkeys("ab", 2.0))
    assert network.arrival(0.0, "a", "b", size) == pytest.approx(arrives)
