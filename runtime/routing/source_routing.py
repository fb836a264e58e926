"""The routing machine of a source, which admits requests, keeps their furthest tokens and is the only one to end them.

A request has one current copy: the stem's tokens, or those of the last RETURN that got further. The copy is never
given up before the request ends: when its next holder has passed it on it is ``AWAY``, watched through MOVED messages,
and routed again when both the holder and the keeper of the copy before are lost, or when there is no news for too long.
To what every process does (``custody.py``) a source adds one transition:

    AWAY -> WAITING   both holders lost, no message, or a contradictory return

A request ends with the first answer that comes back; later ones are counted and dropped. What comes back is used only
as far as the request allows it: its parameters (policy, skips, the order of blocks) are kept here and not taken
from the wire, and its id consists of random bits that only processes with its tokens have. When nothing that may
run now can be reached, the source skips it (at most ``max_skips`` blocks, after a short wait for holders to come
back), which lets the next band run, and at the end of the budget it answers from the furthest tokens if that many
skips are allowed, else with an error.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.errors import BudgetExceeded, NotFinite, Overloaded, RequestError
from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.records import Rejection
from ls_edge.runtime.protocol.messages import (
    MAX_BUDGET_US,
    Accept,
    Cancel,
    Itinerary,
    Moved,
    RequestId,
    ReturnReason,
    TransferId,
)
from ls_edge.runtime.routing.candidates import ONE_BAND, Candidate, LocalNode
from ls_edge.runtime.routing.custody import CustodyMachine
from ls_edge.runtime.routing.events import (
    Abandon,
    Arrived,
    Complete,
    Event,
    Fail,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    NoteKind,
    Returned,
    Send,
    Submit,
)
from ls_edge.runtime.routing.held_request import INFINITY, HeldRequest, Stage
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policies import policy_of

CANCEL_AT_MOST = 256
"""Limit on the requests in one CANCEL."""
MAX_HOLDERS_SEEN = 64
"""Limit on the remembered holders of a request."""
MAX_REMEMBERED = 4096
"""Limit on ended requests that are remembered, to count late answers."""
_HOLDERS_NOT_FINITE = 2
"""Number of peers that must find values of a request not finite before it ends with an error."""


_NO_HOLDER = "had no reachable holder"
_TOO_LATE = "did not run in time"
_NO_TRACK = "stood in a track that did not come back"
_WHY_NOT_RUN = {ReturnReason.UNREACHABLE.value: _NO_HOLDER, ReturnReason.CREDIT.value: "got no peer's credit"}


@dataclass(eq=False)
class OpenRequest:
    """A request without an outcome."""

    number: int
    asked: Itinerary
    """Itinerary as submitted; every return must be consistent with it."""
    copy: HeldRequest
    """The furthest tokens."""
    attempts: int = 1
    not_finite: list[str] = field(default_factory=list)
    """Processes that returned it because of values that are not finite, or with such tokens."""
    seen_holders: dict[str, None] = field(default_factory=dict)
    """Processes that have accepted it, sent MOVED or returned it, in order."""
    before: str = ""
    """Process that keeps the copy before that of :attr:`holder`."""
    holder: str = ""
    passed_on: set[str] = field(default_factory=set)
    """Former holders, whose next holders have passed the request on as well."""
    reason: str = ""
    """Reason of the latest return."""
    way_out: str = ""
    """Process that returned it from beyond the reach of this source, or for lack of a credit there."""
    left_out: dict[int, str] = field(default_factory=dict)
    """Blocks that this source has skipped, with the reason."""
    watch_returns: bool = False


class SourceMachine(CustodyMachine):
    """Routing of a process that has the images."""

    def __init__(
        self,
        name: str,
        *,
        limits: Limits,
        rng: random.Random,
        costs: OrderCosts | None = None,
        bands: Bands = ONE_BAND,
        bundle_id: str = "",
    ) -> None:
        """``rng`` draws what identifies requests too: in a process it has to be a source of secrets.

        ``bundle_id``: the only bundle whose blocks may run; empty for any of the model.
        """
        super().__init__(name, limits=limits, rng=rng, costs=costs, bands=bands)
        self.bundle_id = bundle_id
        self.requests: dict[int, OpenRequest] = {}
        self.rejected: dict[str, Rejection] = {}
        """Impossible answers and returns by sender; replaced with each one."""
        self.duplicates: Counter[int] = Counter()
        """Number of late answers by request."""
        self.head_us = 0
        """Usual time of the head, reserved at the end of every budget; set by the caller."""
        self._local_node = LocalNode(costs=costs, credit_wait=limits.credit_wait, bands=bands)
        self._seen: dict[int, float] = {}
        self._by_id: dict[RequestId, OpenRequest] = {}
        self._answered: dict[RequestId, int] = {}
        self._ended: dict[RequestId, float] = {}
        """Ended requests that peers have not been told about, and their deadlines."""
        self._cancel_at = float("inf")
        self.transitions |= {
            (Stage.AWAY, Stage.WAITING): self._enter_waiting,
        }
        self.event_handlers |= {Submit: self._on_submit, Abandon: self._on_abandon}
        self.message_handlers[Moved] = self._on_moved

    def last_seen(self, block: int) -> float:
        """Return the time at which a holder of ``block`` was last reachable, if only through others; -inf if never."""
        return self._seen.get(block, float("-inf"))

    def _before_event(self, event: Event) -> None:
        if isinstance(event, (NeighbourDown, NeighbourState)):
            self._note_reachable()

    def _after_event(self, event: Event) -> None:
        if isinstance(event, (NeighbourUp, NeighbourState)):
            self._note_reachable()

    def _note_reachable(self) -> None:
        for n in self.neighbours:
            state = n.state
            if n.is_silent or n.hello.role != "peer" or state is None:
                continue
            if state.warm and not state.draining and not state.stuck:
                # What is behind others may be served by any bundle.
                behind = () if self.bundle_id else (state.reach_blocks, *state.far_blocks)
                for block in itertools.chain(n.hello.blocks, *behind):
                    self._seen[block] = self.now

    # Events.

    def _on_submit(self, event: Submit) -> None:
        transfer = TransferId(self.rng.randbytes(16), self.rng.getrandbits(64), 0)
        copy = HeldRequest(
            transfer,
            event.itinerary,
            event.tokens,
            event.deadline,
            None,
            self.now,
            event.request,
            bundle_id=self.bundle_id,
        )
        request = OpenRequest(event.request, event.itinerary, copy, watch_returns=event.watch_returns)
        self.requests[event.request] = self._by_id[transfer.request] = request
        self.hold(copy, "submitted")
        self.decide_soon(copy)

    def _on_abandon(self, event: Abandon) -> None:
        request = self.requests.get(event.request)
        if request is not None:
            self._end_request(request, "abandoned")

    def _on_moved(self, sender: str, message: Moved) -> None:
        request = self._by_id.get(message.transfer.request)
        if request is None:
            return
        copy = request.copy
        new = sender != request.holder
        if request.before:
            request.passed_on.add(request.before)
        request.passed_on -= {message.before, sender}
        request.before, request.holder = message.before, sender
        _note_seen(request, message.before, sender)
        if copy.stage is Stage.AWAY and new:  # repeated MOVED from the same holder extends nothing
            self._watch(copy)
        elif copy.stage is Stage.CUSTODY and copy.downstream == message.before:
            self._released(copy, sender)

    def _on_arrived(self, event: Arrived) -> None:
        run, sender = event.run, event.sender
        self.instructions.append(Send(sender, Accept(run.transfer, 1)))
        request = self._by_id.get(run.transfer.request)
        if request is None:
            number = self._answered.get(run.transfer.request)
            if number is None:
                self._reject(sender, "tokens of a request that it was never given")
            elif not run.itinerary.remaining:
                self.duplicates[number] += 1
            return
        lie = _what_cannot_be(request.asked, run.itinerary, request.left_out, self.bands)
        if lie:
            self._reject(sender, lie, request)
            self._pass_over(request, sender)
            if request.copy.downstream == sender:
                self.reroute(request.copy, f"{sender} gave back what cannot be")
            return
        if self._is_former_holder(request, sender):
            if not run.itinerary.remaining:
                self.duplicates[request.number] += 1
            return
        if not event.finite or run.returning == ReturnReason.NOT_FINITE:
            self._on_not_finite(request, sender)
            return
        old = request.copy
        itinerary = _restored(request.asked, run.itinerary, old.itinerary.avoid)
        gained = itinerary.blocks_done - old.itinerary.blocks_done
        if gained < 0:
            return
        _note_seen(request, sender)
        tokens = event.tokens
        if gained == 0 and itinerary.remaining:
            self._pass_over(request, sender)
            # Without progress keep our own tokens, since the returned ones may differ.
            itinerary, tokens = old.itinerary, old.tokens
        for holder in _holders(itinerary) if gained else ():
            n = self.neighbours.get(holder)
            if n is not None:
                n.reset_back_off()
        slow_us = self.limits.hop_floor * 1e6 / self.limits.hop_factor  # faster ones need no longer deadline
        for visit in itinerary.visits if gained else ():
            if visit.blocks and visit.engine_us > slow_us * len(visit.blocks):
                n = self.neighbours.get(visit.holder)
                if n is not None:
                    took = min(visit.engine_us / 1e6, self.now - old.arrived)
                    n.ran_after(took / len(visit.blocks), self.limits)
        transfer = TransferId(run.transfer.request, self.rng.getrandbits(64), 0)
        request.copy = HeldRequest(
            transfer,
            itinerary,
            tokens,
            old.deadline,
            None,
            self.now,
            old.tie_break,
            avoid=old.avoid,
            bundle_id=self.bundle_id,
        )
        self.end(old, f"{sender} brought it back")
        request.before = request.holder = ""
        request.reason = run.returning
        beyond = run.returning == ReturnReason.CREDIT or any(self._is_beyond(v.holder) for v in itinerary.visits)
        request.way_out = sender if beyond else ""
        if request.watch_returns:
            reported = _restored(request.asked, run.itinerary)
            self.instructions.append(Returned(request.number, sender, reported, event.tokens))
        self.hold(request.copy, f"from {sender}: {run.returning}")
        self.decide_soon(request.copy)

    def _is_former_holder(self, request: OpenRequest, sender: str) -> bool:
        """Return whether a process has nothing to return any more: the request was passed on twice since.

        It may still bring back what comes from who has no link to this source.
        """
        if sender not in request.passed_on or request.copy.stage is not Stage.AWAY:
            return False
        holder = self.neighbours.get(request.holder)
        return holder is not None and not self.leads_beyond(holder)

    def _reject(self, sender: str, why: str, request: OpenRequest | None = None) -> None:
        count = self.rejected[sender].count if sender in self.rejected else 0
        self.rejected = {**self.rejected, sender: Rejection(count + 1, why)}
        note = Note(NoteKind.REJECTED, sender, None if request is None else request.copy.request, why)
        self.instructions.append(note)

    def _pass_over(self, request: OpenRequest, name: str) -> None:
        """Pause offers to a process that returned a request unchanged or in an impossible state."""
        n = self.neighbours.get(name)
        if n is not None:
            n.back_off(self.now, self.limits)
            self.avoid(request.copy, name, n.backoff_until)

    def _annotated(self, request: HeldRequest, itinerary: Itinerary) -> Itinerary:  # noqa: ARG002
        return itinerary

    def _on_not_finite(self, request: OpenRequest, sender: str) -> None:
        """Try one other holder after values that are not finite, then end the request and name the holders."""
        request.not_finite.append(sender)
        copy = request.copy
        why = "NaN or infinity in what it computed"
        self.instructions.append(Note(NoteKind.NOT_FINITE, sender, copy.request, why))
        self.avoid(copy, sender, copy.deadline)
        wanted = frozenset(self.bands.permitted(copy.itinerary.remaining))
        others = [
            c for c in self.reachable(copy) if c.name not in copy.avoid and (wanted & c.blocks or c.leads_to(wanted))
        ]
        if others and len(request.not_finite) < _HOLDERS_NOT_FINITE:
            self.reroute(copy, "numbers that are not finite")
        else:
            self._fail(request, _not_finite(request))

    # Deciding.

    def local_node(self, request: HeldRequest) -> LocalNode:  # noqa: ARG002
        """Return a node without blocks: a source runs none."""
        return self._local_node

    def _decide_locally(self, request: HeldRequest, local: LocalNode) -> bool:  # noqa: ARG002
        return False

    def _run_here(self, request: HeldRequest, block: int) -> None:
        raise AssertionError(f"a source runs no block {block} of {request.history()}")

    def _cannot_go_on(self, request: HeldRequest, reason: ReturnReason) -> None:
        owner = self._by_id[request.request]
        if reason is ReturnReason.DONE:
            self._complete(owner)
            return
        owner.reason = reason
        stuck = self.bands.permitted(request.itinerary.remaining)
        if reason is ReturnReason.UNREACHABLE and _may_skip(request.itinerary, stuck):
            self._note_reachable()
            skip_at = max(self.last_seen(block) for block in stuck) + self.limits.skip_grace
            if skip_at <= self.now:
                self._skip(owner, stuck, _NO_HOLDER)
            else:
                self.wait(request, skip_at, "unreachable")
            return
        # No event announces the end of a pause of offers.
        held_back = bool(request.avoid) or any(n.backoff_until > self.now for n in self.neighbours)
        until = self.now + self.limits.look_again if held_back else None
        saturated = self.able_to_run(request, self.reachable(request)) if reason is ReturnReason.CREDIT else ()
        names = tuple(c.name for c in saturated if not c.credits)
        self.wait(request, until, reason, credit_of=names, or_change=held_back)

    def _waits_on(self, request: HeldRequest, candidates: Iterable[Candidate]) -> bool:  # noqa: ARG002
        return False

    def _way_out(self, request: HeldRequest) -> str:
        owner = self._by_id[request.request]
        way = owner.way_out
        if owner.reason == ReturnReason.UNREACHABLE and _may_skip(
            request.itinerary, self.bands.permitted(request.itinerary.remaining)
        ):
            return ""
        return "" if request.avoid.get(way, 0.0) >= request.deadline else way

    def _waits_for_credit(self, request: HeldRequest) -> None:
        self._by_id[request.request].reason = ReturnReason.CREDIT

    def _skip(self, request: OpenRequest, blocks: tuple[int, ...], why: str) -> None:
        """Leave blocks out; the remaining ones may run now, or the request is complete."""
        copy = request.copy
        copy.itinerary = copy.itinerary.skip(blocks)
        request.left_out.update(dict.fromkeys(blocks, why))
        if copy.itinerary.remaining:
            self.decide_soon(copy)
        else:
            self._complete(request)

    def _why_skipped(self, request: OpenRequest, skipped: tuple[int, ...]) -> str:
        reasons: dict[str, list[int]] = {}
        for block in skipped:
            reasons.setdefault(request.left_out.get(block, _NO_TRACK), []).append(block)
        return "; ".join(f"{self._blocks_text(tuple(blocks))} {why}" for why, blocks in reasons.items())

    def _blocks_text(self, blocks: tuple[int, ...]) -> str:
        """Return blocks for a message, with their band if the model has several."""
        bands = list(dict.fromkeys(self.bands.name(self.bands.band_of(block)) for block in sorted(blocks)))
        text = f"{'block' if len(blocks) == 1 else 'blocks'} {_listed(blocks)}"
        return f"{text} of {bands[0]}" if len(bands) == 1 and bands[0] else text

    # Ends.

    def _complete(self, request: OpenRequest) -> None:
        copy = request.copy
        itinerary = copy.itinerary
        holders = tuple(request.seen_holders)
        why = self._why_skipped(request, itinerary.skipped)
        self.instructions.append(Complete(request.number, itinerary, copy.tokens, request.attempts, holders, why))
        self._end_request(request, "complete", soon=request.attempts == 1 and not itinerary.skipped)

    def _fail(self, request: OpenRequest, error: RequestError) -> None:
        self.instructions.append(Fail(request.number, error, request.copy.itinerary, request.attempts))
        self._end_request(request, "failed")

    def _end_request(self, request: OpenRequest, why: str, *, soon: bool = False) -> None:
        """Forget a request and inform the peers, immediately unless ``soon`` suffices."""
        copy = request.copy
        del self.requests[request.number], self._by_id[copy.request]
        self.end(copy, why)
        self._answered[copy.request] = request.number
        if len(self._answered) > MAX_REMEMBERED:
            del self._answered[next(iter(self._answered))]
        self._ended[copy.request] = copy.deadline
        self._cancel_at = min(self._cancel_at, self.now + (self.limits.cancel_every if soon else 0.0))
        if len(self._ended) >= CANCEL_AT_MOST:
            self._cancel_at = self.now

    def _other_check(self) -> float:
        return self._cancel_at if self._ended else INFINITY

    def _finish(self) -> None:
        """Send the CANCEL that is due."""
        if not self._ended or self.now < self._cancel_at:
            return
        budget = min(MAX_BUDGET_US, max(0, round((max(self._ended.values()) - self.now) * 1e6)))
        cancel = Cancel(tuple(self._ended), budget)
        self.instructions += [Send(n.name, cancel) for n in self.neighbours if n.hello.role == "peer"]
        self._ended.clear()
        self._cancel_at = float("inf")

    def _end(self, request: HeldRequest) -> float:
        return request.deadline - self.limits.way_back - self.head_us / 1e6

    def _over_budget(self, request: HeldRequest) -> bool:
        if self.now < self._end(request):
            return False
        owner = self._by_id[request.request]
        it = request.itinerary
        if not it.remaining:
            self._complete(owner)
            return True
        if _may_skip(it, it.remaining):
            self._skip(owner, it.remaining, _WHY_NOT_RUN.get(owner.reason, _TOO_LATE))
            return True
        if owner.not_finite:
            self._fail(owner, _not_finite(owner))
            return True
        stuck = self.bands.permitted(it.remaining)
        left = self._blocks_text(stuck)
        behind = len(it.remaining) - len(stuck)
        waits = f", and {behind} of later bands had to wait for {'it' if len(stuck) == 1 else 'them'}" if behind else ""
        if owner.reason == ReturnReason.CREDIT:
            error: BudgetExceeded | Overloaded = Overloaded(
                f"request {owner.number}: no peer had a credit for {left} within the budget{waits}; "
                "send more slowly, or raise the peers' credits or the budget"
            )
        else:
            why = _NO_HOLDER if owner.reason == ReturnReason.UNREACHABLE else _TOO_LATE
            error = BudgetExceeded(
                f"request {owner.number}: {left} {why} within the budget{waits} and at most {it.max_skips} may "
                "be skipped; check the peers, or raise --budget-ms or --max-skips"
            )
        self._fail(owner, error)
        return True

    # Watching what is away.

    def _accepted(self, request: HeldRequest) -> None:
        owner = self._by_id[request.request]
        owner.passed_on.discard(request.downstream)
        _note_seen(owner, request.downstream)

    def _released(self, request: HeldRequest, holder: str) -> None:
        owner = self._by_id[request.request]
        if not owner.holder:
            owner.before, owner.holder = request.downstream, holder
        self.transition(request, Stage.AWAY, f"passed on to {holder}")

    def _watch(self, request: HeldRequest) -> None:
        holder = self._by_id[request.request].holder
        n = self.neighbours.get(holder)
        left = max(0.0, self._end(request) - self.now)
        request.keep_until = self.now + self.limits.keep_share * left
        if self._is_beyond(holder) or (n is not None and self.leads_beyond(n)):
            # A process without a link to this source sends no MOVED; the keeper of the copy before watches over it.
            news_by = request.keep_until
        else:
            work = len(request.itinerary.remaining) * self.neighbours.usual_call(holder)
            news_by = self.now + max(self.limits.away_floor, self.neighbours.hop_deadline(holder) + work)
        self.set_check(request, min(news_by, request.keep_until, request.keep_end, self._end(request)))

    def _is_beyond(self, name: str) -> bool:
        """Return whether a process is linked to a neighbour but not to this source."""
        return name not in self.neighbours.by_name and any(n.state and name in n.state.reaches for n in self.neighbours)

    def _late(self, request: HeldRequest) -> None:
        """Start a new branch of an away request without news, or kept for too long."""
        owner = self._by_id[request.request]
        if self._is_beyond(owner.holder):
            pass  # others may be behind it, and it was not this source that waited for its word
        elif owner.holder and owner.holder != request.downstream:
            self.avoid(request, owner.holder, self.now + self.limits.away_floor)
        else:
            self._pass_over(owner, request.downstream)
        self.reroute(request, "no news of it for too long")

    def _neighbour_lost(self, name: str) -> None:
        for request in list(self.requests.values()):
            if request.copy.stage is not Stage.AWAY or name not in (request.before, request.holder):
                continue
            other = request.before if name == request.holder else request.holder
            if other not in self.neighbours.by_name:
                self.reroute(request.copy, f"{name} and {other} were lost")

    def _rerouted(self, request: HeldRequest) -> None:
        owner = self._by_id[request.request]
        owner.attempts += 1
        owner.before = owner.holder = ""

    def _validate_parts(self) -> None:
        copies = {request.copy.transfer for request in self.requests.values()}
        self._expect(copies == self.held.keys(), "requests and held copies differ")
        by_id = {request.copy.request: request for request in self.requests.values()}
        self._expect(by_id == self._by_id, "requests and their ids differ")


def _may_skip(itinerary: Itinerary, blocks: tuple[int, ...]) -> bool:
    """Return whether these blocks may be left out in addition to those already skipped."""
    skips = len(itinerary.skipped) + len(blocks)
    return policy_of(itinerary.policy).may_skip and skips <= itinerary.max_skips


def _what_cannot_be(asked: Itinerary, reported: Itinerary, left_out: Collection[int], bands: Bands) -> str:
    """Return why a returned itinerary cannot belong to the request, or an empty string.

    ``left_out``: blocks that its source has skipped, perhaps not yet when this copy was on its way.

    That each block of the model stands in it once, and who serves which block, is checked on arrival.
    """
    if reported.track is not None:
        return "a track of a wave, which belongs to a peer"
    policy = policy_of(asked.policy)
    skipped = tuple(block for block in reported.skipped if block not in left_out)
    if skipped and (asked.on_straggler != "skip" or not policy.runs_in_waves):
        return f"blocks {_listed(skipped)} left out, which only its source may do"
    if len(reported.skipped) > asked.max_skips:
        return f"{len(reported.skipped)} blocks left out where {asked.max_skips} may be"
    if not policy.runs_in_waves and any(len(wave) != 1 for wave in reported.waves):
        return f"blocks side by side under the policy {asked.policy}"
    ran = tuple(block for wave in reported.waves for track in wave for block, _ in track)
    if not policy.may_reorder and ran != asked.remaining[: len(ran)]:
        return f"blocks in the order {_listed(ran)} under the policy {asked.policy}"
    return "" if bands.is_one else bands.fault(reported.arrangement, _restored(asked, reported).remaining)


def _note_seen(request: OpenRequest, *names: str) -> None:
    for name in names:
        if len(request.seen_holders) < MAX_HOLDERS_SEEN:
            request.seen_holders[name] = None


def _not_finite(request: OpenRequest) -> NotFinite:
    names = ", ".join(dict.fromkeys(request.not_finite))
    return NotFinite(
        f"request {request.number}: NaN or infinity in what {names} computed; check the image, and the bundle with "
        "'ls-edge verify'"
    )


def _holders(itinerary: Itinerary) -> set[str]:
    return {holder for wave in itinerary.waves for track in wave for _, holder in track}


def _listed(blocks: tuple[int, ...]) -> str:
    return ", ".join(map(str, blocks))


def _restored(asked: Itinerary, reported: Itinerary, avoid: tuple[str, ...] = ()) -> Itinerary:
    """Return the itinerary as asked, with the history that was reported."""
    ran = {block for wave in reported.waves for track in wave for block, _ in track}
    gone = ran.union(reported.skipped)
    remaining = tuple(block for block in asked.remaining if block not in gone)
    return msgspec.structs.replace(
        asked,
        waves=reported.waves,
        skipped=reported.skipped,
        remaining=remaining,
        visits=reported.visits,
        relays=(),
        avoid=avoid,
    )
