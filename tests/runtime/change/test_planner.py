"""The order of a change keeps a holder of every part whenever there is such an order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ls_edge.runtime.change.planner import Goal, plan_change

PARTS = st.frozensets(st.integers(0, 3))
NAMES = "abcd"


def goal(blocks, *, pauses=False, is_reached=False):
    return Goal(frozenset(blocks), pauses, is_reached)


@st.composite
def changes(draw):
    now = {name: draw(PARTS) for name in NAMES if draw(st.booleans())}
    goals = {
        name: goal(draw(PARTS.filter(bool)), pauses=draw(st.booleans()), is_reached=draw(st.booleans()))
        for name in NAMES
        if draw(st.integers(0, 4))
    }
    return now, goals


def lacking(now, steps):
    """The parts that lack a holder during or after some step, by applying the steps one by one."""
    held = frozenset().union(*now.values())
    serves, found = dict(now), set()
    for step in steps:
        before = serves.pop(step.peer)
        if step.kind != "follow":
            found |= held - frozenset().union(*serves.values())
        serves[step.peer] = step.after
        assert step.before == before
        found |= held - frozenset().union(*serves.values())
    return found, serves


@given(changes())
def test_a_safe_order_is_found_whenever_there_is_one(change):
    now, goals = change
    plan = plan_change(now, goals)
    found, serves = lacking(now, plan.steps)
    assert serves == {name: goals[name].blocks if name in goals else frozenset() for name in now}
    if found:
        for order in itertools.permutations(plan.steps):
            assert lacking(now, order)[0]
    during = set().union(*plan.outages.values())
    assert during <= found
    assert {part for counts in plan.holders.values() for part, count in counts.items() if not count} == found


def is_safe(now, previous, steps):
    """Whether one of two models is whole during and after each step, and stays whole once sources use it."""
    serves = {name: (name not in previous, parts) for name, parts in now.items()}
    wanted = frozenset().union(*(step.after for step in steps), *(p for is_new, p in serves.values() if is_new))
    before = frozenset().union(*(now[name] for name in previous))

    def is_whole():
        return wanted <= held(True)

    def held(is_wanted):
        return frozenset().union(*(parts for is_new, parts in serves.values() if is_new == is_wanted))

    uses_wanted = not previous or is_whole()
    for step in steps:
        if step.kind != "follow":
            serves[step.peer] = (serves[step.peer][0], frozenset())
        if not (wanted <= held(True) if uses_wanted else before <= held(False)):
            return False
        serves[step.peer] = (True, step.after)
        uses_wanted = uses_wanted or is_whole()
        if not (wanted <= held(True) if uses_wanted else before <= held(False)):
            return False
    return True


@given(changes(), st.data())
def test_a_change_of_the_model_keeps_one_of_them_whole_whenever_that_is_possible(change, data):
    now, goals = change
    now = {name: parts for name, parts in now.items() if parts}
    goals = {name: goal(one.blocks, pauses=True) for name, one in goals.items()}
    previous = data.draw(st.sets(st.sampled_from(sorted(now)), min_size=1)) if now else set()
    plan = plan_change(now, goals, previous)
    assert {step.peer for step in plan.steps} == set(now)
    if not previous:
        return
    assert is_safe(now, previous, plan.steps) == (not plan.outages)
    if plan.outages:
        assert not any(is_safe(now, previous, order) for order in itertools.permutations(plan.steps))


def test_a_new_model_is_whole_on_one_half_before_the_other_half_switches():
    now = {"a": {0, 1}, "b": {0}, "c": {1}, "d": {0}}
    plan = plan_change(now, {name: goal(parts, pauses=True) for name, parts in now.items()}, now)
    assert (plan.steps[0].peer, plan.outages) == ("a", {})
    plan = plan_change({"a": {0, 1}}, {"a": goal({0, 1}, pauses=True)}, "a")
    assert plan.outages == {"a": {0, 1}}


@given(changes())
def test_a_change_that_was_carried_out_has_no_further_steps(change):
    _, goals = change
    now = {name: one.blocks for name, one in goals.items()}
    reached = {name: goal(one.blocks, pauses=one.pauses, is_reached=True) for name, one in goals.items()}
    assert plan_change(now, reached).steps == ()


@pytest.mark.parametrize(
    ("now", "goals", "kinds"),
    [
        ({"a": {0}, "b": ()}, {"a": goal({0}), "b": goal({0, 1})}, {"a": "follow", "b": "add"}),
        ({"a": {0}, "b": {0}}, {"a": goal({0, 1})}, {"a": "switch", "b": "remove"}),
        ({"a": {0}}, {"a": goal({0}, pauses=True)}, {"a": "switch"}),
    ],
)
def test_steps_are_of_the_kind_that_the_peer_needs(now, goals, kinds):
    assert {step.peer: step.kind for step in plan_change(now, goals).steps} == kinds


def test_the_only_holder_of_a_part_that_switches_is_an_outage():
    plan = plan_change({"a": {0, 1}, "b": {1}}, {"a": goal({1, 2}), "b": goal({0, 1})})
    assert [step.peer for step in plan.steps] == ["b", "a"]
    assert plan.outages == {}
    plan = plan_change({"a": {0}, "b": {1}}, {"a": goal({1}), "b": goal({0})})
    assert plan.outages == {"a": {0}, "b": {0}}  # until b has switched; a then holds what b drops


def test_a_large_fleet_is_planned_in_the_order_that_keeps_two_holders():
    now = {f"p{i:02}": {i % 6, (i + 1) % 6} for i in range(24)}
    goals = {name: goal({min(parts)} | {(max(parts) + 1) % 6}) for name, parts in now.items()}
    plan = plan_change(now, goals)
    assert plan.outages == {}
    assert min(min(counts.values()) for counts in plan.holders.values()) >= 2
