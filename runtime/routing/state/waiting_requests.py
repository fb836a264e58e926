"""Waiting requests, indexed by the event that ends the wait: a credit, or any change of a neighbor."""

from __future__ import annotations

import itertools
import operator
from collections import Counter, deque
from collections.abc import Callable

from ls_edge.runtime.routing.state.held_request import HeldRequest, Stage

MAX_SOURCE_TURNS = 1024
"""Limit on the sources whose latest turn is remembered: each start of one has a new name."""
_OWNER = operator.attrgetter("owner")


class WaitingRequests:
    """Index of the requests in the stage ``WAITING``."""

    def __init__(self) -> None:
        self.ready: deque[HeldRequest] = deque()
        """Requests to decide at the end of the turn, unless they wait no longer."""
        self.may_have_room: dict[str, None] = {}
        """Neighbors that requests wait for, and that may have more room than before."""
        self._for_credit: dict[str, dict[int, HeldRequest]] = {}
        """Requests that wait for the credit of a neighbor, by its name, longest wait first."""
        self._for_change: dict[int, HeldRequest] = {}
        """Requests that any change of a neighbor may concern."""
        self._turns = itertools.count(1)
        self._last_turn: dict[str, int] = {}
        """Latest turn of each source whose requests waited for a credit, earliest first."""

    def __bool__(self) -> bool:
        return bool(self._for_change or self._for_credit)

    def wait_for(self, request: HeldRequest, credit_of: tuple[str, ...] = (), *, or_change: bool = False) -> None:
        """Make a waiting request wait for a credit of ``credit_of``, and with ``or_change`` for any change as well.

        Without names it waits for any change. It keeps its place in the queues that it is in already.
        """
        for name in request.waits_for:
            if name not in credit_of:
                self._remove_from(name, request)
        for name in credit_of:
            self._for_credit.setdefault(name, {})[request.number] = request
        request.waits_for = credit_of
        if or_change or not credit_of:
            self._for_change[request.number] = request
        else:
            self._for_change.pop(request.number, None)

    def remove(self, request: HeldRequest, _to: Stage | None = None) -> None:
        """Remove a request that no longer waits."""
        for name in request.waits_for:
            self._remove_from(name, request)
        request.waits_for = ()
        self._for_change.pop(request.number, None)

    def decide_changed(self) -> None:
        """Decide the requests again that wait for any change of a neighbor."""
        self.ready.extend(self._for_change.values())

    def decide_for_credit_of(self, name: str) -> None:
        """Decide the requests again that wait for the credit of a neighbor."""
        self.ready.extend(self._for_credit.get(name, {}).values())

    def note_room(self, name: str) -> None:
        """Record that a neighbor may have more room than before."""
        if name in self._for_credit:
            self.may_have_room[name] = None

    def use_room(self, room: Callable[[str], int], decide: Callable[[HeldRequest], None]) -> None:
        """Take a neighbor out of :attr:`may_have_room`, and decide requests that wait for it.

        Decide at most as many as the neighbor has ``room`` for. Sources take turns, so that none can make the others
        wait; within a source, the longest wait comes first.
        """
        name, _ = self.may_have_room.popitem()
        passed: set[int] = set()  # numbers of those that were decided and still wait for it
        while woken := self._first(name, passed, room(name)):
            for request in woken:
                if name in request.waits_for:
                    decide(request)
                    if name in request.waits_for:
                        passed.add(request.number)
                    else:
                        self._last_turn.pop(request.owner, None)
                        self._last_turn[request.owner] = next(self._turns)
                        if len(self._last_turn) > MAX_SOURCE_TURNS:
                            del self._last_turn[next(iter(self._last_turn))]

    def _first(self, name: str, passed: set[int], most: int) -> list[HeldRequest]:
        """Return at most ``most`` requests that wait for the credit of a neighbor, without those that ``passed``."""
        if most <= 0:
            return []
        waiting = [request for number, request in self._for_credit.get(name, {}).items() if number not in passed]
        if len(set(map(_OWNER, waiting))) > 1:
            ranks, counts = {}, Counter[str]()
            for request in waiting:
                ranks[request.number] = counts[request.owner]
                counts[request.owner] += 1
            waiting.sort(key=lambda one: (ranks[one.number], self._last_turn.get(one.owner, 0)))
        return waiting[:most]

    def _remove_from(self, name: str, request: HeldRequest) -> None:
        waiting = self._for_credit[name]
        del waiting[request.number]
        if not waiting:
            del self._for_credit[name]
