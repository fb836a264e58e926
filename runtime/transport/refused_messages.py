"""Messages that were dropped: counted, logged, and answered with COMPLAINT (guarantee R5)."""

from __future__ import annotations

import logging
import time
from collections import Counter

from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Complaint
from ls_edge.runtime.transport.connections import Incoming, Link
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.problems import one_line
from ls_edge.runtime.transport.zap import is_worth_logging

log = logging.getLogger("ls_edge.runtime")

COMPLAINTS_A_SECOND = 10
"""Largest number of COMPLAINTs per link and second; further messages are only counted."""
_DROPPED = {
    "malformed": "dropped a message",
    "before hello": "dropped a message",
    "complaints": "a neighbour complains",
    "hello refused": "refused a process",
}


class RefusedMessages:
    """Counts of dropped messages by reason."""

    def __init__(self, links: Links) -> None:
        self.counts: Counter[str] = Counter()
        self._links = links
        self._complained: dict[Link, tuple[float, int]] = {}

    def drop(self, event: Incoming, what: str, why: str, name: str, model_id: str = "") -> None:
        """Count a message of the process ``name``, and send a COMPLAINT unless its link had too many."""
        self.count(what, name, why)
        now = time.monotonic()
        since, sent = self._complained.get(event.link, (now, 0))
        if now - since >= 1.0:
            since, sent = now, 0
        if sent < COMPLAINTS_A_SECOND:
            self._complained[event.link] = (since, sent + 1)
            self._links.send(event.link, [wire.encode(Complaint(one_line(why), model_id))])

    def count(self, what: str, name: str, why: str) -> None:
        """Count a message, and log the 1st, 2nd, 4th, 8th and so on."""
        self.counts[what] += 1
        if is_worth_logging(self.counts[what]):
            log.warning(_DROPPED[what], extra={"peer": name or "?", "why": one_line(why), "count": self.counts[what]})

    def forget(self, link: Link) -> None:
        """Forget a link that has ended."""
        self._complained.pop(link, None)
