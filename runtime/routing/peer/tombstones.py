"""Ended requests of a peer, which refuses their late tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ls_edge.runtime.protocol.messages import RequestId


class Tombstones:
    """The newest ``most`` ended requests, each until its own time, and with the source that canceled it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.until: OrderedDict[tuple[str, RequestId], float] = OrderedDict()
        """Time until which each is kept, the newest last."""

    def holds(self, key: tuple[str, RequestId], now: float) -> bool:
        """Return whether a request has ended and its budget is not over."""
        return self.until.get(key, now) > now

    def add(self, keys: Iterable[tuple[str, RequestId]], until: float, now: float) -> None:
        """Keep requests until a time; one that is kept already is renewed."""
        for key in keys:
            self.until[key] = until
            self.until.move_to_end(key)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget the oldest ones, as long as there are too many or the time of the oldest is over."""
        while self.until and (len(self.until) > self._most or next(iter(self.until.values())) <= now):
            self.until.popitem(last=False)
