"""Places for requests that are worked on, and the queue of those that wait for one."""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import time

from ls_edge.runtime.serve.http.replies import Refusal

_DEVIATIONS = 4
"""Mean deviations beyond the mean time in a place that have to be left for a request, as in RFC 6298."""
_RECENT = 8
"""Number of requests over which times are averaged."""


class Places:
    """A number of places. Methods run on one event loop.

    The request with the earliest deadline gets the next place. One that could not be answered by its deadline gets
    none: under a load beyond the capacity, the places would otherwise be taken by requests whose answers come too late.
    Clients that are refused are told to return one after the other: all of them at the same time would take the
    processor from those in the queue, again and again.
    """

    def __init__(self, count: int, queue: int) -> None:
        """Give ``count`` places; at most ``queue`` requests wait for one."""
        self.count = self._free = count
        self.queue = queue
        self._waiting: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._numbers, self._refusals = itertools.count(), itertools.cycle(range(max(1, queue)))
        self._mean_s = self._deviation_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of requests that wait."""
        return len(self._waiting)

    async def take(self, deadline: float) -> None:
        """Take a place, before ``deadline`` by the monotonic clock; raise :class:`Refusal`."""
        if self._free:
            self._free -= 1
            return
        if len(self._waiting) >= self.queue:
            ahead = self.queue + next(self._refusals)
            retry_s = max(1, math.ceil(ahead * self._mean_s / self.count))
            message = f"{self.count} images are being answered and {self.queue} wait, the limit; try again"
            raise Refusal(503, message, {"Retry-After": f"{retry_s}"})
        place = asyncio.get_running_loop().create_future()
        entry = deadline, next(self._numbers), place
        bisect.insort(self._waiting, entry)
        try:
            await asyncio.wait((place,), timeout=deadline - time.monotonic())
            if not place.done() or not place.result():
                raise Refusal(504, "the budget ended before the image had its turn; give it more time, or send fewer")
        except BaseException:
            if not place.done():
                self._waiting.remove(entry)
            elif place.result():
                self.give_back()
            raise

    def give_back(self, used_s: float = 0.0, *, is_answered: bool = False) -> None:
        """Give a place back after ``used_s`` seconds; without an answer, it would have been used for longer."""
        error = used_s - self._mean_s
        if is_answered or error > 0:
            error = error if is_answered else min(error, self._mean_s)  # which may have another cause
            self._mean_s += error / _RECENT
            self._deviation_s += (abs(error) - self._deviation_s) / _RECENT
        while self._waiting:
            deadline, _, place = self._waiting.pop(0)
            is_worth_it = deadline - time.monotonic() >= self._mean_s + _DEVIATIONS * self._deviation_s
            place.set_result(is_worth_it)
            if is_worth_it:
                return
        self._free += 1
