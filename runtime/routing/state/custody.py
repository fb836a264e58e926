"""The requests that a process holds: the table of their transitions, and all that a transition changes.

A process *holds* requests: tokens, their itinerary, and the transfer by which they came. Handing one on takes three
steps (OFFERED, CUSTODY, ENDED or AWAY), and a copy stays here until the last of them. :data:`TRANSITIONS` is the whole
table. :class:`Custody` has a method for each step, in the order in which a request takes them; those to ``RUNNING`` and
``JOINING`` are in ``peer/engine_work.py`` and ``peer/waves.py``.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec

from ls_edge.core.records import Visit
from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, Itinerary, TransferId
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.credits import Credits, counted
from ls_edge.runtime.routing.state.events import Forward, Instruction
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest, Stage, require
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import Neighbors
from ls_edge.runtime.routing.state.timers import Timers
from ls_edge.runtime.routing.state.waiting_requests import WaitingRequests

TRANSITIONS: dict[tuple[Stage, Stage], str] = {
    (Stage.NEW, Stage.WAITING): "taken in: RUN accepted, image submitted, track of a wave begun",
    (Stage.WAITING, Stage.QUEUED): "a block can run here",
    (Stage.QUEUED, Stage.RUNNING): "given to the engine",
    (Stage.RUNNING, Stage.WAITING): "its blocks have run or failed, or the previous engine call hangs",
    (Stage.QUEUED, Stage.WAITING): "the engine hangs, the block failed, or half of the drain is over",
    (Stage.WAITING, Stage.JOINING): "a wave of tracks is worth it",
    (Stage.JOINING, Stage.WAITING): "every track has ended",
    (Stage.WAITING, Stage.OFFERED): "RUN sent to the next holder",
    (Stage.OFFERED, Stage.CUSTODY): "ACCEPT",
    (Stage.OFFERED, Stage.WAITING): "REFUSE, link lost, not sendable, or no progress: decided again",
    (Stage.CUSTODY, Stage.WAITING): "link lost, or no progress: decided again",
    (Stage.OFFERED, Stage.AWAY): "RELEASE ahead of its ACCEPT",
    (Stage.CUSTODY, Stage.AWAY): "RELEASE or MOVED, in the source; RELEASE of a track, in its joiner",
    (Stage.AWAY, Stage.WAITING): "both holders lost, or silence: a new branch starts",
    (Stage.WAITING, Stage.ENDED): "CANCEL, end of the budget, answer or error",
    (Stage.QUEUED, Stage.ENDED): "CANCEL, or end of the budget",
    (Stage.RUNNING, Stage.ENDED): "CANCEL, or end of the budget",
    (Stage.JOINING, Stage.ENDED): "CANCEL, or end of the budget",
    (Stage.OFFERED, Stage.ENDED): "accepted by the source; CANCEL, end of the budget, answer or error",
    (Stage.CUSTODY, Stage.ENDED): "RELEASE; CANCEL, end of the budget, answer or error",
    (Stage.AWAY, Stage.ENDED): "answer or error; the track has come back",
}
"""All transitions and their causes; any other raises :class:`InvalidTransition`. ``docs/architecture.md`` shows it."""
_COUNTED = {pair: counted(*pair) for pair in TRANSITIONS}
"""What each transition adds to the numbers of copies and of held requests."""


class InvalidTransition(Exception):
    """A held request would change between two stages that the table does not connect."""

    def __init__(self, request: HeldRequest, to: Stage, why: str) -> None:
        super().__init__(f"{request.stage.value} -> {to.value} ({why}) is not a transition of\n{request.history()}")


class Context:
    """What all parts of a machine need, besides the held requests."""

    def __init__(self, name: str, limits: Limits, model: Model, rng: random.Random) -> None:
        self.name = name
        self.limits = limits
        self.model = model
        self.bands = model.bands
        self.rng = rng
        """Source of random branches."""
        self.now = 0.0
        """The time of the event that is being handled."""
        self.neighbors = Neighbors(name, limits)
        self.instructions: list[Instruction] = []
        """Instructions that follow from the event so far."""


class Custody(Context):
    """The held requests of a process."""

    def __init__(self, name: str, limits: Limits, model: Model, rng: random.Random) -> None:
        super().__init__(name, limits, model, rng)
        self.held: dict[TransferId, HeldRequest] = {}
        self.sent: dict[TransferId, HeldRequest] = {}
        """Transfers whose answers still count."""
        self.waiting = WaitingRequests()
        self.timers: Timers[HeldRequest] = Timers()
        self.credits = Credits(limits)
        self.own_us = 0
        """Usual time of what this process has still to do for a request: an engine call; in a source, the head."""
        self.checks: list[Callable[[], None]] = [self._check]
        """Functions that raise :class:`InvalidState` for inconsistencies, for ``Machine.validate``."""
        self.queued: list[HeldRequest] = []
        """Requests in the stage ``QUEUED``."""
        self.look_at: dict[Stage, Callable[[HeldRequest], None]] = {Stage.WAITING: self.waiting.ready.append}
        """Functions that are called when the time of a request has come, by its stage."""
        self.leave: dict[Stage, Callable[[HeldRequest, Stage], None]] = {
            Stage.WAITING: self.waiting.remove,
            Stage.QUEUED: lambda request, _to: self.queued.remove(request),
            Stage.OFFERED: self._leave_hop,
            Stage.CUSTODY: self._leave_hop,
        }
        """Functions that are called when a request leaves a stage for another."""
        self.on_end: Callable[[HeldRequest], None] = lambda _request: None
        """Called with each request that is not held any more."""

    # What becomes of a request, from its arrival to its end.

    def hold(self, request: HeldRequest, why: str) -> None:
        """Hold a new request; unless it leaves its wait before, it is decided at the end of this event."""
        request.number = next(self.timers.numbers)
        request.owner = request.itinerary.owner
        self.held[request.transfer] = request
        self.decide_again(request, why)

    def wait(self, request: HeldRequest, why: str, until: float | None = None) -> None:
        """Make a request wait until a neighbor changes, or until ``until``, or the end of its budget.

        One that did not wait has to be decided in the same event if no time is given.
        """
        if request.stage is not Stage.WAITING:
            self.transition(request, Stage.WAITING, why)
            request.downstream, request.check_at = "", INFINITY
            self.waiting.add(request)
            if until is None:
                return
        self.wait_for(request, (), until)

    def wait_for(
        self, request: HeldRequest, holders: tuple[str, ...], until: float | None, *, or_change: bool = False
    ) -> None:
        """Make a waiting request wait for a credit of ``holders``; it is decided in turn with others that do.

        Without holders, or with ``or_change``, any change of a neighbor is followed by a decision.
        """
        end = self.budget_end(request)
        if until is not None and request.waiting_since is None:
            request.waiting_since = self.now
        self.timers.set(request, end if until is None else min(until, end))
        self.waiting.wait_for(request, holders, or_change=or_change)

    def decide_again(self, request: HeldRequest, why: str) -> None:
        """Make a request wait, and decide it at the end of this event."""
        self.wait(request, why)
        self.waiting.ready.append(request)

    def run_here(self, request: HeldRequest, block: int) -> None:
        """Queue a waiting request for the engine of this process, which runs ``block`` next."""
        self.transition(request, Stage.QUEUED, f"block {block}")
        request.engine.block, request.engine.queued_at = block, self.now
        self.timers.set(request, request.deadline)
        self.queued.append(request)

    def offer(self, request: HeldRequest, to: str, itinerary: Itinerary) -> None:
        """Send a waiting request to a neighbor; a copy stays here."""
        self.transition(request, Stage.OFFERED, to)
        came, now = request.transfer, self.now
        sent = TransferId(came.request, came.branch, came.hop + 1)
        if sent in self.sent or request.sent is not None:
            sent = TransferId(came.request, self.rng.getrandbits(64), came.hop + 1)
        self.neighbors.offered(sent, to)
        request.downstream, request.sent, request.waiting_since = to, sent, None
        self.sent[sent] = request
        end = self.budget_end(request)
        left = max(0.0, end - now)
        request.keep_until = now + self.limits.keep_share * left
        request.keep_end = now + self.limits.keep_most * left
        request.most_done = itinerary.blocks_done
        self.extend(request, end)
        budget = min(MAX_BUDGET_US, max(0, round((request.deadline - now) * 1e6)))
        if request.trail is None:
            itinerary = _with_visit(itinerary, request, self.name, now)
        self.instructions.append(
            Forward(to, sent, budget, itinerary, request.tokens, request.returning, request.bundle_id)
        )

    def accepted(self, request: HeldRequest) -> None:
        """Note that the next holder has the tokens; it has to show progress from now on."""
        self.transition(request, Stage.CUSTODY, f"{request.downstream} accepted")
        request.ran_at = self.now
        self.extend(request, self.budget_end(request))

    def watch(self, request: HeldRequest, holder: str) -> None:
        """Wait for news of a request that this process answers for, and that was passed on to ``holder``."""
        self.transition(request, Stage.AWAY, f"passed on to {holder}")
        self.timers.set(request, self.news_by(request))

    def end(self, request: HeldRequest, why: str) -> None:
        """Forget a request, its tokens and its transfers."""
        if request.stage is not Stage.ENDED:
            self.transition(request, Stage.ENDED, why)
            del self.held[request.transfer]
            self.timers.end(request, len(self.held))
            self.on_end(request)
            request.tokens = None  # outdated timers refer to the request for a while

    # Transitions.

    def transition(self, request: HeldRequest, to: Stage, why: str) -> None:
        """Move a request to another stage if the table has it, count it, and note it in its story."""
        before = request.stage
        change = _COUNTED.get((before, to))
        if change is None:
            raise InvalidTransition(request, to, why)
        leave = self.leave.get(before)
        if leave is not None:
            leave(request, to)
        request.story.append((self.now, before, to, why))
        request.stage = to
        if change != (0, 0):
            self.credits.moved(request, change)

    def _leave_hop(self, request: HeldRequest, to: Stage) -> None:
        """Count one transfer less on its way to the next holder; unless it has arrived, ignore its further answers."""
        n = self.neighbors.get(request.downstream)
        if request.stage is Stage.OFFERED and n is not None:
            n.offers -= 1
            self.waiting.note_room(n.name)
        if to is not Stage.CUSTODY and request.sent is not None:
            self.sent.pop(request.sent, None)

    # Deadlines of a request and of a transfer.

    def budget_end(self, request: HeldRequest) -> float:
        """Return the time at which the budget ends a request in its present stage.

        That is before its deadline while something has still to be done here: in a source, and in a peer that has not
        handed it on.
        """
        deadline, stage, is_peer = request.deadline, request.stage, request.trail is None
        if is_peer and (request.returning or (stage is not Stage.WAITING and stage is not Stage.JOINING)):
            return deadline
        own = self.own_us / 1e6
        if is_peer:  # however slow the engine was measured to be, most of the budget is tried
            own = min(own, self.limits.call_share * (deadline - request.arrived))
        return deadline - self.limits.way_back - own

    def news_by(self, request: HeldRequest) -> float:
        """Return the time by which there has to be news of a request that is AWAY."""
        now, neighbors, limits = self.now, self.neighbors, self.limits
        if request.trail is None:  # a track, which has to come back
            return now + limits.away_floor
        holder, end = request.trail.holder, self.budget_end(request)
        n = neighbors.get(holder)
        request.keep_until = now + limits.keep_share * max(0.0, end - now)
        if neighbors.is_beyond(holder) or (n is not None and neighbors.leads_beyond(n)):
            # A process without a link to this source sends no MOVED; the keeper of the copy before watches over it.
            return min(request.keep_until, request.keep_end, end)
        work = len(request.itinerary.remaining) * neighbors.usual_call(holder)
        patience = max(limits.away_floor, neighbors.hop_deadline(holder) + work)
        return min(now + patience, request.keep_until, request.keep_end, end)

    def extend(self, request: HeldRequest, end: float) -> None:
        """Give the next holder time until its next sign of progress; ``end`` is that of the budget."""
        accepted = request.stage is Stage.CUSTODY
        request.hop_at = self.now + self.neighbors.hop_deadline(
            request.downstream, accepted=accepted, failures=request.reroutes
        )
        self.check_hop(request, end)

    def check_hop(self, request: HeldRequest, end: float) -> None:
        """Set the time of the next check of a transfer; ``end`` is that of the budget."""
        at = min(request.hop_at, request.keep_until, request.keep_end, end)
        if request.stage is Stage.OFFERED and request.upstream is not None:
            at = min(at, self.now + self.limits.look_again)
        self.timers.set(request, at)

    def left_by(self, name: str) -> list[tuple[HeldRequest, str]]:
        """Return the requests that are watched and were with a process, each with the other process that has a copy."""
        found = []
        for request in self.held.values():
            trail = request.trail
            if request.stage is Stage.AWAY and trail is not None and name in (trail.before, trail.holder):
                found.append((request, trail.before if name == trail.holder else trail.holder))
        return sorted(found, key=lambda pair: pair[0].tie_break)

    # Validation.

    def _check(self) -> None:
        """Check the held requests; see ``Machine.validate``."""
        require(not self.waiting.ready, "requests are left to be decided")
        counts, offers = Credits(self.limits), Counter[str]()
        for transfer, request in self.held.items():
            stage = request.stage
            counts.moved(request, counted(Stage.NEW, stage))
            offers[request.downstream] += stage is Stage.OFFERED
            on_its_way = stage in (Stage.OFFERED, Stage.CUSTODY)
            require(request.transfer == transfer, "held under another transfer", request)
            require((stage, Stage.ENDED) in TRANSITIONS, "in a stage without an end", request)
            require(on_its_way == (self.sent.get(request.sent or transfer) is request), "sent or not", request)
            require(not on_its_way or request.downstream in self.neighbors.by_name, "no holder has it", request)
            require(stage is not Stage.WAITING or not request.downstream, "waits downstream", request)
            is_timed = request.check_at < INFINITY and self.timers.has_entry(request)
            require(is_timed, "never looked at again", request)
        require(counts == self.credits, f"counts are {self.credits}")
        for n in self.neighbors:
            require(n.offers == offers[n.name], f"{n.offers} offers to {n.name}, {offers[n.name]} are on their way")
        for sent, request in self.sent.items():
            is_held = self.held.get(request.transfer) is request
            require(request.sent == sent and is_held, "sent under another transfer, or not held", request)
        self.waiting.check(self.held.values())


def _with_visit(itinerary: Itinerary, request: HeldRequest, name: str, now: float) -> Itinerary:
    """Return the itinerary with the time that a request spent in this process; a source adds none."""
    engine, waited_us = request.engine, request.waited_us
    queue = max(0, round((now - request.arrived) * 1e6) - engine.engine_us - waited_us)
    visit = Visit(name, engine.ran, queue, engine.engine_us, request.codec_us, waited_us, tuple(request.tracks))
    return msgspec.structs.replace(itinerary, visits=(*itinerary.visits, visit))
