"""Rules of a source, which submits requests, keeps their furthest tokens, and alone ends them.

A request has one current copy: the tokens of the stem, or of the returned transfer that got furthest. The copy is kept
until the request ends: when its next holder has passed it on, it is ``AWAY`` and watched through MOVED messages. It is
rerouted if both the holder and the keeper of the previous copy are lost, or if there is no news for too long.

A request ends with the first answer that comes back; later answers are counted and dropped. Returned tokens count only
as far as the request allows: its policy, skips and order are kept here and not taken from the wire, and its id consists
of random bits that only processes with its tokens have. If no block that may run now can be reached, the source skips
such blocks (at most ``max_skips``, after a short wait for holders to come back), so that the next band can run. At the
end of the budget it answers from the furthest tokens if enough skips are allowed, else with an error.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.errors import BudgetExceeded, ImageRejected, NotFinite, Overloaded, RequestError
from ls_edge.core.parts import STEM
from ls_edge.core.records import Rejection
from ls_edge.core.text import name_blocks
from ls_edge.runtime.protocol.messages import (
    Accept,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    Release,
    RequestId,
    ReturnReason,
    TransferId,
)
from ls_edge.runtime.routing.claims import as_asked, blocks_run, implausible_return, is_former_holder
from ls_edge.runtime.routing.decisions import Handlers, may_skip
from ls_edge.runtime.routing.machine import MTU, Machine
from ls_edge.runtime.routing.source.ended_requests import EndedRequests
from ls_edge.runtime.routing.state.candidates import LocalNode, Model
from ls_edge.runtime.routing.state.custody import StageActions, Stages
from ls_edge.runtime.routing.state.events import (
    Abandon,
    Arrived,
    Complete,
    Event,
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
    Trail,
)
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.turn import Turn

_NO_HOLDER = "had no reachable holder"
_TOO_LATE = "did not run in time"
_NO_TRACK = "belonged to a track that did not come back"
_WHY_NOT_RUN = {ReturnReason.UNREACHABLE.value: _NO_HOLDER, ReturnReason.CREDIT.value: "got no peer's credit"}


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
    trail: Trail
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

    def __init__(self, machine: Machine[SourceRules]) -> None:
        self._machine = machine
        self._turn = turn = machine.turn
        self._custody = custody = machine.custody
        self.requests: dict[int, OpenRequest] = {}
        self.rejected: dict[str, Rejection] = {}
        """Rejected answers by sender. Each rejection replaces the dictionary: other threads read it."""
        self._node = LocalNode(model=turn.model, limits=turn.limits)
        self._reachable: frozenset[int] = frozenset()
        """Blocks that were reachable when last checked."""
        self._last_reachable: dict[int, float] = {}
        """Time at which each block was last reachable, before that check."""
        self._looked_at = -INFINITY
        self._by_id: dict[RequestId, OpenRequest] = {}
        self.ended = EndedRequests(turn.limits)
        self.handlers: Handlers = {
            NeighborUp: (machine.on_up, self._look_at_reach),
            NeighborDown: (machine.on_down, self._look_at_reach),
            NeighborState: (machine.on_state, self._look_at_reach),
            Arrived: (self._take_in,),
            Received: (machine.on_received,),
            Unsendable: (machine.on_unsendable,),
            Submit: (self._on_submit,),
            Abandon: (self._on_abandon,),
            Removed: (),
            Tick: (),
            # Messages, with their sender.
            Accept: (machine.on_accept,),
            Refuse: (machine.on_refuse,),
            Progress: (machine.on_progress,),
            Release: (machine.on_release,),
            Moved: (self._on_moved,),
        }
        self.stages: Stages = {
            WAITING: StageActions(custody.waiting.ready.append, custody.waiting.remove),
            OFFERED: StageActions(machine.check_hop, custody.leave_hop),
            CUSTODY: StageActions(machine.check_hop, custody.leave_hop),
            AWAY: StageActions(self._on_silence),
            ENDED: StageActions(None),
        }

    # Arrival of requests and tokens.

    def _on_submit(self, event: Submit) -> None:
        turn = self._turn
        transfer = TransferId(turn.rng.randbytes(16), turn.rng.getrandbits(64), 0)
        trail = Trail()
        copy = HeldRequest(
            transfer=transfer,
            itinerary=event.itinerary,
            tokens=event.tokens,
            deadline=event.deadline,
            upstream=None,
            arrived=turn.now,
            tie_break=event.request,
            bundle_id=turn.model.bundle_id,
            trail=trail,
        )
        request = OpenRequest(event.request, event.itinerary, copy, trail)
        self.requests[event.request] = self._by_id[transfer.request] = request
        self._custody.hold(copy, "submitted")

    def _take_in(self, event: Arrived) -> None:
        """Accept tokens that come home, and use them if they are plausible and further than the current copy."""
        run, sender, turn = event.run, event.sender, self._turn
        turn.send(sender, Accept(run.transfer, 1))
        request = self._by_id.get(run.transfer.request)
        if request is None:
            number = self.ended.numbers.get(run.transfer.request)
            if number is None:
                self._reject(sender, "tokens of a request that it was never given")
            elif not run.itinerary.remaining:
                self.ended.count_late(number)
            return
        copy, linked = request.copy, turn.neighbors.get(request.trail.holder)
        needs_relay = linked is None or turn.neighbors.leads_beyond(linked)
        lie = implausible_return(request.asked, run.itinerary, request.left_out, turn.bands)
        if lie:
            self._reject(sender, lie, copy)
            self._pass_over(copy, sender)
            if copy.downstream == sender:
                self._machine.reroute(copy, f"{sender} returned an impossible itinerary")
        elif is_former_holder(copy, sender, needs_relay=needs_relay):
            if not run.itinerary.remaining:
                self.ended.count_late(request.number)
        elif STEM in run.itinerary.remaining and run.returning.startswith(ReturnReason.NO_IMAGE):
            why = run.returning.partition(": ")[2]
            self._fail(request, ImageRejected(f"request {request.number}: {why} (on {sender})"))
        elif not event.finite or run.returning == ReturnReason.NOT_FINITE:
            self._on_not_finite(request, sender)
        elif run.itinerary.blocks_done >= copy.itinerary.blocks_done:
            self._take_back(request, event)

    def _take_back(self, request: OpenRequest, event: Arrived) -> None:
        """Continue with returned tokens if they are further; otherwise with the own copy, since they may be false."""
        run, sender, turn, old = event.run, event.sender, self._turn, request.copy
        avoid = old.itinerary.avoid
        if run.returning == ReturnReason.UNREACHABLE and any(map(turn.neighbors.leads_beyond, turn.neighbors)):
            avoid = ()  # a process to avoid may be the only way
        itinerary, tokens = as_asked(request.asked, run.itinerary, avoid), event.tokens
        gained = itinerary.blocks_done > old.itinerary.blocks_done
        request.trail.note(sender)
        if gained:
            _learn_from(itinerary, old, turn)
        elif itinerary.remaining:
            if old.downstream not in ("", sender):  # peers on the way out may announce a holder that is gone
                old.avoid[old.downstream] = turn.now + turn.limits.pause
            if avoid == old.itinerary.avoid:
                self._pass_over(old, sender)
            else:
                old.itinerary = msgspec.structs.replace(old.itinerary, avoid=avoid)
            itinerary, tokens = old.itinerary, old.tokens
        if not itinerary.remaining:
            old.itinerary, old.tokens = itinerary, tokens
            self._complete(request)
            return
        beyond = any(turn.neighbors.is_beyond(visit.holder) for visit in itinerary.visits)
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
            trail=request.trail,
            way_out=sender if beyond or run.returning == ReturnReason.CREDIT else "",
        )
        request.earlier_reroutes += old.reroutes
        request.trail.before = request.trail.holder = ""
        self._custody.end(old, f"returned by {sender}")
        self._custody.hold(request.copy, f"from {sender}: {run.returning}")

    def _reject(self, sender: str, why: str, copy: HeldRequest | None = None) -> None:
        count = self.rejected[sender].count if sender in self.rejected else 0
        self.rejected = {**self.rejected, sender: Rejection(count + 1, why)}
        self._turn.note(NoteKind.REJECTED, sender, None if copy is None else copy.request, why)

    def _pass_over(self, copy: HeldRequest, name: str) -> None:
        """Pause offers to a process that returned a request unchanged or in an impossible state."""
        n = self._turn.neighbors.get(name)
        if n is not None:
            n.back_off()
            self._machine.avoid(copy, name, n.backoff_until)

    def _on_not_finite(self, request: OpenRequest, sender: str) -> None:
        """Try another holder after NaN or infinity; after a second one, fail the request and name the holders."""
        machine, turn, copy = self._machine, self._turn, request.copy
        if sender in request.not_finite and sender != copy.downstream:
            return
        request.not_finite[sender] = None
        why = "NaN or infinity in its output"
        turn.note(NoteKind.NOT_FINITE, sender, copy.request, why)
        machine.avoid(copy, sender, copy.deadline)
        others = machine.decisions.others_could_run(copy, copy.avoid)
        if others and len(request.not_finite) < turn.limits.holders_not_finite:
            machine.reroute(copy, "NaN or infinity")
        else:
            self._fail(request, _not_finite(request))

    # Decisions.

    def local_node(self) -> LocalNode:
        """Return a node without blocks, since a source runs none."""
        return self._node

    def next_step(self, request: HeldRequest) -> bool:
        """Answer a request without remaining blocks; return whether it was one."""
        if request.itinerary.remaining:
            return False
        self._complete(self._by_id[request.request])
        return True

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Skip blocks that are out of reach, or wait."""
        request.reason = reason
        turn, owner = self._turn, self._by_id[request.request]
        stuck = turn.bands.permitted(request.itinerary.remaining)
        if reason is ReturnReason.UNREACHABLE and may_skip(request.itinerary, stuck):
            self._look_at_reach()
            seen = self._last_reachable | dict.fromkeys(self._reachable, turn.now)
            skip_at = max(seen.get(block, -INFINITY) for block in stuck) + turn.limits.skip_grace
            if skip_at <= turn.now:
                self._skip(owner, stuck, _NO_HOLDER)
            else:
                self._custody.wait(request, "unreachable", skip_at)
            return
        # The end of a pause of offers raises no event.
        held_back = bool(request.avoid) or any(n.backoff_until > turn.now for n in turn.neighbors)
        until = turn.now + turn.limits.look_again if held_back else None
        decisions, lacks_credit = self._machine.decisions, reason is ReturnReason.CREDIT
        able = decisions.able_to_run(request, decisions.reachable(request)) if lacks_credit else []
        names = tuple(n.name for n in able if not n.credits)
        self._custody.wait_for(request, names, until, or_change=held_back)

    def _look_at_reach(self, event: Event | None = None) -> None:
        """Record which blocks are reachable, at or through neighbors that are not silent.

        Blocks of the previous check count as reachable until now if an event may have changed them, otherwise until
        that check. If the source demands a bundle or a link, blocks behind neighbors do not count.
        """
        model, until = self._turn.model, self._looked_at if event is None else self._turn.now
        good = [n for n in self._turn.neighbors if n.serves and not n.is_silent]
        linked = model.bundle_id or model.only_linked
        behind = [] if linked else [far for n in good for far in (n.reach_blocks, *n.far_blocks)]
        self._last_reachable |= dict.fromkeys(self._reachable, until)
        self._reachable = frozenset().union(*[n.blocks for n in good], *behind)
        self._looked_at = self._turn.now

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

    def _complete(self, request: OpenRequest) -> None:
        copy, attempts, seen = request.copy, request.attempts, tuple(request.trail.seen)
        why = _why_skipped(copy.itinerary.skipped, request.left_out, self._turn.bands)
        done = Complete(request.number, copy.itinerary, copy.tokens, attempts, seen, why)
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
        del self.requests[request.number], self._by_id[copy.request]
        self._custody.end(copy, why)
        self.ended.add(copy, request.number, self._turn.now, soon=soon)

    def out_of_budget(self, request: HeldRequest) -> bool:
        """Answer from the furthest tokens at the end of the budget if enough skips are allowed, else fail."""
        owner, itinerary = self._by_id[request.request], request.itinerary
        if not itinerary.remaining:
            self._complete(owner)
        elif may_skip(itinerary, itinerary.remaining):
            self._skip(owner, itinerary.remaining, _WHY_NOT_RUN.get(request.reason, _TOO_LATE))
        else:
            self._fail(owner, _not_finite(owner) if owner.not_finite else _too_late(owner, self._turn))
        return True

    # Requests that are AWAY.

    def _on_moved(self, sender: str, message: Moved) -> None:
        request = self._by_id.get(message.transfer.request)
        if request is None:
            return
        copy, custody, is_new = request.copy, self._custody, sender != request.trail.holder
        request.trail.moved(message.before, sender)
        if copy.stage is AWAY and is_new:  # a repeated MOVED of the same holder extends nothing
            custody.timers.set(copy, custody.news_by(copy))
        elif copy.stage is CUSTODY and copy.downstream == message.before:
            self._machine.passed_on(copy, sender)

    def _on_silence(self, request: HeldRequest) -> None:
        """Reroute an ``AWAY`` request without news for too long.

        If its holder is out of reach, this process knows that only from the neighbor that got the tokens. The next
        branch avoids both.
        """
        holder, limits = self._by_id[request.request].trail.holder, self._turn.limits
        if holder in ("", request.downstream) or self._turn.neighbors.is_beyond(holder):
            self._pass_over(request, request.downstream)
        if holder not in ("", request.downstream):
            self._machine.avoid(request, holder, self._turn.now + limits.away_floor)
        self._machine.reroute(request, "no news of it for too long")

    # End of a turn.

    def finish(self) -> float:
        """Send CANCEL if it is due, or due soon and other messages are sent; return the time of the next one."""
        turn = self._turn
        ahead = turn.limits.cancel_every / 2 if turn.instructions else 0.0
        if turn.now + ahead >= self.ended.cancel_at:
            peers = [n.name for n in turn.neighbors if n.hello.role == "peer"]
            for cancel in self.ended.pop_cancels(turn.now):
                for name in peers:
                    turn.send(name, cancel)
        return self.ended.cancel_at


SourceMachine = Machine[SourceRules]
"""Machine of a process that has images, made by :func:`source_machine`."""


def _learn_from(itinerary: Itinerary, old: HeldRequest, turn: Turn) -> None:
    """End the pauses of processes that ran blocks, and record the slow ones, which get longer deadlines."""
    for holder in {holder for _, holder in blocks_run(itinerary)}:
        n = turn.neighbors.get(holder)
        if n is not None:
            n.reset_back_off()
    slow_us = turn.limits.hop_floor * 1e6 / turn.limits.hop_factor  # faster processes do not need longer deadlines
    for visit in itinerary.visits:
        n = turn.neighbors.get(visit.holder)
        if n is not None and visit.blocks and visit.engine_us > slow_us * len(visit.blocks):
            n.ran_after(min(visit.engine_us / 1e6, turn.now - old.arrived) / len(visit.blocks))


# Texts.


def _why_skipped(skipped: tuple[int, ...], left_out: dict[int, str], bands: Bands) -> str:
    reasons: dict[str, list[int]] = {}
    for block in skipped:
        reasons.setdefault(left_out.get(block, _NO_TRACK), []).append(block)
    return "; ".join(f"{_name(blocks, bands)} {why}" for why, blocks in reasons.items())


def _name(blocks: list[int] | tuple[int, ...], bands: Bands) -> str:
    """Return the names of blocks for a message, with their band if the model has several."""
    found = {bands.name(bands.band_of(block)) for block in blocks}
    band = found.pop() if len(found) == 1 else ""
    return f"{name_blocks(blocks)} of {band}" if band else name_blocks(blocks)


def _not_finite(request: OpenRequest) -> NotFinite:
    names = ", ".join(request.not_finite)
    return NotFinite(
        f"request {request.number}: NaN or infinity in the output of {names}; check the image, and the bundle with "
        "'ls-edge verify'"
    )


def _too_late(request: OpenRequest, turn: Turn) -> BudgetExceeded | Overloaded:
    it, reason, bands, cut = request.copy.itinerary, request.copy.reason, turn.bands, turn.neighbors.losing_tokens
    stuck = bands.permitted(it.remaining)
    left = _name(stuck, bands)
    behind = set(it.remaining) - set(stuck)
    waits = f", so {name_blocks(behind)} could not run" if behind else ""
    if cut:
        return BudgetExceeded(
            f"request {request.number}: {left} {_TOO_LATE} within the budget{waits}: the link to {', '.join(cut)} ends "
            f"each time that tokens are sent; {MTU}, see 'ls-edge status'"
        )
    if reason == ReturnReason.CREDIT:
        return Overloaded(
            f"request {request.number}: no peer had a credit for {left} within the budget{waits}; "
            "send more slowly, or raise the peers' credits or the budget"
        )
    why = _NO_HOLDER if reason == ReturnReason.UNREACHABLE else _TOO_LATE
    return BudgetExceeded(
        f"request {request.number}: {left} {why} within the budget{waits}; at most {it.max_skips} may "
        "be skipped; check the peers, or raise --budget-ms or --max-skips"
    )
