"""A source, peers and their links in simulated time: the real routing machines, without processes or sockets.

Used by plans and simulated fleets; tests add other faults (``tests/faults/simulation.py``). Tokens are the tuple of the
blocks that ran on them, so an answer shows its origin. Messages between two processes keep their order and arrive
``latency`` seconds later; messages in flight when a process goes down are lost. Tokens may take longer (``transfers``)
and occupy the links of both ends for a while (``wire``).

Codecs, serialization and engines are not simulated.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from ls_edge.core.bands import Bands
from ls_edge.core.parts import HEAD, STEM
from ls_edge.core.peers_file import usual_credits
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.protocol.payload import IMAGE, LOGITS, payload_of
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.peer_rules import PeerMachine, PeerRules, peer_machine
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Complete,
    Compute,
    Computed,
    Decode,
    Decoded,
    Event,
    Fail,
    Forward,
    Instruction,
    NeighborDown,
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
from ls_edge.runtime.simulator.network import Clock, Network

SOURCE = "source"
_TICK_LATE_S = 1e-6
"""Delay of a tick, so that rounding never makes it early."""


@dataclass(eq=False)
class Process:
    """A simulated process: a routing machine and its state."""

    name: str
    machine: Machine[Any]
    incarnation: int
    alive: bool = True
    events: deque[tuple[Event, ...]] = field(default_factory=deque)
    """Groups of events to handle, in order; the events of a group are handled together."""
    engine_until: float = 0.0
    """Time at which its engine has finished all calls."""
    tick_at: float = math.inf
    """Time of its next scheduled tick."""


@dataclass(frozen=True)
class SimulationSettings:
    """Peers, links and engines of a simulation; times in seconds."""

    peers: Mapping[str, Sequence[int]]
    """Parts by peer. If any peer holds the stem, requests are images, and peers run stem and head."""
    blocks: int
    seed: int = 0
    bands: Bands | None = None
    limits: Limits = field(default_factory=Limits)
    """Limits of every process. With the defaults, the credits of a peer depend on its ``max_batch``."""
    max_batch: int | Mapping[str, int] = 1
    block_seconds: float | Mapping[str, float] = 0.005
    engine_seconds: Callable[[str, Sequence[int], int], float] | None = None
    """Time of an engine call by peer, parts and number of images; None for ``block_seconds`` per part."""
    call_seconds: Mapping[str, float] = field(default_factory=dict)
    """Overhead of an engine call, by peer."""
    latency: float = 0.001
    transfers: Callable[[str, str], float] | None = None
    wire: Mapping[str, float] = field(default_factory=dict)
    image_share: float = 1.0
    """Size of an image, relative to its tokens."""
    logits_share: float = 1.0
    """Size of logits, relative to tokens."""

    @cached_property
    def model(self) -> Model:
        """Properties of the model."""
        return Model(self.bands or Bands(self.blocks))


class Simulation(Clock):
    """A source called ``source`` and its peers in simulated time."""

    def __init__(self, peers: Mapping[str, Sequence[int]], **settings: Any) -> None:
        """Start all processes; ``settings`` are further fields of :class:`SimulationSettings`."""
        super().__init__()
        self.settings = given = SimulationSettings(peers, **settings)
        self.is_thin = any(STEM in held for held in peers.values())
        """Whether the source has neither stem nor head, since peers hold them."""
        self.network = Network(given.latency, given.transfers, given.wire)
        each = given.block_seconds
        self.block_seconds = dict(each) if isinstance(each, Mapping) else dict.fromkeys(peers, each)
        self.busy = dict.fromkeys(peers, 0.0)
        """Total engine time of each peer, in seconds."""
        self.outcomes: dict[int, list[Complete | Fail]] = {}
        self.ended: dict[int, float] = {}
        """Time of the outcome, by request."""
        self.on_end: Callable[[Complete | Fail], None] = lambda _outcome: None
        self.notes: list[tuple[float, str, Note]] = []
        self._requests = itertools.count()
        self._rng = random.Random(given.seed)
        self.source: Machine[Any] = source_machine(SOURCE, limits=given.limits, rng=self._rng, model=given.model)
        self.processes = {SOURCE: Process(SOURCE, self.source, 0)}
        for name in peers:
            self.processes[name] = Process(name, self._new_peer(name), next(self._counter))
        for name in self.processes:
            self._start(name)

    # Interface of tests and planning.

    def submit(self, *, policy: str = "nearest", budget: float = 5.0, max_skips: int = 0, **more: Any) -> int:
        """Submit an image, whose outcome will be in :attr:`outcomes`; ``more`` are further fields of its itinerary."""
        request = next(self._requests)
        order = find_policy(policy).wanted_order(self.settings.model.bands, self.settings.seed, request)
        if self.is_thin:
            order = (STEM, *order, HEAD)
        itinerary = Itinerary(SOURCE, policy, order, max_skips, **{"waves_wanted": 2, **more})
        self.outcomes[request] = []
        self._feed(SOURCE, Submit(request, itinerary, (), self.now + budget))
        return request

    def kill(self, name: str) -> None:
        """Kill a process; the others see it immediately."""
        self.processes[name].alive = False
        for other in self.processes:
            self._link_lost(other, name, "killed")

    def restart(self, name: str) -> None:
        """Restart a killed peer as a new process."""
        assert not self.processes[name].alive
        self.processes[name] = Process(name, self._new_peer(name), next(self._counter))
        self._start(name)

    def settle(self, at_most: float = 60.0) -> None:
        """Advance until every request has its outcome."""
        end = self.now + at_most
        while self.source.rules.requests and self.now < end:
            self.run(0.05)

    # Implementation.

    def _new_peer(self, name: str) -> PeerMachine:
        given = self.settings
        most = given.max_batch[name] if isinstance(given.max_batch, Mapping) else given.max_batch
        limits = given.limits if given.limits != Limits() else Limits.of(usual_credits(most))
        made = peer_machine(name, given.peers[name], limits=limits, rng=self._rng, max_batch=most, model=given.model)
        made.rules.joins.join = join_tuples
        return made

    def _start(self, name: str) -> None:
        process = self.processes[name]
        if isinstance(process.machine.rules, PeerRules) and not process.machine.rules.warm:
            self._feed(name, Warm(round(self.block_seconds[name] * 1e6)))
        self._greet(name)

    def _greet(self, name: str) -> None:
        for other in self.processes:
            if other != name:
                self._hello(name, other)
                self._hello(other, name)

    def _hello(self, sender: str, to: str) -> None:
        process = self.processes[sender]
        role, held = ("source", ()) if sender == SOURCE else ("peer", tuple(self.settings.peers[sender]))
        hello = Hello(sender, role, process.incarnation, MINOR, "model", "bundle", held)
        self._deliver(sender, to, NeighborUp(hello))
        if isinstance(process.machine.rules, PeerRules):
            self._deliver(sender, to, NeighborState(sender, process.machine.rules.announcer.state(to)))

    def _linked(self, a: str, b: str) -> bool:
        return self.processes[a].alive and self.processes[b].alive

    def _link_lost(self, at: str, name: str, why: str) -> None:
        if at != name and self.processes[at].alive:
            self._feed(at, NeighborDown(name, why))

    def _deliver(self, sender: str, to: str, event: Event, size: float = 0.0) -> None:
        """Deliver an event with a payload of ``size``, unless the link or a process is gone when it arrives."""
        a, b = self.processes[sender], self.processes[to]
        if self._linked(sender, to):
            at = self.network.arrival(self.now, sender, to, size)
            self._put(at, next(self._counter), partial(self._arrive, a, b, event))

    def _arrive(self, a: Process, b: Process, event: Event) -> None:
        if self.processes[a.name] is not a or self.processes[b.name] is not b or not self._linked(a.name, b.name):
            return
        if self._hears(b, a.name) or isinstance(event, NeighborUp):
            self._feed(b.name, event)

    def _hears(self, process: Process, name: str) -> bool:
        return name in process.machine.neighbors.by_name

    def _feed(self, name: str, event: Event) -> None:
        process = self.processes[name]
        if process.alive:
            self._handle(process, (event,))

    def _handle(self, process: Process, *groups: tuple[Event, ...]) -> None:
        busy = bool(process.events)
        process.events.extend(groups)
        if busy:
            return  # the loop below already runs, further up the stack
        while process.events:
            for instruction in process.machine.handle_all(process.events[0], self.now):
                self._execute(process, instruction)
            process.events.popleft()
        self._set_tick(process)

    def _set_tick(self, process: Process) -> None:
        """Schedule the next tick, unless an earlier one is scheduled, which then schedules it."""
        due = process.machine.next_check()
        if due is not None and due < process.tick_at:
            process.tick_at = due
            self.at(max(0.0, due - self.now) + _TICK_LATE_S, lambda: self._tick(process, due))

    def _tick(self, process: Process, at: float) -> None:
        if process.tick_at != at or self.processes[process.name] is not process:
            return  # an earlier tick replaced this one
        process.tick_at = math.inf
        if not process.alive:
            return
        due = process.machine.next_check()
        if due is not None and due <= self.now:
            self._handle(process, (Tick(),))
        else:
            self._set_tick(process)

    def _execute(self, process: Process, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            name, message = process.name, instruction.message
            event = NeighborState(name, message) if isinstance(message, State) else Received(name, message)
            self._deliver(name, instruction.to, event)
        elif isinstance(instruction, Forward):
            arrived = Arrived(process.name, instruction.run("raw", 1, 1), instruction.tokens)
            sizes = {IMAGE: self.settings.image_share, LOGITS: self.settings.logits_share}
            size = sizes.get(payload_of(instruction.itinerary), 1.0)  # relative to tokens
            self._deliver(process.name, instruction.to, arrived, size)
        elif isinstance(instruction, Compute):
            self._compute(process, instruction)
        elif isinstance(instruction, Decode):
            self._feed(process.name, Decoded(instruction.transfer, instruction.image, 0))
        elif isinstance(instruction, (Complete, Fail)):
            self.outcomes[instruction.request].append(instruction)
            self.ended[instruction.request] = self.now
            self.on_end(instruction)
        elif isinstance(instruction, Note):
            self.notes.append((self.now, process.name, instruction))

    def _compute(self, process: Process, compute: Compute) -> None:
        name, engine_seconds = process.name, self.settings.engine_seconds
        if engine_seconds is None:
            seconds = self.block_seconds[name] * len(compute.blocks)
        else:
            seconds = engine_seconds(name, compute.blocks, len(compute.tokens))
        self.busy[name] += seconds
        process.engine_until = max(self.now, process.engine_until) + seconds
        outputs = tuple((*tokens, *compute.blocks) for tokens in compute.tokens)
        done = Computed(compute.blocks, compute.transfers, outputs, round(seconds * 1e6))

        def finish() -> None:
            if self.processes[name] is process:
                self._feed(name, done)

        self.at(process.engine_until - self.now + self.settings.call_seconds.get(name, 0.0), finish)


def join_tuples(start: tuple[int, ...], outs: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the blocks that ran before the wave, then the blocks that each track added."""
    return (*start, *(block for out in outs for block in out[len(start) :]))
