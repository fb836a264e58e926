"""Problems of peers, counts of dropped messages, and log lines of the routing machine."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal

from ls_edge.core.logs import LoggedCounts
from ls_edge.core.text import one_line
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Complaint
from ls_edge.runtime.routing.state.events import Note, NoteKind
from ls_edge.runtime.transport.connections import Incoming, Link
from ls_edge.runtime.transport.links import Links

log = logging.getLogger("ls_edge.runtime")

Kind = Literal["link", "greeting", "complaint"]
"""Kind of problem: no link, a refused greeting, or dropped messages; the first kind is shown."""
_KINDS: tuple[Kind, ...] = ("link", "greeting", "complaint")
COMPLAINT_LASTS = 30.0
"""Seconds for which a complaint of a linked peer is shown."""
NOTES_A_MINUTE = 20
"""Limit on log lines per minute for one kind of note and one process."""
_MAX_NOTE_KINDS = 4096
"""Maximum number of counted pairs of kind and process; beyond it, counting starts again."""
COMPLAINTS_A_SECOND = 10
"""Limit on COMPLAINT messages per link and second; further dropped messages are only counted."""
_DROPPED = {
    "malformed": "dropped a message",
    "before hello": "dropped a message",
    "complaints": "a neighbor complains",
    "hello refused": "refused a process",
}


class PeerProblems:
    """Problems by peer. Every change replaces :attr:`reasons`, which any thread may read."""

    def __init__(self, names: Iterable[str]) -> None:
        """Watch the peers ``names``, which have no links yet, and ignore other processes."""
        self._found: dict[str, dict[Kind, tuple[str, float]]] = {}
        self.reasons: Mapping[str, str] = {}
        self._look_at = 0.0
        self.change(names)

    def change(self, names: Iterable[str]) -> None:
        """Watch these peers from now on; new peers have no links yet."""
        before, self._found = self._found, {}
        for name in names:
            self._found[name] = before.get(name, {})
            if name not in before:
                self.note(name, "link", "no link to it yet")
        self._publish()

    def note(self, name: str, kind: Kind, why: str) -> None:
        """Record a problem with a peer."""
        if name not in self._found:
            return
        before = self._found[name].get(kind)
        self._found[name][kind] = (one_line(why), time.monotonic())
        if before is None or before[0] != self._found[name][kind][0]:
            self._publish()

    def clear(self, name: str, kind: Kind | None = None) -> None:
        """Remove one kind of problem of a peer, or all problems."""
        if self._found.get(name):
            for one in _KINDS if kind is None else (kind,):
                self._found[name].pop(one, None)
            self._publish()

    def forget_old(self, now: float) -> None:
        """Once a second, drop complaints that are older than :data:`COMPLAINT_LASTS`."""
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


NoteCounts = dict[tuple[str, str], tuple[int, int]]
"""Latest minute with notes of a kind about a process, and their number in it."""


def log_note(note: Note, logged: NoteCounts) -> None:
    """Log a note of the routing machine, unless there were too many similar ones in this minute."""
    minute = int(time.monotonic() // 60)
    since, count = logged.get((note.what, note.peer), (minute, 0))
    if since != minute:
        count = 0
    if len(logged) > _MAX_NOTE_KINDS:
        logged.clear()
    logged[note.what, note.peer] = minute, count + 1
    if count >= NOTES_A_MINUTE:
        return
    is_usual = note.what in (NoteKind.REROUTED, NoteKind.ENGINE_BACK) or note.why == "left (done)"
    level = logging.INFO if is_usual else logging.WARNING
    why = note.why + ("; further ones in this minute are not logged" if count == NOTES_A_MINUTE - 1 else "")
    extra = {"peer": note.peer, "why": why}
    log.log(level, note.what.value, extra=extra | ({"request": note.request.hex()[:8]} if note.request else {}))


class RefusedMessages:
    """Dropped messages: counts by reason, and complaints to their senders."""

    def __init__(self, links: Links) -> None:
        self.counts = LoggedCounts()
        self._links = links
        self._complained: dict[Link, tuple[float, int]] = {}

    def drop(self, event: Incoming, what: str, why: str, name: str, model_id: str = "") -> None:
        """Count a message of the process ``name``, and send COMPLAINT, at most :data:`COMPLAINTS_A_SECOND` per link."""
        self.count(what, name, why)
        now = time.monotonic()
        since, sent = self._complained.get(event.link, (now, 0))
        if now - since >= 1.0:
            since, sent = now, 0
        if sent < COMPLAINTS_A_SECOND:
            self._complained[event.link] = (since, sent + 1)
            self._links.send(event.link, [framing.encode(Complaint(one_line(why), model_id))])

    def count(self, what: str, name: str, why: str) -> None:
        """Count a message, and log the 1st, 2nd, 4th, 8th and so on."""
        self.counts.note(what, _DROPPED[what], peer=name or "?", why=one_line(why))

    def forget(self, link: Link) -> None:
        """Forget a link that has ended."""
        self._complained.pop(link, None)
