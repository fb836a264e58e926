"""STATE messages of a peer: their contents by neighbor, and the times at which they are sent.

A neighbor that gives this peer work is a *user*: it receives STATE every :data:`STATE_EVERY`, so that it
notices a peer that falls silent. If another message is due earlier, STATE is sent with it, since each separate message
wakes its receiver.
Any other neighbor receives one only when it differs from the last: soon where links or reachable blocks have changed,
and once in :data:`LOAD_EVERY` where only the load has. A fleet without requests therefore sends none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from ls_edge.core.peer_reports import MICROSECONDS
from ls_edge.runtime.protocol.messages import State
from ls_edge.runtime.routing.peer.engine_queue import EngineQueue
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import MAY_WAIT, Forward, NeighborDown, NeighborUp, Send, Unsendable
from ls_edge.runtime.routing.state.held_request import INFINITY
from ls_edge.runtime.routing.state.turn import Turn

STATE_EVERY = 0.2
"""Interval of STATE to neighbors that use this peer, unless it is sent earlier with another message.
1/4: tail -18 % with a slow peer, at twice the messages; x4: mean +7 % where sends fail."""
STATE_LEAST = 0.05
"""Minimum time before a STATE that is sent with another message, or that reports changed links or reachable blocks.
1/4: tail -10 %, at twice the messages; x4: mean +23 %, tail +41 % with a slow peer."""
LOAD_EVERY = 1.0
"""Interval of STATE to other neighbors while only the load changes. A neighbor that used nothing for this long is not a
user."""


class Announced(Protocol):
    """The rules of the peer, whose state is announced."""

    engine: EngineQueue
    warm: bool

    @property
    def draining(self) -> bool:
        """Whether it is draining."""

    @property
    def credits(self) -> int:
        """Number of requests that it would accept now from all senders."""

    def credits_for(self, name: str) -> int:
        """Return the number of requests that it would accept now from one process."""


@dataclass(slots=True, eq=False)
class Listener:
    """Latest report to one process."""

    state: State | None = None
    """Last STATE; None before the first, and if it has to be repeated."""
    told_at: float = -INFINITY
    """Time of that STATE."""
    reach: object = None
    """Links and blocks in that STATE: while they are the same, only the load has changed."""
    used_at: float | None = None
    """Time at which it last had a request here; None unless it is a user."""
    has_credit: bool | None = None
    """False if the last message to it reported no credit. True if it has sent tokens since its last STATE, and the
    last message to it reported some credit."""


class StateAnnouncer:
    """Selection of the neighbors that receive STATE, and record of the credits that messages report."""

    def __init__(self, turn: Turn, custody: Custody, rules: Announced) -> None:
        self.due = INFINITY
        """Time of the next :meth:`announce`."""
        self._turn = turn
        self._held = custody.held
        self._rules = rules
        self._listeners: dict[str, Listener] = {}
        self._announced_at = -INFINITY
        self._urgent = False
        self._reach_version = 0
        self._reach: tuple[tuple[str, ...], tuple[int, ...]] = ((), ())
        """Links and blocks of all neighbors, as in a STATE."""
        self._reach_of: tuple[object, ...] = ()
        """Versions and processes that the reach depends on."""
        self._credits_before = 0
        self._least_credits = 0
        """Fewest credits since the end of the last turn, as far as a message reported them."""

    # Reports of the rules.

    def urgent(self) -> None:
        """Tell all neighbors now: warm, draining or stuck has changed, or a link is lost."""
        self.due, self._urgent = self._turn.now, True

    def look_at_changes(self) -> None:
        """Announce soon if links or reachable blocks have changed, and after a while if there is work."""
        turn = self._turn
        if turn.neighbors.reach_version != self._reach_version:
            self._reach_version = turn.neighbors.reach_version
            self.due = min(self.due, max(turn.now, self._announced_at + STATE_LEAST))
        if self._held and self.due > turn.now + STATE_EVERY:
            self.due = turn.now + STATE_EVERY

    def on_up(self, event: NeighborUp) -> None:
        """Repeat the STATE to a neighbor with a new link."""
        self._forget(event.hello.name)

    def on_unsendable(self, event: Unsendable) -> None:
        """Repeat the STATE to a neighbor that has perhaps missed one: it may wait for the credits in it."""
        self._forget(event.failed.to)
        self.due = min(self.due, self._turn.now + STATE_LEAST)

    def on_down(self, event: NeighborDown) -> None:
        """Forget a neighbor, and tell the others now: they may be about to send work through it."""
        self.urgent()
        self._listeners.pop(event.name, None)

    def _forget(self, name: str) -> None:
        one = self._listeners.get(name)
        if one is not None:
            one.state, one.told_at = None, -INFINITY

    def credits_in_answer(self, name: str, *, accepted: bool) -> int:
        """Return the credits of a neighbor for ACCEPT or REFUSE."""
        one, credit = self._listener(name), self._rules.credits_for(name)
        one.used_at = self._turn.now
        self._report(one, credit)
        if accepted and credit > 0:
            one.has_credit = True
        return credit

    def _listener(self, name: str) -> Listener:
        one = self._listeners.get(name)
        if one is None:
            one = self._listeners[name] = Listener()
        return one

    # Sending.

    def state(self, name: str = "") -> State:
        """Return the STATE for a neighbor that greets on one more link, or for another process."""
        state = self._state_for(name, self._shared())
        if name in self._turn.neighbors.by_name:
            self._tell(name, state)
        return state

    def announce(self) -> None:
        """Send the STATE messages that are due, and set when to look again."""
        turn, now = self._turn, self._turn.now
        urgent, self._urgent = self._urgent, False
        self._announced_at = now
        busy = self._has_users() or bool(self._held)
        self.due = now + STATE_EVERY if busy else INFINITY
        shared = self._shared()
        for n in turn.neighbors:
            one = self._listener(n.name)
            is_user = one.used_at is not None
            due = one.told_at + (STATE_EVERY if is_user else LOAD_EVERY)
            if urgent or not busy or now >= due or one.reach is not self._reach:
                state = self._state_for(n.name, shared)
                if not (urgent or is_user) and state == one.state:
                    continue
                if _reach(state) != _reach(one.state):
                    due = one.told_at + STATE_LEAST
                if urgent or now >= due:
                    self._send(n.name, state)
                    due = now + STATE_EVERY if is_user else INFINITY
            if due < self.due:
                self.due = due
        # The end of a pause changes which blocks are reachable, but raises no event.
        self.due = min([self.due, *(n.pause.until for n in turn.neighbors if n.pause.excludes(now))])

    def announce_credits(self) -> None:
        """Send STATE to neighbors whose credits have run out, or that wait for some."""
        rules, limits = self._rules, self._turn.limits
        before, least, after = self._credits_before, self._least_credits, rules.credits
        if after == before == least:
            return
        self._credits_before = self._least_credits = after
        without = [name for name, one in self._listeners.items() if one.has_credit is False] if after > least else ()
        if without:
            # While the engine has work, a few credits are collected: a message for each would cost more than it gains.
            enough = limits.guaranteed if rules.engine.queued else 1
            self._send_to(name for name in sorted(without) if rules.credits_for(name) >= enough)
        elif after < before and (after <= 0 or after <= limits.reserved < before):
            some = sorted(name for name, one in self._listeners.items() if one.has_credit)
            self._send_to(name for name in some if rules.credits_for(name) <= 0)

    def ride_along(self) -> None:
        """Send STATE with other messages of this turn, to users that have had none for a while."""
        since, names = self._turn.now - STATE_LEAST, []
        for instruction in self._turn.instructions:
            if isinstance(instruction, (Send, Forward)):
                one = self._listeners.get(instruction.to)
                if (
                    one is not None
                    and one.used_at is not None
                    and one.state is not None
                    and one.told_at <= since
                    and (isinstance(instruction, Forward) or type(instruction.message) not in MAY_WAIT)
                ):
                    names.append(instruction.to)
        if names:
            self._send_to(sorted(set(names)))

    def _send_to(self, names: Iterable[str]) -> None:
        shared = self._shared()
        for name in names:
            if name in self._turn.neighbors.by_name:
                self._send(name, self._state_for(name, shared))

    def _send(self, name: str, state: State) -> None:
        self._tell(name, state)
        self._turn.send(name, state)

    def _tell(self, name: str, state: State) -> None:
        """Record a STATE."""
        one = self._listener(name)
        one.has_credit = None
        self._report(one, state.credits)
        one.state, one.told_at, one.reach = state, self._turn.now, self._reach

    def _report(self, one: Listener, credit: int) -> None:
        """Record the credits that a message reports."""
        if credit <= 0:
            one.has_credit = False
            self._least_credits = min(self._least_credits, self._rules.credits)
        elif one.has_credit is False:
            one.has_credit = None

    def _has_users(self) -> bool:
        """Return whether there are users now."""
        now, linked = self._turn.now, self._turn.neighbors.by_name
        for request in self._held.values():
            for name in (request.upstream, request.itinerary.source):
                if name is not None and name in linked:
                    self._listener(name).used_at = now
        users = False
        for one in self._listeners.values():
            if one.used_at is not None:
                if now - one.used_at >= LOAD_EVERY:
                    one.used_at = None
                else:
                    users = True
        return users

    # Contents of a STATE message.

    def _shared(self) -> State:
        """Return the STATE that is common to all neighbors."""
        rules, engine = self._rules, self._rules.engine
        neighbors = self._turn.neighbors
        near = neighbors.candidates()
        reach_of = (neighbors.reach_version, neighbors.reaches_version, engine.usable_blocks, near)
        if reach_of != self._reach_of:
            blocks = set[int]().union(*[n.blocks for n in near])
            self._reach_of = reach_of
            self._reach = tuple(sorted(neighbors.by_name)), tuple(sorted(blocks))
        return State(
            warm=rules.warm,
            draining=rules.draining,
            stuck=engine.stuck,
            credits=rules.credits,
            queue=engine.length,
            calls=engine.num_ended,
            block_us=engine.block_us,
            wait_us=min(MICROSECONDS - 1, engine.work_us(self._turn.now)),
            reaches=self._reach[0],
            reach_blocks=self._reach[1],
        )

    def _state_for(self, name: str, shared: State) -> State:
        credit = self._rules.credits_for(name)
        return shared if credit == shared.credits else msgspec.structs.replace(shared, credits=credit)


def _reach(state: State | None) -> tuple[object, ...]:
    return () if state is None else (state.reaches, state.reach_blocks)
