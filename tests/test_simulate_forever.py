"""The search for broken guarantees: it finds a planted fault, shrinks it, and finds none in the routing."""

import random

import pytest

from ls_edge.runtime.change.progress import Instruction
from ls_edge.runtime.routing import machine, recovery
from ls_edge.runtime.routing.policies.sequential import Sequential
from ls_edge.runtime.routing.state.events import Complete
from tests import simulate_forever
from tests.faults.simulation import FaultySimulation
from tests.simulate_forever import Course, World, draw, fails, main, play, shrink, star


class Forgetful(FaultySimulation):
    """A fleet that forgets answers once a process was stopped: a fault planted for the search."""

    def stop(self, name):
        super().stop(name)
        self.forgets = True

    def _execute(self, process, instruction):
        if isinstance(instruction, Complete) and getattr(self, "forgets", False):
            return
        super()._execute(process, instruction)


class Unheard(FaultySimulation):
    """A fleet in which a process that was stopped does not greet the others when it continues."""

    def cont(self, name):
        del self._inboxes[self.processes[name]]


class Miscounting(FaultySimulation):
    """A fleet in which a process counts a copy too many once its engine hangs."""

    def hang_engine(self, name, *, hangs):
        super().hang_engine(name, hangs=hangs)
        self.processes[name].machine.custody.credits.copies += 1


@pytest.mark.parametrize(
    ("make", "fault", "found"), [(Unheard, "stop", "failed in a mended fleet"), (Miscounting, "hang", "counts are")]
)
def test_a_process_that_does_not_recover_and_wrong_counts_are_found(make, fault, found):
    asked = ("submit", "nearest", 1, 0, 1, 2.0)
    course = Course(World(held={"a": (0,), "b": (1,)}, blocks=2), ((fault, "a"), ("wait", 1.5), asked))
    assert found in str(fails(course, make))
    assert not fails(course)


def test_a_request_that_steady_peers_could_answer_is_found(monkeypatch):
    """Without deadlines, a request stays with the peer whose engine hangs until its budget is over."""
    monkeypatch.setattr(recovery.Recovery, "check_hop", lambda self, one: self._custody.timers.set(one, one.deadline))
    asked = ("submit", "nearest", 2, 0, 1, 5.0)
    world = World(held={"a": (0, 1), "b": (0, 1)}, blocks=2, steady="a")
    course = Course(world, (("hang", "b"), asked, ("wait", 6.0)))
    assert "lacks an answer that steady peers could give" in str(fails(course))
    monkeypatch.undo()
    assert not fails(course)
    steady = [one for seed in range(40) if (one := draw(seed)).world.steady]
    assert len(steady) > 1
    assert all(step[0] in ("submit", "wait") or step[1] not in one.world.steady for one in steady for step in one.steps)


def test_a_fixed_order_that_skips_is_found(monkeypatch):
    """The checks of the routing are the policy's; without them, a request skips what has no holder."""
    monkeypatch.setattr(Sequential, "may_skip", True)
    asked = ("submit", "sequential", 1, 1, 1, 2.0)
    course = Course(World(held={"a": (0,), "b": (1,)}, blocks=2), (("kill", "b"), ("wait", 1.5), asked))
    assert "ran only" in str(fails(course))


def test_the_same_seed_is_the_same_course():
    assert draw(5) == draw(5) != draw(6)
    assert play(draw(5)) == play(draw(5))


@pytest.mark.release
def test_a_planted_fault_is_found_and_shrunk_to_its_cause():
    course = next(course for seed in range(100) if fails(course := draw(seed), Forgetful) and len(course.steps) > 10)
    short = shrink(course, Forgetful)
    assert [step[0] for step in short.steps] == ["stop"], "the mended fleet is asked in any case"
    assert "has 0 outcomes" in str(fails(short, Forgetful))
    (_, stopped), held = short.steps[0], short.world.held
    needed = {part for parts in held.values() for part in parts}
    for left_out in held.keys() - {stopped}:  # the others hold what nobody else does
        assert {part for name in held.keys() - {left_out} for part in held[name]} < needed
    assert not short.world.cuts
    assert not fails(short)


@pytest.mark.release
@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_random_courses_break_no_guarantee(seed):
    played = [play(draw(seed + more)) for more in range(10)]
    assert sum(one.answered for one in played) > 20


def test_copies_do_not_block_the_only_way_home_of_their_requests():
    """The hub kept a copy of each request, and had no room for the tokens that came back."""
    held = {"a": (1, 4, 5, 6, 7), "b": (0, 1, 2, 4, 5, 6), "c": (0, 2, 4, 5, 6, 7), "d": (0, 2, 3, 4, 5, 6, 7)}
    play(Course(World(held=held, blocks=8, credits=1, links=tuple(star("abcd", random.Random()))), ()))


def test_peers_that_need_one_another_do_not_refuse_one_another_forever():
    """An offer freed a credit, which was gone again when the offer was refused and the tokens of the other arrived."""
    held = {"a": (1, 2, 3, 4, 5, 7), "b": (0, 2, 3, 5, 6, 7)}
    play(Course(World(held=held, blocks=8, credits=1, block_s={"a": 0.02, "b": 0.001}, seed=3), ()))


@pytest.mark.parametrize("seed", [0, 2, 3])
def test_a_state_that_changes_nothing_may_end_a_turn_early(seed, monkeypatch):
    """Without the short way, courses have the same answers after the same number of events."""
    short = play(draw(seed))
    monkeypatch.setattr(machine, "NeighborState", None)
    assert play(draw(seed)) == short


def test_peers_whose_blocks_change_lose_no_request():
    changes = [
        ("submit", "nearest", 3, 1, 1, 2.0),
        ("change", "a", (1, 2)),
        ("wait", 0.02),
        ("change", "b", (0,)),
    ]
    world = World(held={"a": (0, 1), "b": (2,), "c": (0, 1, 2)}, blocks=3)
    assert play(Course(world, (*changes, *changes[:1]))).answered == 6


def test_the_blocks_of_a_fleet_change_in_the_order_of_apply(monkeypatch):
    """In the order of the names, the only holder of a block would switch first."""
    held = {"a": (0, 1), "b": (2,), "c": (0,)}
    wanted = (("a", (2,)), ("b", (0, 1)), ("c", (0, 1)))
    steps = (("apply", *wanted), *[("submit", "nearest", 2, 0, 1, 2.0), ("wait", 0.1)] * 4)
    playing = simulate_forever._Play(World(held=held, blocks=3), FaultySimulation)
    for step in steps:
        playing.do(step)
    assert playing.held == dict(wanted)
    assert playing.end().answered == 8
    monkeypatch.setattr(simulate_forever, "next_instruction", lambda *_: Instruction("switch", "a"))
    assert "no holder is left while a switches" in str(fails(Course(World(held=held, blocks=3), steps)))


def test_another_change_ends_the_change_of_a_fleet():
    """The plan knew of a peer with the wanted blocks, which another pusher has changed since."""
    apply = ("apply", ("a", (0, 1, 3, 4)), ("b", (2, 4)))
    changes = (("change", "b", (1,)), ("change", "a", (0, 1, 3, 4)), apply, ("change", "a", (0, 1, 2, 4)))
    world = World(held={"a": (0, 1, 2, 3, 4), "b": (0, 1, 2, 3, 4)}, blocks=5)
    play(Course(world, (*changes, ("submit", "sequential", 1, 1, 1, 2.0))))


def test_the_search_says_what_it_did(capsys):
    assert main(["--minutes", "0.001"]) == 0
    assert capsys.readouterr().out.endswith(" events: no finding\n")
