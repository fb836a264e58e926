"""Checks of this machine for ``ls-edge doctor --peers``, and measurements of the engines, for observers.

A low-priority thread runs them, one at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ls_edge.core.errors import LsEdgeError
from ls_edge.core.peer_reports import MAX_TEXT
from ls_edge.core.text import one_line
from ls_edge.device.threads import Worker
from ls_edge.runtime.protocol.messages import MAX_FINDINGS, FindingRow, Findings

log = logging.getLogger("ls_edge.runtime")

Examine = Callable[[], Sequence[FindingRow]]
MAX_ASKING = 16
"""Maximum number of requests that wait, since a check takes seconds of a whole core."""
_NICENESS = 2


class Inspector(Worker[tuple[str, Findings]]):
    """Service for checks and measurements of this machine; used by the thread of the links."""

    def __init__(
        self,
        examine: Examine,
        measure: Callable[[float], bytes],
        send: Callable[[str, Findings], object],
        wake: Callable[[], None],
    ) -> None:
        """Call ``examine`` and ``measure(seconds)``, which may take a minute, on another thread, then ``wake``."""
        super().__init__("inspector", wake, niceness=_NICENESS)
        self._examine, self._measure, self._send = examine, measure, send

    def ask(self, name: str, measure_ms: int) -> None:
        """Answer a process after the check, or after a measurement of ``measure_ms`` milliseconds."""
        if len(self) < MAX_ASKING:
            self.submit(partial(self._look, name, measure_ms))

    def step(self) -> None:
        """Send new findings."""
        for name, findings in self.results():
            self._send(name, findings)

    def _look(self, name: str, measure_ms: int) -> tuple[str, Findings]:
        """Check or measure; a peer that leaves meanwhile does not wait for it."""
        rows: Sequence[FindingRow] = ()
        document = b""
        try:
            if measure_ms:
                document = self._measure(measure_ms / 1e3)
            else:
                rows = self._examine()
        except LsEdgeError as error:
            rows = [FindingRow("bad", "engines", str(error))]
        except Exception as error:
            log.exception("the check of this machine failed")
            rows = [FindingRow("bad", "ls-edge doctor", f"the check failed: {error!r}", "run 'ls-edge doctor' there")]
        short = [FindingRow(*(one_line(text, MAX_TEXT) for text in msgspec.structs.astuple(row))) for row in rows]
        return name, Findings(tuple(short[:MAX_FINDINGS]), document)
