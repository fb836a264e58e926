"""Rules of a peer: it accepts requests while it has credits, runs blocks, and hands the tokens on or sends them home.

Memory is bounded: a peer grants ``Limits.credits`` for its own work and keeps ``Limits.custody`` copies for others. The
transfers that it guarantees to each source, and tokens on their way home, come on top, within twice these numbers.
REFUSE reports the current number of credits to a sender that knows an older one.
"""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from ls_edge.core.parts import STEM
from ls_edge.core.peer_reports import Visit
from ls_edge.runtime.protocol.messages import (
    Accept,
    Cancel,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    RefuseReason,
    Release,
    RequestId,
    ReturnReason,
    without_alias,
)
from ls_edge.runtime.routing.decisions import (
    Actions,
    Case,
    Handlers,
    Rule,
    block_here,
    budget_is_over,
    follow_policy,
    nobody_has_a_credit,
)
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.engine_queue import EngineQueue
from ls_edge.runtime.routing.peer.engine_work import Decode, EngineWork
from ls_edge.runtime.routing.peer.state_announcer import StateAnnouncer
from ls_edge.runtime.routing.peer.waves import OwnTrack, Split, WaveJoiner, own_track, plan_split
from ls_edge.runtime.routing.peer.way_home import Drop, through_others, to_its_source
from ls_edge.runtime.routing.policies.policy import Wait
from ls_edge.runtime.routing.state import budget, hop
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
    NoteKind,
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
from ls_edge.runtime.routing.state.limits import LOOK_AGAIN, Limits

DRAIN = 4.0
"""Time for which a draining peer tries to hand on everything that it holds; after half of it, it begins nothing. With
12 requests of 8 blocks of 50 ms, 1/4: 8 of them are rerouted instead of 4; x4: none, it leaves after 3.2 s."""
HOPS = 64
"""Transfers of a branch beyond four for each block, after which its tokens go home. Where 3 % of the engine calls fail,
1/16: mean -26 %; x4: mean +54 %, tail x5.5, since tokens go round."""

MAX_TOMBSTONES = 100_000
"""Ended requests whose late tokens a peer refuses: 21 MB, and 1,600 requests a second with budgets of a minute."""


def peer_machine(
    name: str,
    blocks: Iterable[int],
    *,
    limits: Limits,
    rng: random.Random,
    max_batch: int = 1,
    model: Model | None = None,
) -> PeerMachine:
    """Return the machine of a process that serves ``blocks``."""
    return Machine(
        name,
        lambda machine: PeerRules(machine, frozenset(blocks), max_batch),
        limits=limits,
        rng=rng,
        model=model or Model(),
    )


class Tombstones:
    """The newest ended requests with their sources, each until its own time, to refuse their late tokens."""

    def __init__(self) -> None:
        self.until: OrderedDict[tuple[str, RequestId], float] = OrderedDict()
        """Time until which each request is kept, newest last."""

    def holds(self, key: tuple[str, RequestId], now: float) -> bool:
        """Return whether a request has ended and is kept."""
        return self.until.get(key, now) > now

    def add(self, keys: Iterable[tuple[str, RequestId]], until: float, now: float) -> None:
        """Keep requests until a time, or longer than before."""
        for key in keys:
            self.until[key] = max(until, self.until.get(key, until))
            self.until.move_to_end(key)
        self.forget(now)

    def forget(self, now: float) -> None:
        """Forget the oldest requests while there are too many or their time is over."""
        while self.until and (len(self.until) > MAX_TOMBSTONES or next(iter(self.until.values())) <= now):
            self.until.popitem(last=False)


class PeerRules:
    """Rules of a peer."""

    waits_s = LOOK_AGAIN

    def __init__(self, machine: Machine[PeerRules], blocks: frozenset[int], max_batch: int = 1) -> None:
        self._turn = turn = machine.turn
        self._custody = custody = machine.custody
        self._decisions = decisions = machine.decisions
        recovery = machine.recovery
        self.engine = EngineQueue(turn, custody.queued, blocks, max_batch)
        self.announcer = announcer = StateAnnouncer(turn, custody, self)
        self.joins = joins = WaveJoiner(turn, custody, decisions)
        self.tombstones = Tombstones()
        self._work = work = EngineWork(turn, custody, self.engine, joins, announcer, self.return_home)
        self.warm = False
        self._drain_until = INFINITY
        """Time from which the engine starts nothing, half of a drain after its start; infinity without one."""
        self._arrivals = itertools.count()
        self.handlers: Handlers = {
            NeighborUp: (machine.on_up, announcer.on_up),
            NeighborDown: (recovery.on_down, announcer.on_down),
            NeighborState: (machine.on_state,),
            Arrived: (self._take_in,),
            Received: (machine.on_received,),
            Unsendable: (recovery.on_unsendable, announcer.on_unsendable),
            Computed: (work.end_call,),
            ComputeFailed: (work.failed,),
            Decoded: (work.decoded,),
            Warm: (self._on_warm,),
            Drain: (self._on_drain,),
            Removed: (self._on_removed,),
            Tick: (),
            # Messages, with their sender.
            Accept: (machine.on_accept,),
            Refuse: (machine.on_refuse, self._on_refuse),
            Progress: (recovery.on_progress,),
            Release: (machine.on_release,),
            Cancel: (self._on_cancel,),
        }
        self.stages: Stages = {
            WAITING: StageActions(custody.waiting.ready.append, custody.waiting.remove),
            QUEUED: StageActions(None, custody.leave_queue),
            RUNNING: StageActions(work.look_at),
            OFFERED: StageActions(recovery.check_hop, custody.leave_hop),
            CUSTODY: StageActions(recovery.check_hop, custody.leave_hop),
            AWAY: StageActions(joins.give_up),
            JOINING: StageActions(joins.look_at, joins.leave_joining),
            ENDED: StageActions(partial(joins.give_up, why="refused")),
        }
        self.decide: tuple[Rule, ...] = (
            budget_is_over, to_its_source, through_others, own_track, self._decode_first, nothing_remains,
            self._split, too_many_hops, block_here, nobody_has_a_credit, follow_policy_patiently,
        )  # fmt: skip
        self.actions: Actions = {
            **decisions.actions,
            ReturnReason: self.return_home,
            Drop: self._drop,
            Decode: work.decode,
            OwnTrack: joins.decide,
            Split: joins.split,
        }

    # Questions of the process and its neighbors.

    @property
    def credits(self) -> int:
        """Number of requests that would be accepted now from all senders together."""
        return self._custody.credits.total if self._serves else 0

    def credits_for(self, name: str) -> int:
        """Return the number of transfers that would be accepted now from one sender."""
        n = self._turn.neighbors.get(name)
        if n is not None and n.is_source and self._serves:
            return self._custody.credits.of_source(name)
        return self.credits

    @property
    def draining(self) -> bool:
        """Whether it accepts nothing and hands on what it holds."""
        return self._drain_until < INFINITY

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
        reason = self._reason_to_refuse(event)
        copy = self._copy_of(event) if reason is RefuseReason.BUSY else None
        if reason is not None and copy is None:
            credit = self.announcer.credits_in_answer(sender, accepted=False)
            turn.send(sender, Refuse(run.transfer, reason, credit))
            return
        if run.transfer not in self._custody.held:
            if copy is not None:
                self.passed_on(copy, turn.name)
            self._hold(event)
        credit = self.announcer.credits_in_answer(sender, accepted=True)
        turn.send(sender, Accept(run.transfer, credit))

    def _hold(self, event: Arrived) -> None:
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
        custody.hold(request, f"from {sender}")
        source = run.itinerary.source
        if source != sender and source in turn.neighbors.by_name:
            turn.send(source, Moved(run.transfer, sender))

    def _copy_of(self, event: Arrived) -> HeldRequest | None:
        """Return the copy that tokens replace: the one kept for their last transfer, if this process sent it.

        Tokens that would be refused take its place. Otherwise copies could fill a relay that is the only way home for
        their own requests, or the only way to further blocks.
        """
        sent = self._custody.sent.values()
        theirs = (one for one in sent if one.request == event.run.transfer.request and one.downstream == event.sender)
        return next((one for one in theirs if one.open_track is None), None)

    def _reason_to_refuse(self, event: Arrived) -> RefuseReason | None:
        run, sender, turn, custody = event.run, event.sender, self._turn, self._custody
        if self.tombstones.holds((run.itinerary.owner, run.transfer.request), turn.now):
            return RefuseReason.CANCELED
        if run.transfer in custody.held:
            return None
        if not event.finite:
            return RefuseReason.NOT_FINITE
        if run.returning:
            return None if custody.credits.lets_through else RefuseReason.BUSY
        if run.bundle_id and run.bundle_id != turn.model.bundle_id:
            return RefuseReason.OTHER_BUNDLE
        if self.draining:
            return RefuseReason.DRAINING
        if not self.warm:
            return RefuseReason.COLD
        n = turn.neighbors.get(sender)
        if n is not None and n.loses_tokens and run.itinerary.source == sender:  # the tokens would not come back
            return RefuseReason.LOSES_TOKENS
        return RefuseReason.BUSY if self.credits_for(sender) <= 0 else None

    # Next step of a request.

    def local_node(self, wait_us: int = 0) -> LocalNode:
        """Return the blocks that the engine can run: none while it is cold or stuck, and after half of a drain."""
        # No wait by default: the sender of the tokens has counted this queue. Comparing it again with the latest STATE
        # of others would send tokens back and forth.
        return LocalNode(self._usable_blocks, wait_us, self.engine.block_us, self._turn.model)

    @property
    def _usable_blocks(self) -> frozenset[int]:
        usable = self.warm and not self.engine.stuck and self._turn.now < self._drain_until
        return self.engine.usable_blocks if usable else frozenset()

    def outgoing(self, request: HeldRequest, itinerary: Itinerary) -> Itinerary:
        """Return the itinerary with the time that a request spent here."""
        engine, waited_us = request.engine, request.waited_us
        queue = max(0, round((self._turn.now - request.arrived) * 1e6) - engine.engine_us - waited_us)
        tracks = tuple(request.tracks)
        visit = Visit(self._turn.name, engine.ran, queue, engine.engine_us, request.codec_us, waited_us, tracks)
        return msgspec.structs.replace(itinerary, visits=(*itinerary.visits, visit))

    def passed_on(self, request: HeldRequest, holder: str) -> None:
        """Drop the copy of a request that ``holder`` has now; wait for a track to come back."""
        if request.open_track is None:
            self._custody.end(request, f"passed on to {holder}")
        else:
            self._custody.transition(request, AWAY, f"passed on to {holder}", self._turn.now + hop.AWAY)

    # Rules of a decision that depend on the engine.

    def _decode_first(self, case: Case) -> Decode | None:
        """Decode an image before the stem runs here."""
        begins = case.itinerary.remaining[:1] == (STEM,) and not case.request.is_decoded
        return Decode() if begins and STEM in self._usable_blocks else None

    def _split(self, case: Case) -> Split | None:
        """Run a wave of tracks if it pays off."""
        if self.draining or not case.policy.runs_in_waves:
            return None
        return plan_split(case, self.local_node(self.engine.work_us(case.now)))

    # End of the budget, and the way home.

    def budget_end(self, request: HeldRequest) -> float:
        """Return the deadline; earlier while a request waits here that would still have to go home."""
        deadline, stage = request.deadline, request.stage
        if request.returning or (stage is not WAITING and stage is not JOINING) or request.open_track is not None:
            return deadline
        return budget.peer_end(deadline, request.arrived, self._custody.own_us)

    def out_of_budget(self, request: HeldRequest) -> None:
        """Send a request home in time before its deadline, and end it at the deadline."""
        if self._turn.now >= request.deadline:
            self._custody.end(request, "budget")
        elif request.stage is JOINING:
            self.joins.stop_waiting(request)
        else:
            self.return_home(request, ReturnReason.BUDGET)

    def return_home(self, request: HeldRequest, reason: str) -> None:
        """Start to send a waiting request back to its source."""
        request.returning, request.waiting_since = reason, None
        # Processes that relayed the tokens on their way here may do so again.
        request.itinerary = msgspec.structs.replace(request.itinerary, relays=())
        self._decisions.decide(request)

    def _drop(self, request: HeldRequest, step: Drop) -> None:
        """End a request and make the previous holder drop its copy, too."""
        self._turn.note(NoteKind.DROPPED, request.itinerary.source, request.request, step.why)
        if (before := self._turn.neighbors.get(request.upstream or "")) is not None:
            self._turn.send(before.name, Release(request.transfer, step.holder or self._turn.name))
        self._custody.end(request, step.why)

    # Further events.

    def _on_removed(self, event: Removed) -> None:
        """Drop requests of removed sources; each process of a source has an alias."""
        for request in list(self._custody.held.values()):
            if without_alias(request.owner) in event.names and request.stage is not ENDED:
                self._drop(request, Drop("removed from peers.yaml"))

    def _on_refuse(self, sender: str, message: Refuse) -> None:
        """End a request that its source has ended, as the next holder knows."""
        if message.reason == RefuseReason.CANCELED:
            for request in [one for one in self._custody.held.values() if one.request == message.transfer.request]:
                if request.sent == message.transfer and request.stage is WAITING:
                    self._drop(request, Drop("canceled", sender))

    def _on_warm(self, event: Warm) -> None:
        self.warm, self.engine.block_us, self._custody.own_us = True, event.block_us, event.block_us
        self.announcer.urgent()

    def _on_drain(self, _event: Drain) -> None:
        self._drain_until = self._turn.now + DRAIN / 2
        self.announcer.urgent()

    def _on_cancel(self, sender: str, message: Cancel) -> None:
        now, custody = self._turn.now, self._custody
        keys = {(sender, request) for request in message.requests}
        self.tombstones.add(keys, now + message.budget_us / 1e6, now)
        for request in [request for request in custody.held.values() if (request.owner, request.request) in keys]:
            custody.end(request, "canceled")

    def finish(self) -> float:
        """Start engine calls, and send the STATE messages that are due."""
        turn, engine, announcer = self._turn, self.engine, self.announcer
        if self._drain_until <= turn.now and engine.length:
            self._work.requeue("half of the drain is over")
            self._decisions.run()
        announcer.look_at_changes()
        if engine.queued:
            self._work.start(self._usable_blocks)
        if turn.now >= announcer.due:
            self.tombstones.forget(turn.now)
            announcer.announce()
        announcer.announce_credits()
        if turn.instructions:
            announcer.ride_along()
        return min(announcer.due, self._drain_until) if turn.now < self._drain_until else announcer.due


# Rules of a decision.


def nothing_remains(case: Case) -> ReturnReason | None:
    """Send a finished request home."""
    return None if case.itinerary.remaining else ReturnReason.DONE


def too_many_hops(case: Case) -> ReturnReason | None:
    """Send tokens home that do not find their way."""
    transfers = case.request.transfer.hop
    return ReturnReason.HOPS if transfers >= HOPS and transfers >= HOPS + 4 * case.itinerary.blocks else None


def follow_policy_patiently(case: Case) -> Any:
    """Let the policy choose; without a link to the source, wait longer for a credit than the policy would.

    The source has no better choice then. It helps as long as the candidates make progress: otherwise two processes may
    wait for each other's credit, and sending requests home makes room.
    """
    choice = follow_policy(case)
    if choice is not ReturnReason.CREDIT or case.itinerary.source in case.turn.neighbors.by_name:
        return choice
    since = case.now if case.request.waiting_since is None else case.request.waiting_since
    moved_at = max((n.moved_at for n in case.candidates), default=0.0)
    until = min(since + hop.KEEP * (case.budget_end - since), max(since, moved_at) + hop.AWAY)
    return Wait() if case.now < until else choice


PeerMachine = Machine[PeerRules]
"""Machine of a process that serves blocks, made by :func:`peer_machine`."""
