"""The routing machine of a peer: requests come in, wait for the engine, run and are handed on.

To what every process does (``custody.py``) a peer adds these transitions:

    WAITING -> QUEUED    a block can run here        WAITING -> JOINING   a wave of tracks pays
    QUEUED  -> RUNNING   the engine is given it      JOINING -> WAITING   every track has ended
    RUNNING -> WAITING   blocks have run, or failed, or the call before it hangs
    QUEUED  -> WAITING   engine hangs, block failed, drain half over

Bounded: a peer accepts as long as it has credits (``Limits.credits`` requests of its own work, ``Limits.custody``
copies for others); REFUSE reports the current number to a sender that saw an older one.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.records import Visit
from ls_edge.runtime.protocol.messages import (
    Accept,
    Cancel,
    Itinerary,
    Moved,
    Refuse,
    RefuseReason,
    Release,
    ReturnReason,
    State,
    TransferId,
)
from ls_edge.runtime.routing.candidates import ONE_BAND, Candidate, LocalNode
from ls_edge.runtime.routing.credits import Credits
from ls_edge.runtime.routing.custody import CustodyMachine
from ls_edge.runtime.routing.engine_queue import EngineQueue
from ls_edge.runtime.routing.events import (
    Arrived,
    Compute,
    Computed,
    ComputeFailed,
    Drain,
    Event,
    NeighbourDown,
    NeighbourUp,
    Note,
    NoteKind,
    Send,
    Unsendable,
    Warm,
)
from ls_edge.runtime.routing.held_request import HeldRequest, OpenWave, Stage
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.state_announcer import StateAnnouncer
from ls_edge.runtime.routing.tombstones import Tombstones
from ls_edge.runtime.routing.waves import WaveJoiner

_NO_WAY_HOME_S = 0.1
"""Seconds until tokens that no neighbour can bring home are routed again; a new link triggers that immediately."""
_SOURCES_REMEMBERED = 1024
"""Limit on the sources remembered as near; work of a forgotten one stays until its budget ends."""
_BLOCK_SHARE = 0.25
"""Limit on the fraction of a budget reserved for an engine call, so that a wrong measurement cannot prevent calls."""


class PeerMachine(CustodyMachine):
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
        bands: Bands = ONE_BAND,
        bundle_id: str = "",
    ) -> None:
        """``batch_wait``: seconds that a request waits for others to share an engine call with."""
        super().__init__(name, limits=limits, rng=rng, costs=costs, bands=bands)
        self.engine = EngineQueue(frozenset(blocks), limits, max_batch, batch_wait, bands)
        self.joins = WaveJoiner(self, self._run_here)
        self.tombstones = Tombstones(limits.tombstones)
        self.bundle_id = bundle_id
        self.warm = False
        self.draining = False
        self._credits = Credits(limits, self.occupancy)
        self._states = StateAnnouncer(self)
        self._arrivals = 0
        self._local_node: LocalNode | None = None
        """Latest result of :meth:`local_node`."""
        self._drain_until = float("inf")
        self._orphaned: dict[str, float] = {}
        """Sources of held work that are out of reach, and the time at which the work is dropped."""
        self._once_near: dict[str, None] = {}
        """Sources of held work to which this process or a neighbour had a link."""
        self.transitions |= {
            (Stage.WAITING, Stage.QUEUED): self._enter_queued,
            (Stage.QUEUED, Stage.RUNNING): self._enter_running,
            (Stage.QUEUED, Stage.WAITING): self._leave_queue,
            (Stage.RUNNING, Stage.WAITING): self._enter_waiting,
            (Stage.WAITING, Stage.JOINING): self._enter_joining,
            (Stage.JOINING, Stage.WAITING): self._leave_joining,
            (Stage.QUEUED, Stage.ENDED): self._end_queued,
            (Stage.RUNNING, Stage.ENDED): self._forget,
            (Stage.JOINING, Stage.ENDED): self._end_joining,
        }
        self.event_handlers |= {
            Computed: self._on_computed,
            ComputeFailed: self._on_compute_failed,
            Warm: self._on_warm,
            Drain: self._on_drain,
        }
        self.message_handlers[Cancel] = self._on_cancel

    # What the process around it and its neighbours ask.

    @property
    def credits(self) -> int:
        """Number of requests that it would accept now from all senders."""
        return self._credits.total if self._serves else 0

    def credits_for(self, name: str) -> int:
        """Return the number of transfers that it would accept now from a source or peer."""
        if not self._is_source(name):
            return self.credits
        return self._credits.of_source(name, self.now) if self._serves else 0

    @property
    def idle(self) -> bool:
        """It holds nothing, so it may leave."""
        return not self.held

    def state(self, name: str = "") -> State:
        """Return the STATE to send to the neighbour of this name."""
        return self._states.state(name)

    @property
    def _serves(self) -> bool:
        return self.warm and not self.draining and not self.engine.stuck

    def _is_source(self, name: str) -> bool:
        n = self.neighbours.get(name)
        return n is not None and n.hello.role == "source"

    # Taking in.

    def _on_arrived(self, event: Arrived) -> None:
        run, sender = event.run, event.sender
        if run.returning and run.itinerary.source == self.name:
            self.joins.on_returned(event)
            return
        reason = self._reason_to_refuse(event)
        if reason is not None:
            credit = self._states.credits_in_answer(sender, accepted=False)
            self.instructions.append(Send(sender, Refuse(run.transfer, reason, credit)))
            return
        if run.transfer not in self.held:
            request = HeldRequest(
                transfer=run.transfer,
                itinerary=run.itinerary,
                tokens=event.tokens,
                deadline=self.now + run.budget_us / 1e6,
                upstream=sender,
                arrived=self.now,
                tie_break=self._arrivals,
                returning=run.returning,
                codec_us=event.codec_us,
                progress_at=self.now,
                bundle_id=run.bundle_id or "",
            )
            self._arrivals += 1
            if sender == request.owner:
                self._credits.let_in(sender, self.now)
            self.hold(request, f"from {sender}")
            self.decide_soon(request)
            source = run.itinerary.source
            if source != sender and source in self.neighbours.by_name:
                self.instructions.append(Send(source, Moved(run.transfer, sender)))
        credit = self._states.credits_in_answer(sender, accepted=True)
        self.instructions.append(Send(sender, Accept(run.transfer, credit)))

    def _reason_to_refuse(self, event: Arrived) -> RefuseReason | None:
        run, sender = event.run, event.sender
        owner = run.itinerary.owner
        if self.tombstones.holds((owner, run.transfer.request), self.now):
            return RefuseReason.CANCELLED
        if run.transfer in self.held:
            return None
        if not event.finite:
            return RefuseReason.NOT_FINITE
        if run.returning:
            room = self.limits.credits + self.limits.custody
            theirs = sum(bool(request.returning) and request.upstream == sender for request in self.held.values())
            return RefuseReason.BUSY if len(self.held) >= room or theirs >= room // 2 else None
        if run.bundle_id and run.bundle_id != self.bundle_id:
            return RefuseReason.OTHER_BUNDLE
        if self.draining:
            return RefuseReason.DRAINING
        if not self.warm:
            return RefuseReason.COLD
        if self._serves and self._is_source(sender) and self._credits.guaranteed(sender, self.now):
            return None
        return RefuseReason.BUSY if self.credits_for(sender) <= 0 or self._credits.room(owner) <= 0 else None

    # Deciding.

    def local_node(self, request: HeldRequest) -> LocalNode:  # noqa: ARG002
        """Return the blocks that the engine can run: none while it is cold or stuck, or after half of a drain."""
        # No wait: the sender of the tokens has counted our queue. Weighing it again against the last STATE of the
        # others would send them to and fro.
        known, engine = self._local_node, self.engine
        blocks, block_us, beside_us = self.local_blocks, engine.block_us, engine.expected_beside_us(self.now)
        if known is None or (known.blocks, known.block_us, known.beside_us) != (blocks, block_us, beside_us):
            known = self._local_node = LocalNode(
                blocks=blocks,
                block_us=block_us,
                costs=self.costs,
                credit_wait=self.limits.credit_wait,
                beside_us=beside_us,
                bands=self.bands,
            )
        return known

    def _decide_locally(self, request: HeldRequest, local: LocalNode) -> bool:
        if request.returning:
            self._send_home(request)
            return True
        if self._is_own_track(request):
            self.joins.decide(request, local)
            return True
        if request.itinerary.hand_to not in ("", self.name):
            self._hand_over(request)
            return True
        if not local.blocks or self.draining:
            return False
        if not policy_of(request.itinerary.policy).runs_in_waves:
            return False
        return self.joins.split(request, local._replace(wait_us=self.engine.work_us(self.now)))

    def _is_own_track(self, request: HeldRequest) -> bool:
        """Return whether tokens are, or claim to be, a track that this process joins."""
        return request.itinerary.track is not None and request.itinerary.source == self.name

    def _hand_over(self, request: HeldRequest) -> None:
        """Hand tokens to the peer that their source named before a block runs, since the source measures that link."""
        itinerary = request.itinerary
        free = {candidate.name for candidate in self.reachable(request) if candidate.credits > 0}
        if itinerary.hand_to in free:
            passed = msgspec.structs.replace(itinerary, hand_to="", relays=(*itinerary.relays, self.name))
            self.offer(request, itinerary.hand_to, passed)
        else:
            self._return(request, ReturnReason.UNREACHABLE)

    def _run_here(self, request: HeldRequest, block: int) -> None:
        self.transition(request, Stage.QUEUED, f"block {block}", block)

    def _cannot_go_on(self, request: HeldRequest, reason: ReturnReason) -> None:
        self._return(request, reason)

    def _waits_on(self, request: HeldRequest, candidates: Iterable[Candidate]) -> bool:
        """Return whether the source has no better choice and the awaited peers make progress.

        Without a link to the source, the source reaches nothing that this process does not reach sooner. Without
        progress, two processes may wait for each other's credit: returned requests make room.
        """
        if request.itinerary.source in self.neighbours.by_name:
            return False
        since = self.now if request.waiting_since is None else request.waiting_since
        until = since + self.limits.keep_share * (self._end(request) - since)
        moved_at = max((n.moved_at for c in candidates if (n := self.neighbours.get(c.name))), default=0.0)
        return self.now < min(until, max(since, moved_at) + self.limits.away_floor)

    def _way_out(self, request: HeldRequest) -> str:
        """Return the latest holder of the tokens that is linked and leads beyond the neighbours.

        Where all peers are linked with all, there is none.
        """
        itinerary = request.itinerary
        passed = {request.upstream, *itinerary.relays, *itinerary.avoid, *request.avoid}
        for visit in reversed(itinerary.visits):
            n = self.neighbours.get(visit.holder)
            if n is not None and n.name not in passed and self.leads_beyond(n):
                return n.name
        return ""

    def _return(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Begin to send a waiting request back to its source."""
        request.returning = reason
        # Relays on the way here may relay them on the way home as well.
        request.itinerary = msgspec.structs.replace(request.itinerary, relays=())
        self._send_home(request)

    def _send_home(self, request: HeldRequest) -> None:
        """Offer the tokens to the source, to a neighbour that reaches it, or back the way they came."""
        source = request.itinerary.source
        n = self.neighbours.get(source)
        if n is not None and n.window_left(self.now, self.limits) > 0:
            self.offer(request, source, request.itinerary)
            return
        if n is not None:  # a slow link; what waits for it must not be taken for lost
            self.send_progress([request])
            self.wait(request, self.now + self.limits.look_again, "slow link home", credit_of=(source,))
            return
        way = self._way_home(request)
        if way:
            relays = (*request.itinerary.relays, self.name)
            self.offer(request, way, msgspec.structs.replace(request.itinerary, relays=relays))
        else:
            self.wait(request, self.now + _NO_WAY_HOME_S, "no way home")

    def _way_home(self, request: HeldRequest) -> str:
        """Return a process that may bring tokens home, or "". A linked source may be busy and is waited for."""
        source, relays = request.itinerary.source, request.itinerary.relays
        if source in self.neighbours.by_name:
            return source
        usable = {
            n.name: n
            for n in self.neighbours
            if n.available(self.now) and n.name not in relays and request.avoid.get(n.name, 0.0) <= self.now
        }
        ways = [name for name, n in usable.items() if n.state and source in n.state.reaches]
        if ways:
            return request.upstream if request.upstream in ways else min(ways)
        return self._holder_before(request, usable)

    def _holder_before(self, request: HeldRequest, usable: Collection[str]) -> str:
        """Return the earliest reachable holder of the tokens that is not yet on their way back, or "".

        The one before it was its neighbour, so each such step is one nearer to the source.
        """
        return next((visit.holder for visit in request.itinerary.visits if visit.holder in usable), "")

    # Engine and waves: transitions.

    def _enter_queued(self, request: HeldRequest, block: int) -> None:
        request.engine.block, request.engine.queued_at = block, self.now
        self.set_check(request, request.deadline)
        self.engine.queued.append(request)

    def _enter_running(self, request: HeldRequest, until: float) -> None:
        self.engine.queued.remove(request)
        request.engine.until = until
        self._watch_call(request)

    def _watch_call(self, request: HeldRequest) -> None:
        self.set_check(request, min(request.engine.until, self.now + self.limits.progress_every))

    def _leave_queue(self, request: HeldRequest, until: float | None) -> None:
        self.engine.queued.remove(request)
        self._enter_waiting(request, until)

    def _end_queued(self, request: HeldRequest) -> None:
        self.engine.queued.remove(request)
        self._forget(request)

    def _enter_joining(self, request: HeldRequest, wave: OpenWave) -> None:
        self.joins.enter_joining(request, wave)
        self._look_again(request)

    def _leave_joining(self, request: HeldRequest, until: float | None) -> None:
        self.joins.leave_joining(request)
        self._enter_waiting(request, until)

    def _end_joining(self, request: HeldRequest) -> None:
        self.joins.leave_joining(request)
        self._forget(request)

    def _watch(self, request: HeldRequest) -> None:
        self.set_check(request, self.now + self.limits.away_floor)

    def _look_again(self, request: HeldRequest) -> None:
        self.set_check(request, min(self.now + self.limits.look_again, self._end(request)))

    # The engine.

    def _start_engine(self) -> None:
        engine = self.engine
        while engine.queued:
            started = engine.next_batch(self.now, self.local_blocks)
            if started is None:
                return
            batch, blocks = started
            until = self.now + engine.most_s()
            for request in batch:
                self.transition(request, Stage.RUNNING, f"blocks {', '.join(map(str, blocks))}", until)
            self.instructions.append(
                Compute(
                    blocks,
                    tuple(request.transfer for request in batch),
                    tuple(request.tokens for request in batch),
                    tuple(request.itinerary.blocks_done for request in batch),
                )
            )

    @property
    def local_blocks(self) -> frozenset[int]:
        """Blocks that the engine can run now."""
        usable = self.warm and not self.engine.stuck and self.now < self._drain_until
        return self.engine.usable_blocks if usable else frozenset()

    def _on_warm(self, event: Warm) -> None:
        self.warm, self.engine.block_us = True, event.block_us
        self._states.urgent()

    def _on_computed(self, event: Computed) -> None:
        self.engine.measure(event, self.now)
        self._take_outputs(event, self._end_call())

    def _take_outputs(self, event: Computed, running: Mapping[TransferId, HeldRequest]) -> None:
        """Continue the requests whose blocks have run; ``running`` are those of the call that have not ended."""
        for transfer, tokens in zip(event.transfers, event.outputs, strict=True):
            request = running.get(transfer)
            if request is None:
                continue
            request.tokens = tokens
            request.itinerary = request.itinerary.ran(event.blocks, self.name)
            request.engine.ran += event.blocks
            request.engine.engine_us += event.engine_us
            self.wait(request, None, "ran")
            self.decide_soon(request)
            self.send_progress([request if request.open_track is None else request.open_track.wave.request])
        self.send_progress((*self.engine.given, *self.engine.queued))

    def _on_compute_failed(self, event: ComputeFailed) -> None:
        if event.rest is not None:
            self.engine.measure(event.rest, self.now)
        running = self._end_call()
        if event.rest is not None:
            self._take_outputs(event.rest, running)
        failed = self.engine.count_failure(event)
        why = f"block {event.block}: {event.why}"
        if failed:
            self.instructions.append(Note(NoteKind.ENGINE_FAILED, self.name, why=why))
            self._states.urgent()
        elif event.not_finite:
            self.instructions.append(Note(NoteKind.NOT_FINITE, self.name, why=why))
        for transfer in event.transfers:
            request = running.get(transfer)
            if request is None:
                continue
            if event.not_finite and request.open_track is not None:
                self.joins.give_up(request)
                continue
            self.wait(request, None, why)
            if event.not_finite:
                self._return(request, ReturnReason.NOT_FINITE)
            else:
                self.decide_soon(request)
        if failed:
            self._requeue("a block failed")

    def _end_call(self) -> dict[TransferId, HeldRequest]:
        """Finish the call that the engine returned; return its requests that have not ended meanwhile."""
        batch = self.engine.end_call(self.now)
        if self.engine.stuck:
            self.engine.stuck = False
            self.instructions.append(Note(NoteKind.ENGINE_BACK, self.name))
            self._states.urgent()
        return {request.transfer: request for request in batch if request.stage is Stage.RUNNING}

    def _requeue(self, why: str) -> None:
        """Decide again every request that waits for the engine, or that it has not begun."""
        for request in (*self.engine.queued, *self.engine.take_back()):
            if request.stage in (Stage.QUEUED, Stage.RUNNING):
                self.wait(request, None, why)
                self.decide_soon(request)

    # Handing on.

    def _accepted(self, request: HeldRequest) -> None:
        if request.upstream in self.neighbours.by_name:
            assert request.upstream is not None
            release = Release(request.transfer, request.downstream, request.link_us)
            self.instructions.append(Send(request.upstream, release))
        if request.returning and request.downstream == request.itinerary.source:
            self.end(request, "home")

    def _released(self, request: HeldRequest, holder: str) -> None:
        n = self.neighbours.get(request.downstream)
        if n is not None:
            n.reset_back_off()
        if request.open_track is None:
            self.end(request, f"passed on to {holder}")
        else:  # it is on its way back to us by another way than it went
            self.transition(request, Stage.AWAY, f"passed on to {holder}")

    def _refused(self, request: HeldRequest, sender: str, message: Refuse) -> None:
        cancelled = message.reason == RefuseReason.CANCELLED
        if cancelled and request.returning and not self._way_home(request):
            # The only way home could as well accept the tokens and forget them.
            if request.upstream in self.neighbours.by_name:
                assert request.upstream is not None
                self.instructions.append(Send(request.upstream, Release(request.transfer, sender)))
            self.end(request, f"cancelled, says {sender}, the only way home")

    def _annotated(self, request: HeldRequest, itinerary: Itinerary) -> Itinerary:
        engine, joins = request.engine, request.joins
        queue = max(0, round((self.now - request.arrived) * 1e6) - engine.engine_us - joins.wait_us)
        visit = Visit(
            self.name, tuple(engine.ran), queue, engine.engine_us, request.codec_us, joins.wait_us, tuple(joins.rows)
        )
        return msgspec.structs.replace(itinerary, visits=(*itinerary.visits, visit))

    # Times.

    def _end(self, request: HeldRequest) -> float:
        if request.stage in (Stage.WAITING, Stage.JOINING) and not request.returning:
            # However slow the engine was measured to be, most of the budget is tried.
            usual = min(self.engine.block_us / 1e6, _BLOCK_SHARE * (request.deadline - request.arrived))
            return request.deadline - self.limits.way_back - usual
        return request.deadline

    def _over_budget(self, request: HeldRequest) -> bool:
        if self.now >= request.deadline:
            self.end(request, "budget")
            return True
        if request.stage is Stage.JOINING and self.now >= self._end(request):
            self.joins.stop_waiting(request)
            return True
        on_its_way = request.returning or request.itinerary.source == self.name
        if request.stage is Stage.WAITING and not on_its_way and self.now >= self._end(request):
            self._return(request, ReturnReason.BUDGET)
            return True
        return False

    def _late(self, request: HeldRequest) -> None:
        if request.stage is Stage.RUNNING and self.now < request.engine.until:
            if self.engine.is_in_time(self.now):
                self.send_progress((*self.engine.given, *self.engine.queued))
            self._watch_call(request)
        elif request.stage is Stage.RUNNING:
            self.set_check(request, request.deadline)
            if not self.engine.stuck:
                self.engine.stuck = True
                why = f"block {request.engine.block} has been running for longer than its deadline"
                self.instructions.append(Note(NoteKind.ENGINE_STUCK, self.name, request.request, why))
                self._states.urgent()
                self._requeue("the engine is stuck")
                for running in self.engine.running:
                    self.joins.give_up(running)
        elif request.stage is Stage.JOINING:
            self.send_progress([request])
            self._look_again(request)
        elif request.stage is Stage.AWAY:
            self.joins.give_up(request)

    def _other_check(self) -> float:
        start = self.engine.next_start
        at = self._states.due if start is None else min(start, self._states.due)
        if self._orphaned:
            at = min(at, *self._orphaned.values())
        if self.draining and self.now < self._drain_until:
            at = min(at, self._drain_until)
        return at

    # Work that no process waits for any more.

    def _on_drain(self, _event: Drain) -> None:
        self.draining = True
        self._drain_until = self.now + self.limits.drain / 2
        self._states.urgent()

    def _on_cancel(self, sender: str, message: Cancel) -> None:
        """Forget requests of the sender, which cannot cancel the requests of others."""
        keys = {(sender, request) for request in message.requests}
        self.tombstones.add(keys, self.now + message.budget_us / 1e6, self.now)
        for request in [request for request in self.held.values() if (request.owner, request.request) in keys]:
            self.end(request, "cancelled")

    def _track_forgotten(self, request: HeldRequest) -> None:
        self.joins.on_track_forgotten(request)

    def _after_event(self, event: Event) -> None:
        if self.now >= self._drain_until and self.engine.length:
            self._requeue("half of the drain is over")
        if self._orphaned:
            self._drop_orphans()
        if isinstance(event, NeighbourDown):
            self._credits.forget(event.name)
            self._states.lost(event.name)
        elif isinstance(event, NeighbourUp):
            self._states.forget(event.hello.name)
        elif isinstance(event, Unsendable):
            self._states.forget(event.failed.to)
        if self.held:
            self._states.load_changed()

    def _reach_changed(self) -> None:
        self._states.reach_changed()

    def _drop_orphans(self) -> None:
        """Forget the work of sources that have been out of reach for too long."""
        for name in [name for name, at in self._orphaned.items() if at <= self.now]:
            del self._orphaned[name]
            for request in [request for request in self.held.values() if request.itinerary.source == name]:
                self.instructions.append(Note(NoteKind.DROPPED, name, request.request, "its source went away"))
                self.end(request, "its source went away")

    def _look_for_orphans(self) -> None:
        """Find sources of held work that no linked process reaches any more.

        A source that was never that near counts only if no process is beyond the neighbours.
        """
        sources = self.occupancy.sources.keys() - {self.name}
        for name in sources:
            if name in self.neighbours.by_name or any(n.state and name in n.state.reaches for n in self.neighbours):
                self._orphaned.pop(name, None)
                self._once_near[name] = None
                if len(self._once_near) > _SOURCES_REMEMBERED:
                    del self._once_near[next(iter(self._once_near))]
            elif name in self._once_near or not any(map(self.leads_beyond, self.neighbours)):
                self._orphaned.setdefault(name, self.now + self.limits.away_floor)
        for name in self._orphaned.keys() - sources:
            del self._orphaned[name]

    def _finish(self) -> None:
        """Start the engine, and send the STATE messages that are due."""
        self._start_engine()
        if self.now >= self._states.due:
            self._look_for_orphans()
            self.tombstones.forget(self.now)
            self._states.announce()
        self._states.announce_credits()

    def _validate_parts(self) -> None:
        engine, held = self.engine, self.held.values()
        queued = [request for request in held if request.stage is Stage.QUEUED]
        self._expect({id(r) for r in engine.queued} == {id(r) for r in queued}, "the engine's queue differs")
        self._expect(len(engine.queued) == len(queued), "queued twice")
        for request in held:
            given = any(one is request for one in engine.given)
            self._expect(given == (request.stage is Stage.RUNNING), "on the engine or not", request)
            self._expect((request.wave is not None) == (request.stage is Stage.JOINING), "joining or not", request)
        for fault in self.joins.faults():
            self._expect(False, fault)
