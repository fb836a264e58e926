"""A peer's machine takes tokens, runs its blocks, hands them on, and meets a next holder that fails."""

import weakref

import pytest

from ls_edge.runtime.protocol.messages import (
    Accept,
    Hello,
    Moved,
    Progress,
    Refuse,
    RefuseReason,
    Release,
    State,
)
from ls_edge.runtime.routing.peer import engine_queue
from ls_edge.runtime.routing.peer.state_announcer import STATE_EVERY, STATE_LEAST
from ls_edge.runtime.routing.state.events import (
    Compute,
    ComputeFailed,
    Drain,
    Forward,
    NeighborDown,
    NeighborUp,
    Note,
    Send,
    Unsendable,
)
from ls_edge.runtime.routing.state.held_request import Stage
from ls_edge.runtime.routing.state.hop import HopLimit
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import CUTS
from ls_edge.runtime.routing.state.pause import PauseReason
from tests.runtime.routing.driver import BY_X, cancel, handed_on, new_peer, request_id, run_of, transfer


@pytest.fixture
def peer():
    """A warm peer ``a`` that serves blocks 0 and 1, one an engine call, linked with the source ``laptop``."""
    return new_peer()


# A peer: taking tokens, running its blocks, handing on.


def test_a_peer_accepts_runs_all_its_blocks_hands_on_and_releases(peer):
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of())
    assert peer.sent(Accept, "laptop") == [Accept(transfer(), 7)]
    peer.computes(peer.only(Compute))
    peer.computes(peer.only(Compute), after=0.09)
    assert peer.sent(Progress, "laptop") == [Progress(transfer())]
    (onward,) = peer.sent(Forward, "b")
    assert onward.transfer == transfer(hop=2)
    assert onward.itinerary.waves == ((((0, "a"), (1, "a")),),)
    assert onward.itinerary.remaining == (2, 3)
    assert onward.itinerary.visits[0].blocks == (0, 1)
    assert [s.tokens for s in peer.said if s is onward] == [(0, 1)]
    assert not peer.sent(Release)
    peer.hears("b", Accept(onward.transfer, 8))
    assert peer.sent(Release, "laptop") == [Release(transfer(), "b")]
    assert [item.stage for item in peer.machine.held.values()] == [Stage.CUSTODY]
    peer.hears("b", Release(onward.transfer, "b"))
    assert not peer.machine.held
    assert not list(peer.machine.custody.sent)


def test_tokens_are_let_go_with_their_request(peer):
    class Tokens:
        pass

    peer.gets("laptop", run_of(transfer(99), remaining=(2, 3), waves=BY_X, budget=1.0))  # has the first timer
    peer.meets("b", [2, 3])
    alive = weakref.WeakSet()
    for number in range(20):
        alive.add(tokens := Tokens())
        peer.gets("laptop", run_of(transfer(number), remaining=(2, 3), waves=BY_X), tokens)
        (onward,) = peer.sent(Forward, "b")
        peer.hears("b", Accept(onward.transfer, 8))
        peer.hears("b", Release(onward.transfer, "b"))
        del tokens, onward
        assert not alive


def test_the_last_block_goes_home_with_what_is_done(peer):
    peer.gets("b", run_of(remaining=(1,), waves=((((0, "b"), (2, "b"), (3, "b")),),)))
    peer.computes(peer.only(Compute))
    (home,) = peer.sent(Forward, "laptop")
    assert (home.returning, home.itinerary.remaining) == ("done", ())
    peer.hears("laptop", Accept(home.transfer, 1))
    assert not peer.machine.held


def test_the_slot_is_how_many_blocks_have_run(peer):
    peer.gets("laptop", run_of(remaining=(1,), waves=((((0, "b"), (2, "b"), (3, "b")),),)))
    assert peer.only(Compute).slots == (3,)


def test_the_source_is_told_who_holds_a_request_that_came_from_a_peer(peer):
    peer.meets("b", [2])
    peer.gets("b", run_of())
    assert peer.sent(Moved, "laptop") == [Moved(transfer(), "b")]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda p: p(Drain()), "draining"),
        (lambda p: p.hears("laptop", cancel(0)), "canceled"),
        (lambda p: setattr(p.machine.rules, "warm", False), "cold"),
        (lambda p: [p.gets("laptop", run_of(transfer(n + 1))) for n in range(16)], "busy"),
    ],
    ids=["draining", "canceled", "cold", "busy"],
)
def test_a_peer_says_why_it_does_not_take_tokens(peer, prepare, reason):
    prepare(peer)
    held = len(peer.machine.held)
    peer.gets("laptop", run_of())
    assert [message.reason for message in peer.sent(Refuse, "laptop")] == [reason]
    assert len(peer.machine.held) == held


def test_the_same_transfer_twice_is_accepted_twice_and_run_once(peer):
    peer.gets("laptop", run_of())
    peer.gets("laptop", run_of())
    assert len(peer.sent(Accept)) == 1
    assert not [s for s in peer.said if isinstance(s, Compute)]
    assert len(peer.machine.held) == 1


def credits_sent(peer):
    return {
        name: [state.credits for state in peer.sent(State, name)]
        for name in peer.machine.neighbors.by_name
        if peer.sent(State, name)
    }


def test_a_sender_without_credit_gets_state_when_it_has_one_again():
    peer = new_peer(limits=Limits(credits=1))
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of())
    assert [message.credits for message in peer.sent(Accept, "laptop")] == [0]
    assert not peer.sent(State)  # ACCEPT told the only one that uses it
    peer.computes(peer.only(Compute))
    assert peer.sent(Forward, "b")
    assert credits_sent(peer) == {"laptop": [1]}


def test_state_goes_with_another_message_once_the_last_one_is_old_enough():
    peer = new_peer()
    peer.gets("laptop", run_of(transfer(0)))
    peer.passes(STATE_LEAST)
    assert peer.sent(State, "laptop")
    peer.passes(STATE_LEAST * 0.4)
    peer.gets("laptop", run_of(transfer(1)))
    assert not peer.sent(State)
    peer.passes(STATE_LEAST * 0.6)
    assert not peer.sent(State)
    peer.gets("laptop", run_of(transfer(2)))
    assert [type(s.message) for s in peer.said if isinstance(s, Send)] == [Accept, State]
    peer.computes_next()  # the engine is not stuck
    peer.passes(STATE_EVERY * 0.9)
    assert not peer.sent(State)
    peer.passes(STATE_EVERY * 0.1)
    assert len(peer.sent(State, "laptop")) == 1  # alone


def test_a_recent_sender_is_told_that_others_took_its_credits():
    peer = new_peer(limits=Limits(credits=4))
    peer.meets("x")
    peer.meets("y")
    peer.gets("x", run_of(transfer(0)))
    peer.gets("laptop", run_of(transfer(1)))
    for number in range(2, 4):
        peer.gets("y", run_of(transfer(number)))
    assert credits_sent(peer) == {"x": [0]}


def test_credits_are_announced_several_at_once_while_the_engine_is_busy():
    peer = new_peer(limits=Limits(credits=16))
    peer.meets("b", [2, 3])
    peer.meets("x")
    peer.gets("x", run_of(transfer(0)))
    for number in range(1, 16):
        peer.gets("x", run_of(transfer(number)))
    assert [message.credits for message in peer.sent(Accept, "x")] == [0]
    announced = []
    while not announced:
        peer.computes_next()
        announced += credits_sent(peer).items()
    assert announced == [("x", [2])]
    assert peer.machine.rules.credits == 2


def test_requests_at_one_block_run_as_a_batch_whatever_their_slots():
    peer = new_peer(max_batch=3)
    peer.gets("laptop", run_of(transfer(0), remaining=(0, 2, 3), waves=((((1, "x"),),),)), ("first",))
    first = peer.only(Compute)
    assert first.slots == (1,)
    peer.gets("laptop", run_of(transfer(1)), ("second",))
    peer.gets("laptop", run_of(transfer(2), remaining=(0, 3), waves=((((1, "x"), (2, "x")),),)), ("third",))
    peer.gets("laptop", run_of(transfer(3), remaining=(1, 2, 3), waves=((((0, "x"),),),)), ("other block",))
    peer.computes(first)
    batch = peer.only(Compute)
    assert (batch.blocks[0], batch.slots) == (0, (0, 2))
    assert batch.tokens == (("second",), ("third",))
    peer.computes(batch)
    items = {item.transfer.request: item for item in peer.machine.held.values()}
    assert items[request_id(1)].itinerary.remaining == (1, 2, 3)
    assert items[request_id(2)].itinerary.remaining == (3,)
    assert items[request_id(2)].tokens == ("third", 0)


def test_blocks_that_would_follow_anyway_run_in_one_engine_call():
    peer = new_peer((0, 1, 3), Limits(chain=0.0025))
    peer.gets("laptop", run_of())
    first = peer.only(Compute)
    assert first.blocks == (0, 1)
    peer.computes(first)
    (item,) = peer.machine.held.values()
    assert item.itinerary.waves == ((((0, "a"), (1, "a")),),)
    assert item.tokens == (0, 1)
    assert peer.only(Compute).blocks == (3,)
    longer = new_peer((0, 1, 2, 3), Limits(chain=0.0035))
    longer.gets("laptop", run_of())
    assert longer.only(Compute).blocks == (0, 1, 2)


def test_sources_take_turns_at_the_engine():
    peer = new_peer()
    peer.meets("phone", role="source")
    for number in range(4):
        peer.gets("laptop", run_of(transfer(number)))
    peer.gets("phone", run_of(transfer(9), source="phone"))
    ran = [peer.computes_next().transfers[0].request for _ in range(4)]
    assert ran[:3] == [request_id(0), request_id(1), request_id(9)]


def test_the_engine_is_given_its_next_call_while_one_runs_and_no_further_one():
    peer = new_peer()
    for number in range(3):
        assert peer.machine.rules.engine.is_ahead == (number > 1)
        peer.gets("laptop", run_of(transfer(number)))
    assert [call.transfers[0].request for call in peer.calls] == [request_id(0), request_id(1)]
    assert peer.machine.rules.announcer.state().queue == 3
    peer.computes_next()
    assert [call.transfers[0].request for call in peer.calls][:2] == [request_id(1), request_id(0)]


def test_a_call_that_came_after_a_slow_one_has_its_whole_time():
    peer = new_peer(limits=Limits(chain=0))
    for number in range(2):
        peer.gets("laptop", run_of(transfer(number)))
    peer.passes(0.24)
    peer.computes_next()
    peer.passes(0.2)
    assert not peer.machine.rules.engine.stuck
    peer.passes(0.4)
    assert peer.machine.rules.engine.stuck


def test_a_batch_that_is_not_full_is_kept_for_others_to_join():
    peer = new_peer(max_batch=2)
    for number in range(2):
        peer.gets("laptop", run_of(transfer(number)))
    assert [len(call.transfers) for call in peer.calls] == [1]
    peer.gets("laptop", run_of(transfer(2)))
    assert [len(call.transfers) for call in peer.calls] == [1, 2]


@pytest.mark.parametrize("why", ["it hangs", "half of a drain is over"])
def test_a_call_that_has_not_begun_is_taken_back_and_its_result_not_used(why):
    peer = new_peer((0,), Limits(chain=0, hop=HopLimit(floor=0.25 if why == "it hangs" else 60)))
    peer.meets("b", [0, 1])
    for number in range(2):
        peer.gets("laptop", run_of(transfer(number), budget=60))
    first, second = peer.calls
    if why == "it hangs":
        peer.passes(1.0)
    else:
        peer(Drain())
        peer.passes(2.1, step=0.05)
    assert peer.machine.rules.engine.stuck == (why == "it hangs")
    taken = [r for r in peer.machine.held.values() if r.request == request_id(1)]
    assert not any(request.stage is Stage.RUNNING for request in taken)
    before = [request.itinerary for request in taken]
    peer.computes(first)
    peer.computes(second)
    assert [request.itinerary for request in taken] == before


def test_an_engine_that_fails_twice_in_a_block_says_so_once(monkeypatch):
    monkeypatch.setattr(engine_queue, "FAILURES", 1)
    peer = new_peer()
    for number in range(2):
        peer.gets("laptop", run_of(transfer(number)))
    first, second = peer.calls
    peer(ComputeFailed(0, first.transfers, "the engine fell over"))
    assert "engine failed" in peer.notes()
    peer(ComputeFailed(0, second.transfers, "the engine fell over"))
    assert peer.notes() == []


# A peer: what goes wrong at the next holder.


def two_holders(peer):
    peer.meets("b", [2, 3])
    peer.meets("c", [2, 3], wait_us=10)
    return handed_on(peer)


@pytest.mark.parametrize("accepted", [False, True], ids=["offered", "in custody"])
def test_a_next_holder_that_is_lost_costs_a_new_branch_to_another(peer, accepted):
    sent = two_holders(peer)
    if accepted:
        peer.hears("b", Accept(sent, 5))
    peer(NeighborDown("b", "killed"))
    assert peer.notes() == ["lost", "rerouted"]
    (again,) = peer.sent(Forward, "c")
    assert again.transfer.request == sent.request
    assert again.transfer.branch != sent.branch
    assert again.itinerary.remaining == (2, 3)


@pytest.mark.parametrize("accepted", [False, True], ids=["offered", "in custody"])
def test_a_next_holder_without_progress_is_suspected_and_passed_by(peer, accepted):
    sent = two_holders(peer)
    if accepted:
        peer.hears("b", Accept(sent, 5))
    peer.passes(0.2)
    assert not peer.sent(Forward)
    peer.passes(0.1)
    assert peer.notes()[:2] == ["suspect", "rerouted"]
    assert len(peer.sent(Forward, "c")) == 1
    assert not peer.machine.neighbors.get("b").available


def test_progress_keeps_a_next_holder_from_suspicion(peer):
    sent = two_holders(peer)
    peer.hears("b", Accept(sent, 5))
    for _ in range(5):
        assert not [note for note in peer.passes(0.2) if isinstance(note, Note)]
        peer.hears("b", Progress(sent))
    assert peer.machine.neighbors.get("b").available


def test_a_slow_engine_has_a_longer_deadline(peer):
    peer.meets("b", [2, 3], block_us=200_000)
    peer.hears("b", Accept(handed_on(peer), 5))
    peer.passes(0.75)
    assert peer.notes() == []
    peer.passes(0.1)
    assert peer.notes()[0] == "suspect"


@pytest.mark.parametrize("others", [True, False])
def test_a_holder_that_reports_progress_keeps_a_request_only_if_no_other_could_continue(peer, others):
    sent = two_holders(peer) if others else (peer.meets("b", [2, 3]), handed_on(peer))[1]
    peer.hears("b", Accept(sent, 5))
    said = []
    for _ in range(14):
        said += peer.hears("b", Progress(sent), 0.2)
    assert [one.to for one in said if isinstance(one, Forward)] == (["c"] if others else [])


def test_a_slow_engine_shows_progress_while_it_computes_but_not_for_ever():
    peer = new_peer()
    peer.machine.rules.engine.block_us = 500_000
    peer.gets("laptop", run_of())
    peer.gets("laptop", run_of(transfer(1)))
    peer.passes(1.9)
    for number in range(2):
        told = [m for m in peer.sent(Progress, "laptop") if m.transfer == transfer(number)]
        assert len(told) >= 10
    peer.passes(1.0)
    assert len(peer.sent(Progress, "laptop")) < 5
    assert peer.machine.held[transfer(0)].stage is Stage.RUNNING


@pytest.mark.parametrize("reason", ["busy", "cold", "draining"])
def test_a_refusal_sends_the_tokens_elsewhere(peer, reason):
    sent = two_holders(peer)
    peer.hears("b", Refuse(sent, reason, 0))
    assert len(peer.sent(Forward, "c")) == 1
    assert peer.machine.neighbors.get("b").offers == 0


@pytest.mark.parametrize("reason", ["not finite", "because"])
def test_an_unusual_refusal_names_who_refused_to_the_next_holder(peer, reason):
    peer.hears("b", Refuse(two_holders(peer), reason))
    (onward,) = peer.sent(Forward, "c")
    assert (onward.returning, onward.itinerary.remaining, onward.itinerary.avoid) == ("", (2, 3), ("b",))


def test_a_refusal_that_is_usual_does_not(peer):
    peer.hears("b", Refuse(two_holders(peer), "busy", 5))
    assert peer.sent(Forward, "c")[0].itinerary.avoid == ()


def test_holders_to_avoid_are_offered_a_request_that_nobody_else_can_take(peer):
    peer.hears("b", Refuse(two_holders(peer), "because"))
    (onward,) = peer.sent(Forward, "c")
    peer.hears("c", Refuse(onward.transfer, "because"))
    (home,) = peer.sent(Forward)
    assert (home.to, home.returning, home.itinerary.avoid) == ("laptop", "unreachable", ("b", "c"))
    peer.passes(0.2)
    peer.hears_state("b")
    peer.gets("laptop", run_of(transfer(hop=5), remaining=(2, 3), waves=BY_X, avoid=("b", "c")))
    assert peer.sent(Forward)[0].to == "b"


def test_a_request_that_the_next_holder_knows_to_be_canceled_ends(peer):
    peer.hears("b", Refuse(two_holders(peer), "canceled"))
    assert not peer.machine.held
    assert [message.holder for message in peer.sent(Release, "laptop")] == ["b"]


def test_a_message_from_somebody_else_about_a_transfer_counts_for_nothing(peer):
    sent = two_holders(peer)
    for message in (Accept(sent, 1), Release(sent, "b"), Refuse(sent, "canceled"), Progress(sent)):
        peer.hears("c", message)
        assert [item.stage for item in peer.machine.held.values()] == [Stage.OFFERED]


def test_unsendable_tokens_are_tried_again_soon(peer):
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    (run,) = peer.sent(Forward, "b")
    peer(Unsendable(run))
    assert not peer.sent(Forward)
    peer.passes(0.1)
    assert len(peer.sent(Forward, "b")) == 1


def test_a_source_whose_links_end_each_time_is_sent_its_tokens_through_others_and_told_so(peer):
    peer.meets("b", (2, 3), reaches=("laptop",))
    for number in range(CUTS):
        peer.meets("laptop", role="source")
        peer.gets("laptop", run_of(transfer(number), remaining=(0,)))
        peer.computes_next()
        assert peer.sent(Forward, "laptop")
        peer.passes(HopLimit.floor)
        peer(NeighborDown("laptop", "silent"))
        assert peer.sent(Forward, "b")
    assert any("MTU" in note.why for note in peer.said if isinstance(note, Note))
    peer.gets("b", run_of(transfer(8), remaining=(0,)))
    peer.meets("laptop", role="source")
    peer.computes_next()
    assert [home.to for home in peer.sent(Forward)] == ["b"]
    peer.gets("laptop", run_of(transfer(9)))
    assert [refused.reason for refused in peer.sent(Refuse)] == [RefuseReason.LOSES_TOKENS]
    peer.passes(PauseReason.LOSES_TOKENS.value[1])
    peer.gets("laptop", run_of(transfer(10)))
    assert peer.sent(Accept, "laptop")


def test_links_that_come_and_go_under_tokens_are_used_again(peer):
    peer.meets("b", (2, 3), reaches=("laptop",))
    for number in range(2 * CUTS):
        peer.meets("laptop", role="source")
        peer.gets("laptop", run_of(transfer(number), remaining=(0,)))
        peer.computes_next()
        assert peer.sent(Forward, "laptop")
        peer(NeighborDown("laptop", "reset"))
        assert peer.sent(Forward, "b")


def test_a_neighbor_that_came_back_as_a_new_process_has_lost_what_it_held(peer):
    sent = two_holders(peer)
    peer.hears("b", Accept(sent, 5))
    peer(NeighborUp(Hello("b", "peer", 2, 0, "m", "b", (2, 3))))
    assert peer.notes() == ["lost", "rerouted"]
    assert len(peer.sent(Forward, "c")) == 1
