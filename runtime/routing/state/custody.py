"""Requests that a process holds, and the table of their transitions.

A process *holds* requests: tokens, their itinerary, and the transfer that brought them. Handing a request on takes
three steps (OFFERED, CUSTODY, then ENDED or AWAY); a copy stays here until the last one. :data:`TRANSITIONS` lists all
transitions, each with the method of :class:`Custody` that makes it; :meth:`Custody.transition` calls the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from ls_edge.core.parts import STEM
from ls_edge.core.records import Visit
from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, Itinerary, TransferId
from ls_edge.runtime.routing.state.credits import WORKS_AGAIN, Credits, counted
from ls_edge.runtime.routing.state.events import Forward
from ls_edge.runtime.routing.state.held_request import (
    AWAY,
    CUSTODY,
    ENDED,
    INFINITY,
    JOINING,
    NEW,
    OFFERED,
    QUEUED,
    RUNNING,
    WAITING,
    HeldRequest,
    OpenWave,
    Stage,
)
from ls_edge.runtime.routing.state.neighbors import Neighbor, owner_of
from ls_edge.runtime.routing.state.timers import Timers
from ls_edge.runtime.routing.state.turn import Turn
from ls_edge.runtime.routing.state.waiting_requests import WaitingRequests


class StageActions(NamedTuple):
    """Actions of a source or a peer in one stage."""

    on_due: Callable[[HeldRequest], object] | None
    """Called when a request is due; in ``ENDED``, immediately."""
    on_leave: Callable[[HeldRequest, Stage], object] | None = None
    """Called with a request that leaves the stage, and the next stage."""


Stages = Mapping[Stage, StageActions]


class InvalidTransition(Exception):
    """The table has no transition between two stages of a request."""

    def __init__(self, request: HeldRequest, to: Stage, why: str) -> None:
        super().__init__(f"{request.stage.value} -> {to.value} ({why}) is not a transition of\n{request.history()}")


class Custody:
    """Held requests of a process."""

    def __init__(self, turn: Turn) -> None:
        self.held: dict[TransferId, HeldRequest] = {}
        self.sent: dict[TransferId, HeldRequest] = {}
        """Requests by their latest transfer, while its replies count."""
        self.waiting = WaitingRequests()
        self.timers: Timers[HeldRequest] = Timers()
        self.credits = Credits(turn.limits)
        self.own_us = 0
        """Typical time of the work that a request still needs here: an engine call; in a source, the head."""
        self.queued: list[HeldRequest] = []
        """Requests in the stage ``QUEUED``."""
        self._turn = turn
        self._on_leave: dict[Stage, Callable[[HeldRequest, Stage], object]] = {}
        self._on_end: Callable[[HeldRequest], object] | None = None

    def follow(self, stages: Stages) -> None:
        """Set the actions of a source or a peer."""
        self._on_leave = {stage: actions.on_leave for stage, actions in stages.items() if actions.on_leave is not None}
        self._on_end = stages[ENDED].on_due

    def hold(self, request: HeldRequest, why: str, copy: HeldRequest | None = None) -> None:
        """Hold a new request, and decide it at the end of this turn.

        If it replaces a ``copy``, it counts for the same account.
        """
        request.number = next(self.timers.numbers)
        request.owner = request.itinerary.owner
        if request.upstream not in (None, request.owner) and not request.returning:
            request.relay = str(request.upstream)
        request.account = self.account_of(request.owner, request.upstream)
        if copy is not None and copy.relay and not request.returning:
            request.account, request.relay = copy.account, copy.relay
        self.held[request.transfer] = request
        self.decide_again(request, why)

    def account_of(self, owner: str, sender: str | None) -> str:
        """Return the account of a request: its source, or its sender if the source has no link here.

        Otherwise a member could use up all shares with work of sources that do not exist.
        """
        is_known = sender is None or owner in self._turn.neighbors.by_name
        return owner_of(owner) if is_known else str(sender)

    def decide_again(self, request: HeldRequest, why: str) -> None:
        """Make a request wait, and decide it at the end of this turn."""
        if request.stage is WAITING:
            self.wait_for(request, (), None)
        else:
            self.transition(request, WAITING, why)
        self.waiting.ready.append(request)

    def wait(self, request: HeldRequest, why: str, until: float | None = None) -> None:
        """Make a request wait until a neighbor changes, until ``until``, or until its budget ends.

        Without a time, the caller has to decide the request in this turn if it was not waiting before.
        """
        if request.stage is not WAITING:
            self.transition(request, WAITING, why)
            if until is None:
                return
        self.wait_for(request, (), until)

    def wait_for(
        self, request: HeldRequest, holders: tuple[str, ...], until: float | None, *, or_change: bool = False
    ) -> None:
        """Make a waiting request wait for a credit of ``holders``, behind others that wait for it.

        Without holders, or with ``or_change``, it is decided again after any change of a neighbor.
        """
        end = self.budget_end(request)
        if until is not None and request.waiting_since is None:
            request.waiting_since = self._turn.now
        self.timers.set(request, end if until is None else min(until, end))
        self.waiting.wait_for(request, holders, or_change=or_change)

    def end(self, request: HeldRequest, why: str) -> None:
        """Forget a request, its tokens and its transfers."""
        if request.stage is not ENDED:
            self.transition(request, ENDED, why)

    # Transitions.

    def transition(self, request: HeldRequest, to: Stage, why: str, detail: Any = None) -> None:
        """Move a request to another stage by the method of :data:`TRANSITIONS`, which gets ``detail`` too."""
        before = request.stage
        step = TRANSITIONS.get((before, to))
        if step is None:
            raise InvalidTransition(request, to, why)
        leave = self._on_leave.get(before)
        if leave is not None:
            leave(request, to)
        request.story.append((self._turn.now, before, to, why))
        request.stage = to
        if step.change is not None and request.trail is None:  # a source accepts everything
            self.credits.moved(request, step.change)
        step.make(self, request, detail)

    def _wait(self, request: HeldRequest, _: None) -> None:
        request.downstream, request.check_at = "", INFINITY
        self.waiting.wait_for(request)

    def _queue(self, request: HeldRequest, block: int) -> None:
        """Queue a request for the engine, to run ``block``."""
        if request.is_copy:
            self.credits.moved(request, WORKS_AGAIN)
        request.engine.block, request.engine.queued_at = block, self._turn.now
        self.timers.set(request, request.deadline)
        self.queued.append(request)

    def _run(self, request: HeldRequest, until: float) -> None:
        """Watch the engine call of a request, which counts as stuck from ``until`` on."""
        request.engine.until = until
        self.watch_call(request)

    def _join(self, request: HeldRequest, wave: OpenWave) -> None:
        """Wait for the tracks of ``wave``."""
        if request.is_copy:
            self.credits.moved(request, WORKS_AGAIN)
        request.wave, request.waiting_since = wave, None
        self.watch_wave(request)

    def _offer(self, request: HeldRequest, detail: Any) -> None:
        """Send a request to a neighbor; a copy stays here."""
        to, itinerary = detail
        turn, came = self._turn, request.transfer
        now, limits = turn.now, turn.limits
        sent = TransferId(came.request, came.branch, came.hop + 1)
        if sent in self.sent or request.sent is not None:
            sent = TransferId(came.request, turn.rng.getrandbits(64), came.hop + 1)
        turn.neighbors.offered(sent, to)
        request.downstream, request.sent, request.waiting_since = to, sent, None
        self.sent[sent] = request
        end = self.budget_end(request)
        left = max(0.0, end - now)
        request.ran_at = request.counts_until = now
        request.keep_until = now + limits.keep_share * left
        request.keep_end = now + limits.keep_most * left
        request.most_done = itinerary.blocks_done
        self.extend(request, end)
        # ACCEPT takes about as long as the tokens: half of the measured time is theirs.
        budget = min(
            MAX_BUDGET_US, max(0, round((request.deadline - now) * 1e6) - turn.neighbors.by_name[to].link_us // 2)
        )
        if request.trail is None:
            itinerary = _with_visit(itinerary, request, turn.name, now)
        turn.instructions.append(
            Forward(to, sent, budget, itinerary, request.tokens, request.returning, request.bundle_id)
        )

    def _keep(self, request: HeldRequest, _: None) -> None:
        """Keep a copy of a request that the next holder has accepted; its deadlines begin."""
        request.ran_at = self._turn.now
        self.extend(request, self.budget_end(request))

    def _watch(self, request: HeldRequest, _: None) -> None:
        """Wait for news of a request that the next holder has passed on."""
        self.timers.set(request, self.news_by(request))

    def _end(self, request: HeldRequest, _: None) -> None:
        del self.held[request.transfer]
        self.timers.end(request, len(self.held))
        if self._on_end is not None:
            self._on_end(request)
        request.tokens = None  # outdated timers still refer to the request

    # Actions on leaving a stage, for the tables of the rules.

    def leave_queue(self, request: HeldRequest, _to: Stage) -> None:
        """Remove a request from the queue of the engine."""
        self.queued.remove(request)

    def leave_hop(self, request: HeldRequest, to: Stage) -> None:
        """Stop counting an offer; unless the next holder has accepted it, ignore further replies."""
        n = self._turn.neighbors.get(request.downstream)
        if request.stage is OFFERED and n is not None:
            n.offers -= 1
            self.waiting.note_room(n.name)
        if to is not CUSTODY and request.sent is not None:
            self.sent.pop(request.sent, None)

    # Deadlines of a request and of a transfer.

    def budget_end(self, request: HeldRequest) -> float:
        """Return the time at which the budget of a request ends in its current stage.

        It is earlier than the deadline while work remains here: in a source, and in a peer that has not handed it on.
        """
        deadline, stage, is_peer = request.deadline, request.stage, request.trail is None
        if is_peer and (request.returning or (stage is not WAITING and stage is not JOINING)):
            return deadline
        own, limits = self.own_us / 1e6, self._turn.limits
        if is_peer:  # a wrong measurement of the engine must not prevent the attempt
            own = min(own, limits.call_share * (deadline - request.arrived))
        return deadline - limits.way_back - own

    def news_by(self, request: HeldRequest) -> float:
        """Return the time by which news of an ``AWAY`` request is due."""
        turn, now = self._turn, self._turn.now
        if request.trail is None:  # a track, which has to come back
            return now + turn.limits.away_floor
        end = self.budget_end(request)
        return min(now + self._patience(request, request.trail.holder, now, end), request.keep_end, end)

    def _patience(self, request: HeldRequest, holder: str, since: float, end: float) -> float:
        """Return the seconds from ``since`` for which a holder may keep tokens without another block.

        An idle holder in sight would have run one soon, and its announcements alone extend nothing. A holder that leads
        to processes without a link to this one may have handed the tokens to them.
        """
        neighbors, limits = self._turn.neighbors, self._turn.limits
        n, share = neighbors.get(holder), limits.keep_share * max(0.0, end - since)
        if n is None:
            return share if neighbors.reach(holder) else min(share, limits.away_floor)
        if neighbors.leads_beyond(n):
            return share
        left, deadline = len(request.itinerary.remaining), neighbors.hop_deadline(holder)
        longest = max(limits.away_floor, deadline + self._explained(request, n))
        announced = (left * n.block_us + neighbors.slowest_us + (0 if n.is_silent else n.wait_us)) / 1e6
        return min(share, longest, deadline + limits.hop_factor * announced)

    def _explained(self, request: HeldRequest, n: Neighbor) -> float:
        """Return the seconds that the queue and the remaining blocks of a neighbor explain, by measured times."""
        work = len(request.itinerary.remaining) * self._turn.neighbors.usual_call(n.name)
        return min(0.0 if n.is_silent else n.wait_us / 1e6, self._turn.limits.credits * work) + work

    def counts_until(self, request: HeldRequest, end: float) -> float:
        """Return the time until which PROGRESS of the next holder counts without another block.

        That is ``keep_until`` for a holder that may wait for events that this process cannot see: it decodes images, or
        waits for credits without a link to the source.
        """
        limits, itinerary, n = self._turn.limits, request.itinerary, self._turn.neighbors.by_name[request.downstream]
        is_source, reaches = request.trail is not None, () if n.state is None else n.state.reaches
        if STEM in itinerary.remaining or request.returning or not (is_source or itinerary.source in reaches):
            return request.keep_until
        until = request.ran_at + self._patience(request, n.name, request.ran_at, end)
        reported = request.most_done - itinerary.blocks_done
        if reported and not (is_source and reported == len(itinerary.remaining)):  # it hands the tokens on
            until += limits.hop_most + limits.transfer
        # A queue becomes shorter while the request waits in it.
        request.counts_until = max(request.counts_until, until)
        # With the time alone, 338 of 480 requests to slow peers were answered, with twice the time 392.
        request.keep_until = max(request.keep_until, request.ran_at + 2 * self._explained(request, n))
        return request.counts_until

    def extend(self, request: HeldRequest, end: float) -> None:
        """Give the next holder a new deadline for progress; ``end`` is the end of the budget."""
        turn, accepted = self._turn, request.stage is CUSTODY
        request.hop_at = turn.now + turn.neighbors.hop_deadline(
            request.downstream, accepted=accepted, failures=request.reroutes
        )
        self.check_hop(request, end)

    def check_hop(self, request: HeldRequest, end: float) -> None:
        """Set the time of the next check of a transfer; ``end`` is the end of the budget."""
        at = min(request.hop_at, request.keep_until, request.keep_end, end)
        if request.stage is OFFERED and request.upstream is not None:
            at = min(at, self._turn.now + self._turn.limits.look_again)
        self.timers.set(request, at)

    def watch_call(self, request: HeldRequest) -> None:
        """Set the time of the next check of an engine call."""
        self.timers.set(request, min(request.engine.until, self._turn.now + self._turn.limits.progress_every))

    def watch_wave(self, request: HeldRequest) -> None:
        """Set the time of the next check of an open wave."""
        self.timers.set(request, min(self._turn.now + self._turn.limits.look_again, self.budget_end(request)))

    def left_by(self, name: str) -> list[tuple[HeldRequest, str]]:
        """Return the ``AWAY`` requests that a process has or keeps, each with the other process that has a copy."""
        found = []
        for request in self.held.values():
            trail = request.trail
            if request.stage is AWAY and trail is not None and name in (trail.before, trail.holder):
                found.append((request, trail.before if name == trail.holder else trail.holder))
        return sorted(found, key=lambda pair: pair[0].tie_break)


def _with_visit(itinerary: Itinerary, request: HeldRequest, name: str, now: float) -> Itinerary:
    """Return the itinerary with the time that a request spent in this process."""
    engine, waited_us = request.engine, request.waited_us
    queue = max(0, round((now - request.arrived) * 1e6) - engine.engine_us - waited_us)
    visit = Visit(name, engine.ran, queue, engine.engine_us, request.codec_us, waited_us, tuple(request.tracks))
    return msgspec.structs.replace(itinerary, visits=(*itinerary.visits, visit))


@dataclass(slots=True)
class Step:
    """Transition of a held request."""

    make: Callable[..., None]
    """Method of :class:`Custody` that makes the transition."""
    when: str
    change: tuple[int, int] | None = None
    """Change of the numbers of copies and of held requests, if there may be one."""


TRANSITIONS: dict[tuple[Stage, Stage], Step] = {
    (NEW, WAITING): Step(Custody._wait, "taken in: RUN accepted, image submitted, track of a wave begun"),
    (WAITING, QUEUED): Step(Custody._queue, "a block can run here"),
    (QUEUED, RUNNING): Step(Custody._run, "given to the engine"),
    (RUNNING, WAITING): Step(Custody._wait, "its blocks have run or failed, or the previous engine call hangs"),
    (QUEUED, WAITING): Step(Custody._wait, "the engine hangs, the block failed, or half of the drain is over"),
    (WAITING, JOINING): Step(Custody._join, "a wave of tracks is worth it"),
    (JOINING, WAITING): Step(Custody._wait, "every track has ended"),
    (WAITING, OFFERED): Step(Custody._offer, "RUN sent to the next holder"),
    (OFFERED, CUSTODY): Step(Custody._keep, "ACCEPT"),
    (OFFERED, WAITING): Step(Custody._wait, "REFUSE, link lost, send failed, or no progress: decided again"),
    (CUSTODY, WAITING): Step(Custody._wait, "link lost, or no progress: decided again"),
    (OFFERED, AWAY): Step(Custody._watch, "RELEASE ahead of its ACCEPT"),
    (CUSTODY, AWAY): Step(Custody._watch, "RELEASE or MOVED, in the source; RELEASE of a track, in its joiner"),
    (AWAY, WAITING): Step(Custody._wait, "both holders lost, silence, or kept too long: a new branch starts"),
    (WAITING, ENDED): Step(Custody._end, "CANCEL, end of the budget, answer or error"),
    (QUEUED, ENDED): Step(Custody._end, "CANCEL, or end of the budget"),
    (RUNNING, ENDED): Step(Custody._end, "CANCEL, or end of the budget"),
    (JOINING, ENDED): Step(Custody._end, "CANCEL, or end of the budget"),
    (OFFERED, ENDED): Step(Custody._end, "accepted by the source; CANCEL, end of the budget, answer or error"),
    (CUSTODY, ENDED): Step(Custody._end, "RELEASE; CANCEL, end of the budget, answer or error"),
    (AWAY, ENDED): Step(Custody._end, "CANCEL, end of the budget, answer or error; the track came back or is late"),
}
"""All transitions; any other raises :class:`InvalidTransition`. ``docs/architecture.md`` lists them."""
for _pair, _step in TRANSITIONS.items():
    _step.change = counted(*_pair)
