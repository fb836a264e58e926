"""Waiting requests, indexed by the event that ends the wait: a credit or any change of a neighbor."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection

from ls_edge.runtime.routing.state.held_request import HeldRequest, Stage, require


class WaitingRequests:
    """An index of the requests in the stage ``WAITING``."""

    def __init__(self) -> None:
        self.ready: deque[HeldRequest] = deque()
        """Requests that are decided at the end of the event, if they still wait."""
        self.may_have_room: dict[str, None] = {}
        """Neighbors that may take more than before, and for which requests wait."""
        self._for_credit: dict[str, dict[int, HeldRequest]] = {}
        """Requests that wait for the credit of a neighbor, by its name, the first that began to wait first."""
        self._for_change: dict[int, HeldRequest] = {}
        """Requests that wait for anything else, or for more than a credit: each change of a neighbor may end it."""

    def __bool__(self) -> bool:
        return bool(self._for_change or self._for_credit)

    def add(self, request: HeldRequest) -> None:
        """Make a request wait for any change of a neighbor."""
        self._for_change[request.number] = request

    def wait_for(self, request: HeldRequest, credit_of: tuple[str, ...], *, or_change: bool) -> None:
        """Make a waiting request wait for the credit of these, and (``or_change``, or if none is given) any change.

        Where it waits for the credit of one of them already, it keeps its place.
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
        """Remove a request that waits no longer."""
        for name in request.waits_for:
            self._remove_from(name, request)
        request.waits_for = ()
        self._for_change.pop(request.number, None)

    def decide_changed(self) -> None:
        """Decide again the requests whose wait any change of a neighbor may end."""
        self.ready.extend(self._for_change.values())

    def decide_for_credit_of(self, name: str) -> None:
        """Decide again the requests that wait for the credit of a neighbor."""
        self.ready.extend(self._for_credit.get(name, {}).values())

    def note_room(self, name: str) -> None:
        """Note that a neighbor may be able to take more than before."""
        if name in self._for_credit:
            self.may_have_room[name] = None

    def use_room(self, room: Callable[[str], int], decide: Callable[[HeldRequest], None]) -> None:
        """Decide again what waits for a neighbor of :attr:`may_have_room`, and remove the neighbor from there.

        As many are decided as the neighbor has ``room`` for, in the order in which they began to wait.
        """
        name, _ = self.may_have_room.popitem()
        passed = 0  # those that were decided, and wait for it still
        while woken := self._first(name, passed, room(name)):
            for request in woken:
                if name in request.waits_for:
                    decide(request)
                    passed += name in request.waits_for

    def _first(self, name: str, passed: int, most: int) -> list[HeldRequest]:
        """Return the requests that wait for the credit of a neighbor, behind those that were ``passed``."""
        return list(itertools.islice(self._for_credit.get(name, {}).values(), passed, passed + max(0, most)))

    def check(self, held: Collection[HeldRequest]) -> None:
        """Check that the index has the waiting ones of the held requests; see ``Machine.validate``."""
        known = {request.number for request in held}
        for request in held:
            waits = {name for name, those in self._for_credit.items() if request.number in those}
            require(waits == set(request.waits_for), "listed as waiting for others", request)
            is_listed = bool(waits) or request.number in self._for_change
            require(is_listed == (request.stage is Stage.WAITING), "waiting or not", request)
        for name, those in self._for_credit.items():
            require(bool(those) and those.keys() <= known, f"waiting for {name}, but not held")
        require(self._for_change.keys() <= known, "waiting for a change, but not held")

    def _remove_from(self, name: str, request: HeldRequest) -> None:
        waiting = self._for_credit[name]
        del waiting[request.number]
        if not waiting:
            del self._for_credit[name]
