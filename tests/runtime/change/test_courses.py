"""Kills at every step of a change, and in any order, lose no holder; the same command completes the change."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ls_edge.runtime.change.planner import Goal, plan_change
from ls_edge.runtime.change.progress import Seen, next_instruction
from tests.runtime.change.world import AnsweringWorld, World

ONE, TWO = {"old": "m0"}, {"old": "m0", "new": "m1"}
ALL = frozenset(range(4))


def placed(**parts):
    return {name: frozenset(map(int, blocks)) for name, blocks in parts.items()}


BEFORE = placed(a="0123", b="01", c="23", d="0123")
CHANGES = {
    "blocks move": ("old", placed(a="0123", b="23", c="01", d="0123")),
    "a board is added": ("old", placed(a="0123", b="01", c="23", d="0123", e="12")),
    "a board is removed": ("old", placed(a="0123", b="01", c="23")),
    "only others change": ("old", placed(a="0123", b="012", c="23", d="0123")),
    "new model": ("new", BEFORE),
    "new model and file": ("new", placed(a="0123", b="0123", c="23", d="01")),
}


def course(bundle, placement, kill=None):
    """Run a change, with a kill of someone after some number of steps; return the number of steps."""
    world = World(BEFORE, TWO)
    world.apply(bundle, placement)
    for count in range(60):
        if kill is not None and count == kill[0]:
            if kill[1] == "pusher":
                world.kill_pusher()
            else:
                world.boards[kill[1]].kill()
            world.complete()
            return count
        for name in world.boards:
            world.step(name)
        world.step("pusher")
        if world.pusher is None:
            world.complete()
            return count
    raise AssertionError(f"it takes too long: {world.boards}")


@pytest.mark.parametrize("change", CHANGES)
def test_a_kill_at_each_step_of_a_change_loses_no_holder_and_the_change_completes(change):
    steps = course(*CHANGES[change])
    assert steps > 3
    for when, who in itertools.product(range(steps), ("pusher", *BEFORE)):
        course(*CHANGES[change], (when, who))


@pytest.mark.parametrize("who", [None, "pusher", *BEFORE])
def test_requests_are_answered_while_a_fleet_in_the_simulator_changes(who):
    world = AnsweringWorld(BEFORE)
    for count, change in enumerate(("blocks move", "a board is removed", "only others change")):
        world.apply(*CHANGES[change])
        for _ in range(3 + 2 * count):
            for name in (*world.boards, "pusher"):
                world.step(name)
        if who == "pusher":
            world.kill_pusher()
        elif who is not None:
            world.kill(who)
        world.complete()
    world.check_answers()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_course_of_changes_and_kills_keeps_a_holder_of_every_part(data):
    parts = st.frozensets(st.integers(0, 3))

    def placements(names):
        return {"a": ALL, "b": ALL, **{name: data.draw(parts.filter(bool), name) for name in names}}

    world = World(placements("cd"), TWO)
    for _ in range(data.draw(st.integers(1, 3))):
        world.apply(data.draw(st.sampled_from(sorted(TWO))), placements(data.draw(st.sampled_from(["c", "cd", "ce"]))))
        for _ in range(data.draw(st.integers(0, 40))):
            who = data.draw(st.sampled_from(["pusher", *world.boards]))
            if data.draw(st.integers(0, 9)):
                world.step(who)
            elif who == "pusher":
                world.again()
            elif world.boards[who].is_up:
                world.boards[who].kill()
            else:
                world.boards[who].start()
    world.complete()


def test_a_peer_does_not_switch_while_the_only_other_holder_of_its_parts_is_away():
    both = {"a": frozenset({0, 1}), "b": frozenset({0, 1})}
    plan = plan_change(both, {name: Goal(parts, pauses=True, is_reached=False) for name, parts in both.items()})
    assert not plan.outages
    fleet = {"a": Seen(frozenset(), "m"), "b": Seen(both["b"], "m", is_active=False)}
    now = next_instruction(plan, fleet, both, "m")
    assert (now.phase, now.peer, now.parts) == ("cover", "b", both["b"])
    now = next_instruction(plan, {**fleet, "a": Seen(both["a"], "m")}, both, "m")
    assert (now.phase, now.peer) == ("switch", "b")


def test_sources_are_waited_for_until_the_pusher_has_no_more_patience():
    parts = frozenset({0})
    plan = plan_change({"a": parts, "b": parts}, {"a": Goal(parts, pauses=True, is_reached=False)})
    fleet = {"a": Seen(parts, "m", is_active=False, late=frozenset({"camera"})), "b": Seen(parts, "m")}
    now = next_instruction(plan, fleet, ["a"], "m")
    assert (now.phase, now.names) == ("follow", {"camera"})
    assert next_instruction(plan, fleet, ["a"], "m", impatient=["follow"]).phase == "switch"
