"""A simulation with more faults: stopped and drained processes, hung engines, cut links, and what cannot be sent."""

import math

from ls_edge.core.errors import WireError
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Computed,
    Drain,
    Forward,
    NeighborState,
    Received,
    Send,
    Unsendable,
)
from ls_edge.runtime.simulator.simulation import Simulation
from tests.faults.consistency import validate

_TOGETHER = (Arrived, Received, NeighborState, Computed)
"""Events that a process may handle together, as a node handles those of one turn of its loop."""


class FaultySimulation(Simulation):
    """A source called ``source`` and peers, with faults."""

    def __init__(self, peers, *, turn=0.0, check_run=None, validate=False, detection=0.35, **settings):
        """Start all processes.

        For ``turn`` seconds a process collects messages and results to handle them together. ``check_run`` is called
        with receiver, tokens and sender, and raises :class:`WireError` for tokens to drop on arrival. With ``validate``
        the state of a machine is checked after each event.
        """
        self.send_failures = 0.0
        """Fraction of messages that cannot be sent, as when the queue of a link is full."""
        self.dropped = []
        """Tokens that were dropped on arrival: receiver, sender and reason."""
        self._cut = set()
        self._turn_s, self._check_run, self._validate = turn, check_run, validate
        self._turns = {}
        """Events since the last turn, by process."""
        self._detection = detection
        self._inboxes = {}
        """Events that wait for stopped processes."""
        self._hung = {}
        """Results that hung engines keep."""
        super().__init__(peers, **settings)

    def cut(self, a, b):
        """Take the link between two processes down."""
        self._cut.add(frozenset((a, b)))
        self._link_lost(a, b, "cut")
        self._link_lost(b, a, "cut")

    def is_cut(self, a, b):
        """Return whether the link between two processes was taken down."""
        return frozenset((a, b)) in self._cut

    def restore(self, a, b):
        """Bring the link between two processes up again."""
        self._cut.discard(frozenset((a, b)))
        self._hello(a, b)
        self._hello(b, a)

    def stop(self, name):
        """Suspend a process; heartbeats detect that after ``detection`` seconds."""
        process = self.processes[name]
        inbox = self._inboxes[process] = self._turns.pop(process, [])

        def found():
            if self._inboxes.get(process) is inbox and process.alive:
                for other in self.processes:
                    self._link_lost(other, name, "heartbeat")

        self.at(self._detection, found)

    def cont(self, name):
        """Resume a process; its links come back."""
        process = self.processes[name]
        hung = self._hung.pop(process, None)
        for event in self._inboxes.pop(process):  # with results that the engine returned before it hung
            self._feed(name, event)
        if hung is not None:
            self._hung[process] = hung
        self._set_tick(process)
        for other in self.processes:
            if other != name and name not in self.processes[other].machine.neighbors.by_name:
                self._link_lost(name, other, "heartbeat")
        self._greet(name)

    def is_stopped(self, name):
        """Return whether a process is suspended."""
        return self.processes[name] in self._inboxes

    def hang_engine(self, name, *, hangs):
        """Make the engine of a peer hang, or let it return its pending calls."""
        process = self.processes[name]
        if hangs:
            self._hung[process] = []
        else:
            for call in self._hung.pop(process):
                self._feed(name, call)

    def is_hung(self, name):
        """Return whether the engine of a peer hangs."""
        return self.processes[name] in self._hung

    def drain(self, name):
        """Make a peer accept no new requests, and leave when it holds none."""
        self._feed(name, Drain())

    def is_idle(self, name):
        """Return whether a peer holds no requests, so that it may leave."""
        return not self.processes[name].machine.held

    def _linked(self, a, b):
        return super()._linked(a, b) and not self.is_cut(a, b)

    def _deliver(self, sender, to, event, size=0.0):
        if not self.is_stopped(sender):
            super()._deliver(sender, to, event, size)

    def _hears(self, process, name):
        return super()._hears(process, name) or process in self._inboxes

    def _tick(self, process, at):
        if process not in self._inboxes:
            super()._tick(process, at)
        elif process.tick_at == at:
            process.tick_at = math.inf

    def _start(self, name):
        if self._validate:
            _validate_after_each_event(self.processes[name].machine)
        super()._start(name)

    def _feed(self, name, event):
        process = self.processes[name]
        if self._check_run is not None and isinstance(event, Arrived):
            try:
                self._check_run(name, event.run, event.sender)
            except WireError as error:
                self.dropped.append((name, event.sender, str(error)))
                return
        if process in self._hung and isinstance(event, Computed):
            self._hung[process].append(event)
        elif process.alive and process in self._inboxes:
            self._inboxes[process].append(event)
        elif process.alive and self._turn_s and isinstance(event, _TOGETHER):
            waiting = self._turns.setdefault(process, [])
            waiting.append(event)
            if len(waiting) == 1:
                self.at(self._turn_s, lambda: self._handle(process))
        else:
            super()._feed(name, event)

    def _handle(self, process, *groups):
        """Let a process handle its turn, then these events."""
        if not process.alive or self.processes[process.name] is not process:
            return
        waiting = tuple(self._turns.pop(process, ()))
        super()._handle(process, *([waiting] if waiting else ()), *groups)

    def _execute(self, process, instruction):
        if isinstance(instruction, (Send, Forward)) and self._rng.random() < self.send_failures:
            self._feed(process.name, Unsendable(instruction))
            return
        super()._execute(process, instruction)


def _validate_after_each_event(machine):
    handle_all = machine.handle_all

    def checked(events, now):
        instructions = handle_all(events, now)
        validate(machine)
        return instructions

    machine.handle_all = checked
