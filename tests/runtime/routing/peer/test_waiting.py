"""A peer's machine waits, gives back, relays; its engine fails or drains; and nobody needs the work any more."""

import pytest

from ls_edge.core.peer_reports import MICROSECONDS, Visit
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import (
    Accept,
    Cancel,
    Release,
)
from ls_edge.runtime.routing.peer import peer_rules
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Compute,
    ComputeFailed,
    Drain,
    Forward,
    NeighborDown,
    Received,
    Removed,
    Warm,
)
from ls_edge.runtime.routing.state.held_request import Stage
from ls_edge.runtime.routing.state.hop import HopLimit
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.link_times import WINDOW
from tests.runtime.routing.driver import BY_X, cancel, handed_on, new_peer, request_id, run_of, transfer


@pytest.fixture
def peer():
    """A warm peer ``a`` that serves blocks 0 and 1, one an engine call, linked with the source ``laptop``."""
    return new_peer()


# A peer: waiting, giving back, relaying.


def test_waiting_for_credit_is_bounded_and_ends_at_the_source(peer):
    peer.meets("b", [2, 3], credit=0)
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert not peer.sent(Forward)
    peer.passes(0.2)
    assert not peer.sent(Forward)
    peer.passes(0.1)
    (home,) = peer.sent(Forward, "laptop")
    assert (home.returning, home.itinerary.remaining) == ("credit", (2, 3))


def test_tokens_wait_for_the_transfer_in_flight_on_a_slow_link():
    """The way back over such links takes longer, and uses up the budget."""
    slow = 5 * WINDOW + 0.3
    peer = new_peer(blocks=())
    peer.meets("b", (0, 1, 2, 3))
    peer.gets("laptop", run_of(transfer(1), budget=20))
    peer.hears("b", Accept(peer.only(Forward).transfer, 9), slow)
    for number in (2, 3):
        peer.gets("laptop", run_of(transfer(number), budget=20))
    assert not peer.sent(Forward), "one is in flight"
    sent = list(peer.machine.custody.sent)[-1]
    peer.passes(slow / 2)
    assert not peer.sent(Forward)
    peer.hears("b", Accept(sent, 9))
    assert [again.to for again in peer.sent(Forward)] == ["b"]


def test_a_credit_that_comes_meanwhile_is_used_at_once(peer):
    peer.meets("b", [2, 3], credit=0)
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    peer.hears_state("b", credit=1)
    assert len(peer.sent(Forward, "b")) == 1


def test_a_peer_that_reaches_no_holder_hands_back_to_the_source(peer):
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert [message.returning for message in peer.sent(Forward, "laptop")] == ["unreachable"]


def test_without_the_source_what_goes_home_goes_by_who_reaches_it(peer):
    peer.meets("b", [], reaches=("laptop",))
    peer.meets("c", [], reaches=("laptop",))
    peer(NeighborDown("laptop", "cut"))
    peer.gets("c", run_of(remaining=(2, 3), waves=BY_X))
    (home,) = peer.sent(Forward, "c")
    assert home.returning == "unreachable"
    assert home.itinerary.relays == ("a",)


def test_a_process_that_relayed_tokens_here_may_relay_them_home(peer):
    peer.meets("r", [], reaches=("laptop",))
    peer(NeighborDown("laptop", "cut"))
    peer.gets("r", run_of(remaining=(2, 3), relays=("r",), waves=BY_X))
    assert [message.returning for message in peer.sent(Forward, "r")] == ["unreachable"]


def test_without_anybody_who_reaches_the_source_they_go_back_the_way_they_came(peer):
    peer.meets("b", [2])
    peer.meets("c", [2])
    peer(NeighborDown("laptop", "cut"))
    visits = tuple(Visit(name, (), 0, 0, 0) for name in ("x", "c", "b"))
    peer.gets("b", run_of(remaining=(3,), waves=BY_X, visits=visits, skipped=(2,)))
    (home,) = peer.sent(Forward, "c")
    assert (home.returning, home.itinerary.relays) == ("unreachable", ("a",))
    peer.gets("c", run_of(transfer(1), remaining=(3,), visits=visits, relays=("c",), returning="unreachable"))
    assert len(peer.sent(Forward, "b")) == 1


def test_a_relay_passes_on_without_running(peer):
    peer.gets("b", run_of(remaining=(2, 3), returning="budget"))
    assert not [s for s in peer.said if isinstance(s, Compute)]
    assert [message.returning for message in peer.sent(Forward, "laptop")] == ["budget"]


def test_tokens_go_back_in_time(peer):
    """With a block and the way back no longer in the budget, what is there goes home."""
    peer.meets("b", [2, 3], credit=0)
    peer.gets("laptop", run_of(remaining=(2, 3), budget=0.1, waves=BY_X))
    peer.passes(0.09)
    assert not peer.sent(Forward)
    peer.passes(0.02, step=0.001)
    assert [message.returning for message in peer.sent(Forward, "laptop")] == ["budget"]
    peer.passes(0.1)
    assert not peer.machine.held


# A peer: its own engine.


def test_an_engine_that_hangs_gives_its_queue_to_others(peer):
    peer.meets("b", [0, 1, 2, 3], wait_us=10**6)
    peer.gets("laptop", run_of(transfer(0)))
    hanging = peer.only(Compute)
    peer.gets("laptop", run_of(transfer(1)))
    peer.passes(0.3)
    assert "engine is stuck" in peer.notes()
    assert [message.transfer.request for message in peer.sent(Forward, "b")] == [request_id(1)]
    assert peer.machine.rules.announcer.state().stuck
    assert peer.machine.rules.credits == 0
    peer.computes(hanging)
    assert "engine is back" in peer.notes()
    assert not peer.machine.rules.announcer.state().stuck
    assert peer.machine.rules.credits > 0


def test_a_block_that_keeps_failing_is_not_tried_again_here(peer):
    """Memory that other programs took may come back."""
    peer.meets("b", [0, 1, 2, 3], wait_us=10**6)
    peer.gets("laptop", run_of())
    for _ in range(3):
        assert peer.machine.rules.engine.failed_blocks == {}
        peer(ComputeFailed(0, peer.only(Compute).transfers, "out of memory"))
    assert "engine failed" in peer.notes()
    assert peer.machine.rules.engine.failed_blocks == {0: "out of memory"}
    (onward,) = peer.sent(Forward, "b")
    assert onward.itinerary.remaining == (0, 1, 2, 3)


def test_draining_finishes_then_gives_back_then_leaves_nothing(peer):
    for number in range(3):
        peer.gets("laptop", run_of(transfer(number)))
    peer(Drain())
    assert peer.machine.rules.announcer.state().draining
    assert peer.machine.rules.credits == 0
    while peer.calls:
        peer.computes_next()
        for message in peer.sent(Forward, "laptop"):
            peer.hears("laptop", Accept(message.transfer, 1))
    assert not peer.machine.held


def test_a_drain_that_takes_too_long_gives_back_what_waits_for_the_engine():
    peer = new_peer(limits=Limits(chain=0, hop=HopLimit(floor=60)))
    peer.gets("laptop", run_of(transfer(0), budget=60))
    peer.gets("laptop", run_of(transfer(1), budget=60))
    peer(Drain())
    peer.passes(2.1, step=0.05)
    assert [(m.transfer.request, m.returning) for m in peer.sent(Forward, "laptop")] == [(request_id(1), "unreachable")]


# A peer: what nobody waits for any more.


@pytest.mark.parametrize("stage", ["queued", "running", "offered", "custody"])
def test_cancel_frees_what_is_held_wherever_it_stands(peer, stage):
    peer.meets("b", [2, 3])
    sent = None
    if stage == "queued":
        peer.gets("laptop", run_of(transfer(9)))
    if stage in ("queued", "running"):
        peer.gets("laptop", run_of())
    else:
        sent = handed_on(peer)
        if stage == "custody":
            peer.hears("b", Accept(sent, 1))
    peer.hears("laptop", cancel(0))
    assert not [item for item in peer.machine.held.values() if item.request == request_id(0)]
    assert not list(peer.machine.custody.sent)
    assert peer.machine.neighbors.get("b").offers == 0
    if sent is not None:
        peer.hears("b", Release(sent, "b"))
        assert not peer.said


def test_the_result_of_a_canceled_block_is_dropped(peer):
    peer.gets("laptop", run_of())
    running = peer.only(Compute)
    peer.hears("laptop", cancel(0))
    peer.computes(running)
    assert not peer.sent(Forward)
    assert not peer.machine.held
    peer.gets("laptop", run_of(transfer(1)))
    assert peer.only(Compute).transfers == (transfer(1),)


def test_tombstones_cost_the_same_however_many_there_are(peer, monkeypatch):
    """They were rebuilt on each event at multiples of 256."""
    monkeypatch.setattr(peer_rules, "MAX_TOMBSTONES", 1000)
    for number in range(1024):
        peer.hears("laptop", Cancel((request_id(number),), 10**8))
    kept = peer.machine.rules.tombstones.until
    peer.passes(0.05)
    assert len(kept) == 1000
    for _ in range(10):
        peer.hears("laptop", Cancel(tuple(map(request_id, range(1000))), 10**8))
        assert len(kept) == 1000
    peer.passes(101, step=1.0)
    peer.hears("laptop", Cancel((request_id(0),), 10**8))
    assert len(kept) == 1


def test_tombstones_end_with_their_budget():
    peer = new_peer()
    for request in range(255):
        peer.hears("laptop", cancel(request, seconds=0.001))
    peer.now += 1
    peer.hears("laptop", cancel(255, seconds=0.001))
    assert len(peer.machine.rules.tombstones.until) == 1


def test_requests_of_a_lost_source_are_dropped_when_they_find_no_way_home(peer):
    peer.gets("laptop", run_of(budget=60))
    peer(NeighborDown("laptop", "killed"))
    for _ in range(2):
        peer.computes_next()
    peer.passes(0.9)
    assert len(peer.machine.held) == 1
    peer.passes(0.2)
    assert not peer.machine.held
    assert "dropped" in peer.notes()


def test_the_work_of_processes_removed_from_the_file_ends_immediately_whatever_its_stage(peer):
    alias = "guest.01234567"
    peer.meets("b", (2, 3), reaches=("laptop", "far"))
    peer.meets("m")
    peer.meets(alias, role="source")
    peer.gets(alias, run_of(transfer(0), source=alias))
    peer.gets("m", run_of(transfer(1), source=alias, remaining=(2, 3), waves=BY_X))
    peer.gets("b", run_of(transfer(3), source="far"))
    peer.gets("laptop", run_of(transfer(4)))
    stages = {request.stage for request in peer.machine.held.values()}
    assert {Stage.QUEUED, Stage.RUNNING, Stage.OFFERED} <= stages
    peer(Removed(frozenset({"guest"})))
    assert peer.machine.held.keys() == {transfer(3), transfer(4)}
    assert [one.transfer for one in peer.sent(Release, "m")] == [transfer(1)]


def test_but_not_while_a_neighbor_reaches_it(peer):
    peer.meets("b", [], credit=0, reaches=("laptop",), draining=True)
    peer.gets("laptop", run_of(remaining=(2, 3), budget=60, waves=BY_X))
    peer(NeighborDown("laptop", "cut"))
    peer.passes(3, step=0.05)
    assert len(peer.machine.held) == 1


# What comes together.


def test_tokens_that_arrive_together_are_decided_once_and_share_an_engine_call():
    peer = new_peer(max_batch=2)
    runs = [run_of(transfer(number)) for number in (1, 2)]
    peer.together(*(Arrived("laptop", run, ()) for run in runs))
    assert peer.only(Compute).transfers == tuple(run.transfer for run in runs)
    assert [message.transfer for message in peer.sent(Accept)] == [run.transfer for run in runs]


def test_a_request_canceled_together_with_its_tokens_is_not_computed(peer):
    peer.together(Arrived("laptop", run_of(), ()), Received("laptop", cancel(0)))
    assert not [one for one in peer.said if isinstance(one, Compute)]
    assert not peer.machine.held


@pytest.mark.release
def test_the_state_of_a_slow_peer_with_a_very_long_queue_can_be_read():
    a = new_peer(range(4), limits=Limits.of(2048))
    a(Warm(5_000_000))
    for number in range(1000):
        a.gets("laptop", run_of(transfer(number), budget=600.0))
    (state,) = framing.decode(framing.encode(a.machine.rules.announcer.state("laptop")))
    assert state.wait_us == MICROSECONDS - 1
