"""Credits: what a peer holds, and how much more it accepts from whom."""

from ls_edge.runtime.protocol.messages import Accept, Refuse, Release
from ls_edge.runtime.routing.state.credits import WORKS_AGAIN, Credits, counted
from ls_edge.runtime.routing.state.events import Forward
from ls_edge.runtime.routing.state.held_request import HeldRequest, Stage
from ls_edge.runtime.routing.state.limits import Limits
from tests.runtime.routing.driver import BY_X, new_peer, run_of, transfer

LIMITS = Limits(credits=8, custody=16)


def held(owner, returning=""):
    run = run_of(source=owner)
    return HeldRequest(run.transfer, run.itinerary, (), 10.0, "x", 0.0, owner=owner, returning=returning)


def holding(*requests):
    """Credits of a peer at which these requests wait."""
    found = Credits(LIMITS)
    for request in requests:
        found.count(request, int(bool(request.returning)), 1)
    return found


def goes_through(counts, request, *stages):
    """Copies and working requests after each of the stages."""
    found = []
    for stage in stages:
        if change := counted(request.stage, stage):
            counts.moved(request, change)
        if stage is Stage.QUEUED and request.is_copy:
            counts.moved(request, WORKS_AGAIN)
        request.stage = stage
        found.append((counts.copies, counts.working))
    return found


def test_a_request_works_until_it_is_offered_and_is_a_copy_from_then_on():
    work = (Stage.WAITING, Stage.QUEUED, Stage.RUNNING, Stage.WAITING)
    counts, request = Credits(LIMITS), held("laptop")
    assert goes_through(counts, request, *work) == [(0, 1)] * 4
    assert goes_through(counts, request, Stage.OFFERED, Stage.CUSTODY) == [(1, 0)] * 2
    assert goes_through(counts, request, Stage.ENDED) == [(0, 0)]
    assert counts == Credits(LIMITS)


def test_a_refused_offer_does_not_take_back_the_credit_that_it_freed():
    counts, request = Credits(LIMITS), held("laptop")
    goes_through(counts, request, Stage.WAITING, Stage.OFFERED)
    assert goes_through(counts, request, Stage.WAITING, Stage.OFFERED, Stage.WAITING) == [(1, 0)] * 3
    assert goes_through(counts, request, Stage.QUEUED, Stage.RUNNING) == [(0, 1)] * 2  # nobody else could run it
    assert goes_through(counts, request, Stage.ENDED) == [(0, 0)]


def test_counts_return_to_zero_with_the_last_request():
    requests = [held("laptop"), held("laptop"), held("phone")]
    counts = holding(*requests)
    assert (counts.working, counts.copies, counts.total) == (3, 0, LIMITS.credits - 3)
    assert counts.working_of == {"laptop": 2, "phone": 1}
    for request in requests:
        counts.count(request, 0, -1)
    assert counts == Credits(LIMITS)


def test_tokens_on_their_way_home_are_copies_and_take_no_credit():
    counts = holding(held("laptop", "done"))
    assert (counts.working, counts.copies, counts.total) == (0, 1, min(LIMITS.credits, LIMITS.custody - 1))


def test_a_source_may_not_use_what_is_reserved_for_peers_and_has_a_minimum():
    counts = holding(*[held("laptop")] * (LIMITS.credits - LIMITS.reserved))
    assert counts.total == LIMITS.reserved
    assert (counts.of_source("laptop"), counts.of_source("phone")) == (0, LIMITS.guaranteed)


def test_minimums_and_the_way_home_have_bounds():
    counts = holding(*[held(f"s{number}") for number in range(2 * LIMITS.credits + LIMITS.custody)])
    assert (counts.of_source("new"), counts.lets_through) == (0, True)
    for _ in range(LIMITS.custody):
        counts.count(held("s0", "done"), 1, 1)
    assert not counts.lets_through


def test_credits_count_what_is_held_and_custody_apart():
    peer = new_peer(limits=Limits(credits=2, custody=3))
    peer.meets("b", [2, 3])
    for number in range(3):
        peer.gets("x", run_of(transfer(number), remaining=(2, 3), waves=BY_X))
        (onward,) = peer.sent(Forward, "b")
        assert peer.machine.rules.credits == min(2, 2 - number)  # what was sent counts as a copy
        peer.hears("b", Accept(onward.transfer, 5))
    assert peer.machine.rules.credits == 0
    peer.gets("x", run_of(transfer(9), source="phone"))
    assert peer.sent(Refuse)[0].reason == "busy"
    for sent in list(peer.machine.custody.sent):
        peer.hears("b", Release(sent, "b"))
    assert peer.machine.rules.credits == 2


def test_half_of_the_credits_are_for_transfers_from_peers():
    peer = new_peer(limits=Limits(credits=4))
    for number in range(2):
        peer.gets("laptop", run_of(transfer(number)))
        assert peer.sent(Accept, "laptop")[0].credits == 1 - number
    peer.gets("laptop", run_of(transfer(2)))
    assert peer.sent(Refuse, "laptop")[0].reason == "busy"
    peer.gets("x", run_of(transfer(3)))
    assert peer.sent(Accept, "x")[0].credits == 1
    assert (peer.machine.rules.announcer.state("x").credits, peer.machine.rules.announcer.state("laptop").credits) == (
        1,
        0,
    )
