"""Counts of the work of a process, for Prometheus (:mod:`ls_edge.runtime.serve.metrics`).

One thread adds to them, and any thread may read them: each is one number, or a list or dictionary of numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ls_edge.core.errors import RequestError
from ls_edge.core.records import RequestRecord
from ls_edge.runtime.routing.events import Computed
from ls_edge.runtime.transport.outbox import LinkCounts

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Buckets for the latency of answers: milliseconds on one board, up to a budget of seconds."""
CALL_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
"""Buckets for engine calls: from one block of a small model to a batch of large ones on a slow board."""


class Durations:
    """A histogram of durations."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        """Use ``bounds_s``, ascending upper bounds in seconds, and one more bucket for longer durations."""
        self.bounds_s = tuple(bounds_s)
        self.counts = [0] * (len(bounds_s) + 1)
        self.total_us = 0
        self._bounds_us = [round(bound * 1e6) for bound in bounds_s]

    def add(self, microseconds: int) -> None:
        """Count one duration."""
        self.counts[bisect_left(self._bounds_us, microseconds)] += 1
        self.total_us += microseconds


class RequestCounts:
    """Counts of the requests of a source, at their submission and at their end."""

    def __init__(self) -> None:
        self.submitted = self.answered = self.degraded = self.cancelled = self.retries = 0
        kinds: list[type[RequestError]] = [RequestError, *RequestError.__subclasses__()]
        self.failed = {kind.__name__: 0 for kind in kinds}
        self.latency = Durations(LATENCY_BOUNDS_S)

    @property
    def in_flight(self) -> int:
        """Number of requests that were submitted and have not ended."""
        ended = self.answered + self.cancelled + sum(self.failed.values())
        return max(0, self.submitted - ended)

    def add_answer(self, record: RequestRecord) -> None:
        """Count an answer."""
        self.answered += 1
        self.degraded += record.degraded
        self.retries += max(0, record.attempts - 1)
        self.latency.add(record.latency_us)

    def add_error(self, error: RequestError, record: RequestRecord) -> None:
        """Count a request that ended with an error."""
        name = type(error).__name__
        self.failed[name] = self.failed.get(name, 0) + 1
        self.retries += max(0, record.attempts - 1)


class EngineCounts:
    """Counts of the successful engine calls of a peer that serves ``blocks``."""

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self.requests = self.blocks = 0
        """A request counts once per call, and a block once per request of a call."""
        self.calls = Durations(CALL_BOUNDS_S)
        self.block_us = dict.fromkeys(blocks, 0.0)
        """Engine time by block; a call of several blocks is divided equally among them."""

    def add(self, event: Computed) -> None:
        """Count a call."""
        self.requests += len(event.transfers)
        self.blocks += len(event.transfers) * len(event.blocks)
        self.calls.add(event.engine_us)
        share_us = event.engine_us / len(event.blocks)
        for block in event.blocks:
            self.block_us[block] += share_us


@dataclass(frozen=True)
class PeerSnapshot:
    """The state of a peer at one moment."""

    name: str
    bundle_id: str = ""
    """Empty while the peer waits for its first bundle."""
    warm: bool = False
    stuck: bool = False
    held: int = 0
    """Number of held requests, copies included."""
    queue: int = 0
    """Number of requests that wait for the engine, and of calls in it."""
    credits: int = 0
    failed_blocks: int = 0
    linked: frozenset[str] = frozenset()
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped messages and refused connections, by reason."""
    reroutes: int = 0
    """Number of transfers that were sent again to another holder."""
    links: LinkCounts = field(default_factory=lambda: LinkCounts(()))
    """Not a snapshot, like ``engine``: these continue to count."""
    engine: EngineCounts = field(default_factory=EngineCounts)
