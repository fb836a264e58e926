"""STATE messages of a peer: what each neighbor was told, and when it is told something else.

A neighbor that gives this peer work is a *user*: it receives STATE every ``Limits.state_every``, so that it notices a
peer that falls silent, and earlier together with another message, since each message alone wakes its receiver.
Any other neighbor receives one only when it differs from the last: soon where links or reachable blocks have changed,
and once in ``Limits.load_every`` where only the load has. A fleet without requests therefore sends none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from ls_edge.core.parts import ENDS
from ls_edge.runtime.protocol.messages import MAX_FAR, MINOR_OF_CHANGES, State
from ls_edge.runtime.routing.peer.engine_queue import EngineQueue
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import MAY_WAIT, Forward, Send
from ls_edge.runtime.routing.state.held_request import INFINITY
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.routing.state.turn import Turn


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


class StateAnnouncer:
    """Decides which neighbors receive STATE, and notes which credits messages report."""

    def __init__(self, turn: Turn, custody: Custody, rules: Announced) -> None:
        self.due = INFINITY
        """Time of the next :meth:`announce`."""
        self._turn = turn
        self._held = custody.held
        self._rules = rules
        self._told: dict[str, tuple[float, State]] = {}
        """The last STATE to each neighbor, and its time."""
        self._users: dict[str, float] = {}
        """Users, and when each last had a request here."""
        self._announced_at = -INFINITY
        self._urgent = False
        self._reach_version = 0
        self._credits_before = 0
        self._least_credits = 0
        """Fewest credits since the end of the last event, as far as a message reported them."""
        self._reported_none: set[str] = set()
        """Neighbors whose last message from here reported no credit."""
        self._reported_some: set[str] = set()
        """Neighbors that sent tokens since their last STATE, and whose last message reported some credit."""

    # What the rules report.

    def urgent(self) -> None:
        """Tell all neighbors now: warm, draining or stuck has changed, or a link is lost."""
        self.due, self._urgent = self._turn.now, True

    def look_at_changes(self) -> None:
        """Announce soon if links or reachable blocks have changed, and after a while if there is work."""
        turn, limits = self._turn, self._turn.limits
        if turn.neighbors.reach_version != self._reach_version:
            self._reach_version = turn.neighbors.reach_version
            self.due = min(self.due, max(turn.now, self._announced_at + limits.state_least))
        if self._held and self.due > turn.now + limits.state_every:
            self.due = turn.now + limits.state_every

    def forget(self, name: str) -> None:
        """Forget what a neighbor was told: its links are new or gone, or a STATE could not be sent."""
        self._told.pop(name, None)

    def lost(self, name: str) -> None:
        """Forget a neighbor, and tell the others now: they may be about to send work by that way."""
        self.urgent()
        self.forget(name)
        self._users.pop(name, None)
        self._reported_none.discard(name)
        self._reported_some.discard(name)

    def credits_in_answer(self, name: str, *, accepted: bool) -> int:
        """Return the credits of a neighbor for ACCEPT or REFUSE."""
        self._users[name] = self._turn.now
        credit = self._report(name, self._rules.credits_for(name))
        if accepted and credit > 0:
            self._reported_some.add(name)
        return credit

    # What is sent.

    def state(self, name: str) -> State:
        """Return the STATE for a neighbor that greets on one more link, or for another process."""
        near = self._turn.neighbors.candidates()
        shared = self._shared(near)
        self._reported_some.discard(name)
        if name not in self._turn.neighbors.by_name:
            return shared
        state = self._state_for(name, shared, near)
        self._report(name, state.credits)
        self._told[name] = self._turn.now, state
        return state

    def announce(self) -> None:
        """Send the STATE messages that are due, and set when to look again."""
        turn, now, limits = self._turn, self._turn.now, self._turn.limits
        urgent, self._urgent = self._urgent, False
        self._announced_at, self.due = now, INFINITY
        self._update_users()
        near = turn.neighbors.candidates()
        shared = self._shared(near)
        for n in turn.neighbors:
            state = self._state_for(n.name, shared, near)
            at, before = self._told.get(n.name, (-INFINITY, None))
            is_user = n.name in self._users or n.hello.minor < MINOR_OF_CHANGES
            if not urgent and state == before and not is_user:
                continue
            every = limits.state_every if is_user else limits.load_every
            due = at + (every if _reach(state) == _reach(before) else limits.state_least)
            if urgent or now >= due:
                self._send(n.name, state)
                due = now + limits.state_every if is_user else INFINITY
            self.due = min(self.due, due)
        if self._held or self._users:
            self.due = min(self.due, now + limits.state_every)
        # The end of a suspicion changes which blocks are reachable, and is no event.
        self.due = min([self.due, *(n.suspected_until for n in turn.neighbors if n.suspected_until > now)])

    def announce_credits(self) -> None:
        """Send STATE to neighbors whose credits have run out, or that wait for some."""
        rules, limits = self._rules, self._turn.limits
        before, least, after = self._credits_before, self._least_credits, rules.credits
        if after == before == least:
            return
        self._credits_before = self._least_credits = after
        if after > least and self._reported_none:
            # While the engine has work there is time to collect a few: a message for each would cost more than it wins.
            enough = limits.guaranteed if rules.engine.queued else 1
            self._send_to(name for name in sorted(self._reported_none) if rules.credits_for(name) >= enough)
        elif after < before and self._reported_some and (after <= 0 or after <= limits.reserved < before):
            self._send_to(name for name in sorted(self._reported_some) if rules.credits_for(name) <= 0)

    def ride_along(self) -> None:
        """Send STATE to users that get another message now, and had none for a while."""
        turn, told, users = self._turn, self._told, self._users
        since, names = turn.now - turn.limits.state_least, []
        for one in turn.instructions:
            if (
                isinstance(one, (Send, Forward))
                and one.to in users
                and one.to in told
                and told[one.to][0] <= since
                and (isinstance(one, Forward) or type(one.message) not in MAY_WAIT)
            ):
                names.append(one.to)
        if names:
            self._send_to(sorted(set(names)))

    def _send_to(self, names: Iterable[str]) -> None:
        near = self._turn.neighbors.candidates()
        shared = self._shared(near)
        for name in names:
            if name in self._turn.neighbors.by_name:
                self._send(name, self._state_for(name, shared, near))

    def _send(self, name: str, state: State) -> None:
        self._reported_some.discard(name)
        self._report(name, state.credits)
        self._told[name] = self._turn.now, state
        self._turn.instructions.append(Send(name, state))

    def _report(self, name: str, credit: int) -> int:
        """Note what a message tells a neighbor about its credits, and return it."""
        if credit > 0:
            self._reported_none.discard(name)
        else:
            self._reported_none.add(name)
            self._reported_some.discard(name)
            self._least_credits = min(self._least_credits, self._rules.credits)
        return credit

    def _update_users(self) -> None:
        turn, now = self._turn, self._turn.now
        for request in self._held.values():
            for name in (request.upstream, request.itinerary.source):
                if name in turn.neighbors.by_name:
                    self._users[name] = now
        self._users = {name: at for name, at in self._users.items() if now - at < turn.limits.load_every}

    # What a STATE contains.

    def _shared(self, near: Iterable[Neighbor]) -> State:
        """Return the STATE for all neighbors, but for what differs between them; ``near`` may be handed tokens."""
        turn, rules, engine = self._turn, self._rules, self._rules.engine
        return State(
            warm=rules.warm,
            draining=rules.draining,
            stuck=engine.stuck,
            credits=rules.credits,
            queue=engine.length,
            calls=engine.times.calls,
            block_us=engine.times.block_us,
            wait_us=engine.work_us(turn.now),
            reaches=tuple(sorted(turn.neighbors.by_name)),
            reach_blocks=tuple(sorted({block for n in near for block in n.blocks})),
        )

    def _state_for(self, name: str, shared: State, near: Iterable[Neighbor]) -> State:
        credit, far = self._rules.credits_for(name), self._far_blocks(name, shared, near)
        if credit == shared.credits and not far:
            return shared
        return msgspec.structs.replace(shared, credits=credit, far_blocks=far)

    def _far_blocks(self, name: str, shared: State, near: Iterable[Neighbor]) -> tuple[tuple[int, ...], ...]:
        """Return the blocks that are 2, 3, … links away by a way that does not begin at ``name``, nearest first.

        A neighbor is not told what it told us itself, nor what others that have links to it tell it. So where all have
        links to all nobody is told anything, and after the only holder of a block has gone nobody passes on what others
        said before they knew. In a ring they do, until :data:`MAX_FAR` ends it.
        """
        turn = self._turn
        known = {*shared.reach_blocks, *self._rules.engine.usable_blocks}
        if len(known) >= turn.bands.num_blocks + len(ENDS):
            return ()
        states = [n.state for n in near if n.name != name and n.state is not None and name not in n.state.reaches]
        found: list[tuple[int, ...]] = []
        for distance in range(MAX_FAR):
            if distance == 0:
                heard = {block for state in states for block in state.reach_blocks}
            else:
                heard = {b for s in states if len(s.far_blocks) >= distance for b in s.far_blocks[distance - 1]}
            found.append(tuple(sorted(heard - known)))
            known |= heard
        while found and not found[-1]:
            found.pop()
        return tuple(found)


def _reach(state: State | None) -> tuple[object, ...]:
    return () if state is None else (state.reaches, state.reach_blocks, state.far_blocks)
