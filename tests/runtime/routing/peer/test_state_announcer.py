"""STATE of a peer: who receives it, when, and with which credits."""

import pytest

from ls_edge.runtime.protocol.messages import Accept, State
from ls_edge.runtime.routing.peer.state_announcer import STATE_LEAST
from ls_edge.runtime.routing.state.events import NeighborDown, Send, Tick, Unsendable
from ls_edge.runtime.routing.state.limits import Limits
from tests.runtime.routing.driver import new_peer, run_of, transfer


def test_a_peer_without_work_is_quiet_and_a_user_hears_of_it_regularly():
    peer = new_peer()
    peer.passes(0.5)
    peer.passes(3.0)
    assert not peer.sent(State)
    peer.gets("laptop", run_of(budget=60.0))
    peer.passes(1.0)
    assert 4 <= len(peer.sent(State, "laptop")) <= 6


@pytest.mark.parametrize("change", ["new link", "lost link", "other blocks"])
def test_changed_links_and_blocks_are_announced_soon(change):
    peer = new_peer()
    peer.meets("b", [2])
    peer.passes(0.5)
    if change == "new link":
        peer.meets("c", [3])
    elif change == "lost link":
        peer(NeighborDown("b", "killed"))
    else:
        peer.hears_state("b", draining=True)
    said = peer.said + peer.passes(STATE_LEAST + 0.02)
    told = [one.message for one in said if getattr(one, "to", "") == "laptop" and isinstance(one.message, State)]
    blocks = {"new link": (2, 3), "lost link": (), "other blocks": ()}[change]
    assert told[-1].reach_blocks == blocks


def test_a_sender_without_a_credit_hears_when_there_is_one():
    peer = new_peer(limits=Limits(credits=2, chain=0))
    peer.gets("laptop", run_of(transfer(0), remaining=(0,)))
    assert [one.credits for one in peer.sent(Accept, "laptop")] == [0]
    peer.computes_next()
    assert [one.credits for one in peer.sent(State, "laptop")] == [1]
    peer(Tick())
    assert not peer.sent(State)


def test_a_credit_that_could_not_be_told_is_told_again_although_there_is_no_work():
    peer = new_peer(limits=Limits(credits=2, chain=0))
    peer.gets("laptop", run_of(transfer(0), remaining=(0,), budget=1.0))
    peer.computes_next()
    (told,) = peer.sent(State, "laptop")
    peer.passes(60.0)
    assert not peer.machine.held
    peer(Unsendable(Send("laptop", told)))
    peer.passes(STATE_LEAST + 0.02)
    assert [one.credits for one in peer.sent(State, "laptop")] == [told.credits] == [1]
