"""Places for requests that are worked on, and the queue of those that wait for one."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import functools
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
    Refusals are sent one for each request that leaves a place, at different times before their deadlines, and clients
    are told to return one after the other: otherwise all that return take the processor from those in the queue, again
    and again.
    """

    def __init__(self, count: int, queue: int) -> None:
        """Give ``count`` places; at most ``queue`` requests wait for one."""
        self.count = self._free = count
        self.queue = queue
        self._waiting: list[tuple[float, int, asyncio.Future[bool]]] = []
        self._numbers, self._refusals = itertools.count(), itertools.cycle(range(max(1, queue)))
        self._turns = asyncio.BoundedSemaphore(count)
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
            number, left_s = next(self._refusals), deadline - time.monotonic()
            retry_s = max(1, math.ceil((self.queue + number) * self._mean_s / self.count))
            message = f"{self.count} images are being answered and {self.queue} wait, the limit; try again"
            turn = functools.partial(self._wait_turn, left_s * (number + 1) / max(1, self.queue))
            raise Refusal(503, message, {"Retry-After": f"{retry_s}"}, turn)
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
        with contextlib.suppress(ValueError):  # nobody has been refused
            self._turns.release()
        while self._waiting:
            deadline, _, place = self._waiting.pop(0)
            is_worth_it = deadline - time.monotonic() >= self._mean_s + _DEVIATIONS * self._deviation_s
            place.set_result(is_worth_it)
            if is_worth_it:
                return
        self._free += 1

    async def _wait_turn(self, seconds: float) -> None:
        """Wait with a refusal until a request has left its place, but at most for some seconds."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._turns.acquire(), seconds)
