"""What waits for a credit is decided again when one comes: the first first, no more than there are credits."""

import random
import unittest.mock

import pytest

from ls_edge.runtime.protocol.messages import Accept, Refuse
from ls_edge.runtime.routing.decisions import CREDIT_WAIT
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.events import Forward, NeighborDown
from ls_edge.runtime.routing.state.limits import Limits
from tests.runtime.routing.driver import Driver, submits

WAITING = 10


@pytest.fixture
def source():
    """A source with ten requests for the peer ``a``, which has no credit; ``b`` and ``c`` hold later blocks."""
    driver = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    driver.meets("a", [0], credit=0)
    driver.meets("b", [1])
    driver.meets("c", [2, 3])
    for number in range(WAITING):
        submits(driver, number)
        assert not driver.sent(Forward)
    return driver


def numbers(source):
    by_id = {request.copy.request: number for number, request in source.machine.rules.requests.items()}
    return [by_id[sent.transfer.request] for sent in source.sent(Forward)]


def decided(source, act):
    with unittest.mock.patch.object(source.machine.decisions, "decide", wraps=source.machine.decisions.decide) as found:
        act()
    return found.call_count


def test_each_credit_decides_one_request_in_order(source, monkeypatch):
    monkeypatch.setattr("ls_edge.runtime.routing.state.waiting_requests.MAX_SOURCE_TURNS", 0)
    assert decided(source, lambda: source.hears_state("a", credit=2)) == 2
    assert (numbers(source), source.machine.custody.waiting._last_turn) == ([0, 1], {})  # sources of the past go


def test_an_answer_to_a_transfer_lets_the_next_ones_go(source):
    source.hears_state("a", credit=1)
    (sent,) = source.sent(Forward)
    assert decided(source, lambda: source.hears("a", Accept(sent.transfer, 0))) == 0
    assert decided(source, lambda: source.hears_state("a", credit=1)) == 1
    (sent,) = source.sent(Forward)
    assert decided(source, lambda: source.hears("a", Accept(sent.transfer, 1))) == 1
    assert numbers(source) == [2]


def test_one_that_was_refused_waits_behind_the_others(source):
    source.hears_state("a", credit=1)
    (sent,) = source.sent(Forward)
    source.hears("a", Refuse(sent.transfer, "busy", 0))
    assert not source.sent(Forward)
    source.hears_state("a", credit=2)
    assert numbers(source) == [1, 2]


@pytest.mark.parametrize("changes", [{"queue": 3}, {"calls": 7}, {"wait_us": 500}, {"block_us": 2000}])
def test_the_load_of_others_decides_nothing(source, changes):
    for name in ("a", "b", "c"):
        assert decided(source, lambda name=name: source.hears_state(name, credit=9 * (name != "a"), **changes)) == 0


def test_a_request_that_any_holder_may_take_waits_for_each_of_them():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    source.meets("a", [0], credit=0)
    source.meets("b", [1], credit=0)
    submits(source, 0, policy="fastest")
    submits(source, 1, policy="nearest")
    assert decided(source, lambda: source.hears_state("b", credit=2)) == 1
    assert numbers(source) == [0]


def test_a_new_holder_is_given_what_waits(source):
    source.meets("d", [0], credit=2)
    assert numbers(source) == [0, 1]


def test_a_neighbor_that_is_trusted_again_gets_waiting_requests(source):
    source.meets("d", [0], credit=0)
    source.hears_state("d", credit=0, stuck=True)
    source.hears_state("d", credit=1)
    assert numbers(source) == [0]


def test_requests_that_waited_for_a_lost_neighbor_are_decided_immediately(source):
    assert decided(source, lambda: source(NeighborDown("a", "cut"))) == WAITING
    assert numbers(source) == [0, 1]
    assert {sent.to for sent in source.sent(Forward)} == {"b"}


def test_patience_ends_without_a_credit(source):
    waits = CREDIT_WAIT
    said = source.passes(1.5 * waits)
    assert {sent.to for sent in said if isinstance(sent, Forward)} == {"b", "c"}
