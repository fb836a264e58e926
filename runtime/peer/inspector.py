"""Checks of a peer's machine that an observer asks for: what ``ls-edge doctor --peers`` collects.

The checks run on a low-priority thread, one at a time. Their findings answer everybody who asks within :data:`FRESH_S`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ls_edge.core.records import MAX_TEXT
from ls_edge.runtime.execution.worker import introduce_thread
from ls_edge.runtime.protocol.messages import MAX_FINDINGS, FindingRow, Findings
from ls_edge.runtime.transport.problems import one_line

log = logging.getLogger("ls_edge.runtime")

Examine = Callable[[], Sequence[FindingRow]]
FRESH_S = 10.0
"""Seconds for which findings are sent again instead of checking anew: a check takes seconds of a whole core."""
MAX_ASKING = 64
"""Processes that wait for findings at the same time."""
_NICENESS = 2


class Inspector:
    """Answers processes that ask for a check; used by the thread of the links."""

    def __init__(self, examine: Examine, send: Callable[[str, Findings], object], wake: Callable[[], None]) -> None:
        """``examine`` may take a minute and start processes; it runs on another thread."""
        self._examine, self._send, self._wake = examine, send, wake
        self._asking: set[str] = set()
        self._new: deque[Findings] = deque()
        self._found: Findings | None = None
        self._found_at = 0.0

    def ask(self, name: str) -> None:
        """Answer a process, immediately or when the check is done."""
        if self._found is not None and time.monotonic() < self._found_at + FRESH_S:
            self._send(name, self._found)
            return
        if not self._asking:
            threading.Thread(target=self._look, name="inspector", daemon=True).start()
        if len(self._asking) < MAX_ASKING:
            self._asking.add(name)

    def step(self) -> None:
        """Send new findings."""
        while self._new:
            self._found, self._found_at = self._new.popleft(), time.monotonic()
            for name in self._asking:
                self._send(name, self._found)
            self._asking.clear()

    def _look(self) -> None:
        """Check the machine; a peer that leaves meanwhile does not wait for the end."""
        introduce_thread("inspector", _NICENESS)
        try:
            rows = self._examine()
        except Exception as error:
            log.exception("the check of this machine failed")
            rows = [FindingRow("bad", "ls-edge doctor", f"the check failed: {error}", "run 'ls-edge doctor' there")]
        short = [FindingRow(*(one_line(text, MAX_TEXT) for text in msgspec.structs.astuple(row))) for row in rows]
        self._new.append(Findings(tuple(short[:MAX_FINDINGS])))
        self._wake()
