"""Random fleets in simulated time until a guarantee breaks: ``python -m tests.simulate_forever --minutes 10``.

Each seed is a course: a fleet (links, bands, credits, speeds) and steps (requests of all policies,
faults, changes of one peer's blocks, and of the whole fleet as by ``apply``: in its order, and only what keeps a holder
of each block). After each event the state of the machine is validated. At the end each request has one outcome within
its budget, each answer is what its arrangement computes, nothing is left behind, and the mended fleet answers
everything, with the processes that still run. Where peers that no fault concerns hold all blocks together, requests get
complete answers. A course that breaks a guarantee is shrunk to the fewest steps and the plainest fleet that still do.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.errors import LsEdgeError
from ls_edge.core.parts import HEAD, STEM
from ls_edge.runtime.change.planner import Goal, Plan, plan_change
from ls_edge.runtime.change.progress import Seen, next_instruction
from ls_edge.runtime.routing.state.custody import InvalidTransition
from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE, Simulation
from tests.faults.consistency import InvalidState
from tests.faults.simulation import FaultySimulation

POLICIES = ("nearest", "sequential", "random", "fastest", "parallel")
_LATE_S = 1e-3
_SETTLE_S = 0.5
_THIN = 0.2
"""Fraction of the courses in which the source has neither stem nor head."""
_STEADY = 0.2
"""Fraction of the other courses in which peers that no fault concerns hold everything."""
_SPARSE = 0.4
"""Fraction of the courses in which some processes have no link to one another."""
_MEET_S = 3.0
"""Time in which all processes of a sparse network hear of the blocks of the others."""
_PATIENCE = 100
"""Transfers that a request may need in a mended sparse fleet."""
_STEADY_S = 60.0
"""Budget of requests in steady courses: two peers with one credit each took 12 s for 27 requests that pass from one to
the other after each block."""
_SLACK = 6
"""Transfers of the slowest link after which no copy remains, counted from the end of the budgets."""

FINDINGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    InvalidState,
    InvalidTransition,
    LsEdgeError,
)
"""Whatever a machine raises; a broken guarantee is an AssertionError."""

Step = tuple[Any, ...]


class World(msgspec.Struct, frozen=True, kw_only=True):
    """A fleet."""

    held: dict[str, tuple[int, ...]]
    """Parts by peer. If a peer holds the stem, the source is thin."""
    blocks: int
    cuts: tuple[int, ...] = ()
    """Blocks with which a band begins."""
    credits: int = 4
    batch: int = 1
    block_s: dict[str, float] = {}
    """Time of a block by peer."""
    turn: float = 0.0
    send_failures: float = 0.0
    seed: int = 0
    links: tuple[tuple[str, str], ...] = ()
    """The only links; empty if each process has a link to every other."""
    latency: float = 0.001
    steady: str = ""
    """Peers that no fault concerns, and that hold everything together: few requests of a long budget are answered."""


class Course(NamedTuple):
    """A fleet and what happens to it."""

    world: World
    steps: tuple[Step, ...]


class Played(NamedTuple):
    """Counts of a course without a finding."""

    requests: int
    answered: int
    events: int


def star(names: Sequence[str], _rng: random.Random) -> list[tuple[str, str]]:
    """Return links that all lead to the first peer."""
    return [(SOURCE, names[0]), *((names[0], name) for name in names[1:])]


def star_with_more_links(names: Sequence[str], rng: random.Random) -> list[tuple[str, str]]:
    """Return the links of a star, and up to three more."""
    more = [rng.choice(((SOURCE, rng.choice(names)), tuple(rng.sample(names, 2)))) for _ in range(rng.randint(1, 3))]
    return list(dict.fromkeys((*star(names, rng), *more)))


def two_networks_with_a_gateway(names: Sequence[str], rng: random.Random) -> list[tuple[str, str]]:
    """Return the links of two full meshes, one with the source; the first peer is in both."""
    near, far = [SOURCE], []
    for name in names[1:]:
        rng.choice((near, far)).append(name)
    return [*itertools.combinations((*near, names[0]), 2), *itertools.combinations((names[0], *far), 2)]


def through_the_source(names: Sequence[str], rng: random.Random) -> list[tuple[str, str]]:
    """Return the links of two full meshes that have only the source in common."""
    sides: tuple[list[str], list[str]] = [], []
    for name in names:
        rng.choice(sides).append(name)
    return [pair for side in sides for pair in itertools.combinations((SOURCE, *side), 2)]


SHAPES = (star, star_with_more_links, two_networks_with_a_gateway, through_the_source)
"""Networks with at most one process between any two."""


def draw(seed: int) -> Course:
    """Return the course of a seed."""
    rng = random.Random(seed)
    names = "abcdef"[: rng.randint(2, 6)]
    blocks, thin = rng.randint(2, 8), rng.random() < _THIN
    held = {name: _parts(rng, blocks, thin) for name in names}
    if thin:
        held[names[0]] = tuple(sorted({*held[names[0]], STEM, HEAD}))
    world = World(
        held=held,
        blocks=blocks,
        cuts=tuple(sorted(rng.sample(range(1, blocks), rng.choice((0, 0, rng.randint(0, blocks - 1)))))),
        credits=rng.randint(1, 5),
        batch=rng.choice((1, 1, 2, 4)),
        block_s={name: rng.choice((0.001, 0.005, 0.02)) for name in names},
        turn=rng.choice((0.0, 0.0005, 0.003)),
        send_failures=rng.choice((0.0, 0.0, 0.02, 0.2)),
        seed=rng.getrandbits(32),
    )
    steps = tuple(_steps(rng, names, blocks, thin, rng.randint(3, 40)))
    if rng.random() < _SPARSE:
        links = tuple(rng.choice(SHAPES)(names, rng))
        world = msgspec.structs.replace(world, links=links, latency=rng.choice((0.001, 0.001, 0.02, 0.2)))
    elif rng.random() < _STEADY:
        return _steady(rng, Course(world, steps))
    return Course(world, steps)


def _steady(rng: random.Random, course: Course) -> Course:
    """Return a course in which no fault concerns one or two peers, which hold everything together."""
    world, (first, second) = course.world, list(course.world.held)[:2]
    steady = rng.choice((first, first + second))
    parts = sorted({part for held in world.held.values() for part in held} | {*range(world.blocks)})
    there = {first: tuple(part for part in parts if len(steady) == 1 or rng.random() < 0.6)}
    there[second] = tuple(part for part in parts if part not in there[first] or rng.random() < 0.3)
    held = {**world.held, **{name: there[name] for name in steady}}
    steps = [
        (*step[:2], min(step[2], 2), *step[3:5], _STEADY_S) if step[0] == "submit" else step
        for step in course.steps
        if step[0] != "apply" and (step[0] in ("submit", "wait") or step[1] not in steady)
    ]
    failures = min(world.send_failures, 0.02)
    return Course(msgspec.structs.replace(world, held=held, steady=steady, send_failures=failures), tuple(steps))


def _parts(rng: random.Random, blocks: int, thin: bool) -> tuple[int, ...]:
    """Return parts that a peer holds: some blocks, and for thin sources perhaps the stem or the head."""
    ends = [part for part in (STEM, HEAD) if thin and rng.random() < 0.5]
    return tuple(sorted((*rng.sample(range(blocks), rng.randint(1, blocks)), *ends)))


def _steps(rng: random.Random, names: str, blocks: int, thin: bool, count: int) -> Iterator[Step]:
    faults = rng.sample(("kill", "stop", "hang", "drain", "cut", "change", "apply"), rng.randint(0, 7))
    for _ in range(count):
        kind = rng.choice(("submit", "submit", "wait", "wait", *faults))
        name = rng.choice(names)
        if kind == "submit":
            budget = rng.choice((0.05, 0.5, 2.0, 2.0))
            yield kind, rng.choice(POLICIES), rng.randint(1, 6), rng.randint(0, 3), rng.randint(1, 4), budget
        elif kind == "wait":
            yield kind, rng.choice((0.0005, 0.003, 0.02, 0.1, 0.4, 1.5))
        elif kind == "change":
            yield kind, name, _parts(rng, blocks, thin)
        elif kind == "apply":
            yield kind, *((one, _parts(rng, blocks, thin)) for one in names)
        elif kind == "cut":
            yield kind, name, rng.choice([other for other in (SOURCE, *names) if other != name])
        else:
            yield kind, name


class _Play:
    """A course while it runs."""

    def __init__(self, world: World, make: Callable[..., Simulation]) -> None:
        self.world = world
        self.bands = Bands(world.blocks, world.cuts)
        limits = Limits(credits=world.credits, custody=2 * world.credits)
        self.parts = sorted(
            (*range(world.blocks), *((STEM, HEAD) if any(STEM in held for held in world.held.values()) else ()))
        )
        self.held = dict(world.held)
        """Blocks of each peer now."""
        self.ran = {name: set(blocks) for name, blocks in world.held.items()}
        """Blocks that each peer has ever held."""
        self.sim: Any = make(
            self.held, blocks=world.blocks, bands=self.bands, limits=limits, max_batch=world.batch, seed=world.seed,
            block_seconds=world.block_s or 0.005, turn=world.turn, validate=True, latency=world.latency,
        )  # fmt: skip
        self.names = list(world.held)
        self.plan: Plan | None = None
        """Change of the fleet that is under way."""
        self.wanted: dict[str, tuple[int, ...]] = {}
        """Blocks after that change."""
        self.asked: dict[int, tuple[str, int, float]] = {}
        pairs = list(itertools.combinations((SOURCE, *world.held), 2))
        self.links = [pair for pair in pairs if not world.links or {pair, pair[::-1]} & set(world.links)]
        for one, other in pairs:
            if (one, other) not in self.links:
                self.sim.cut(one, other)
        self.sim.run(_MEET_S if world.links else 0.05)
        self.sim.send_failures = world.send_failures

    def do(self, step: Step) -> None:
        """Take a step; one that makes no sense now does nothing, so that steps before it may be left out."""
        kind, *rest = step
        self._continue()
        if kind == "submit":
            policy, count, skips, waves, budget = rest
            for _ in range(count):
                due = self.sim.now + budget
                request = self.sim.submit(policy=policy, max_skips=skips, waves_wanted=waves, budget=budget)
                self.asked[request] = (policy, skips, due)
        elif kind == "wait":
            self.sim.run(*rest)
        elif kind == "change":
            self.plan = None  # whoever changes a peer ends the change of the fleet: there is one pusher at a time
            self._change(*rest)
        elif kind == "apply":
            self._apply(dict(rest))
        elif kind == "cut":
            if {tuple(rest), tuple(rest[::-1])} & set(self.links):
                (self.sim.restore if self.sim.is_cut(*rest) else self.sim.cut)(*rest)
        else:
            self._fault(kind, *rest)
        for name in self.names:
            machine = self.sim.processes[name].machine
            most = 2 * (machine.turn.limits.credits + machine.turn.limits.custody)
            assert len(machine.held) <= most, f"{name} holds too many requests"

    def _serving(self, *, but: str = "") -> dict[str, frozenset[int]]:
        """Return the blocks of the peers that serve now."""
        found = {}
        for name in self.names:
            process = self.sim.processes[name]
            if name != but and process.alive and not self.sim.is_stopped(name) and not process.machine.rules.draining:
                found[name] = frozenset(self.held[name])
        return found

    def _apply(self, wanted: dict[str, tuple[int, ...]]) -> None:
        """Begin to change the fleet as ``apply`` does, unless a block would have no holder meanwhile."""
        there = self._serving()
        self.wanted = {name: wanted[name] for name in there}
        goals = {
            name: Goal(frozenset(blocks), pauses=blocks != self.held[name], is_reached=blocks == self.held[name])
            for name, blocks in self.wanted.items()
        }
        plan = plan_change(there, goals)
        self.plan = None if plan.outages else plan

    def _continue(self) -> None:
        """Take the next step of a change of the fleet."""
        if self.plan is None:
            return
        serving = self._serving()
        fleet = {
            name: Seen(serving.get(name, frozenset()), "model", is_active=self.held[name] == blocks)
            for name, blocks in self.wanted.items()
        }
        now = next_instruction(self.plan, fleet, self.wanted, "model")
        if now.phase == "switch":
            left = frozenset[int]().union(*self._serving(but=now.peer).values())
            assert serving.get(now.peer, left) <= left, f"no holder is left while {now.peer} switches"
            self._change(now.peer, self.wanted[now.peer])
        elif now.phase == "done":
            self.plan = None

    def _change(self, name: str, blocks: tuple[int, ...]) -> None:
        """Give a peer other blocks as ``apply`` does: it drains, and starts again."""
        process = self.sim.processes[name]
        if name not in self.names or self.sim.is_stopped(name):
            return
        if process.alive:
            self.sim.drain(name)
            self.sim.run(1.0)
            self.sim.kill(name)
        self.held[name] = blocks
        self.ran[name] |= {*blocks}
        self.sim.restart(name)

    def _fault(self, kind: str, name: str) -> None:
        process = self.sim.processes[name]
        if kind == "kill":
            (self.sim.kill if process.alive else self.sim.restart)(name)
        elif not process.alive or name not in self.names:
            return
        elif kind == "stop":
            (self.sim.cont if self.sim.is_stopped(name) else self.sim.stop)(name)
        elif kind == "hang":
            self.sim.hang_engine(name, hangs=not self.sim.is_hung(name))
        elif not self.sim.is_stopped(name):
            self.sim.drain(name)

    def end(self) -> Played:
        """Check what must hold at the end."""
        last = max((due for _, _, due in self.asked.values()), default=self.sim.now)
        self.sim.run(max(0.0, last - self.sim.now) + _SETTLE_S)
        assert not self.sim.source.held, "the source still holds requests"
        answered = sum(self._check(request) for request in self.asked)
        self.sim.run(3.0 + _SLACK * self.world.latency)
        for name in self.names:
            process = self.sim.processes[name]
            if process.alive and not self.sim.is_stopped(name) and not self.sim.is_hung(name):
                assert not process.machine.held, f"{name} still holds {len(process.machine.held)} requests"
        self._recover()
        return Played(len(self.asked), answered, next(self.sim._counter))

    def _check(self, request: int) -> bool:
        policy, skips, due = self.asked[request]
        outcomes = self.sim.outcomes[request]
        assert len(outcomes) == 1, f"request {request} has {len(outcomes)} outcomes"
        (outcome,) = outcomes
        assert self.sim.ended[request] <= due + _LATE_S, f"request {request} ended after its budget"
        itinerary = outcome.itinerary
        order = [block for wave in itinerary.waves for track in wave for block, _ in track]
        assert len(set(order)) == len(order), f"request {request} ran a block twice: {order}"
        assert len(itinerary.skipped) <= skips, f"request {request} skipped {itinerary.skipped}"
        assert not self.bands.fault(itinerary.arrangement, itinerary.remaining), f"request {request} left its bands"
        is_whole = isinstance(outcome, Complete) and not itinerary.skipped
        assert is_whole or not self.world.steady, f"request {request} lacks an answer that steady peers could give"
        if not isinstance(outcome, Complete):
            return False
        assert sorted([*order, *itinerary.skipped]) == self.parts, f"request {request} lacks blocks"
        assert outcome.tokens == tuple(order), f"request {request} is not what its arrangement computes"
        assert all(b in self.ran[h] for w in itinerary.waves for t in w for b, h in t), "a block ran elsewhere"
        blocks = [part for part in order if part in range(self.world.blocks)]
        assert policy != "sequential" or blocks == [*range(self.world.blocks)], f"request {request} ran only {order}"
        assert {STEM, HEAD}.isdisjoint(itinerary.skipped), f"request {request} skipped {itinerary.skipped}"
        return True

    def _recover(self) -> None:
        """Mend what is broken: then all requests are answered with all blocks."""
        self.sim.send_failures = 0.0
        for a, b in self.links:
            if self.sim.is_cut(a, b):
                self.sim.restore(a, b)
        for name, process in [*self.sim.processes.items()]:
            if process.alive and self.sim.is_stopped(name):
                self.sim.cont(name)
            if self.sim.is_hung(name):
                self.sim.hang_engine(name, hangs=False)
            if name != SOURCE and process.alive and process.machine.rules.draining:
                self.sim.kill(name)
            if not process.alive:
                self.sim.restart(name)
        self.sim.run(_MEET_S if self.world.links else 0.3)
        if {part for parts in self.held.values() for part in parts} != set(self.parts):
            return
        for _ in range(3):
            self.do(("submit", "sequential", 1, 0, 1, 5.0 + _PATIENCE * self.world.latency))
        self.sim.settle()
        for request in itertools.islice(reversed(self.asked), 3):
            assert self._check(request), f"request {request} failed in a mended fleet"


def play(course: Course, make: Callable[..., Simulation] = FaultySimulation) -> Played:
    """Run a course; raise what is wrong."""
    playing = _Play(course.world, make)
    for step in course.steps:
        playing.do(step)
    return playing.end()


def fails(course: Course, make: Callable[..., Simulation] = FaultySimulation) -> Exception | None:
    """Return what is wrong with a course."""
    try:
        play(course, make)
    except FINDINGS as error:
        return error
    return None


def shrink(course: Course, make: Callable[..., Simulation] = FaultySimulation) -> Course:
    """Return the shortest course that still fails: without steps, then in a plainer fleet, as long as that helps."""
    before = None
    while before != course:
        before = course
        size = len(course.steps)
        while size:
            for start in range(0, len(course.steps), size):
                shorter = Course(course.world, (*course.steps[:start], *course.steps[start + size :]))
                if fails(shorter, make):
                    course = shorter
                    break
            else:
                size //= 2
            size = min(size, len(course.steps))
        for plainer in _plainer(course):
            if fails(plainer, make):
                course = plainer
                break
    return course


def _plainer(course: Course) -> Iterator[Course]:
    world = course.world
    plain = World(held=world.held, blocks=world.blocks)
    for field in reversed(World.__struct_fields__):
        if getattr(world, field) != (value := getattr(plain, field)):
            yield Course(msgspec.structs.replace(world, **{field: value}), course.steps)
    for name in world.held:
        if len(world.held) > 1 and not any(name in one for one in (*course.steps, *world.links, world.steady)):
            fewer = {other: blocks for other, blocks in world.held.items() if other != name}
            yield Course(msgspec.structs.replace(world, held=fewer), course.steps)
    for number, step in enumerate(course.steps):
        if step[0] == "submit" and step[2] > 1:
            one = (*step[:2], 1, *step[3:])
            yield Course(world, (*course.steps[:number], one, *course.steps[number + 1 :]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run courses for some minutes; return 1 at the first finding."""
    parser = argparse.ArgumentParser(description="Random fleets in simulated time until a guarantee breaks.")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    given = parser.parse_args(arguments)
    until = time.monotonic() + 60 * given.minutes
    counts = Played(0, 0, 0)
    for number in itertools.count():
        course = draw(given.seed + number)
        try:
            counts = Played(*map(sum, zip(counts, play(course), strict=True)))
        except FINDINGS as error:
            sys.stdout.write(f"seed {given.seed + number}: {type(error).__name__}: {error}; shrinking\n")
            short = shrink(course)
            sys.stdout.write(f"{short.world}\n{short.steps}\n{type(fails(short)).__name__}: {fails(short)}\n")
            return 1
        if time.monotonic() >= until:
            break
    sys.stdout.write(
        f"{number + 1:,} courses, {counts.requests:,} requests, {counts.answered:,} answered, "
        f"{counts.events:,} events: no finding\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
