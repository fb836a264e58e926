"""A routing machine that a test drives by hand: events in, what it says out, on a clock of its own."""

import random
from collections import deque
from typing import NamedTuple

from ls_edge.runtime.protocol.messages import (
    Cancel,
    Hello,
    Itinerary,
    Run,
    State,
    TransferId,
)
from ls_edge.runtime.routing.peer.peer_rules import peer_machine
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Compute,
    Computed,
    Forward,
    NeighborState,
    NeighborUp,
    Note,
    Received,
    Send,
    Submit,
    Tick,
    Warm,
)
from ls_edge.runtime.routing.state.limits import Limits
from tests.faults.consistency import validate

BLOCKS = 4
ALL_BY_A = ((tuple((block, "a") for block in range(BLOCKS)),),)
BY_X = ((((0, "x"), (1, "x")),),)


def request_id(number):
    return number.to_bytes(16, "big")


def transfer(request=0, branch=1, hop=1):
    return TransferId(request_id(request), branch, hop)


def cancel(*requests, seconds=1.0):
    return Cancel(tuple(map(request_id, requests)), round(seconds * 1e6))


def run_of(
    one=None, *, remaining=(0, 1, 2, 3), policy="nearest", budget=5.0, skips=0, returning="", source="laptop", **more
):
    itinerary = Itinerary(source, policy, tuple(remaining), skips, **more)
    return Run(one or transfer(), round(budget * 1e6), itinerary, "raw", 1, 1, returning)


class Candidate(NamedTuple):
    """What policies and the planner of waves read of a neighbor, as it is at one moment."""

    name: str
    blocks: frozenset
    reach_blocks: frozenset
    credits: int
    wait_us: int
    block_us: int = 0
    link_us: int = 0
    trip_us: int = 0


class Driver:
    """A machine with a clock of its own; what it said last stands in ``said``."""

    def __init__(self, machine):
        self.machine = machine
        self.now = 100.0
        self.said = []
        self.calls = deque()
        """What the engine was given and has not returned."""

    def __call__(self, event, after=0.0):
        return self.together(event, after=after)

    def together(self, *events, after=0.0):
        self.now += after
        self.said = self.machine.handle_all(events, self.now)
        self.calls.extend(said for said in self.said if isinstance(said, Compute))
        validate(self.machine)
        return self.said

    def meets(self, name, blocks=(), *, role="peer", incarnation=1, **state):
        self(NeighborUp(Hello(name, role, incarnation, 0, "m", "b", tuple(blocks))))
        if role == "peer":
            self.hears_state(name, **state)

    def hears_state(self, name, credit=9, **changes):
        base = {"warm": True, "draining": False, "stuck": False, "queue": 0, "calls": 0, "block_us": 1000}
        self(NeighborState(name, State(credits=credit, **{**base, **changes})))

    def hears(self, name, message, after=0.0):
        return self(Received(name, message), after)

    def gets(self, name, run, tokens=()):
        return self(Arrived(name, run, tokens))

    def computes_next(self):
        """The engine returns the call that it was given first; returns that call."""
        self.computes(self.calls[0])
        return self.calls.popleft()

    def computes(self, compute, after=0.001):
        outputs = tuple((*tokens, *compute.blocks) for tokens in compute.tokens)
        return self(Computed(compute.blocks, compute.transfers, outputs, 1000), after)

    def passes(self, seconds, step=0.01):
        """Let time pass in small steps; returns all that was said."""
        collected = []
        end = self.now + seconds
        while self.now < end:
            collected += self(Tick(), step)
        self.said = collected
        return collected

    def sent(self, kind, to=None):
        """What was sent to a process: messages of a kind, or Forward instructions."""
        if kind is Forward:
            return [s for s in self.said if isinstance(s, Forward) and to in (None, s.to)]
        return [
            s.message for s in self.said if isinstance(s, Send) and isinstance(s.message, kind) and to in (None, s.to)
        ]

    def only(self, kind):
        (found,) = [s for s in self.said if isinstance(s, kind)]
        return found

    def notes(self):
        return [note.what for note in self.said if isinstance(note, Note)]


def new_peer(blocks=(0, 1), limits=None, **options):
    driver = Driver(peer_machine("a", blocks, limits=limits or Limits(chain=0), rng=random.Random(0), **options))
    driver(Warm(1000))
    driver.meets("laptop", role="source")
    return driver


def submits(source, request=0, *, budget=5.0, max_skips=0, policy="nearest", tokens=(), **more):
    itinerary = Itinerary("laptop", policy, tuple(range(BLOCKS)), max_skips, **more)
    return source(Submit(request, itinerary, tokens, source.now + budget))


def handed_on(peer):
    """The peer has offered a request to ``b``; returns that transfer's ticket."""
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    return peer.sent(Forward)[0].transfer
