"""Checks of this machine for ``ls-edge doctor --peers``, and measurements of the engines, for observers.

A low-priority thread runs them, one at a time. A result is reused for :data:`FRESH_S` seconds for the same request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ls_edge.core.errors import LsEdgeError
from ls_edge.core.records import MAX_TEXT
from ls_edge.device.worker import Worker
from ls_edge.runtime.protocol.messages import MAX_FINDINGS, FindingRow, Findings
from ls_edge.runtime.transport.problems import one_line

log = logging.getLogger("ls_edge.runtime")

Examine = Callable[[], Sequence[FindingRow]]
FRESH_S = 10.0
"""Seconds for which findings are reused: a check takes seconds of a whole core."""
MAX_ASKING = 64
"""Maximum number of processes that wait for findings at the same time."""
_NICENESS = 2


class Inspector(Worker[tuple[int, Findings]]):
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
        self._asking: dict[int, set[str]] = {}
        """Waiting processes by the length of the measurement in milliseconds; 0 for checks."""
        self._found: tuple[int, Findings, float] | None = None

    def ask(self, name: str, measure_ms: int) -> None:
        """Answer a process, immediately or after the check or measurement."""
        if self._found is not None and self._found[0] == measure_ms and time.monotonic() < self._found[2] + FRESH_S:
            self._send(name, self._found[1])
        elif sum(map(len, self._asking.values())) < MAX_ASKING:
            if measure_ms not in self._asking:
                self.submit(partial(self._look, measure_ms))
            self._asking.setdefault(measure_ms, set()).add(name)

    def step(self) -> None:
        """Send new findings."""
        for measure_ms, findings in self.results():
            self._found = measure_ms, findings, time.monotonic()
            for name in self._asking.pop(measure_ms):
                self._send(name, findings)

    def _look(self, measure_ms: int) -> tuple[int, Findings]:
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
            rows = [FindingRow("bad", "ls-edge doctor", f"the check failed: {error}", "run 'ls-edge doctor' there")]
        short = [FindingRow(*(one_line(text, MAX_TEXT) for text in msgspec.structs.astuple(row))) for row in rows]
        return measure_ms, Findings(tuple(short[:MAX_FINDINGS]), document)
