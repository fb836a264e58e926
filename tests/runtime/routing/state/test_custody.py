"""The table of transitions of held requests, the story that an error prints, and the check of a machine's books."""

import dataclasses
import random
from typing import get_args

import pytest

from ls_edge.runtime.protocol.messages import Accept, Release
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.custody import TRANSITIONS, InvalidTransition
from ls_edge.runtime.routing.state.events import Compute, Event, Forward
from ls_edge.runtime.routing.state.held_request import Stage
from ls_edge.runtime.routing.state.limits import Limits
from tests.faults.consistency import InvalidState, validate
from tests.runtime.routing.driver import BY_X, Driver, new_peer, run_of, submits


def test_a_transition_that_the_table_lacks_prints_the_story_of_the_request():
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of())
    peer.computes(peer.only(Compute))
    peer.computes(peer.only(Compute))
    (sent,) = peer.sent(Forward, "b")
    peer.hears("b", Accept(sent.transfer, 8))
    (request,) = peer.machine.held.values()
    with pytest.raises(InvalidTransition) as failed:
        peer.machine.custody.transition(request, Stage.RUNNING, "made up")
    text = str(failed.value)
    assert "custody -> running (made up)" in text
    told = [line.split(" ", 1)[1] for line in text.splitlines() if "->" in line][1:]
    assert told == [
        "new -> waiting: from laptop", "waiting -> queued: block 0", "queued -> running: blocks 0",
        "running -> waiting: ran", "waiting -> queued: block 1", "queued -> running: blocks 1",
        "running -> waiting: ran", "waiting -> offered: b", "offered -> custody: b accepted",
    ]  # fmt: skip


def test_every_stage_that_can_be_entered_can_be_left_and_ended():
    entered = {to for _, to in TRANSITIONS} - {Stage.ENDED}
    left = {before for before, _ in TRANSITIONS} - {Stage.NEW}
    assert entered == left == set(Stage) - {Stage.NEW, Stage.ENDED}
    assert all((stage, Stage.ENDED) in TRANSITIONS for stage in entered)
    assert not [pair for pair in TRANSITIONS if pair[0] is pair[1] or pair[0] is Stage.ENDED]


def test_a_transition_is_made_by_the_method_in_the_table(monkeypatch):
    made = []
    step = TRANSITIONS[Stage.WAITING, Stage.QUEUED]

    def instead(custody, request, block):
        made.append((custody, request, block))
        step.make(custody, request, block)

    monkeypatch.setitem(TRANSITIONS, (Stage.WAITING, Stage.QUEUED), dataclasses.replace(step, make=instead))
    peer = new_peer()
    peer.gets("laptop", run_of())
    (request,) = peer.machine.held.values()
    assert made == [(peer.machine.custody, request, 0)]


def test_the_tables_of_a_role_have_every_stage_and_event():
    peer = new_peer().machine.rules
    source = source_machine("laptop", limits=Limits(), rng=random.Random(0)).rules
    assert set(peer.stages) == set(Stage) - {Stage.NEW}
    assert set(source.stages) == set(Stage) - {Stage.NEW, Stage.QUEUED, Stage.RUNNING, Stage.JOINING}
    assert set(get_args(Event)) <= peer.handlers.keys() | source.handlers.keys()


@pytest.mark.parametrize("count", ["copies", "working"])
def test_books_that_do_not_agree_are_found(count):
    peer = new_peer()
    peer.gets("laptop", run_of())
    counts = peer.machine.custody.credits
    setattr(counts, count, getattr(counts, count) + 1)
    with pytest.raises(InvalidState, match="counts are"):
        validate(peer.machine)


def test_offers_that_are_counted_wrong_are_found():
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.machine.neighbors.get("b").offers += 1
    with pytest.raises(InvalidState, match="1 offers to b, 0 are"):
        validate(peer.machine)


def test_a_request_that_waits_and_is_listed_nowhere_is_found():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    submits(source, 0)
    validate(source.machine)
    (request,) = source.machine.held.values()
    source.machine.custody.waiting.remove(request)
    with pytest.raises(InvalidState, match="waiting or not"):
        validate(source.machine)


def test_a_release_ahead_of_its_accept_settles_the_offer_once():
    """It counted as two settled offers, so that a full link looked as if it had room."""
    peer = new_peer()
    peer.meets("b", [2, 3])
    for number in range(2):
        peer.gets("laptop", run_of(run_of().transfer._replace(branch=number), remaining=(2, 3), waves=BY_X))
    sent = peer.sent(Forward, "b")
    assert len(sent) == 1
    assert peer.machine.neighbors.get("b").offers == 2
    peer.hears("b", Release(sent[0].transfer, "laptop"))
    assert peer.machine.neighbors.get("b").offers == 1


def test_next_check_is_the_earliest_time_of_any_request():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    source.meets("a", [0, 1, 2, 3])
    for number, budget in enumerate((5.0, 2.0)):
        submits(source, number, budget=budget)
    assert not source.machine.custody.waiting
    assert source.machine.next_check() == min(request.check_at for request in source.machine.held.values())


def test_waiting_requests_are_looked_at_often():
    """The end of a suspicion, a refusal or a pause of a neighbor is no event."""
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    submits(source, 0, budget=5.0)
    for _ in range(3):
        assert source.now <= source.machine.next_check() <= source.now + 0.1
        source.passes(0.3, step=0.1)
