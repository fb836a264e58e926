"""A simulation with faults of links: cut links, messages that cannot be sent, and tokens that their receiver drops."""

from ls_edge.core.errors import WireError
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Computed,
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

    def __init__(self, peers, *, turn=0.0, check_run=None, validate=False, **settings):
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

    def _matters(self, process, event):
        return True  # with each STATE as an event, it may end a turn, and is lost with its link

    def _linked(self, a, b):
        return super()._linked(a, b) and not self.is_cut(a, b)

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
        if process.alive and process.stopped:
            process.inbox += self._turns.pop(process, ())
        elif process.alive and self._turn_s and isinstance(event, _TOGETHER):
            waiting = self._turns.setdefault(process, [])
            waiting.append(event)
            if len(waiting) == 1:
                self.at(self._turn_s, lambda: self._handle(process))
            return
        super()._feed(name, event)

    def _handle(self, process, *groups):
        """Let a process handle its turn, then these events."""
        if not process.alive or self.processes[process.name] is not process:
            return
        waiting = tuple(self._turns.pop(process, ()))
        if process.stopped:
            process.inbox += [*waiting, *(event for group in groups for event in group)]
            return
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
