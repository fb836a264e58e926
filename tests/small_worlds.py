"""Every course of a small world: ``python -m tests.small_worlds``, or with ``--any-order --most N`` a drawn part.

One request, two or three peers, two or three blocks. Each message and each end of an engine call happens in every order
that links allow (what one process sends another keeps its order), with at most one fault at every point: a peer is
killed, a link is cut, an engine hangs, a message cannot be sent, or a peer drains. Time passes only when nothing else
can happen. States with the same content are looked at once. In each, ``validate`` holds; the request has one outcome,
in its budget, that is what its arrangement computes; and then nothing is left.
"""

from __future__ import annotations

import argparse
import enum
import itertools
import pickle  # noqa: TID251  copies in memory, several times faster than deep ones
import random
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ls_edge.core.bands import Bands
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.routing.peer.peer_rules import PeerRules, peer_machine
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Complete,
    Compute,
    Computed,
    Drain,
    Event,
    Fail,
    Forward,
    NeighborDown,
    NeighborState,
    NeighborUp,
    Received,
    Send,
    Submit,
    Tick,
    Unsendable,
    Warm,
)
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE, join_tuples
from tests.faults.consistency import validate

BUDGET_S = 1.0
BLOCK_US = 1000
SETTLE_S = 3.0
ATOMS = (str, bytes, int, float, bool, type(None), enum.Enum, type)
UNSEEN = ("story", "model", "limits", "handlers", "stages", "decide", "actions", "_actions", "recent", "log")
"""Fields that decide nothing: what happened before, and what never changes."""

WORLDS: dict[str, tuple[Mapping[str, Sequence[int]], str, int, bool]] = {
    "two peers with everything": ({"a": (0, 1), "b": (0, 1)}, "nearest", 0, False),
    "two peers in a fixed order": ({"a": (0, 1), "b": (0, 1)}, "sequential", 0, False),
    "two peers with a block each": ({"a": (0,), "b": (1,)}, "nearest", 1, True),
    "three peers, two blocks": ({"a": (0,), "b": (1,), "c": (0, 1)}, "nearest", 0, True),
    "three peers, three blocks": ({"a": (0, 1), "b": (1, 2), "c": (2, 0)}, "fastest", 0, True),
}
"""Blocks by peer, policy, skips, and whether each STATE arrives before anything else."""


class World:
    """Machines, and all that is on its way between them."""

    def __init__(self, held: Mapping[str, Sequence[int]], policy: str, max_skips: int, prompt: bool) -> None:
        self.prompt = prompt
        self.held, self.blocks = held, len({block for blocks in held.values() for block in blocks})
        self.skips = max_skips
        model = Model(Bands(self.blocks))
        limits = Limits(credits=2, custody=4)
        self.machines: dict[str, Any] = {
            SOURCE: source_machine(SOURCE, limits=limits, rng=random.Random(0), model=model)
        }
        for name, blocks in held.items():
            machine = peer_machine(name, blocks, limits=limits, rng=random.Random(name), max_batch=1, model=model)
            machine.rules.joins.join = join_tuples
            self.machines[name] = machine
        self.now = 0.0
        self.alive = set(self.machines)
        self.queues: dict[tuple[str, str], deque[Event]] = {}
        """Messages by sender and receiver; the results of an engine come from its own process."""
        self.cut: frozenset[str] = frozenset()
        self.hung = ""
        self.refuses: tuple[str, str] | None = None
        """Link on which the next message cannot be sent."""
        self.faults = 1
        self.outcomes: list[Complete | Fail] = []
        self.ended_at = 0.0
        self.contents: dict[str, int] = {}
        """Hash of the content of each machine that has not changed since."""
        for name in self.machines:
            if name != SOURCE:
                self.feed(name, Warm(BLOCK_US))
        for a, b in itertools.permutations(self.machines, 2):
            role, blocks = ("source", ()) if a == SOURCE else ("peer", tuple(held[a]))
            self.queues.setdefault((a, b), deque()).append(NeighborUp(Hello(a, role, 1, MINOR, "m", "b", blocks)))
        self.settle(0.3)
        order = find_policy(policy).wanted_order(model.bands, 0, 0)
        self.feed(SOURCE, Submit(0, Itinerary(SOURCE, policy, order, max_skips), (), self.now + BUDGET_S))
        self.due = self.now + BUDGET_S

    def feed(self, name: str, event: Event) -> None:
        """Let a process handle an event, and do what it asks."""
        if name not in self.alive:
            return
        machine = self.machines[name]
        self.contents.pop(name, None)
        instructions = machine.handle_all((event,), self.now)
        validate(machine)
        for one in instructions:
            self._execute(name, one)

    def _execute(self, name: str, one: Any) -> None:
        if isinstance(one, (Send, Forward)):
            if (name, one.to) == self.refuses:
                self.refuses = None
                self.feed(name, Unsendable(one))
            elif self.linked(name, one.to):
                self.queues.setdefault((name, one.to), deque()).append(_arriving(name, one))
        elif isinstance(one, Compute):
            outputs = tuple((*tokens, *one.blocks) for tokens in one.tokens)
            took = BLOCK_US * len(one.blocks)
            self.queues.setdefault((name, name), deque()).append(Computed(one.blocks, one.transfers, outputs, took))
        elif isinstance(one, (Complete, Fail)):
            self.outcomes.append(one)
            self.ended_at = self.now

    def linked(self, a: str, b: str) -> bool:
        """Return whether messages pass between two processes."""
        return {a, b} <= self.alive and {a, b} != self.cut

    def choices(self) -> Iterator[tuple[Any, ...]]:
        """Yield all that may happen next."""
        ready = [key for key, queue in self.queues.items() if queue and not (key[0] == key[1] == self.hung)]
        states = [key for key in ready if isinstance(self.queues[key][0], NeighborState)] if self.prompt else []
        for key in states[:1] or ready:
            yield ("deliver", *key)
        if states:
            return
        if not ready:
            yield ("wait",)
        if self.faults:
            for name in self.held:
                yield "kill", name
                yield "hang", name
                yield "drain", name
            for a, b in itertools.combinations(self.machines, 2):
                yield "cut", a, b
            for a, b in itertools.permutations(self.machines, 2):
                yield "refuse", a, b

    def take(self, step: tuple[Any, ...]) -> None:
        """Let one thing happen."""
        kind, *names = step
        if kind == "deliver":
            self._deliver(names[0], names[1])
        elif kind == "wait":
            self._wait()
        else:
            self.faults = 0
            self._fault(kind, names)

    def _deliver(self, a: str, b: str) -> None:
        event = self.queues[a, b].popleft()
        known = a == b or isinstance(event, NeighborUp) or a in self.machines[b].neighbors.by_name
        if known:
            self.feed(b, event)
        if isinstance(event, NeighborUp) and isinstance(self.machines[b].rules, PeerRules) and self.linked(a, b):
            self.queues.setdefault((b, a), deque()).append(NeighborState(b, self.machines[b].rules.announcer.state(a)))

    def _wait(self) -> None:
        """Let time pass until the next check of a machine."""
        checks = [due for name in self.alive if (due := self.machines[name].next_check()) is not None]
        self.now = max(self.now, min(checks, default=self.now + BUDGET_S)) + 1e-6
        for name in sorted(self.alive):
            due = self.machines[name].next_check()
            if due is not None and due <= self.now:
                self.feed(name, Tick())

    def _fault(self, kind: str, names: Sequence[str]) -> None:
        if kind == "hang":
            (self.hung,) = names
        elif kind == "refuse":
            self.refuses = (names[0], names[1])
        elif kind == "drain":
            self.feed(names[0], Drain())
        else:
            if kind == "kill":
                self.alive.remove(names[0])
            else:
                self.cut = frozenset(names)
            for a, b in itertools.permutations(self.machines, 2):
                if not self.linked(a, b):
                    self.queues.pop((a, b), None)
            lost = itertools.permutations(names) if kind == "cut" else ((other, names[0]) for other in self.alive)
            for at, gone in list(lost):
                self.feed(at, NeighborDown(gone, kind))

    def settle(self, seconds: float) -> None:
        """Let everything happen in one order, until nothing is left to happen or time is over."""
        end = self.now + seconds
        while self.now < end:
            self.take(next(iter(self.choices())))

    def check(self) -> None:
        """Check the outcome, and what is left after it."""
        (outcome,) = self.outcomes
        assert self.ended_at <= self.due + 1e-3, "ended after its budget"
        itinerary = outcome.itinerary
        order = [block for wave in itinerary.waves for track in wave for block, _ in track]
        assert len(set(order)) == len(order), f"ran a block twice: {order}"
        assert len(itinerary.skipped) <= self.skips, f"skipped {itinerary.skipped}"
        if isinstance(outcome, Complete):
            assert sorted([*order, *itinerary.skipped]) == list(range(self.blocks)), f"lacks blocks: {order}"
            assert outcome.tokens == tuple(order), f"{outcome.tokens} is not what {order} computes"
        self.faults = 0
        self.settle(SETTLE_S)
        assert len(self.outcomes) == 1, "a second outcome"
        for name in self.alive:
            if name != self.hung:
                assert not self.machines[name].held, f"{name} still holds the request"

    def content(self) -> Any:
        """Return all that decides what happens next."""
        for name in self.alive - self.contents.keys():
            self.contents[name] = hash(_content(self.machines[name], {}))
        machines = {name: self.contents[name] for name in self.alive}
        state = (round(self.now, 9), self.queues, self.cut, self.hung, self.refuses, self.faults, machines)
        return _content(state, {})


class Explored(NamedTuple):
    """Counts of a world."""

    states: int
    ends: int
    answered: int


def explore(world: World, most: int = 1_000_000, rng: random.Random | None = None) -> Explored:
    """Look at every course, up to ``most`` states; raise what is wrong, with the course that leads there.

    With ``rng``, the next state is drawn from all that are left, so that a part of a large world is spread over it.
    """
    seen = {hash(world.content())}
    left: list[tuple[bytes, tuple[Any, ...]]] = [(pickle.dumps(world), ())]
    ends = answered = 0
    while left and len(seen) < most:
        if rng is not None:
            drawn = rng.randrange(len(left))
            left[drawn], left[-1] = left[-1], left[drawn]
        packed, course = left.pop()
        for step in list(pickle.loads(packed).choices()):
            after = pickle.loads(packed)
            try:
                after.take(step)
                if after.outcomes:
                    ends += 1
                    answered += isinstance(after.outcomes[0], Complete)
                    after.check()
                    continue
                assert after.now < after.due + 1.0, "no outcome"
            except Exception as error:
                raise AssertionError(f"{type(error).__name__}: {error} after {(*course, step)}") from error
            content = hash(after.content())
            if content not in seen:
                seen.add(content)
                left.append((pickle.dumps(after), (*course, step)))
    return Explored(len(seen), ends, answered)


def _arriving(name: str, one: Send | Forward) -> Event:
    if isinstance(one, Forward):
        return Arrived(name, one.run("raw", 1, 1), one.tokens)
    if isinstance(one.message, State):
        return NeighborState(name, one.message)
    return Received(name, one.message)


def _content(value: Any, seen: dict[int, int]) -> Any:
    """Return a hashable copy of a value; what was met before is its number, so that cycles end."""
    if isinstance(value, ATOMS):
        return value
    if id(value) in seen:
        return ("met", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, random.Random):
        return hash(value.getstate())
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(repr, value)))
    if isinstance(value, Mapping):
        items = [(repr(key), _content(one, seen)) for key, one in value.items() if one not in (deque(), [], {})]
        return tuple(sorted(items, key=lambda item: item[0]))
    if isinstance(value, (list, tuple, deque)):
        return tuple(_content(one, seen) for one in value)
    if callable(value) and not hasattr(value, "__dict__"):
        return ""
    names = getattr(value, "__struct_fields__", None) or [
        *getattr(value, "__dict__", ()), *(n for kind in type(value).__mro__ for n in getattr(kind, "__slots__", ()))
    ]  # fmt: skip
    fields = [(name, getattr(value, name)) for name in names if name not in UNSEEN and hasattr(value, name)]
    return (type(value).__name__, *((name, _content(one, seen)) for name, one in fields if not callable(one)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the worlds and print how many states each has."""
    parser = argparse.ArgumentParser(description="Every course of small worlds.")
    parser.add_argument("--most", type=int, default=1_000_000, help="states of a world")
    parser.add_argument("--any-order", action="store_true", help="let STATE arrive in any order in all worlds")
    given = parser.parse_args(arguments)
    for name, (held, policy, skips, prompt) in WORLDS.items():
        if given.any_order > prompt:
            continue
        rng = random.Random(0) if given.any_order else None
        found = explore(World(held, policy, skips, prompt and not given.any_order), given.most, rng)
        limit = ", not all" if found.states >= given.most else ""
        sys.stdout.write(
            f"{name}: {found.states:,} states{limit}, {found.ends:,} ends, {found.answered:,} answered: no violation\n"
        )
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
