"""Requests that a process holds, and the table of their transitions.

A process *holds* requests: tokens, their itinerary, and the transfer that brought them. Handing a request on takes
three steps (OFFERED, CUSTODY, then ENDED or AWAY); a copy stays here until the last one. :data:`TRANSITIONS` lists all
transitions, each with the method of :class:`Custody` that makes it; :meth:`Custody.transition` calls the method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ls_edge.runtime.protocol.messages import MAX_BUDGET_US, TransferId
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
from ls_edge.runtime.routing.state.limits import LOOK_AGAIN
from ls_edge.runtime.routing.state.timers import Timers
from ls_edge.runtime.routing.state.turn import PROGRESS_EVERY, Turn
from ls_edge.runtime.routing.state.waiting_requests import WaitingRequests


class StageActions(NamedTuple):
    """Actions of a source or a peer in one stage."""

    on_due: Callable[[HeldRequest], object] | None
    """Called when a request is due; in ``ENDED``, immediately."""
    on_leave: Callable[[HeldRequest, Stage], object] | None = None
    """Called with a request that leaves the stage, and the next stage."""


Stages = Mapping[Stage, StageActions]


class Holder(Protocol):
    """Rules of a source or a peer about the requests that it holds."""

    stages: Stages

    def budget_end(self, request: HeldRequest) -> float:
        """Return the time at which the budget of a request ends here; earlier than its deadline if work remains."""


class InvalidTransition(Exception):
    """The table has no transition between two stages of a request."""

    def __init__(self, request: HeldRequest, to: Stage, why: str) -> None:
        super().__init__(f"{request.stage.value} -> {to.value} ({why}) is not a transition of\n{request.history()}")


class Custody:
    """Held requests of a process."""

    rules: Holder
    """Rules of the source or peer, set by :class:`.machine.Machine`."""

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

    def hold(self, request: HeldRequest, why: str) -> None:
        """Hold a new request, and decide it at the end of this turn."""
        request.number = next(self.timers.numbers)
        request.owner = request.itinerary.owner
        self.held[request.transfer] = request
        self.decide_again(request, why)

    def sent_to(self, receiver: str, transfer: TransferId) -> HeldRequest | None:
        """Return the request of a transfer if its receiver has it, else None."""
        request = self.sent.get(transfer)
        return request if request is not None and request.downstream == receiver else None

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
        end = self.rules.budget_end(request)
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
        actions = self.rules.stages.get(before)
        if actions is not None and actions.on_leave is not None:
            actions.on_leave(request, to)
        request.story.append((self._turn.now, before, to, why))
        request.stage = to
        if step.change is not None:
            self.credits.moved(request, step.change)
        step.make(self, request, detail)

    def _wait(self, request: HeldRequest, _: None) -> None:
        request.downstream, request.check_at = "", INFINITY
        self.waiting.wait_for(request)

    def _queue(self, request: HeldRequest, block: int) -> None:
        """Queue a request for the engine, to run ``block``."""
        if request.is_copy:
            self.credits.moved(request, WORKS_AGAIN)
        request.engine.block = block
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
        sent = TransferId(came.request, came.branch, came.hop + 1)
        if sent in self.sent or request.sent is not None:
            sent = TransferId(came.request, turn.rng.getrandbits(64), came.hop + 1)
        turn.neighbors.offered(sent, to)
        request.downstream, request.sent, request.waiting_since = to, sent, None
        self.sent[sent] = request
        request.sent_at = turn.now
        self.extend(request)
        # ACCEPT takes about as long as the tokens: half of the measured time is theirs.
        left = round((request.deadline - turn.now) * 1e6) - turn.neighbors.by_name[to].link_us // 2
        budget = min(MAX_BUDGET_US, max(0, left))
        turn.instructions.append(
            Forward(to, sent, budget, itinerary, request.tokens, request.returning, request.bundle_id)
        )

    def _keep(self, request: HeldRequest, _: None) -> None:
        """Keep a copy of a request that the next holder has accepted; its deadlines begin."""
        self.extend(request)

    def _watch(self, request: HeldRequest, until: float) -> None:
        """Wait until ``until`` for news of a request that the next holder has passed on."""
        self.timers.set(request, until)

    def _end(self, request: HeldRequest, _: None) -> None:
        del self.held[request.transfer]
        self.timers.end(request, len(self.held))
        on_end = self.rules.stages[ENDED].on_due
        if on_end is not None:
            on_end(request)
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

    # Next look at a request.

    def extend(self, request: HeldRequest) -> None:
        """Give the next holder a new deadline for progress."""
        turn, accepted = self._turn, request.stage is CUSTODY
        patience = turn.neighbors.hop_deadline(request.downstream, accepted=accepted, failures=request.reroutes)
        request.hop_at = turn.now + patience
        self.check_hop(request)

    def check_hop(self, request: HeldRequest) -> None:
        """Set the time of the next check of a transfer; on the way to its receiver, PROGRESS is due meanwhile."""
        at = min(request.hop_at, self.rules.budget_end(request))
        if request.stage is OFFERED:
            at = min(at, self._turn.now + LOOK_AGAIN)
        self.timers.set(request, at)

    def watch_call(self, request: HeldRequest) -> None:
        """Set the time of the next check of an engine call."""
        self.timers.set(request, min(request.engine.until, self._turn.now + PROGRESS_EVERY))

    def watch_wave(self, request: HeldRequest) -> None:
        """Set the time of the next check of an open wave."""
        self.timers.set(request, min(self._turn.now + LOOK_AGAIN, self.rules.budget_end(request)))


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
    (AWAY, WAITING): Step(Custody._wait, "both holders lost, or silence: a new branch starts"),
    (WAITING, ENDED): Step(Custody._end, "CANCEL, end of the budget, answer or error"),
    (QUEUED, ENDED): Step(Custody._end, "CANCEL, or end of the budget"),
    (RUNNING, ENDED): Step(Custody._end, "CANCEL, or end of the budget"),
    (JOINING, ENDED): Step(Custody._end, "CANCEL, or end of the budget"),
    (OFFERED, ENDED): Step(Custody._end, "accepted by the source; CANCEL, end of the budget, answer or error"),
    (CUSTODY, ENDED): Step(Custody._end, "RELEASE; CANCEL, end of the budget, answer or error"),
    (AWAY, ENDED): Step(Custody._end, "CANCEL, end of the budget, answer or error; the track came back or is late"),
}
"""All transitions; any other raises :class:`InvalidTransition`. ``docs/develop.md`` lists them."""
for _pair, _step in TRANSITIONS.items():
    _step.change = counted(*_pair)
