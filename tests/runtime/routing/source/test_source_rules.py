"""A source's machine keeps the furthest tokens, routes them again, skips, and ends its requests."""

import random

import pytest

from ls_edge.core.errors import BudgetExceeded, NotFinite, Overloaded
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import (
    MAX_CANCELED,
    Accept,
    Cancel,
    Hello,
    Itinerary,
    Moved,
    Release,
    TransferId,
)
from ls_edge.runtime.routing.source.ended_requests import CANCEL_EVERY
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.events import (
    Abandon,
    Arrived,
    Complete,
    Fail,
    Forward,
    NeighborDown,
    NeighborUp,
    Send,
    Submit,
)
from ls_edge.runtime.routing.state.held_request import Stage
from ls_edge.runtime.routing.state.hop import AWAY
from ls_edge.runtime.routing.state.limits import Limits
from tests.runtime.routing.driver import ALL_BY_A, Driver, run_of, submits


@pytest.fixture
def source():
    """A source without peers."""
    return Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))


# A source.


def test_a_source_keeps_the_tokens_until_the_answer_and_cancels_everywhere(source):
    source.meets("a", [0, 1, 2, 3])
    source.meets("b", [0], wait_us=10)
    submits(source, tokens=("stem",))
    (run,) = source.sent(Forward, "a")
    source.hears("a", Accept(run.transfer, 8))
    source.hears("a", Release(run.transfer, "b"))
    assert [item.stage for item in source.machine.held.values()] == [Stage.AWAY]
    done = run_of(
        run.transfer._replace(hop=5), remaining=(), returning="done", waves=(((*((b, "a") for b in range(4)),),),)
    )
    source.gets("a", done, ("last",))
    answer = source.only(Complete)
    assert (answer.request, answer.tokens, answer.attempts) == (0, ("last",), 1)
    assert len(source.sent(Accept, "a")) == 1
    assert not any(isinstance(s, Send) and isinstance(s.message, Cancel) for s in source.said)
    said = source.passes(CANCEL_EVERY)
    assert {s.to for s in said if isinstance(s, Send) and s.message.requests == (run.transfer.request,)} == {"a", "b"}
    assert source.machine.next_check() is None
    assert not source.machine.held
    assert not source.machine.rules.requests


def test_cancel_goes_with_another_message_in_the_second_half_of_its_time(source):
    source.meets("a", [0, 1, 2, 3])

    def answers(request):
        submits(source, request)
        (run,) = source.sent(Forward, "a")
        source.gets("a", run_of(run.transfer._replace(hop=2), remaining=(), returning="done", waves=ALL_BY_A))
        return run.transfer.request

    first = answers(0)
    source.passes(CANCEL_EVERY * 0.4)
    second = answers(1)
    assert not source.sent(Cancel)
    source.passes(CANCEL_EVERY * 0.1)
    submits(source, 2)
    assert [cancel.requests for cancel in source.sent(Cancel, "a")] == [(first, second)]


def test_a_later_answer_is_accepted_counted_and_dropped(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source)
    (run,) = source.sent(Forward, "a")
    for branch in range(3):
        source.gets(
            "a", run_of(run.transfer._replace(hop=5, branch=branch), remaining=(), returning="done", waves=ALL_BY_A)
        )
    assert source.sent(Accept, "a")
    assert not [s for s in source.said if isinstance(s, Complete)]
    assert source.machine.rules.ended.late_answers == 2


def test_an_answer_of_a_request_that_it_was_not_given_is_dropped(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source)
    source.gets("a", run_of(TransferId(b"x" * 16, 0, 0), remaining=(), returning="done", waves=ALL_BY_A))
    assert not [s for s in source.said if isinstance(s, Complete)]
    assert source.machine.rules.requests
    assert not source.machine.rules.ended.late_answers


def away(source, wait_us=0):
    """A request that ``a`` has passed on to ``b``; ``b`` and ``c`` announce a queue."""
    source.meets("a", [0, 1])
    source.meets("b", [2, 3], wait_us=wait_us)
    source.meets("c", [0, 1, 2, 3], credit=0, wait_us=wait_us)
    submits(source, budget=60)
    (run,) = source.sent(Forward, "a")
    source.hears("a", Accept(run.transfer, 8))
    source.hears("a", Release(run.transfer, "b"))
    source.hears("b", Moved(run.transfer._replace(hop=2), "a"))
    source.hears_state("c", wait_us=wait_us)
    return run


def test_one_of_holder_and_keeper_lost_is_no_matter_for_the_source(source):
    for name in ("a", "b"):
        one = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
        away(one)
        one(NeighborDown(name, "killed"))
        assert one.notes() == ["lost"]
        assert not one.sent(Forward)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a"), ("a", "a returns", "b"), ("b", "b returns", "a")])
def test_holder_and_keeper_both_lost_start_a_new_branch_from_the_stem(source, order):
    run = away(source)
    for name in order:
        source(
            NeighborUp(Hello(name[0], "peer", 2, 0, "m", "b"))
            if name.endswith("returns")
            else NeighborDown(name, "killed")
        )
    assert source.notes() == ["lost", "rerouted"]
    (again,) = source.sent(Forward, "c")
    assert again.itinerary.remaining == (0, 1, 2, 3)
    assert again.transfer.branch != run.transfer.branch
    assert source.machine.rules.requests[0].attempts == 2


def test_no_news_for_too_long_starts_a_new_branch(source):
    """The first half of the remaining budget is for the holder, the other one for the next attempt."""
    run = away(source)
    source.passes(29.0, step=0.5)
    assert not source.sent(Forward)
    source.hears("c", Moved(run.transfer, "b"))
    source.passes(15.0, step=0.5)
    assert not source.sent(Forward)
    source.passes(1.0, step=0.5)
    assert source.sent(Forward)


def test_moved_that_overtakes_release_counts_as_one(source):
    source.meets("a", [0, 1])
    source.meets("b", [2, 3])
    submits(source)
    (run,) = source.sent(Forward, "a")
    source.hears("a", Accept(run.transfer, 8))
    source.hears("b", Moved(run.transfer._replace(hop=2), "a"))
    assert [item.stage for item in source.machine.held.values()] == [Stage.AWAY]


def test_returned_tokens_that_got_further_continue_and_others_are_dropped(source):
    source.meets("a", [0, 1])
    submits(source, budget=60)
    (run,) = source.sent(Forward, "a")
    source.hears("a", Accept(run.transfer, 8))
    further = run_of(
        run.transfer._replace(hop=4), remaining=(2, 3), returning="unreachable", waves=((((0, "a"), (1, "a")),),)
    )
    source.gets("a", further, ("further",))
    source.gets("a", run_of(run.transfer._replace(hop=9), remaining=(1, 2, 3), waves=((((0, "a"),),),)), ("behind",))
    assert [item.tokens for item in source.machine.held.values()] == [("further",)]
    source.meets("b", [2, 3])
    (onward,) = [s for s in source.said if isinstance(s, Forward)]
    assert (onward.to, onward.tokens) == ("b", ("further",))
    assert onward.itinerary.remaining == (2, 3)


def test_a_skip_waits_a_moment_for_the_holder_to_come_back(source):
    source.meets("a", [0, 1, 2])
    source.meets("b", [3])
    source(NeighborDown("b", "killed"))
    submits(source, max_skips=1)
    (run,) = source.sent(Forward, "a")
    waves = ((((0, "a"), (1, "a"), (2, "a")),),)
    back = run_of(run.transfer._replace(hop=2), remaining=(3,), skips=1, returning="unreachable", waves=waves)
    source.gets("a", back, ("far",))
    assert not [s for s in source.said if isinstance(s, Complete)]
    source.passes(0.15)
    assert not [s for s in source.said if isinstance(s, Complete)]
    source.passes(0.1)
    answer = source.only(Complete)
    assert (answer.itinerary.skipped, answer.tokens) == ((3,), ("far",))


def test_the_budget_ends_in_an_answer_where_skips_allow_it_else_in_an_error(source):
    source.meets("a", [0, 1, 2], credit=0)
    submits(source, 0, budget=0.5, max_skips=0)
    submits(source, 1, budget=0.5, max_skips=4)
    said = source.passes(0.5)
    fails = {s.request: s for s in said if isinstance(s, Fail)}
    answers = {s.request: s for s in said if isinstance(s, Complete)}
    assert isinstance(fails[0].error, (Overloaded, BudgetExceeded))
    assert "blocks 0-3" in str(fails[0].error)
    assert answers[1].itinerary.skipped == (0, 1, 2, 3)
    assert source.now - 100.0 < 0.52


@pytest.mark.parametrize(("credit", "error"), [(0, Overloaded), (None, BudgetExceeded)], ids=["saturated", "alone"])
def test_the_error_says_what_was_missing(source, credit, error):
    if credit is not None:
        source.meets("a", range(4), credit=credit)
    submits(source, budget=0.5)
    said = source.passes(0.6)
    (fail,) = [s for s in said if isinstance(s, Fail)]
    assert type(fail.error) is error


def test_a_cancel_at_the_end_of_a_budget_lasts_until_late_tokens_have_come(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source, budget=0.5)
    source.passes(0.6)
    (cancel,) = source.sent(Cancel, "a")
    assert cancel.budget_us >= AWAY * 1e6


def test_abandoned_requests_are_canceled_and_give_no_outcome(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source)
    source(Abandon(0))
    assert len(source.sent(Cancel, "a")) == 1
    assert not source.machine.rules.requests
    assert not source.machine.held
    source(Abandon(0))
    assert not source.said


def test_each_cancel_of_many_requests_that_end_together_can_be_read(source):
    source.meets("a", [0, 1, 2, 3])
    itinerary = Itinerary("laptop", "nearest", (0, 1, 2, 3), 0)
    source.together(*(Submit(number, itinerary, ("stem",), source.now + 5.0) for number in range(MAX_CANCELED + 1)))
    ids = {request.request for request in source.machine.held.values()}
    source.together(*map(Abandon, range(MAX_CANCELED + 1)))
    read = [one for cancel in source.sent(Cancel, "a") for one in framing.decode(framing.encode(cancel))]
    assert len(ids) == sum(len(cancel.requests) for cancel in read) == MAX_CANCELED + 1
    assert {request for cancel in read for request in cancel.requests} == ids


def test_requests_wait_for_the_credits_of_a_holder_that_comes_later(source):
    """They waited only for the holders of the first decision: for the rest of the budget, if those hung."""
    source.meets("a", [0, 1, 2, 3], credit=0)
    submits(source)
    source.passes(1.0)
    source.meets("b", [0, 1, 2, 3], credit=0)
    source.passes(1.0)
    source.hears_state("b", credit=1)
    (run,) = source.sent(Forward)
    assert run.to == "b"


# Tokens that come home.


@pytest.fixture
def between_two(source):
    """The source with the peers ``a`` and ``b``, each with all blocks."""
    for name in ("a", "b"):
        source.meets(name, range(4))
    return source


def given(source):
    """Submit a request that goes to ``a``; its first RUN."""
    source.hears_state("b", wait_us=10**6)
    submits(source)
    (run,) = source.sent(Forward, "a")
    source.hears("a", Accept(run.transfer, 8))
    return run


def test_tokens_that_were_not_asked_for_are_counted_and_dropped(between_two):
    source = between_two
    run = given(source)
    for transfer, waves in ((TransferId(b"f" * 16, 0, 1), ALL_BY_A), (run.transfer, ((((7, "a"),),),))):
        source.gets("b", run_of(transfer, remaining=(), returning="done", waves=waves))
        assert not [one for one in source.said if isinstance(one, Complete)]
    assert {name: one.count for name, one in source.machine.rules.rejected.items()} == {"b": 2}
    source.gets("a", run_of(run.transfer, remaining=(), returning="done", waves=ALL_BY_A))
    assert source.only(Complete).request == 0


def test_unchanged_returned_tokens_do_not_replace_the_sent_ones(between_two):
    source = between_two
    submits(source, tokens=("mine",))
    (run,) = source.sent(Forward, "a")
    source.gets("a", run_of(run.transfer, returning="unreachable"), ("other",))
    assert [s.tokens for s in source.said if isinstance(s, Forward)] == [("mine",)]


def test_not_finite_from_two_holders_ends_the_request_and_names_them(between_two):
    source = between_two
    run = given(source)
    source.gets("a", run_of(run.transfer, returning="not finite"))
    (again,) = source.sent(Forward, "b")
    source.hears("b", Accept(again.transfer, 8))
    source(Arrived("b", run_of(again.transfer, returning="done", remaining=(), waves=ALL_BY_A), (), finite=False))
    fail = source.only(Fail)
    assert isinstance(fail.error, NotFinite)
    assert "a, b" in str(fail.error)
    assert not source.machine.rules.requests


def test_not_finite_from_the_only_holder_ends_the_request_at_once():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    source.meets("a", range(4))
    submits(source)
    (run,) = source.sent(Forward)
    source.gets("a", run_of(run.transfer, returning="not finite"))
    assert isinstance(source.only(Fail).error, NotFinite)
