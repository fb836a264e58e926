"""The machine of a peer: whose messages count, what it refuses, and what it says while it waits."""

from ls_edge.runtime.protocol.messages import Accept, Progress, Refuse
from ls_edge.runtime.routing.recent_events import MOST, text_of
from ls_edge.runtime.routing.state.events import Arrived, Compute, Computed, Forward, Send, Tick
from ls_edge.runtime.routing.state.held_request import Stage
from tests.runtime.routing.driver import BY_X, cancel, new_peer, run_of, transfer


def test_nobody_cancels_the_requests_of_others():
    peer = new_peer()
    peer.meets("phone", role="source")
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of())
    for stranger in ("phone", "b"):
        peer.hears(stranger, cancel(0, seconds=600))
    assert len(peer.machine.held) == 1
    peer.gets("laptop", run_of(transfer(branch=7)))
    assert peer.sent(Accept, "laptop")
    peer.hears("laptop", cancel(0))
    assert not peer.machine.held


def test_a_pause_of_the_engine_does_not_turn_a_peer_into_a_black_hole():
    """One engine call of 15 s made it return everything for lack of time, and nothing ever corrected that."""
    peer = new_peer()
    peer.gets("laptop", run_of(transfer(0), budget=60))
    peer.machine.rules.engine.block_us = 1000
    compute = peer.only(Compute)
    outputs = tuple((*tokens, *compute.blocks) for tokens in compute.tokens)
    peer(Computed(compute.blocks, compute.transfers, outputs, 15_000_000), 15.0)
    assert peer.machine.rules.engine.block_us < 2000
    peer.machine.rules.engine.block_us = 1_500_000
    peer.gets("laptop", run_of(transfer(1), budget=1.0))
    assert peer.sent(Accept, "laptop")
    assert not peer.sent(Forward, "laptop")


def test_tokens_that_are_not_finite_are_refused():
    peer = new_peer()
    peer(Arrived("laptop", run_of(), (), finite=False))
    assert [message.reason for message in peer.sent(Refuse)] == ["not finite"]


def test_tokens_do_not_bounce_for_ever():
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.gets("b", run_of(transfer(hop=64 + 16), remaining=(2, 3), waves=BY_X))
    assert [message.returning for message in peer.sent(Forward, "laptop")] == ["hops"]


def test_a_process_that_waits_for_the_next_holder_is_not_suspected():
    """The deadline of who keeps the copy before fired first, and hit the wrong process."""
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert peer.sent(Forward, "b")
    said = peer.passes(0.24)
    told = [s for s in said if isinstance(s, Send) and isinstance(s.message, Progress) and s.to == "laptop"]
    assert len(told) >= 2
    peer.passes(0.05)
    assert peer.notes()[0] == "suspect"


def test_a_slow_link_carries_a_few_transfers_at_a_time():
    peer = new_peer((0,))
    peer.meets("b", [1, 2, 3], credit=9)
    for number in range(6):
        peer.gets("laptop", run_of(transfer(number), remaining=(1, 2, 3), waves=((((0, "x"),),),)))
    assert sum(item.stage is Stage.OFFERED for item in peer.machine.held.values()) == 2
    first = next(iter(list(peer.machine.custody.sent)))
    peer.hears("b", Accept(first, 9), after=0.2)
    n = peer.machine.neighbors.get("b")
    assert n.link.usual_us > 150_000
    assert n.credits <= 1


def test_the_latest_events_are_kept_without_tokens():
    peer = new_peer()
    peer.gets("laptop", run_of(), ("secret",))
    peer.computes_next()
    lines = text_of(peer.machine.recent).splitlines()
    assert [line.split()[1].split("(")[0] for line in lines[-2:]] == ["Arrived", "Computed"]
    assert "remaining=(0, 1, 2, 3)" in lines[-2]
    assert not any("secret" in line for line in lines)
    for _ in range(MOST + 1):
        peer(Tick())
    assert len(text_of(peer.machine.recent).splitlines()) == MOST
