"""Queue of a peer's engine, its calls and their typical times.

The engine runs one call at a time. Sources take turns, and each source's oldest request comes first. Requests at the
same block run as one batch of at most ``max_batch``, whatever their slots, since all blocks of a bundle take the same
tokens.

While a call runs, the engine already gets the next one if its batch is full, and then continues without waiting for the
socket thread. A batch that is not full stays in the queue, where others may join it.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass

from ls_edge.runtime.protocol.messages import RequestId
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.state.events import Computed, ComputeFailed
from ls_edge.runtime.routing.state.held_request import HeldRequest
from ls_edge.runtime.routing.state.hop import call_seconds
from ls_edge.runtime.routing.state.link_times import SMOOTH_SLOW, clamped
from ls_edge.runtime.routing.state.turn import Turn
from ls_edge.runtime.routing.state.waiting_requests import MAX_SOURCE_TURNS

NOT_FINITE = 3
"""Requests in a row without finite outputs after which a block counts as failed. Where 3 % of the calls end so, 1: 59
of 120 requests fail instead of 8; x4: no effect, but a block that never works is found later."""
FAILURES = 3
"""Failed calls in a row after which a block counts as failed: memory that other programs used may become free."""
ENGINE_CALLS = 2
"""Calls that an engine has: the running one and the next. With turns of 1 ms and calls of 2.4 ms, 1 answers 17 % less;
3 answer no more than 2, and close batches that others may join."""
CALL_FACTOR = 10.0
"""Usual engine calls after which the engine of this process counts as stuck."""


@dataclass(eq=False)
class _Call:
    """A call that the engine has."""

    batch: tuple[HeldRequest, ...]
    """Requests of the call, including ended ones; empty if they were taken back."""
    num_blocks: int


class EngineQueue:
    """Queue and calls of an engine that runs ``blocks``."""

    def __init__(self, turn: Turn, queued: list[HeldRequest], blocks: frozenset[int], max_batch: int) -> None:
        self.blocks = blocks
        self.failed_blocks: dict[int, str] = {}
        """Blocks that have failed permanently, with the reason."""
        self.stuck = False
        """Whether the running call takes too long."""
        self.num_ended = 0
        """Number of calls that have ended with outputs."""
        self.block_us = 0
        """Typical time of a call for one block."""
        self._running_since = 0.0
        """Start of the running call, or end of the latest one."""
        self._last_took = 0.0
        self._limits = turn.limits
        self.queued = queued
        self.max_batch = max_batch
        self._bands = turn.bands
        self._calls: deque[_Call] = deque()
        """Calls that the engine has, the running one first."""
        self._served: dict[str, int] = {}
        """Sequence number of each source's latest call; sources take turns."""
        self._not_finite: dict[int, set[RequestId]] = {}
        """Consecutive requests without finite outputs, by block."""
        self._failures = Counter[int]()
        """Consecutive failed calls, by block."""

    @property
    def usable_blocks(self) -> frozenset[int]:
        """Blocks that have not failed."""
        return self.blocks.difference(self.failed_blocks) if self.failed_blocks else self.blocks

    @property
    def keeps_failing(self) -> bool:
        """Whether calls of every block keep failing."""
        return bool(self.blocks) and all(self._failures[b] >= FAILURES for b in self.blocks)

    @property
    def running(self) -> tuple[HeldRequest, ...]:
        """Requests of the running call, including ended ones."""
        return self._calls[0].batch if self._calls else ()

    @property
    def given(self) -> tuple[HeldRequest, ...]:
        """Requests of all calls that the engine has, including ended ones."""
        return tuple(request for call in self._calls for request in call.batch)

    @property
    def length(self) -> int:
        """Number of queued requests and calls."""
        return len(self.queued) + len(self._calls)

    @property
    def beside_wave(self) -> bool:
        """Whether the running call is for a track of an open wave, whose other tracks may return meanwhile."""
        return any(request.open_track is not None for request in self.running)

    @property
    def is_ahead(self) -> bool:
        """Whether the engine has as many calls as it may have."""
        return len(self._calls) >= ENGINE_CALLS

    def work_us(self, now: float) -> int:
        """Return the remaining time of the engine for queued and running requests."""
        calls, over, block_us = 0, 0, self.block_us
        for request in (*self.queued, *self.given):
            calls += len(self.blocks.intersection(request.itinerary.remaining))
        if self._calls:
            over = min(round((now - self._running_since) * 1e6), self._calls[0].num_blocks * block_us)
        return max(0, calls * block_us // self.max_batch - over)

    def next_batch(self, now: float, usable: frozenset[int]) -> tuple[tuple[HeldRequest, ...], tuple[int, ...]] | None:
        """Return the requests and blocks of the next call; None if no call should start now."""
        least = self.max_batch if self._calls else 1
        if self.is_ahead or len(self.queued) < least or self.stuck:
            return None
        served = self._served
        first = self.queued[0]
        if len(self.queued) > 1:
            first = min(self.queued, key=lambda one: (served.get(one.owner, 0), one.arrived, one.transfer.request))
        batch = [first]
        if self.max_batch > 1:
            block = first.engine.block
            others = (one for one in self.queued if one is not first and self._may_join(one, block))
            batch += itertools.islice(others, self.max_batch - 1)
        if len(batch) < self.max_batch and self._calls:
            return None
        served[first.owner] = max(served.values(), default=0) + 1
        if len(served) > MAX_SOURCE_TURNS:
            del served[min(served, key=served.__getitem__)]
        blocks = self._chain(batch, first.engine.block, usable)
        if not self._calls:
            self._running_since = now
        self._calls.append(_Call(tuple(batch), len(blocks)))
        return self._calls[-1].batch, blocks

    def most_s(self) -> float:
        """Return the seconds after which the engine counts as stuck unless all its calls have ended."""
        floor, usual = self._limits.hop.floor, self.block_us / 1e6
        return sum(max(floor, CALL_FACTOR * usual * call.num_blocks) for call in self._calls)

    def is_in_time(self, now: float) -> bool:
        """Return whether the running call is within the deadline that other processes give it."""
        blocks = self._calls[0].num_blocks if self._calls else 0
        return now - self._running_since <= call_seconds(self.block_us, blocks)

    def end_call(self, now: float) -> tuple[HeldRequest, ...]:
        """Remove the running call, which has ended, and return its requests."""
        self._running_since = now
        return self._calls.popleft().batch if self._calls else ()

    def take_back(self) -> tuple[HeldRequest, ...]:
        """Take back the requests of all calls but the running one, and return them."""
        taken = tuple(request for call in list(self._calls)[1:] for request in call.batch)
        for call in list(self._calls)[1:]:
            call.batch = ()
        return taken

    def _chain(self, batch: list[HeldRequest], first: int, usable: frozenset[int]) -> tuple[int, ...]:
        """Return the blocks that all requests of a batch would run here in sequence anyway, as many as fit one call.

        A chain has only blocks that the policies choose regardless of other processes: the next preferred block,
        if it is here. The preferred order keeps the bands, and so does a chain.
        """
        most = max(1, int(self._limits.chain * 1e6 / max(1, self.block_us)))
        chain, following = [first], []
        for request in batch:
            it = request.itinerary
            # A policy that plans waves decides anew for each band.
            waves = policy_of(it.policy).runs_in_waves and it.track is None
            following.append(
                [b for b in (self._bands.permitted(it.remaining) if waves else it.remaining) if b != first]
            )
        for wanted in itertools.zip_longest(*following, fillvalue=-1):
            if len(chain) >= most or wanted[0] not in usable or wanted.count(wanted[0]) < len(wanted):
                break
            chain.append(wanted[0])
        return tuple(chain)

    def _may_join(self, request: HeldRequest, block: int) -> bool:
        """Return whether a queued request may run ``block`` next, at any slot."""
        if request.engine.block == block:
            return True
        itinerary = request.itinerary
        return policy_of(itinerary.policy).batches_freely and block in self._bands.permitted(itinerary.remaining)

    def measure(self, event: Computed) -> None:
        """Update the times from a call that has ended."""
        for block in event.blocks:
            self._not_finite.pop(block, None)
            self._failures.pop(block, None)
        self.num_ended += 1
        took = event.engine_us / len(event.blocks)
        took, self._last_took = clamped(took, self.block_us, self._last_took), took
        self.block_us = round(self.block_us + SMOOTH_SLOW * (took - self.block_us))

    def count_failure(self, event: ComputeFailed) -> bool:
        """Count a failed call; return whether its block counts as failed for good from now on."""
        if event.block in self.failed_blocks:
            return False
        if event.not_finite and event.rest is not None:  # the same call gave finite outputs, too
            self._not_finite.pop(event.block, None)
            return False
        if event.not_finite:
            seen = self._not_finite.setdefault(event.block, set())
            seen.update(transfer.request for transfer in event.transfers)
            if len(seen) < NOT_FINITE:
                return False
        else:
            self._failures[event.block] += 1
            if self._failures[event.block] < FAILURES:
                return False
        self.failed_blocks[event.block] = event.why
        return True
