"""Routing machine of a process: events in, instructions out, without clock, sockets or threads.

Peers, sources and the simulator run the same machine. An object with the rules of a source or a peer
(``source/source_rules.py``, ``peer/peer_rules.py``) has a dispatch table with the handlers of events, the actions of
stages, and the list of rules of a decision. Read on in this order: held requests and their transitions
(``state/custody.py``), the choice of the next block and holder (``decisions.py``), failures (``recovery.py``).

A request takes these steps:

It arrives. The rules accept the tokens and hold them (WAITING), or refuse them. ``Decisions.decide`` asks the policy: a
block runs here (QUEUED, RUNNING), or ``Decisions.offer`` sends the tokens to the next holder and keeps a copy
(OFFERED). On ACCEPT (CUSTODY), ``on_accept`` releases the copy of the previous holder. When the next holder has passed
the request on, ``on_release`` drops the copy here (ENDED); a source, and the joiner of a track, watch the request until
it comes back (AWAY). So two processes have the tokens at any time, and the source has the furthest tokens that came
back.

At the end of the budget, ``Rules.out_of_budget`` sends a request home in time, and the source answers from the tokens
that it has, or fails the request.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from ls_edge.core.peer_reports import MICROSECONDS
from ls_edge.runtime.protocol.messages import Accept, Refuse, Release
from ls_edge.runtime.routing.decisions import Decisions, Rules
from ls_edge.runtime.routing.recent_events import MOST, without_tokens
from ls_edge.runtime.routing.recovery import Recovery
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import (
    Event,
    Instruction,
    NeighborDown,
    NeighborState,
    NeighborUp,
    Received,
    in_order,
)
from ls_edge.runtime.routing.state.held_request import CUSTODY, ENDED, INFINITY, OFFERED
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.turn import Turn

R = TypeVar("R", bound=Rules)


class Machine(Generic[R]):
    """Routing of one process, with the ``rules`` of a source or a peer."""

    def __init__(
        self,
        name: str,
        rules: Callable[[Machine[R]], R],
        *,
        limits: Limits,
        rng: random.Random,
        model: Model,
    ) -> None:
        """``rng`` draws branches; seed it in a test, never in a process."""
        self.turn = Turn(name, limits, model, rng)
        self.custody = Custody(self.turn)
        self.decisions = Decisions(self.turn, self.custody)
        self.recovery = Recovery(self.turn, self.custody, self.decisions)
        self.neighbors = self.turn.neighbors
        self.held = self.custody.held
        """Requests that this process holds."""
        self._next = INFINITY
        """Time of the next ``Tick`` if no event comes before."""
        self.recent: deque[tuple[float, Event]] = deque(maxlen=MOST)
        """Latest events with their times, without tokens and images."""
        self.rules = self.decisions.rules = self.custody.rules = rules(self)

    # The interface of the process around it.

    def handle_all(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Handle the events of a turn, decide once at its end, and return the instructions in their order.

        ``now`` never decreases.
        """
        turn, handlers = self.turn, self.rules.handlers
        if now > turn.now:
            turn.now = turn.neighbors.now = now
        turn.instructions = []
        reach, is_news = turn.neighbors.reach_version, False
        for event in events:
            self.recent.append((turn.now, without_tokens(event)))
            kind = type(event)
            is_news |= kind is not NeighborState
            for handle in handlers[kind]:
                handle(event)
        if self._next <= turn.now:
            self._check_due()
        elif not (is_news or self.custody.waiting or turn.neighbors.reach_version != reach):
            return []  # the load of a neighbor only matters to later decisions
        self.decisions.run()
        self._next = min(self.rules.finish(), self.custody.timers.next, self.decisions.next_look())
        return in_order(turn.instructions)

    def next_check(self) -> float | None:
        """Return the time of the next ``Tick`` if no event comes before; None without one."""
        return None if self._next == INFINITY else self._next

    def _check_due(self) -> None:
        """Check the requests that are due."""
        rules, now = self.rules, self.turn.now
        for request in self.custody.timers.due(now):
            if request.stage is ENDED:
                continue
            if now >= rules.budget_end(request):
                rules.out_of_budget(request)
            elif (on_due := rules.stages[request.stage].on_due) is not None:
                on_due(request)

    # Replies of the next holder: it accepts the request, refuses it, or has passed it on.

    def on_received(self, event: Received) -> None:
        """Handle a message, or ignore it if it has no handler."""
        for handle in self.rules.handlers.get(type(event.message), ()):
            handle(event.sender, event.message)

    def on_accept(self, sender: str, message: Accept) -> None:
        """Keep a copy of an accepted request, and release the previous copy."""
        seconds = self._learn(sender, message)
        request = self.custody.sent_to(sender, message.transfer)
        if request is None or request.stage is not OFFERED:
            return
        self.custody.transition(request, CUSTODY, f"{sender} accepted")
        before = request.upstream
        if before is not None and before in self.neighbors.by_name:
            link_us = min(round(seconds * 1e6), MICROSECONDS - 1)
            self.turn.send(before, Release(request.transfer, sender, link_us))
        if request.returning and sender == request.itinerary.source:
            self.neighbors.cuts.pop(sender, None)
            self.custody.end(request, "home")

    def on_refuse(self, sender: str, message: Refuse) -> None:
        """Decide a refused request again."""
        self._learn(sender, message)
        self.recovery.on_refuse(sender, message)

    def on_release(self, sender: str, message: Release) -> None:
        """Drop the copy of a request that the next holder has passed on, or watch the request."""
        request = self.custody.sent_to(sender, message.transfer)
        if request is not None:
            n = self.neighbors.get(sender)
            if n is not None:
                n.has_worked()
            self.rules.passed_on(request, message.holder)

    def _learn(self, name: str, message: Accept | Refuse) -> float:
        """Record the credits in a reply to a transfer; return the seconds that the transfer took."""
        n = self.neighbors.get(name)
        took = self.neighbors.answered(message.transfer, name)
        if n is None or took is None:
            return 0.0
        n.reported_credits = message.credits
        if isinstance(message, Accept):
            n.accepted_after(took)
        self.custody.waiting.note_room(name)
        return took

    # Changes of neighbors.

    def on_up(self, event: NeighborUp) -> None:
        """Record a process that has a link now, or its new description."""
        hello = event.hello
        known = self.neighbors.get(hello.name)
        if known is not None and known.hello.incarnation != hello.incarnation:
            for handle in self.rules.handlers[NeighborDown]:
                handle(NeighborDown(hello.name, "came back as a new process"))
        self.neighbors.add(hello)
        self.decisions.wake_all()

    def on_state(self, event: NeighborState) -> None:
        """Record a STATE, and decide the requests again that it may concern."""
        reach = self.neighbors.reach_version
        is_new = self.neighbors.update(event.name, event.state)
        if self.neighbors.reach_version != reach:
            self.decisions.wake_all()
        else:
            if is_new:
                self.custody.waiting.decide_changed()
            self.custody.waiting.note_room(event.name)
