"""The rules of a peer: requests come in as long as there are credits, run on its engine, and are handed on or home.

Bounded: a peer accepts as long as it has credits (``Limits.credits`` requests of its own work, ``Limits.custody``
copies for others); REFUSE reports the current number to a sender that saw an older one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from ls_edge.core.parts import STEM
from ls_edge.runtime.protocol.messages import (
    Accept,
    Cancel,
    Moved,
    Refuse,
    RefuseReason,
    ReturnReason,
    State,
)
from ls_edge.runtime.routing.claims import own_requests
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.engine_queue import EngineQueue
from ls_edge.runtime.routing.peer.engine_work import EngineWork
from ls_edge.runtime.routing.peer.orphans import Orphans
from ls_edge.runtime.routing.peer.state_announcer import StateAnnouncer
from ls_edge.runtime.routing.peer.tombstones import Tombstones
from ls_edge.runtime.routing.peer.waves import WaveJoiner
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Computed,
    ComputeFailed,
    Decoded,
    Drain,
    NeighborDown,
    NeighborUp,
    Send,
    Unsendable,
    Warm,
)
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest, Stage, require
from ls_edge.runtime.routing.state.limits import Limits


def peer_machine(
    name: str,
    blocks: Iterable[int],
    *,
    limits: Limits,
    rng: random.Random,
    max_batch: int = 1,
    batch_wait: float = 0.0,
    model: Model | None = None,
) -> PeerMachine:
    """Return the machine of a process that serves ``blocks``.

    ``batch_wait``: seconds that a request waits for others to share an engine call with.
    """
    return Machine(
        name,
        lambda machine: PeerRules(machine, frozenset(blocks), max_batch, batch_wait),
        limits=limits,
        rng=rng,
        model=model or Model(),
    )


class PeerRules:
    """What a peer does with requests, beyond what every process does."""

    def __init__(
        self, machine: Machine[PeerRules], blocks: frozenset[int], max_batch: int = 1, batch_wait: float = 0.0
    ) -> None:
        self.custody = custody = machine.custody
        self.decisions = decisions = machine.decisions
        self.engine = EngineQueue(custody, blocks, max_batch, batch_wait)
        self.announcer = StateAnnouncer(custody, self)
        self.joins = WaveJoiner(custody, decisions)
        self.tombstones = Tombstones(custody.limits.tombstones)
        self.orphans = Orphans(custody)
        self.work = EngineWork(custody, decisions, self.engine, self.joins, self.announcer.urgent)
        self.warm = False
        self._drain_until = INFINITY
        """Half of the drain, after which the engine begins nothing; infinity until it begins."""
        self._arrivals = itertools.count()
        machine.handlers |= {
            Warm: [self._on_warm],
            Drain: [self._on_drain],
            Cancel: [self._on_cancel],
            Computed: [self.work.end_call],
            ComputeFailed: [self.work.failed],
            Decoded: [self.work.decoded],
        }
        machine.handlers[NeighborDown] += (
            lambda down: self.custody.credits.forget(down.name),
            lambda down: self.announcer.lost(down.name),
        )
        machine.handlers[NeighborUp].append(lambda event: self.announcer.forget(event.hello.name))
        machine.handlers[Unsendable].append(lambda event: self.announcer.forget(event.failed.to))
        custody.checks.append(self._check)

    # What the process and its neighbors ask.

    @property
    def credits(self) -> int:
        """Number of requests that it would accept now from all senders."""
        return self.custody.credits.total if self._serves else 0

    def credits_for(self, name: str) -> int:
        """Return the number of transfers that it would accept now from a source or peer."""
        if self._serves and self.custody.neighbors.is_source(name):
            return self.custody.credits.of_source(name, self.custody.now)
        return self.credits

    @property
    def draining(self) -> bool:
        """It takes nothing in and hands on what it has."""
        return self._drain_until < INFINITY

    def state(self, name: str = "") -> State:
        """Return the STATE to send to the neighbor of this name."""
        return self.announcer.state(name)

    @property
    def _serves(self) -> bool:
        return self.warm and self._drain_until == INFINITY and not self.engine.stuck

    # Taking in.

    def take_in(self, event: Arrived) -> None:
        """Accept tokens and hold them, or refuse them; take tracks of its own waves back."""
        run, sender, custody = event.run, event.sender, self.custody
        if run.returning and run.itinerary.source == custody.name:
            self.joins.on_returned(event)
            return
        reason = self._reason_to_refuse(event)
        if reason is not None:
            credit = self.announcer.credits_in_answer(sender, accepted=False)
            custody.instructions.append(Send(sender, Refuse(run.transfer, reason, credit)))
            return
        if run.transfer not in custody.held:
            self._hold(event)
        credit = self.announcer.credits_in_answer(sender, accepted=True)
        custody.instructions.append(Send(sender, Accept(run.transfer, credit)))

    def _hold(self, event: Arrived) -> None:
        run, sender, custody = event.run, event.sender, self.custody
        request = HeldRequest(
            transfer=run.transfer,
            itinerary=run.itinerary,
            tokens=event.tokens,
            deadline=custody.now + run.budget_us / 1e6,
            upstream=sender,
            arrived=custody.now,
            tie_break=next(self._arrivals),
            returning=run.returning,
            codec_us=event.codec_us,
            progress_at=custody.now,
            bundle_id="" if run.bundle_id is UNSET else run.bundle_id,
        )
        if sender == run.itinerary.owner:
            self.custody.credits.let_in(sender, custody.now)
        custody.hold(request, f"from {sender}")
        source = run.itinerary.source
        if source != sender and source in custody.neighbors.by_name:
            custody.instructions.append(Send(source, Moved(run.transfer, sender)))

    def _reason_to_refuse(self, event: Arrived) -> RefuseReason | None:
        run, sender, custody = event.run, event.sender, self.custody
        owner = run.itinerary.owner
        if self.tombstones.holds((owner, run.transfer.request), custody.now):
            return RefuseReason.CANCELLED
        if run.transfer in custody.held:
            return None
        if not event.finite:
            return RefuseReason.NOT_FINITE
        if run.returning:
            room = custody.limits.credits + custody.limits.custody
            theirs = sum(bool(request.returning) and request.upstream == sender for request in custody.held.values())
            return RefuseReason.BUSY if len(custody.held) >= room or theirs >= room // 2 else None
        if run.bundle_id and run.bundle_id != custody.model.bundle_id:
            return RefuseReason.OTHER_BUNDLE
        if self.draining:
            return RefuseReason.DRAINING
        if not self.warm:
            return RefuseReason.COLD
        if (
            self._serves
            and self.custody.neighbors.is_source(sender)
            and self.custody.credits.guaranteed(sender, custody.now)
        ):
            return None
        return RefuseReason.BUSY if self.credits_for(sender) <= 0 or self.custody.credits.room(owner) <= 0 else None

    # The next step.

    def local_node(self, wait_us: int = 0) -> LocalNode:
        """Return the blocks that the engine can run: none while it is cold or stuck, or after half of a drain."""
        # By default no wait: the sender of the tokens has counted our queue. Weighing it again against the last STATE
        # of the others would send them to and fro.
        times, custody = self.engine.times, self.custody
        return LocalNode(
            self._usable_blocks,
            wait_us,
            times.block_us,
            custody.model,
            custody.limits,
            times.expected_beside_us(custody.now),
        )

    @property
    def _usable_blocks(self) -> frozenset[int]:
        usable = self.warm and not self.engine.stuck and self.custody.now < self._drain_until
        return self.engine.usable_blocks if usable else frozenset()

    def next_step(self, request: HeldRequest) -> bool:
        """Run a track, hand over, decode, return what is done, or begin a wave; return whether it was one of these."""
        itinerary, name = request.itinerary, self.custody.name
        if itinerary.track is not None and itinerary.source == name:
            self.joins.decide(request, self._usable_blocks)
        elif itinerary.hand_to not in ("", name):
            self._hand_over(request)
        elif itinerary.remaining[:1] == (STEM,) and not request.is_decoded and STEM in self._usable_blocks:
            self.work.decode(request)
        elif not itinerary.remaining:
            self.cannot_continue(request, ReturnReason.DONE)
        elif self.draining or not policy_of(itinerary.policy).runs_in_waves:
            return False
        else:
            local = self.local_node(self.engine.work_us(self.custody.now))
            return bool(local.blocks) and self.joins.split(request, local)
        return True

    def _hand_over(self, request: HeldRequest) -> None:
        """Hand tokens to the peer that their source named before a block runs, since the source measures that link."""
        itinerary = request.itinerary
        if any(n.name == itinerary.hand_to and n.credits > 0 for n in self.decisions.reachable(request)):
            passed = msgspec.structs.replace(itinerary, hand_to="", relays=(*itinerary.relays, self.custody.name))
            self.custody.offer(request, itinerary.hand_to, passed)
        else:
            self.cannot_continue(request, ReturnReason.UNREACHABLE)

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Begin to send a waiting request back to its source."""
        self.decisions.return_home(request, reason)

    # Times and ends.

    def out_of_budget(self, request: HeldRequest) -> bool:
        """End a request at the end of its budget, and send it home in time before."""
        stage, on_its_way = request.stage, request.returning or request.itinerary.source == self.custody.name
        if self.custody.now >= request.deadline:
            self.custody.end(request, "budget")
        elif stage is Stage.JOINING:
            self.joins.stop_waiting(request)
        elif stage is Stage.WAITING and not on_its_way:
            self.cannot_continue(request, ReturnReason.BUDGET)
        else:
            return False
        return True

    # Events of a peer alone.

    def _on_warm(self, event: Warm) -> None:
        self.warm, self.engine.times.block_us, self.custody.own_us = True, event.block_us, event.block_us
        self.announcer.urgent()

    def _on_drain(self, _event: Drain) -> None:
        self._drain_until = self.custody.now + self.custody.limits.drain / 2
        self.announcer.urgent()

    def _on_cancel(self, sender: str, message: Cancel) -> None:
        custody = self.custody
        keys = own_requests(sender, message)
        self.tombstones.add(keys, custody.now + message.budget_us / 1e6, custody.now)
        for request in [request for request in custody.held.values() if (request.owner, request.request) in keys]:
            custody.end(request, "cancelled")

    def finish(self) -> float:
        """Drop the work of sources that have gone, start the engine, and send the STATE messages that are due."""
        custody, engine, announcer, orphans = self.custody, self.engine, self.announcer, self.orphans
        if orphans.next <= custody.now:
            orphans.drop()
        if self._drain_until <= custody.now and engine.length:
            self.work.requeue("half of the drain is over")
            self.decisions.run()
        announcer.look_at_changes()
        if engine.queued:
            self.work.start(self._usable_blocks)
        if custody.now >= announcer.due:
            orphans.look_for()
            self.tombstones.forget(custody.now)
            announcer.announce()
        announcer.announce_credits()
        if custody.instructions:
            announcer.ride_along()
        at = min(engine.next_start, announcer.due, orphans.next)
        return min(at, self._drain_until) if custody.now < self._drain_until else at

    def _check(self) -> None:
        """Check the requests of the engine; see ``Machine.validate``."""
        held, engine = self.custody.held.values(), self.engine
        queued = sorted(id(request) for request in held if request.stage is Stage.QUEUED)
        require(sorted(map(id, engine.queued)) == queued, "the engine's queue differs")
        for request in held:
            given = any(one is request for one in engine.given)
            require(given == (request.stage is Stage.RUNNING), "on the engine or not", request)


PeerMachine = Machine[PeerRules]
"""The machine of a process that serves blocks; made by :func:`peer_machine`."""
