"""Rules of a peer: it accepts requests while it has credits, runs blocks, and hands the tokens on or sends them home.

Memory is bounded: a peer grants ``Limits.credits`` for its own work and keeps ``Limits.custody`` copies for others. The
transfers that it guarantees to each source come on top, but no more than these two together.
REFUSE reports the current number of credits to a sender that knows an older one.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

from msgspec import UNSET

from ls_edge.core.parts import STEM
from ls_edge.runtime.protocol.messages import (
    Accept,
    Cancel,
    Moved,
    Progress,
    Refuse,
    RefuseReason,
    Release,
    ReturnReason,
    State,
)
from ls_edge.runtime.routing.claims import own_requests
from ls_edge.runtime.routing.decisions import Handlers
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.engine_queue import EngineQueue
from ls_edge.runtime.routing.peer.engine_work import EngineWork
from ls_edge.runtime.routing.peer.orphans import Orphans
from ls_edge.runtime.routing.peer.state_announcer import StateAnnouncer
from ls_edge.runtime.routing.peer.tombstones import Tombstones
from ls_edge.runtime.routing.peer.waves import WaveJoiner
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.routing.state.custody import StageActions, Stages
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Computed,
    ComputeFailed,
    Decoded,
    Drain,
    NeighborDown,
    NeighborState,
    NeighborUp,
    Received,
    Removed,
    Tick,
    Unsendable,
    Warm,
)
from ls_edge.runtime.routing.state.held_request import (
    AWAY,
    CUSTODY,
    ENDED,
    INFINITY,
    JOINING,
    OFFERED,
    QUEUED,
    RUNNING,
    WAITING,
    HeldRequest,
)
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import owner_of


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

    A request waits for ``batch_wait`` seconds for others that share its engine call.
    """
    return Machine(
        name,
        lambda machine: PeerRules(machine, frozenset(blocks), max_batch, batch_wait),
        limits=limits,
        rng=rng,
        model=model or Model(),
    )


class PeerRules:
    """Rules of a peer."""

    def __init__(
        self, machine: Machine[PeerRules], blocks: frozenset[int], max_batch: int = 1, batch_wait: float = 0.0
    ) -> None:
        self._machine = machine
        self._turn = turn = machine.turn
        self._custody = custody = machine.custody
        self._decisions = decisions = machine.decisions
        self.engine = EngineQueue(turn, custody.queued, blocks, max_batch, batch_wait)
        self.announcer = StateAnnouncer(turn, custody, self)
        self.joins = joins = WaveJoiner(turn, custody, decisions)
        self.tombstones = Tombstones(turn.limits.tombstones)
        self._orphans = Orphans(turn, custody, decisions)
        self._work = work = EngineWork(turn, custody, decisions, self.engine, joins, self.announcer.urgent)
        self.warm = False
        self._drain_until = INFINITY
        """Time from which the engine starts nothing, half of a drain after its start; infinity without one."""
        self._arrivals = itertools.count()
        self.handlers: Handlers = {
            NeighborUp: (machine.on_up, self._on_up),
            NeighborDown: (machine.on_down, self._on_down),
            NeighborState: (machine.on_state,),
            Arrived: (self._take_in,),
            Received: (machine.on_received,),
            Unsendable: (machine.on_unsendable, self._on_unsendable),
            Computed: (work.end_call,),
            ComputeFailed: (work.failed,),
            Decoded: (work.decoded,),
            Warm: (self._on_warm,),
            Drain: (self._on_drain,),
            Removed: (self._on_removed,),
            Tick: (),
            # Messages, with their sender.
            Accept: (machine.on_accept,),
            Refuse: (machine.on_refuse,),
            Progress: (machine.on_progress,),
            Release: (machine.on_release,),
            Cancel: (self._on_cancel,),
        }
        self.stages: Stages = {
            WAITING: StageActions(custody.waiting.ready.append, custody.waiting.remove),
            QUEUED: StageActions(None, custody.leave_queue),
            RUNNING: StageActions(work.look_at),
            OFFERED: StageActions(machine.check_hop, custody.leave_hop),
            CUSTODY: StageActions(machine.check_hop, custody.leave_hop),
            AWAY: StageActions(joins.give_up),
            JOINING: StageActions(joins.look_at, joins.leave_joining),
            ENDED: StageActions(joins.on_ended),
        }

    # Questions of the process and its neighbors.

    @property
    def credits(self) -> int:
        """Number of requests that would be accepted now from all senders together."""
        return self._custody.credits.total if self._serves else 0

    def credits_for(self, name: str) -> int:
        """Return the number of transfers that would be accepted now from one sender."""
        neighbors, room = self._turn.neighbors, self._custody.credits
        n = neighbors.get(name)
        if n is None or not self._serves:
            return self.credits
        if n.hello.role == "source":
            return room.of_source(name, self._turn.now)
        return room.of_relay(name) if neighbors.leads_beyond(n) else room.total

    @property
    def draining(self) -> bool:
        """Whether it accepts nothing and hands on what it holds."""
        return self._drain_until < INFINITY

    def state(self, name: str = "") -> State:
        """Return the STATE for a neighbor."""
        return self.announcer.state(name)

    @property
    def _serves(self) -> bool:
        return self.warm and self._drain_until == INFINITY and not self.engine.stuck

    # Arrival of tokens.

    def _take_in(self, event: Arrived) -> None:
        """Accept tokens and hold them, or refuse them; pass returned tracks to their wave."""
        run, sender, turn = event.run, event.sender, self._turn
        if run.returning and run.itinerary.source == turn.name:
            self.joins.on_returned(event)
            return
        copy = self._copy_of(event)
        reason = self._reason_to_refuse(event, copy)
        if reason is not None:
            credit = self.announcer.credits_in_answer(sender, accepted=False)
            turn.send(sender, Refuse(run.transfer, reason, credit))
            return
        if run.transfer not in self._custody.held:
            if copy is not None:
                self._machine.passed_on(copy, turn.name)
            self._hold(event, copy)
        credit = self.announcer.credits_in_answer(sender, accepted=True)
        turn.send(sender, Accept(run.transfer, credit))

    def _hold(self, event: Arrived, copy: HeldRequest | None) -> None:
        run, sender, turn, custody = event.run, event.sender, self._turn, self._custody
        request = HeldRequest(
            transfer=run.transfer,
            itinerary=run.itinerary,
            tokens=event.tokens,
            deadline=turn.now + run.budget_us / 1e6,
            upstream=sender,
            arrived=turn.now,
            tie_break=next(self._arrivals),
            returning=run.returning,
            codec_us=event.codec_us,
            progress_at=turn.now,
            bundle_id="" if run.bundle_id is UNSET else run.bundle_id,
        )
        if sender == run.itinerary.owner:
            custody.credits.let_in(sender, turn.now)
        custody.hold(request, f"from {sender}", copy)
        source = run.itinerary.source
        if source != sender and source in turn.neighbors.by_name:
            turn.send(source, Moved(run.transfer, sender))

    def _copy_of(self, event: Arrived) -> HeldRequest | None:
        """Return the copy that tokens replace: the one kept for their last transfer, if this process sent it.

        Without this, copies could fill a relay that is the only way home for their own requests, or the only way to
        further blocks. Copies from a linked source are replaced only by tokens that would be refused, and as long as
        peers have passed on less than may be held in all: a source may fill their places again.
        """
        run, sender, room = event.run, event.sender, self._custody.credits
        owner = run.itinerary.owner
        if not run.returning and run.itinerary.track is not None:
            return None
        if not run.returning and owner in self._turn.neighbors.by_name and not self._is_full(owner, sender):
            return None
        return next(
            (
                request
                for request in self._custody.sent.values()
                if request.request == run.transfer.request
                and request.downstream == sender
                and (run.returning or request.relay or room.takes_relayed)
            ),
            None,
        )

    def _reason_to_refuse(self, event: Arrived, copy: HeldRequest | None) -> RefuseReason | None:
        run, sender, turn, custody = event.run, event.sender, self._turn, self._custody
        owner = run.itinerary.owner
        if self.tombstones.holds((owner, run.transfer.request), turn.now):
            return RefuseReason.CANCELED
        if run.transfer in custody.held:
            return None
        if not event.finite:
            return RefuseReason.NOT_FINITE
        if run.returning:
            room = turn.limits.credits + turn.limits.custody + (copy is not None)
            theirs = sum(bool(request.returning) and request.upstream == sender for request in custody.held.values())
            from_peers = len(custody.held) - custody.credits.held_from_owner
            return RefuseReason.BUSY if from_peers >= room or theirs >= room // 2 else None
        if run.bundle_id and run.bundle_id != turn.model.bundle_id:
            return RefuseReason.OTHER_BUNDLE
        if self.draining:
            return RefuseReason.DRAINING
        if not self.warm:
            return RefuseReason.COLD
        n = turn.neighbors.get(sender)
        if n is not None and n.loses_tokens and run.itinerary.source == sender:  # the tokens would not come back
            return RefuseReason.LOSES_TOKENS
        if self._serves and turn.neighbors.is_source(sender) and custody.credits.guaranteed(sender, turn.now):
            return None
        return RefuseReason.BUSY if copy is None and self._is_full(owner, sender) else None

    def _is_full(self, owner: str, sender: str) -> bool:
        account = self._custody.account_of(owner, sender)
        return self.credits_for(sender) <= 0 or (account != sender and self._custody.credits.room(account) <= 0)

    # Next step of a request.

    def local_node(self, wait_us: int = 0) -> LocalNode:
        """Return the blocks that the engine can run: none while it is cold or stuck, and after half of a drain."""
        # No wait by default: the sender of the tokens has counted this queue. Comparing it again with the latest STATE
        # of others would send tokens back and forth.
        times, turn = self.engine.times, self._turn
        return LocalNode(
            self._usable_blocks,
            wait_us,
            times.block_us,
            turn.model,
            turn.limits,
            times.expected_beside_us(turn.now),
        )

    @property
    def _usable_blocks(self) -> frozenset[int]:
        usable = self.warm and not self.engine.stuck and self._turn.now < self._drain_until
        return self.engine.usable_blocks if usable else frozenset()

    def next_step(self, request: HeldRequest) -> bool:
        """Run a track, decode, send home or start a wave; return whether one of these applied."""
        itinerary, name = request.itinerary, self._turn.name
        if itinerary.track is not None and itinerary.source == name:
            self.joins.decide(request, self._usable_blocks)
        elif itinerary.remaining[:1] == (STEM,) and not request.is_decoded and STEM in self._usable_blocks:
            self._work.decode(request)
        elif not itinerary.remaining:
            self.cannot_continue(request, ReturnReason.DONE)
        elif self.draining or not policy_of(itinerary.policy).runs_in_waves:
            return False
        else:
            local = self.local_node(self.engine.work_us(self._turn.now))
            return bool(local.blocks) and self.joins.split(request, local)
        return True

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Start to send a waiting request back to its source."""
        self._decisions.return_home(request, reason)

    # End of the budget.

    def out_of_budget(self, request: HeldRequest) -> bool:
        """Send a request home in time before its deadline, and end it at the deadline."""
        stage, on_its_way = request.stage, request.returning or request.itinerary.source == self._turn.name
        if self._turn.now >= request.deadline:
            self._custody.end(request, "budget")
        elif stage is JOINING:
            self.joins.stop_waiting(request)
        elif stage is WAITING and not on_its_way:
            self.cannot_continue(request, ReturnReason.BUDGET)
        else:
            return False
        return True

    # Further events.

    def _on_up(self, event: NeighborUp) -> None:
        self.announcer.forget(event.hello.name)

    def _on_down(self, event: NeighborDown) -> None:
        self._custody.credits.forget(event.name)
        self.announcer.lost(event.name)

    def _on_removed(self, event: Removed) -> None:
        """Drop requests of removed sources, and those that removed peers sent for sources without a link here."""
        for request in list(self._custody.held.values()):
            is_theirs = owner_of(request.owner) in event.names or request.account in event.names
            if is_theirs and request.stage is not ENDED:  # the end of a wave ends its tracks
                self._decisions.drop(request, self._turn.name, "removed from peers.yaml")

    def _on_unsendable(self, event: Unsendable) -> None:
        self.announcer.forget(event.failed.to)

    def _on_warm(self, event: Warm) -> None:
        self.warm, self.engine.times.block_us, self._custody.own_us = True, event.block_us, event.block_us
        self.announcer.urgent()

    def _on_drain(self, _event: Drain) -> None:
        self._drain_until = self._turn.now + self._turn.limits.drain / 2
        self.announcer.urgent()

    def _on_cancel(self, sender: str, message: Cancel) -> None:
        now, custody = self._turn.now, self._custody
        keys = own_requests(sender, message)
        self.tombstones.add(keys, now + message.budget_us / 1e6, now)
        for request in [request for request in custody.held.values() if (request.owner, request.request) in keys]:
            custody.end(request, "canceled")

    def finish(self) -> float:
        """Drop requests of sources that are gone, start engine calls, and send the STATE messages that are due."""
        turn, engine, announcer, orphans = self._turn, self.engine, self.announcer, self._orphans
        if orphans.next <= turn.now:
            orphans.drop()
        if self._drain_until <= turn.now and engine.length:
            self._work.requeue("half of the drain is over")
            self._decisions.run()
        announcer.look_at_changes()
        if engine.queued:
            self._work.start(self._usable_blocks)
        if turn.now >= announcer.due:
            orphans.look_for()
            self.tombstones.forget(turn.now)
            announcer.announce()
        announcer.announce_credits()
        if turn.instructions:
            announcer.ride_along()
        at = min(engine.next_start, announcer.due, orphans.next)
        return min(at, self._drain_until) if turn.now < self._drain_until else at


PeerMachine = Machine[PeerRules]
"""Machine of a process that serves blocks, made by :func:`peer_machine`."""
