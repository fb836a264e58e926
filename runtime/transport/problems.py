"""The reason why each peer cannot be used, for users: one a peer, kept up to date, read by any thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from ls_edge.core.errors import printable

Kind = Literal["link", "greeting", "complaint"]
"""There is no link to it, one of us refused the other, or it dropped messages of ours. The first of these is shown."""
_KINDS: tuple[Kind, ...] = ("link", "greeting", "complaint")
COMPLAINT_LASTS = 30.0
"""Seconds for which a complaint of a peer that is linked is shown."""


class PeerProblems:
    """Reasons by name; :attr:`reasons` is a snapshot, replaced with every change."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names``: the peers that are watched; what concerns others is ignored. None has a link yet."""
        self._found: dict[str, dict[Kind, tuple[str, float]]] = {name: {} for name in names}
        self.reasons: Mapping[str, str] = {}
        self._look_at = 0.0
        for name in self._found:
            self.note(name, "link", "no link to it yet")

    def note(self, name: str, kind: Kind, why: str) -> None:
        """Record a problem with a peer."""
        if name not in self._found:
            return
        before = self._found[name].get(kind)
        self._found[name][kind] = (one_line(why), time.monotonic())
        if before is None or before[0] != self._found[name][kind][0]:
            self._publish()

    def clear(self, name: str, kind: Kind | None = None) -> None:
        """Remove a problem of a peer, or all of them."""
        if self._found.get(name):
            for one in _KINDS if kind is None else (kind,):
                self._found[name].pop(one, None)
            self._publish()

    def forget_old(self, now: float) -> None:
        """Drop complaints that have not been repeated for :data:`COMPLAINT_LASTS`."""
        if now < self._look_at:
            return
        self._look_at = now + 1.0
        for name, found in self._found.items():
            if "complaint" in found and found["complaint"][1] < now - COMPLAINT_LASTS:
                self.clear(name, "complaint")

    def _publish(self) -> None:
        shown = {}
        for name, found in self._found.items():
            kind = next((one for one in _KINDS if one in found), None)
            if kind is not None:
                shown[name] = found[kind][0]
        self.reasons = MappingProxyType(shown)


def one_line(text: str, longest: int = 500) -> str:
    """``text`` for a terminal, a log or a message to another process: printable, and at most ``longest`` characters."""
    return "".join(one if one.isprintable() else "?" for one in printable(text)[:longest])
