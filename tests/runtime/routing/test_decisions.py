"""Decisions: the order of the rules, and when waiting requests are decided again."""

from ls_edge.runtime.protocol.messages import Accept, Refuse
from ls_edge.runtime.routing.decisions import Case, Hold, Stay, nobody_has_a_credit
from ls_edge.runtime.routing.peer.way_home import through_others, to_its_source
from ls_edge.runtime.routing.policies.policy import SendTo
from ls_edge.runtime.routing.state.events import Forward
from ls_edge.runtime.routing.state.limits import LOOK
from tests.runtime.routing.driver import BY_X, new_peer, run_of, transfer


def waiting(peer, **run):
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X, **run))
    (request,) = peer.machine.held.values()
    return request


def test_a_waiting_request_is_looked_at_without_an_event():
    """The pause of a holder ends without one."""
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    (sent,) = peer.sent(Forward, "b")
    peer.hears("b", Refuse(sent.transfer, "draining", 5))
    assert peer.machine.decisions.next_look() <= peer.now + LOOK
    assert [one.to for one in peer.passes(0.15) if isinstance(one, Forward)] == ["b"]


def test_nothing_is_looked_at_while_nothing_waits():
    peer = new_peer()
    peer.gets("laptop", run_of())
    assert peer.machine.decisions.next_look() == float("inf")


def test_rules_change_nothing():
    """A rule that acts would make a decision depend on how often it is asked."""
    peer = new_peer()
    peer.meets("b", [2, 3], credit=0)
    request = waiting(peer)
    before = (request.stage, request.check_at, request.waits_for, request.waiting_since, dict(request.avoid))
    machine = peer.machine
    machine.turn.instructions = []
    steps = [rule(Case(machine.decisions, request)) for rule in machine.rules.decide for _ in range(2)]
    assert steps[::2] == steps[1::2]
    assert not machine.turn.instructions
    after = (request.stage, request.check_at, request.waits_for, request.waiting_since, dict(request.avoid))
    assert after == before


def test_a_request_keeps_waiting_while_nobody_has_a_credit():
    peer = new_peer((0,))
    peer.machine.rules.engine.failed_blocks[0] = "gone"
    peer.meets("b", [2, 3], credit=0)
    request = waiting(peer)
    assert nobody_has_a_credit(Case(peer.machine.decisions, request)) == Stay()
    peer.meets("c", [2, 3], credit=0)  # whose credit would not end the wait
    assert request.waits_for == ("b", "c")
    peer.hears_state("c", credit=1)
    assert peer.sent(Forward, "c")


def test_tokens_go_home_directly_then_through_a_neighbor_then_wait():
    peer = new_peer()
    peer.meets("r", [], reaches=("laptop",))
    request = waiting(peer)
    request.returning = "unreachable"
    case = Case(peer.machine.decisions, request)
    assert to_its_source(case) == SendTo("laptop")
    peer.machine.neighbors.by_name.pop("laptop")
    assert to_its_source(case) is None
    assert through_others(case) == SendTo("r", relay=True)
    peer.machine.neighbors.by_name.pop("r")
    assert through_others(case) == Hold((), case.now + LOOK)


def test_a_request_that_waits_for_a_credit_leaves_with_it():
    peer = new_peer()
    peer.meets("b", [2, 3], credit=1)
    for number in range(2):
        peer.gets("laptop", run_of(transfer(number), remaining=(2, 3), waves=BY_X))
    (first,) = list(peer.machine.custody.sent)
    peer.hears("b", Accept(first, 1))
    assert len(peer.sent(Forward, "b")) == 1
