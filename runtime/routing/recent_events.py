"""Latest events of a machine, from which an odd state or answer can be explained and played again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from ls_edge.runtime.routing.state.events import Arrived, Computed, ComputeFailed, Decoded, Event, Submit, Unsendable

MOST = 2000
"""Events that are kept, each at most a few KB: a minute of a busy peer, hours of an idle one."""


class RecentEvents:
    """Ring of events with their times. Tokens and images are left out."""

    def __init__(self) -> None:
        self._ring: deque[tuple[float, Event]] = deque(maxlen=MOST)

    def add(self, now: float, event: Event) -> None:
        """Record an event."""
        strip = _WITHOUT_TOKENS.get(type(event))
        self._ring.append((now, event if strip is None else strip(event)))

    def lines(self) -> list[str]:
        """Return the events, one line each, oldest first."""
        return [f"{at:.6f} {event!r}" for at, event in list(self._ring)]


def _empty(event: Any) -> Any:
    return msgspec.structs.replace(event, tokens=None)


def _computed(event: Computed) -> Computed:
    return Computed(event.blocks, event.transfers, (), event.engine_us)


def _failed(event: ComputeFailed) -> ComputeFailed:
    return event if event.rest is None else msgspec.structs.replace(event, rest=_computed(event.rest))


def _unsendable(event: Unsendable) -> Unsendable:
    return Unsendable(_empty(event.failed)) if hasattr(event.failed, "tokens") else event


_WITHOUT_TOKENS: dict[type, Callable[[Any], Event]] = {
    Arrived: _empty,
    Computed: _computed,
    ComputeFailed: _failed,
    Decoded: _empty,
    Submit: _empty,
    Unsendable: _unsendable,
}
