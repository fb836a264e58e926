"""Counts of the work of a peer, for Prometheus (:mod:`ls_edge.runtime.serve.metrics`).

One thread adds to them, and any thread may read them: each is one number, or a list or dictionary of numbers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ls_edge.runtime.routing.state.events import Computed
from ls_edge.runtime.transport.outbox import LinkCounts

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


class EngineCounts:
    """Counts of the successful engine calls of a peer that serves ``blocks``."""

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self.requests = self.blocks = 0
        """Requests, counted once per call, and blocks, counted once per request of a call."""
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
    """Id of the served bundle; empty while the peer waits for its first one."""
    warm: bool = False
    stuck: bool = False
    held: int = 0
    """Number of held requests, copies included."""
    queue: int = 0
    """Number of requests that wait for the engine, plus the calls that it has."""
    credits: int = 0
    failed_blocks: int = 0
    linked: frozenset[str] = frozenset()
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped messages and refused connections, by reason."""
    reroutes: int = 0
    """Number of transfers that were sent again to another holder."""
    links: LinkCounts = field(default_factory=lambda: LinkCounts(()))
    """Live counts, like ``engine``: these two are not copied."""
    engine: EngineCounts = field(default_factory=EngineCounts)
