"""Latest events of a machine, from which an odd state or answer can be explained and played again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ls_edge.runtime.routing.state.events import Arrived, Computed, ComputeFailed, Decoded, Event, Submit, Unsendable

MOST = 2000
"""Events that are kept, each at most a few KB: a minute of a busy peer, hours of an idle one."""


def without_tokens(event: Event) -> Event:
    """Return an event without its tokens or image."""
    strip = _WITHOUT_TOKENS.get(type(event))
    return event if strip is None else strip(event)


def text_of(events: Sequence[tuple[float, Event]]) -> str:
    """Return events with their times, one line each."""
    return "\n".join(f"{at:.6f} {event!r}" for at, event in list(events))


def _empty(event: Any) -> Any:
    return msgspec.structs.replace(event, tokens=None)


def _computed(event: Computed) -> Computed:
    return Computed(event.blocks, event.transfers, (), event.engine_us)


def _failed(event: ComputeFailed) -> ComputeFailed:
    return event if event.rest is None else msgspec.structs.replace(event, rest=_computed(event.rest))


_WITHOUT_TOKENS: dict[type, Callable[[Any], Event]] = {
    Arrived: _empty,
    Computed: _computed,
    ComputeFailed: _failed,
    Decoded: _empty,
    Submit: _empty,
    Unsendable: lambda event: Unsendable(_empty(event.failed)) if hasattr(event.failed, "tokens") else event,
}
