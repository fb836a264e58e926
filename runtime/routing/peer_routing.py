"""The routing machine of a peer: items that come in, wait for the engine, run and are handed on.

Bounded: a peer accepts as long as it has credits (``Limits.credits`` items of its own work, ``Limits.custody`` copies
for others); REFUSE says so to a sender that saw an older number. The engine runs one call at a time; sources take turns
at it, and within a source the request that came first goes first. Requests that are at the same block, at whatever
slot, run as one batch of at most ``max_batch``, since all blocks of a bundle take the same tokens.
"""

from __future__ import annotations

import functools
import heapq
import math
import random
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from ls_edge.order_costs import OrderCosts
from ls_edge.records import Visit
from ls_edge.runtime.protocol.messages import Accept, Cancel, Itinerary, Refuse, Release, RequestId, State
from ls_edge.runtime.routing.candidates import LocalNode
from ls_edge.runtime.routing.custody import Item, Stage
from ls_edge.runtime.routing.events import (
    Arrived,
    Compute,
    Computed,
    ComputeFailed,
    Drain,
    Event,
    Instruction,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    Received,
    Send,
    TellState,
    Tick,
    Warm,
)
from ls_edge.runtime.routing.neighbours import TRIP_HALVES, Limits, clamped
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.base import Choice, ReturnToSource, RunHere
from ls_edge.runtime.routing.waves import Joiner

_SOURCES = 1024
"""Sources whose turns are remembered."""
_NOT_FINITE = 3
"""Requests in a row without finite outputs after which a block counts as failed: one odd image is not enough."""
_SMOOTH = 0.1
"""Weight of the newest engine call in the usual time of one."""
_SMOOTH_BESIDE = 0.3
_BLOCK_SHARE = 0.25
"""Most of a budget that is kept back for an engine call: a wrong belief in its length must not keep it from running."""


class PeerMachine(Joiner):
    """Routing of a process that serves ``blocks``."""

    def __init__(
        self,
        name: str,
        blocks: Iterable[int],
        *,
        limits: Limits,
        rng: random.Random,
        max_batch: int = 1,
        batch_wait: float = 0.0,
        costs: OrderCosts | None = None,
    ) -> None:
        """``batch_wait``: seconds that a request waits for others to share an engine call with."""
        super().__init__(name, limits=limits, rng=rng, costs=costs)
        self.blocks = frozenset(blocks)
        self.max_batch = max_batch
        self.batch_wait = batch_wait if max_batch > 1 else 0.0
        self.warm = False
        self.draining = False
        self.stuck = False
        self.calls = 0
        self.block_us = 0
        self.beside_us = 0.0
        """The same while a wave of ours is open, when transfers share our core; 0 before the first."""
        self._beside_at = 0.0
        self._last_took = 0.0
        self.failed_blocks: dict[int, str] = {}
        self._queue: list[Item] = []
        self._running: tuple[Item, ...] | None = None
        self._running_since = 0.0
        self._running_blocks = 0
        self._served: dict[str, int] = {}
        self._turn = 0
        self._arrivals = 0
        self._let_in: dict[str, float] = {}
        """When each source, its aliases counting as one, last made a transfer to this peer itself."""
        self._start_at = 0.0
        self._drain_until = float("inf")
        self._tombstones: dict[tuple[str, RequestId], float] = {}
        self._tombstone_ends: list[tuple[float, tuple[str, RequestId]]] = []
        self._orphaned: dict[str, float] = {}
        self._not_finite: dict[int, set[RequestId]] = {}
        """Requests in a row for which a block gave what is not finite."""

    @property
    def credits(self) -> int:
        """Items that it would accept now, from whomever they come."""
        if not self.warm or self.draining or self.stuck:
            return 0
        kept = sum(item.stage is Stage.CUSTODY for item in self.items.values())
        return max(0, min(self.limits.credits - (len(self.items) - kept), self.limits.custody - kept))

    @property
    def idle(self) -> bool:
        """Whether it holds nothing, so that it may leave."""
        return not self.items

    def credits_for(self, name: str) -> int:
        """Transfers that it would accept now from a process, a source or a peer."""
        if not self._is_source(name):
            return self.credits
        held = self._held_by_owner()
        return max(0, min(self.credits - self.limits.reserved, self._room(name, held)), self._guaranteed(name))

    def _is_source(self, name: str) -> bool:
        n = self.neighbours.get(name)
        return n is not None and n.hello.role == "source"

    def _held_by_owner(self) -> Counter[str]:
        """How much of the work here is whose; aliases of a source count as one."""
        return Counter(owner_of(item.owner) for item in self.items.values() if item.stage is not Stage.CUSTODY)

    def _room(self, owner: str, held: Counter[str]) -> int:
        """How many more requests a source may have here: all share the credits equally."""
        who = owner_of(owner)
        return self.limits.fair_share(len(held.keys() | {who})) - held[who]

    def _guaranteed(self, sender: str) -> int:
        """How many transfers a linked source may make even if others hold all credits and never let go.

        That a request is its own is a peer's word where it came from one; so a source that was not let in for a while
        may make one whatever is held in its name.
        """
        if not self.warm or self.draining or self.stuck or not self._is_source(sender):
            return 0
        who = owner_of(sender)
        working = [item for item in self.items.values() if item.stage is not Stage.CUSTODY]
        if sum(item.upstream == item.owner for item in working) >= self.limits.credits:
            return 0
        starved = self._now - self._let_in.get(who, float("-inf")) >= self.limits.starved
        return max(int(starved), self.limits.guaranteed - sum(owner_of(item.owner) == who for item in working))

    def state(self, name: str = "") -> State:
        """What the neighbour of this name has to know."""
        peers = [n for n in self.neighbours if n.hello.role == "peer"]
        reached = {block for n in peers if n.available(self._now) for block in n.hello.blocks}
        return State(
            warm=self.warm,
            draining=self.draining,
            stuck=self.stuck,
            credits=self.credits_for(name),
            queue=len(self._queue) + (self._running is not None),
            calls=self.calls,
            block_us=self.block_us,
            wait_us=self.work_us,
            reaches=tuple(sorted(n.name for n in self.neighbours)),
            reach_blocks=tuple(sorted(reached)),
        )

    def next_check(self) -> float | None:
        """See :meth:`Machine.next_check`; the end of a drain and sources that went away count too."""
        times = [t for t in (super().next_check(), *self._orphaned.values()) if t is not None]
        if self.draining and self._now < self._drain_until:
            times.append(self._drain_until)
        if self._running is None and self._queue and not self.stuck:
            times.append(self._start_at)
        return min(times, default=None)

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """See :meth:`Machine.handle`; that credits have run out, or are there again, is told at once."""
        before, reserved = self.credits, self.limits.reserved
        out = super().handle(event, now)
        after = self.credits
        crossed = (before > 0) != (after > 0) or (before > reserved) != (after > reserved)
        if crossed and TellState() not in out:
            out.append(TellState())
        return out

    def _on(self, event: Event) -> None:
        if isinstance(event, Computed):
            self._on_computed(event)
        elif isinstance(event, ComputeFailed):
            self._on_compute_failed(event)
        elif isinstance(event, Warm):
            self.warm, self.block_us = True, event.block_us
            self._out.append(TellState())
        elif isinstance(event, Drain):
            self.draining = True
            self._drain_until = self._now + self.limits.drain / 2
            self._out.append(TellState())
        else:
            super()._on(event)
        if isinstance(event, NeighbourDown):
            self._let_in.pop(owner_of(event.name), None)
        if isinstance(event, (NeighbourUp, NeighbourDown, NeighbourState, Tick)) and self.items:
            self._look_for_orphans()
        self._forget()

    def _on_message(self, event: Received) -> None:
        if isinstance(event.message, Cancel):
            self._cancel(event.sender, event.message)
        else:
            super()._on_message(event)

    def _on_run(self, event: Arrived) -> None:
        run, sender = event.run, event.sender
        if run.returning and run.itinerary.source == self.name:
            self._on_track(event)
            return
        reason = self._reason_to_refuse(event)
        if reason:
            self._out.append(Send(sender, Refuse(run.transfer, reason, self.credits_for(sender))))
            return
        if run.transfer not in self.items:
            item = Item(
                transfer=run.transfer,
                itinerary=run.itinerary,
                tokens=event.tokens,
                deadline=self._now + run.budget_us / 1e6,
                upstream=sender,
                arrived=self._now,
                tie_break=self._arrivals,
                returning=run.returning,
                codec_us=event.codec_us,
                progress_at=self._now,
            )
            self._arrivals += 1
            if sender == item.owner:
                self._let_in[owner_of(sender)] = self._now
            self.items[run.transfer] = item
            self._ready.append(item)
            self._tell_source(item, sender)
        self._out.append(Send(sender, Accept(run.transfer, self.credits_for(sender))))

    def _reason_to_refuse(self, event: Arrived) -> str:
        run = event.run
        owner = run.itinerary.owner
        if self._tombstones.get((owner, run.transfer.request), self._now) > self._now:
            return "cancelled"
        if run.transfer in self.items:
            return ""
        if not event.finite:
            return "not finite"
        if run.returning:
            room = self.limits.credits + self.limits.custody
            theirs = sum(bool(item.returning) and item.upstream == event.sender for item in self.items.values())
            return "busy" if len(self.items) >= room or theirs >= room // 2 else ""
        if self.draining:
            return "draining"
        if not self.warm:
            return "cold"
        held = self._held_by_owner()
        if self._guaranteed(event.sender):
            return ""
        return "busy" if self.credits_for(event.sender) <= 0 or self._room(owner, held) <= 0 else ""

    # The engine.

    def _own(self, item: Item) -> LocalNode:
        if not self.warm or self.stuck or self._now >= self._drain_until:
            return super()._own(item)
        usable = self.blocks - self.failed_blocks.keys()
        # No wait: whoever sent the tokens here has counted our queue. Weighing it again against what the others said
        # a moment ago would send them to and fro.
        return LocalNode(usable, 0, self.block_us, self.costs, self.limits.credit_wait, self._expected_beside_us())

    def _expected_beside_us(self) -> int:
        """As :meth:`Neighbour.expected_trip_us`, belief fades, so that waves are tried again."""
        if not self.beside_us:
            return 0
        belief = math.pow(0.5, (self._now - self._beside_at) / TRIP_HALVES)
        return round(self.block_us + (self.beside_us - self.block_us) * belief)

    def _decide(self, item: Item) -> None:
        if self._over_budget(item):
            return
        own = self._own(item)
        alone = item.returning or not own.blocks or self.draining
        if alone or not self._split(item, replace(own, wait_us=self.work_us)):
            super()._decide(item)

    @property
    def work_us(self) -> int:
        """What the engine has to do for the requests that wait for it or are on it."""
        waiting = (*self._queue, *(self._running or ()))
        calls = sum(len(self.blocks.intersection(item.itinerary.remaining)) for item in waiting)
        over = min(round((self._now - self._running_since) * 1e6), self._running_blocks * self.block_us)
        return max(0, calls * self.block_us // self.max_batch - (over if self._running else 0))

    def _take(self, item: Item, choice: Choice) -> None:
        if isinstance(choice, RunHere):
            item.stage, item.block, item.check_at = Stage.QUEUED, choice.block, item.deadline
            item.queued_at = self._now
            self._queue.append(item)
        elif isinstance(choice, ReturnToSource):
            self._give_back(item, choice.reason)

    def _after(self) -> None:
        self._queue = [i for i in self._queue if self.items.get(i.transfer) is i and i.stage is Stage.QUEUED]
        if self._running is not None or not self._queue or self.stuck:
            return
        first = min(self._queue, key=lambda i: (self._served.get(i.owner, 0), i.arrived, i.transfer.request))
        batch = [first]
        for item in self._queue:
            if len(batch) < self.max_batch and item is not first and self._may_join(item, first.block):
                batch.append(item)
        self._start_at = first.queued_at + self.batch_wait
        if len(batch) < self.max_batch and self._now < self._start_at:
            return
        self._turn += 1
        self._served[first.owner] = self._turn
        if len(self._served) > _SOURCES:
            del self._served[min(self._served, key=lambda owner: self._served[owner])]
        blocks = self._chain(batch, first.block)
        usual = len(blocks) * self.block_us / 1e6
        for item in batch:
            item.stage = Stage.RUNNING
            item.check_at = self._now + max(self.limits.hop_floor, self.limits.hop_factor * usual)
            self._queue.remove(item)
        self._running = tuple(batch)
        self._running_since, self._running_blocks = self._now, len(blocks)
        self._out.append(
            Compute(
                blocks,
                tuple(i.transfer for i in batch),
                tuple(i.tokens for i in batch),
                tuple(i.itinerary.blocks_done for i in batch),
            )
        )

    def _may_join(self, item: Item, block: int) -> bool:
        """Whether a request that waits for the engine may run ``block`` next; its slot may be any."""
        free = policy_of(item.itinerary.policy).batches_freely
        return item.block == block or (free and block in item.itinerary.remaining)

    def _chain(self, batch: list[Item], first: int) -> tuple[int, ...]:
        """Blocks that all of a batch would run here one after the other anyway, as many as fit one engine call.

        Only what the policies would choose without looking at anybody else: the next wanted block, held here.
        """
        if not all(policy_of(item.itinerary.policy).chains_blocks for item in batch):
            return (first,)
        most = max(1, int(self.limits.chain * 1e6 / max(1, self.block_us)))
        chain = [first]
        own = self._own(batch[0]).blocks
        following = [[b for b in item.itinerary.remaining if b != first] for item in batch]
        while len(chain) < most:
            index = len(chain) - 1
            wanted = {blocks[index] if index < len(blocks) else -1 for blocks in following}
            block = wanted.pop()
            if wanted or block not in own:
                break
            chain.append(block)
        return tuple(chain)

    def _on_computed(self, event: Computed) -> None:
        self.calls += 1
        took = event.engine_us / len(event.blocks)
        took, self._last_took = clamped(took, self.block_us, self._last_took), took
        for block in event.blocks:
            self._not_finite.pop(block, None)
        if any(self._track_of(item) is not None for item in self._running or ()):
            self.beside_us += (took - self.beside_us) * (_SMOOTH_BESIDE if self.beside_us else 1.0)
            self._beside_at = self._now
        else:
            self.block_us = round(self.block_us + _SMOOTH * (took - self.block_us))
        self._engine_is_back()
        for transfer, tokens in zip(event.transfers, event.outputs, strict=True):
            item = self.items.get(transfer)
            if item is None or item.stage is not Stage.RUNNING:
                continue
            item.tokens = tokens
            for block in event.blocks:
                item.itinerary = item.itinerary.ran(block, self.name)
            item.ran += event.blocks
            item.engine_us += event.engine_us
            self._wait(item, None)
            self._ready.append(item)
            found = self._track_of(item)
            self._send_progress([item if found is None else found[0].item])
        self._send_progress(self._queue)

    def _on_compute_failed(self, event: ComputeFailed) -> None:
        if event.rest is not None:
            self._on_computed(event.rest)
        failed = not event.not_finite or self._not_finite_again(event)
        if failed:
            self.failed_blocks[event.block] = event.why
            self._out += [Note("engine failed", self.name, why=f"block {event.block}: {event.why}"), TellState()]
        else:
            self._out.append(Note("not finite", self.name, why=f"block {event.block}: {event.why}"))
        self._engine_is_back()
        for transfer in event.transfers:
            item = self.items.get(transfer)
            if item is None or item.stage is not Stage.RUNNING:
                continue
            if event.not_finite and self._track_of(item) is not None:
                self._give_up(item)
            elif event.not_finite:
                self._give_back(item, "not finite")
            else:
                self._wait(item, None)
                self._ready.append(item)
        if event.rest is not None:
            self._on_computed(event.rest)
        if failed:
            self._requeue()

    def _not_finite_again(self, event: ComputeFailed) -> bool:
        """Count a block's outputs that are not finite; whether there were too many in a row."""
        seen = self._not_finite.setdefault(event.block, set())
        seen.update(transfer.request for transfer in event.transfers)
        return len(seen) >= _NOT_FINITE

    def _engine_is_back(self) -> None:
        self._running = None
        if self.stuck:
            self.stuck = False
            self._out += [Note("engine is back", self.name), TellState()]

    def _late(self, item: Item) -> None:
        if item.stage is Stage.RUNNING:
            item.check_at = item.deadline
            if not self.stuck:
                self.stuck = True
                why = f"block {item.block} has been running for longer than its deadline"
                self._out += [Note("engine is stuck", self.name, item.request, why), TellState()]
                self._requeue()
                for part in self._running or ():
                    self._give_up(part)
        else:
            super()._late(item)

    def _requeue(self) -> None:
        """What waits for the engine is decided again."""
        for item in self._queue:
            self._wait(item, None)
            self._ready.append(item)
        self._queue = []

    # Handing on.

    def _accepted(self, item: Item) -> None:
        if item.upstream in self.neighbours.by_name:
            assert item.upstream is not None
            self._out.append(Send(item.upstream, Release(item.transfer, item.next)))
        if item.returning and item.next == item.itinerary.source:
            self._drop(item)

    def _give_back(self, item: Item, reason: str) -> None:
        item.returning = reason
        # Who relayed them on the way here may relay them on the way home.
        item.itinerary = msgspec.structs.replace(item.itinerary, relays=())
        self._send_home(item)

    def _with_visit(self, item: Item, itinerary: Itinerary) -> Itinerary:
        stay = round((self._now - item.arrived) * 1e6)
        queue = max(0, stay - item.engine_us - item.wait_us)
        visit = Visit(
            self.name, tuple(item.ran), queue, item.engine_us, item.codec_us, item.wait_us, tuple(item.tracks)
        )
        return msgspec.structs.replace(itinerary, visits=(*itinerary.visits, visit))

    def _end(self, item: Item) -> float:
        if item.stage in (Stage.WAITING, Stage.JOINING) and not item.returning:
            # However slow the engine is believed to be, most of the time that there was is tried.
            usual = min(self.block_us / 1e6, _BLOCK_SHARE * (item.deadline - item.arrived))
            return item.deadline - self.limits.way_back - usual
        return item.deadline

    def _over_budget(self, item: Item) -> bool:
        if self._now >= item.deadline:
            self._drop(item)
            return True
        if item.stage is Stage.JOINING and self._now >= self._end(item):
            self._stop_waiting(item)
            return True
        on_its_way = item.returning or item.itinerary.source == self.name
        if item.stage is Stage.WAITING and not on_its_way and self._now >= self._end(item):
            self._give_back(item, "budget")
            return True
        return False

    def _on_refuse(self, item: Item, message: Refuse) -> None:
        super()._on_refuse(item, message)
        if message.reason == "cancelled" and not item.returning and item.itinerary.source != self.name:
            # If it is so, the source will take them and forget them; if the other lied, nothing is lost.
            self._give_back(item, "cancelled")

    def _released(self, item: Item, holder: str) -> None:
        n = self.neighbours.get(item.next)
        if n is not None:
            n.got_on()
        super()._released(item, holder)

    # What nobody waits for any more.

    def _cancel(self, sender: str, message: Cancel) -> None:
        """Forget what belongs to the sender: nobody cancels the requests of others."""
        until = self._now + message.budget_us / 1e6
        keys = {(sender, request) for request in message.requests}
        for key in keys:
            self._tombstones.pop(key, None)
            self._tombstones[key] = until
            heapq.heappush(self._tombstone_ends, (until, key))
        self._forget_tombstones()
        for item in [i for i in self.items.values() if (i.owner, i.request) in keys]:
            self._drop(item)

    def _forget_tombstones(self) -> None:
        ends = self._tombstone_ends
        while len(self._tombstones) > self.limits.tombstones:
            del self._tombstones[next(iter(self._tombstones))]  # the oldest
        while ends and (ends[0][0] <= self._now or len(ends) > 2 * self.limits.tombstones):
            until, key = heapq.heappop(ends)
            if self._tombstones.get(key, self._now) <= until and until <= self._now:
                self._tombstones.pop(key, None)

    def _look_for_orphans(self) -> None:
        """Find sources of held work that nobody reaches any more, however it was that they were reached."""
        sources = {item.itinerary.source for item in self.items.values()} - {self.name}
        for name in sources:
            if name in self.neighbours.by_name or any(n.state and name in n.state.reaches for n in self.neighbours):
                self._orphaned.pop(name, None)
            else:
                self._orphaned.setdefault(name, self._now + self.limits.away_floor)
        for name in self._orphaned.keys() - sources:
            del self._orphaned[name]

    def _forget(self) -> None:
        if self._now >= self._drain_until and self._queue:
            self._requeue()
        self._forget_tombstones()
        for name in [n for n, at in self._orphaned.items() if at <= self._now]:
            del self._orphaned[name]
            for item in [i for i in self.items.values() if i.itinerary.source == name]:
                self._out.append(Note("dropped", name, item.request, "its source went away"))
                self._drop(item)


_ALIAS = re.compile(r"\.[0-9a-f]{8}$")


@functools.lru_cache(4096)
def owner_of(name: str) -> str:
    """The name in ``peers.yaml`` behind the alias of a source process."""
    return _ALIAS.sub("", name)
