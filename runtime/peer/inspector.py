"""Checks of a peer's machine that an observer asks for: what ``ls-edge doctor --peers`` collects.

The checks themselves are handed in. They run on a thread of low priority, one at a time, and what they found serves
everybody who asks within :data:`FRESH_S`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from ls_edge.core.records import MAX_TEXT
from ls_edge.runtime.execution.worker import Worker
from ls_edge.runtime.protocol.messages import MAX_FINDINGS, FindingRow, Findings
from ls_edge.runtime.transport.problems import one_line

log = logging.getLogger("ls_edge.runtime")

Examine = Callable[[], Sequence[FindingRow]]
FRESH_S = 10.0
"""Seconds for which findings are given again instead of looking anew: a check takes seconds of a whole core."""
MAX_ASKING = 64
"""Most processes that wait for an answer at once."""
_NICENESS = 2


class Inspector:
    """Answers who asks for a check; used by the thread of the links."""

    def __init__(self, examine: Examine, send: Callable[[str, Findings], object], wake: Callable[[], None]) -> None:
        """``examine`` may take a minute and start processes; it runs on a thread of its own."""
        self._examine, self._send, self._wake = examine, send, wake
        self._worker: Worker[Findings] | None = None
        self._asking: dict[str, None] = {}
        self._found: Findings | None = None
        self._found_at = 0.0
        self._running = False

    def ask(self, name: str) -> None:
        """Answer a process, at once or when the check is done."""
        if self._found is not None and time.monotonic() < self._found_at + FRESH_S:
            self._send(name, self._found)
            return
        if len(self._asking) < MAX_ASKING:
            self._asking[name] = None
        if not self._running:
            self._running = True
            if self._worker is None:
                self._worker = Worker("inspector", self._wake, niceness=_NICENESS)
            self._worker.submit(self._look)

    def step(self) -> None:
        """Send what was found."""
        for found in self._worker.results() if self._worker is not None else ():
            self._found, self._found_at, self._running = found, time.monotonic(), False
            for name in self._asking:
                self._send(name, found)
            self._asking.clear()

    def close(self) -> None:
        """Stop; a check that runs is left behind."""
        if self._worker is not None:
            self._worker.close()

    def _look(self) -> Findings:
        try:
            rows = self._examine()
        except Exception as error:
            log.exception("the check of this machine failed")
            rows = [FindingRow("bad", "ls-edge doctor", f"the check failed: {error}", "run 'ls-edge doctor' there")]
        short = [FindingRow(*(one_line(text, MAX_TEXT) for text in msgspec.structs.astuple(row))) for row in rows]
        return Findings(tuple(short[:MAX_FINDINGS]))
