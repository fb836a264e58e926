"""Rules of a source, which submits requests, keeps their furthest tokens, and alone ends them.

A request has one current copy: the tokens of the stem, or of the returned transfer that got furthest. The copy is kept
until the request ends: when its next holder has passed it on, it is ``AWAY`` and watched through MOVED messages. It is
rerouted if both the holder and the keeper of the previous copy are lost, or if there is no news for too long.

A request ends with the first answer that comes back; later answers are counted and dropped. If no block that may run
now can be reached, the source skips such blocks (at most ``max_skips``, after a short wait for holders to come back),
so that the next band can run. At the end of the budget it answers from the furthest tokens if enough skips are allowed,
else with an error.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ls_edge.core.errors import ImageRejected, RequestError
from ls_edge.core.parts import STEM
from ls_edge.core.records import Rejection
from ls_edge.runtime.protocol.messages import (
    MAX_CANCELED,
    Accept,
    Cancel,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    Release,
    RequestId,
    ReturnReason,
    TransferId,
)
from ls_edge.runtime.routing.decisions import (
    Actions,
    Case,
    Handlers,
    Rule,
    budget_is_over,
    follow_policy,
    may_skip,
    nobody_has_a_credit,
)
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.reach import able_to_run, candidates_for
from ls_edge.runtime.routing.source.block_reach import BlockReach
from ls_edge.runtime.routing.source.ended_requests import CANCEL_EVERY, EndedRequests
from ls_edge.runtime.routing.source.outcomes import NO_HOLDER, not_finite, too_late, why_not_run, why_skipped
from ls_edge.runtime.routing.state.budget import source_end
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.routing.state.custody import StageActions, Stages
from ls_edge.runtime.routing.state.events import (
    Abandon,
    Arrived,
    Complete,
    Fail,
    NeighborDown,
    NeighborState,
    NeighborUp,
    NoteKind,
    Received,
    Removed,
    Submit,
    Tick,
    Unsendable,
)
from ls_edge.runtime.routing.state.held_request import (
    AWAY,
    CUSTODY,
    ENDED,
    INFINITY,
    OFFERED,
    WAITING,
    HeldRequest,
    Stage,
    Trail,
)
from ls_edge.runtime.routing.state.hop import news_by
from ls_edge.runtime.routing.state.limits import LOOK, LOOK_AGAIN, Limits
from ls_edge.runtime.routing.state.pause import PauseReason

SKIP_GRACE = 0.2
"""Wait of the source for an unreachable block before it skips it. With a holder back after 0.4 s, 1/4: 15 % more skips,
mean -6 %; x4: no skips, mean +30 %, tail +74 %."""
HOLDERS_NOT_FINITE = 2
"""Peers that must find values of a request not finite before it fails."""


def source_machine(name: str, *, limits: Limits, rng: random.Random, model: Model | None = None) -> SourceMachine:
    """Return the machine of a process that has images.

    ``rng`` also draws the ids of requests: a process has to use a source of secrets.
    """
    return Machine(name, SourceRules, limits=limits, rng=rng, model=model or Model())


@dataclass(eq=False)
class OpenRequest:
    """Request without an outcome."""

    number: int
    asked: Itinerary
    """Itinerary as submitted; returned itineraries must be consistent with it."""
    copy: HeldRequest
    """Furthest tokens."""
    trail: Trail = field(default_factory=Trail)
    earlier_reroutes: int = 0
    """Number of reroutes of previous copies."""
    not_finite: dict[str, None] = field(default_factory=dict)
    """Processes that returned the request because of NaN or infinity, or with such values."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Blocks that this source has skipped, with the reason."""

    @property
    def attempts(self) -> int:
        """Number of branches that started from the source's own copy."""
        return 1 + self.earlier_reroutes + self.copy.reroutes


class SourceRules:
    """Rules of a source."""

    waits_s = INFINITY

    def __init__(self, machine: Machine[SourceRules]) -> None:
        self._recovery = recovery = machine.recovery
        self._turn = turn = machine.turn
        self._custody = custody = machine.custody
        self.requests: dict[int, OpenRequest] = {}
        self.rejected: dict[str, Rejection] = {}
        """Rejected answers by sender. Each rejection replaces the dictionary: other threads read it."""
        self._node = LocalNode(model=turn.model)
        self._reach = BlockReach(turn)
        self._by_id: dict[RequestId, OpenRequest] = {}
        self.ended = EndedRequests()
        self.handlers: Handlers = {
            NeighborUp: (self._on_up, machine.on_up, self._reach.look),
            NeighborDown: (recovery.on_down, self._on_lost, self._reach.look),
            NeighborState: (machine.on_state, self._reach.look),
            Arrived: (self._take_in,),
            Received: (machine.on_received,),
            Unsendable: (recovery.on_unsendable,),
            Submit: (self._on_submit,),
            Abandon: (self._on_abandon,),
            Removed: (),
            Tick: (),
            # Messages, with their sender.
            Accept: (machine.on_accept,),
            Refuse: (machine.on_refuse,),
            Progress: (recovery.on_progress,),
            Release: (machine.on_release,),
            Moved: (self._on_moved,),
        }
        self.stages: Stages = {
            WAITING: StageActions(custody.waiting.ready.append, custody.waiting.remove),
            OFFERED: StageActions(recovery.check_hop, self._leave_hop),
            CUSTODY: StageActions(recovery.check_hop, self._leave_hop),
            AWAY: StageActions(self._on_silence, self._leave_hop),
            ENDED: StageActions(None),
        }
        self.decide: tuple[Rule, ...] = (budget_is_over, nothing_remains, nobody_has_a_credit, follow_policy)
        self.actions: Actions = {
            **machine.decisions.actions,
            Answer: self._answer,
            ReturnReason: self._cannot_continue,
        }

    # Arrival of requests and tokens.

    def _on_submit(self, event: Submit) -> None:
        turn = self._turn
        transfer = TransferId(turn.rng.randbytes(16), turn.rng.getrandbits(64), 0)
        copy = HeldRequest(
            transfer=transfer,
            itinerary=event.itinerary,
            tokens=event.tokens,
            deadline=event.deadline,
            upstream=None,
            arrived=turn.now,
            tie_break=event.request,
            bundle_id=turn.model.bundle_id,
        )
        request = OpenRequest(event.request, event.itinerary, copy)
        self.requests[event.request] = self._by_id[transfer.request] = request
        self._custody.hold(copy, "submitted")

    def _take_in(self, event: Arrived) -> None:
        """Accept tokens that come home, and use them if they are plausible and further than the current copy."""
        run, sender, turn = event.run, event.sender, self._turn
        turn.send(sender, Accept(run.transfer, 1))
        request = self._by_id.get(run.transfer.request)
        if request is None:
            if run.transfer.request not in self.ended.remembered:
                self._reject(sender, "tokens of a request that it was never given")
            elif not run.itinerary.remaining:
                self.ended.late_answers += 1
            return
        copy, reported = request.copy, run.itinerary
        odd = _not_asked(request.asked, reported)
        if odd:
            self._reject(sender, odd, copy)
        elif STEM in reported.remaining and run.returning.startswith(ReturnReason.NO_IMAGE):
            why = run.returning.partition(": ")[2]
            self._fail(request, ImageRejected(f"request {request.number}: {why} (on {sender})"))
        elif not event.finite or run.returning == ReturnReason.NOT_FINITE:
            self._on_not_finite(request, sender)
        elif reported.blocks_done >= copy.itinerary.blocks_done:
            self._take_back(request, event)

    def _take_back(self, request: OpenRequest, event: Arrived) -> None:
        """Continue with returned tokens if they are further; otherwise with the own copy, elsewhere."""
        run, sender, turn, old = event.run, event.sender, self._turn, request.copy
        itinerary, tokens = old.itinerary, old.tokens
        if run.itinerary.blocks_done > itinerary.blocks_done or not run.itinerary.remaining:
            itinerary = _with_history(request.asked, run.itinerary, itinerary.avoid)
            tokens = event.tokens
            for holder in {holder for wave in itinerary.waves for track in wave for _, holder in track}:
                if (n := turn.neighbors.get(holder)) is not None:
                    n.has_worked()
        elif run.returning == ReturnReason.CREDIT:
            old.avoid[sender] = turn.now + LOOK
        else:
            if (n := turn.neighbors.get(sender)) is not None:  # it returned the request unchanged
                self._recovery.avoid(old, sender, n.hold_off(PauseReason.UNWILLING))
            itinerary = old.itinerary  # which names the process to avoid
        if not itinerary.remaining:
            old.itinerary, old.tokens = itinerary, tokens
            self._complete(request)
            return
        request.copy = HeldRequest(
            transfer=TransferId(run.transfer.request, turn.rng.getrandbits(64), 0),
            itinerary=itinerary,
            tokens=tokens,
            deadline=old.deadline,
            upstream=None,
            arrived=turn.now,
            tie_break=old.tie_break,
            avoid=old.avoid,
            bundle_id=turn.model.bundle_id,
            reason=run.returning,
        )
        request.earlier_reroutes += old.reroutes
        self._custody.end(old, f"returned by {sender}")
        self._custody.hold(request.copy, f"from {sender}: {run.returning}")

    def _reject(self, sender: str, why: str, copy: HeldRequest | None = None) -> None:
        count = self.rejected[sender].count if sender in self.rejected else 0
        self.rejected = {**self.rejected, sender: Rejection(count + 1, why)}
        self._turn.note(NoteKind.REJECTED, sender, None if copy is None else copy.request, why)

    def _on_not_finite(self, request: OpenRequest, sender: str) -> None:
        """Try another holder after NaN or infinity; after a second one, fail the request and name the holders."""
        turn, copy = self._turn, request.copy
        request.not_finite[sender] = None
        turn.note(NoteKind.NOT_FINITE, sender, copy.request, "NaN or infinity in its output")
        self._recovery.avoid(copy, sender, copy.deadline)
        others = [n for n in candidates_for(turn, copy) if n.name not in copy.avoid]
        if able_to_run(turn, copy, others) and len(request.not_finite) < HOLDERS_NOT_FINITE:
            self._recovery.reroute(copy, "NaN or infinity", "refused")
        else:
            self._fail(request, not_finite(request.number, request.not_finite))

    # Decisions.

    def local_node(self) -> LocalNode:
        """Return a node without blocks, since a source runs none."""
        return self._node

    def outgoing(self, request: HeldRequest, itinerary: Itinerary) -> Itinerary:  # noqa: ARG002
        """Return the itinerary as it is: sources are not among its visits."""
        return itinerary

    def budget_end(self, request: HeldRequest) -> float:
        """Return the time at which the head has to run."""
        return source_end(request.deadline, self._custody.own_us)

    def _cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Skip blocks that are out of reach, or wait."""
        request.reason = reason
        turn, owner = self._turn, self._by_id[request.request]
        stuck = turn.bands.permitted(request.itinerary.remaining)
        if reason is ReturnReason.UNREACHABLE and may_skip(request.itinerary, stuck):
            skip_at = self._reach.lost_since(stuck) + SKIP_GRACE
            if skip_at <= turn.now:
                self._skip(owner, stuck, NO_HOLDER)
            else:
                self._custody.wait(request, "unreachable", skip_at)
            return
        # The end of a pause of offers raises no event.
        held_back = bool(request.avoid) or any(n.pause.until > turn.now for n in turn.neighbors)
        until = turn.now + LOOK_AGAIN if held_back else None
        lacks_credit = reason is ReturnReason.CREDIT
        able = able_to_run(turn, request, candidates_for(turn, request)) if lacks_credit else []
        names = tuple(n.name for n in able if not n.credits)
        self._custody.wait_for(request, names, until, or_change=held_back)

    def _skip(self, request: OpenRequest, blocks: tuple[int, ...], why: str) -> None:
        """Skip blocks; then remaining blocks may run, or the request is complete."""
        copy = request.copy
        copy.itinerary = copy.itinerary.skip(blocks)
        request.left_out.update(dict.fromkeys(blocks, why))
        if copy.itinerary.remaining:
            self._custody.waiting.ready.append(copy)
        else:
            self._complete(request)

    # End of a request.

    def _answer(self, copy: HeldRequest, _step: Answer) -> None:
        self._complete(self._by_id[copy.request])

    def _complete(self, request: OpenRequest) -> None:
        copy, attempts = request.copy, request.attempts
        why = why_skipped(copy.itinerary.skipped, request.left_out, self._turn.bands)
        done = Complete(request.number, copy.itinerary, copy.tokens, attempts, why)
        self._turn.instructions.append(done)
        self._end_request(request, "complete", soon=attempts == 1 and not copy.itinerary.skipped)

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        self._turn.instructions.append(Fail(request.number, error, request.copy.itinerary, request.attempts))
        self._end_request(request, "failed")

    def _on_abandon(self, event: Abandon) -> None:
        if event.request in self.requests:
            self._end_request(self.requests[event.request], "abandoned")

    def _end_request(self, request: OpenRequest, why: str, *, soon: bool = False) -> None:
        """Forget a request and tell the peers immediately, or with ``soon`` together with others."""
        copy = request.copy
        self._custody.end(copy, why)
        del self.requests[request.number], self._by_id[copy.request]
        self.ended.add(copy, self._turn.now, soon=soon)

    def out_of_budget(self, request: HeldRequest) -> None:
        """Answer from the furthest tokens at the end of the budget if enough skips are allowed, else fail."""
        owner, itinerary = self._by_id[request.request], request.itinerary
        if not itinerary.remaining:
            self._complete(owner)
        elif may_skip(itinerary, itinerary.remaining):
            self._skip(owner, itinerary.remaining, why_not_run(request.reason))
        else:
            if owner.not_finite:
                self._fail(owner, not_finite(owner.number, owner.not_finite))
            else:
                self._fail(owner, too_late(owner.number, owner.copy, itinerary.avoid, self._turn))

    # Location of a request, and requests that are AWAY.

    def _leave_hop(self, request: HeldRequest, to: Stage) -> None:
        self._custody.leave_hop(request, to)
        if to in (WAITING, ENDED):
            trail = self._by_id[request.request].trail
            trail.before = trail.holder = ""

    def passed_on(self, request: HeldRequest, holder: str) -> None:
        """Watch a request that ``holder`` has now."""
        trail = self._by_id[request.request].trail
        if not trail.holder:
            trail.before, trail.holder = request.downstream, holder
        until = news_by(self._turn.now, self.budget_end(request))
        self._custody.transition(request, AWAY, f"passed on to {holder}", until)

    def _on_moved(self, sender: str, message: Moved) -> None:
        request = self._by_id.get(message.transfer.request)
        if request is None:
            return
        copy, custody = request.copy, self._custody
        request.trail.before, request.trail.holder = (
            message.before if message.before in self._turn.neighbors.by_name else sender,  # the news may be late
            sender,
        )
        if copy.stage is AWAY:
            custody.timers.set(copy, news_by(self._turn.now, self.budget_end(copy)))
        elif copy.stage is CUSTODY and copy.downstream == message.before:
            self.passed_on(copy, sender)

    def _on_up(self, event: NeighborUp) -> None:
        """Tell a peer that was away which requests have ended: it would run those that it still holds."""
        hello, ended = event.hello, tuple(self.ended.remembered)[-MAX_CANCELED:]
        if ended and hello.role == "peer" and hello.name not in self._turn.neighbors.by_name:
            self._turn.send(hello.name, Cancel(ended, 1_000_000))

    def _on_lost(self, event: NeighborDown) -> None:
        """Reroute ``AWAY`` requests whose holder and keeper are both lost; one may be back, without its tokens."""
        linked, lost = self._turn.neighbors.by_name, []
        for request in self.requests.values():
            trail = request.trail
            if event.name in (trail.before, trail.holder):
                trail.before = trail.holder = trail.before if event.name == trail.holder else trail.holder
                if request.copy.stage is AWAY and trail.holder not in linked:
                    lost.append(request.copy)
        for copy in lost:
            self._recovery.reroute(copy, f"{event.name} was lost, the last one with its tokens", "lost")

    def _on_silence(self, request: HeldRequest) -> None:
        """Reroute an ``AWAY`` request without news for too long, if possible past its holders."""
        trail = self._by_id[request.request].trail
        for name in dict.fromkeys((request.downstream, trail.before, trail.holder)):
            if name:
                self._recovery.avoid(request, name)
        self._recovery.reroute(request, "no news of it for too long", "late")

    # End of a turn.

    def finish(self) -> float:
        """Send CANCEL if it is due, or due soon and other messages are sent; return the time of the next one."""
        turn = self._turn
        ahead = CANCEL_EVERY / 2 if turn.instructions else 0.0
        if turn.now + ahead >= self.ended.cancel_at:
            for cancel in self.ended.pop_cancels(turn.now):
                for n in (n for n in turn.neighbors if n.is_peer):
                    turn.send(n.name, cancel)
        return self.ended.cancel_at


SourceMachine = Machine[SourceRules]
"""Machine of a process that has images, made by :func:`source_machine`."""


class Answer(NamedTuple):
    """Step of a decision: answer a request."""


def nothing_remains(case: Case) -> Answer | None:
    """Answer a request without remaining blocks."""
    return None if case.itinerary.remaining else Answer()


def _with_history(asked: Itinerary, reported: Itinerary, avoid: tuple[str, ...]) -> Itinerary:
    """Return the itinerary that was asked for, with what has happened to it."""
    return msgspec.structs.replace(
        asked,
        waves=reported.waves,
        skipped=reported.skipped,
        remaining=reported.remaining,
        visits=reported.visits,
        avoid=avoid,
    )


def _not_asked(asked: Itinerary, reported: Itinerary) -> str:
    """Return why a returned itinerary does not belong to the request, or an empty string."""
    if reported.track is not None:
        return "it returned a track of a wave, which belongs to a peer"
    ran = [block for wave in reported.waves for track in wave for block, _ in track]
    if {*ran, *reported.skipped, *reported.remaining} != {*asked.remaining}:
        return "it returned other blocks than those of the request"
    return ""
