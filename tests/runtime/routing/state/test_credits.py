"""Credits: what a peer holds, and how much more it accepts from whom."""

from ls_edge.runtime.protocol.messages import Accept, Refuse, Release
from ls_edge.runtime.routing.state.credits import WORKS_AGAIN, Credits, counted
from ls_edge.runtime.routing.state.events import Forward
from ls_edge.runtime.routing.state.held_request import HeldRequest, Stage
from ls_edge.runtime.routing.state.limits import Limits
from tests.runtime.routing.driver import BY_X, new_peer, run_of, transfer

LIMITS = Limits(credits=8, custody=16)


def held(upstream, owner, account=None, relay=""):
    run = run_of(source=owner)
    return HeldRequest(
        run.transfer, run.itinerary, (), 10.0, upstream, 0.0, owner=owner, account=account or owner, relay=relay
    )


def holding(*requests):
    """Credits of a peer at which these requests wait."""
    found = Credits(LIMITS)
    for request in requests:
        found.count(request, int(request.passes_through), 1)
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
    counts, request = Credits(LIMITS), held("laptop", "laptop")
    assert goes_through(counts, request, *work) == [(0, 1)] * 4
    assert goes_through(counts, request, Stage.OFFERED, Stage.CUSTODY) == [(1, 0)] * 2
    assert goes_through(counts, request, Stage.ENDED) == [(0, 0)]
    assert counts == Credits(LIMITS)


def test_a_refused_offer_does_not_take_back_the_credit_that_it_freed():
    counts, request = Credits(LIMITS), held("laptop", "laptop")
    goes_through(counts, request, Stage.WAITING, Stage.OFFERED)
    assert goes_through(counts, request, Stage.WAITING, Stage.OFFERED, Stage.WAITING) == [(1, 0)] * 3
    assert goes_through(counts, request, Stage.QUEUED, Stage.RUNNING) == [(0, 1)] * 2  # nobody else could run it
    assert goes_through(counts, request, Stage.ENDED) == [(0, 0)]


def test_counts_return_to_zero_with_the_last_request():
    requests = [held("laptop", "laptop"), held("b", "laptop", relay="b"), held("b", "phone", account="b", relay="b")]
    counts = holding(*requests)
    assert (counts.working, counts.copies, counts.total) == (3, 0, LIMITS.credits - 3)
    assert (counts.working_from_owner, counts.held_from_owner) == (1, 1)
    assert (counts.working_of, counts.held_from) == ({"laptop": 2, "b": 1}, {"b": 2})
    for request in requests:
        counts.count(request, 0, -1)
    assert counts == Credits(LIMITS)


def test_tokens_on_their_way_home_are_copies_and_take_no_credit():
    counts = holding(held("b", "laptop"))
    assert (counts.working, counts.copies, counts.total) == (0, 1, min(LIMITS.credits, LIMITS.custody - 1))


def test_accounts_share_the_credits_equally():
    counts = holding(*[held("laptop", "laptop")] * 3)
    assert counts.room("laptop") == LIMITS.credits - 3
    assert counts.room("phone") == LIMITS.credits // 2
    counts.count(held("phone", "phone"), 0, 1)
    assert (counts.room("laptop"), counts.room("phone")) == (1, 3)


def test_a_source_may_not_use_what_is_reserved_for_peers_and_a_relay_may():
    counts = holding(*[held("x", "laptop", relay="x")] * (LIMITS.credits - LIMITS.reserved))
    counts.let_in("phone", 0.0)
    assert counts.total == LIMITS.reserved
    assert counts.of_source("phone", 0.0) == LIMITS.guaranteed
    assert counts.of_relay("y") == LIMITS.reserved


def test_a_relay_is_served_even_if_another_one_has_all_credits():
    counts = holding(*[held("x", "laptop", relay="x")] * LIMITS.credits)
    assert (counts.of_relay("x"), counts.of_relay("y")) == (0, LIMITS.guaranteed)


def test_a_source_in_whose_name_others_work_is_let_in_once_in_a_while():
    counts = holding(*[held("liar", "laptop", relay="liar")] * LIMITS.credits)
    assert counts.guaranteed("laptop", 5.0) == 1
    counts.let_in("laptop.0123abcd", 5.0)  # aliases are one source
    assert counts.guaranteed("laptop", 5.0 + LIMITS.starved * 0.9) == 0
    assert counts.guaranteed("laptop", 5.0 + LIMITS.starved) == 1
    counts.let_in("laptop", 6.0)
    counts.forget("laptop")
    assert counts.guaranteed("laptop", 6.0) == 1


def test_direct_transfers_are_bounded_regardless_of_guarantees():
    counts = holding(*[held(f"s{number}", f"s{number}") for number in range(LIMITS.credits)])
    assert counts.guaranteed("new", 0.0) == 0


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
    assert (peer.machine.rules.state("x").credits, peer.machine.rules.state("laptop").credits) == (1, 0)
