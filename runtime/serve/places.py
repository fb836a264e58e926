"""Places for requests in progress, and the queue of requests that wait for a place."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import time

from ls_edge.runtime.serve.replies import Refusal

SLOW_AT_ONCE = 4
"""Maximum number of requests without a place, because their images are large or take long."""
_DEVIATIONS = 4
"""Mean deviations, beyond the mean service time, that a request needs until its deadline; as in RFC 6298."""
_RECENT = 8
"""Number of requests over which service times are averaged."""


class Places:
    """A limited number of places; used by one event loop.

    The request with the earliest deadline gets the next place. A request that can hardly be answered by its deadline
    gets none: under overload, requests whose answers come too late would otherwise occupy the places. Refused clients
    are told to return one after the other: together, they would repeatedly take the processor from the requests in
    the queue.
    """

    def __init__(self, count: int, queue: int) -> None:
        """Provide ``count`` places, for which at most ``queue`` requests wait."""
        self.count = self._free = count
        self._slow_free = SLOW_AT_ONCE
        self.queue = queue
        self._waiting: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._numbers, self._refusals = itertools.count(), itertools.cycle(range(max(1, queue)))
        self._mean_s = self._deviation_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    def leave(self) -> bool:
        """Give a place to others, since its request takes long, unless many do; return whether it was given."""
        if not self._slow_free:
            return False
        self._slow_free -= 1
        self.give_back()
        return True

    def end_slow(self) -> None:
        """Note the end of a request that had left its place."""
        self._slow_free += 1

    async def take(self, deadline: float) -> None:
        """Take a place, before ``deadline`` by the monotonic clock; raise :class:`Refusal`."""
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= self.queue:
            retry_s = max(1, math.ceil((self.queue + next(self._refusals)) * self._mean_s / self.count))
            raise Refusal(
                503,
                f"the limit of images is reached ({self.count} being answered, {self.queue} waiting); try again",
                {"Retry-After": f"{retry_s}"},
            )
        place = asyncio.get_running_loop().create_future()
        entry = deadline, next(self._numbers), place
        bisect.insort(self._waiting, entry)
        try:
            await asyncio.wait((place,), timeout=deadline - time.monotonic())
            if not place.done() or not place.result():
                raise Refusal(
                    504, "the budget ended while the image waited for its turn; give it more time, or send fewer"
                )
        except BaseException:
            if not place.done():
                self._waiting.remove(entry)
            elif place.result():
                self.give_back()
            raise

    def give_back(self, used_s: float = 0.0, *, is_answered: bool = False) -> None:
        """Return a place after ``used_s`` seconds; without an answer, the request would have needed longer."""
        error = used_s - self._mean_s
        if is_answered or error > 0:
            if self._mean_s or not is_answered:  # an outage that has ended delays no further request
                error = min(error, self._mean_s)
            self._mean_s += error / _RECENT
            self._deviation_s += (abs(error) - self._deviation_s) / _RECENT
        while self._waiting:
            deadline, _, place = self._waiting.pop(0)
            is_worth_it = deadline - time.monotonic() >= self._mean_s + _DEVIATIONS * self._deviation_s
            place.set_result(is_worth_it)
            if is_worth_it:
                return
        self._free += 1
