"""Statistics of the records of a run: latencies, and lost peers.

Times are milliseconds since the start of the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ls_edge.core.peer_reports import PeerState
from ls_edge.core.records import PeerEvent, RequestRecord
from ls_edge.core.text import class_name
from ls_edge.evaluation.run_summary import Floats, RunSummary


class Away(NamedTuple):
    """Time during which a peer could not be reached."""

    peer: str
    start: float
    end: float
    returned: bool = False


@dataclass(frozen=True)
class RunData:
    """A run with the statistics that its charts and tables share."""

    summary: RunSummary
    records: Sequence[RequestRecord]
    events: Sequence[PeerEvent]
    classes: Sequence[str] = ()
    """Names of the model's classes; without them, classes are shown by number."""

    def class_name(self, index: int | None) -> str:
        """Return the name of a class, shortened."""
        return class_name(index, self.classes)

    @cached_property
    def answers(self) -> list[RequestRecord]:
        """Requests that ended with an answer."""
        return [record for record in self.records if record.error is None]

    @cached_property
    def failed(self) -> list[RequestRecord]:
        """Requests that ended with an error."""
        return [record for record in self.records if record.error is not None]

    @cached_property
    def latency(self) -> Floats:
        """Milliseconds, ``[answers]``."""
        return np.array([record.latency_us / 1e3 for record in self.answers], dtype=np.float64)

    @cached_property
    def start_ms(self) -> float:
        """Time of the first submission."""
        return min((record.submitted_us for record in self.records), default=0) / 1e3

    @cached_property
    def end_ms(self) -> float:
        """Time of the last answer or error, at least a millisecond after the start."""
        ends = (record.submitted_us + record.latency_us for record in self.records)
        return max(max(ends, default=0) / 1e3, self.start_ms + 1.0)

    @cached_property
    def changes(self) -> list[PeerEvent]:
        """Changes of state in chronological order, without the first greeting of each peer."""
        known: dict[str, PeerState] = {}
        found = []
        for event in sorted(self.events, key=lambda event: event.at_us):
            before = known.get(event.peer)
            known[event.peer] = event.state
            if before != event.state and (before is not None or event.state != PeerState.ALIVE):
                found.append(event)
        return found

    @cached_property
    def away(self) -> list[Away]:
        """Times from the loss of a peer until its return or the end of the run."""
        since: dict[str, float] = {}
        spells = []
        for event in sorted(self.events, key=lambda event: event.at_us):
            if event.state == PeerState.LOST:
                since.setdefault(event.peer, event.at_us / 1e3)
            elif event.state == PeerState.ALIVE and event.peer in since:
                spells.append(Away(event.peer, since.pop(event.peer), event.at_us / 1e3, returned=True))
        spells += [Away(peer, start, max(self.end_ms, start)) for peer, start in since.items()]
        return sorted(spells, key=lambda spell: spell.start)
