"""Ended requests that a peer remembers, to refuse their late tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ls_edge.runtime.protocol.messages import RequestId

MOST = 100_000
"""Ended requests whose late tokens a peer refuses: 21 MB, and 1,600 requests a second with budgets of a minute."""


class Tombstones:
    """The newest ended requests with their sources, each until its own time."""

    def __init__(self) -> None:
        self.until: OrderedDict[tuple[str, RequestId], float] = OrderedDict()
        """Time until which each request is kept, newest last."""

    def holds(self, key: tuple[str, RequestId], now: float) -> bool:
        """Return whether a request has ended and is kept."""
        return self.until.get(key, now) > now

    def add(self, keys: Iterable[tuple[str, RequestId]], until: float, now: float) -> None:
        """Keep requests until a time, or longer than before."""
        for key in keys:
            self.until[key] = until
            self.until.move_to_end(key)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget the oldest requests while there are too many or their time is over."""
        while self.until and (len(self.until) > MOST or next(iter(self.until.values())) <= now):
            self.until.popitem(last=False)
