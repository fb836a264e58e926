"""What becomes of waiting requests: the next block and holder, by the policy, within the credits of the neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from ls_edge.core.parts import has_ends
from ls_edge.runtime.protocol.messages import Itinerary, Progress, Release, ReturnReason
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.policy import Choice, Policy, RunHere, SendTo, Wait
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.custody import Custody, Stages
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest, Stage
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.routing.state.turn import Turn


def may_skip(itinerary: Itinerary, blocks: tuple[int, ...]) -> bool:
    """Return whether these blocks may be left out in addition to those already skipped; stem and head never may."""
    skips = len(itinerary.skipped) + len(blocks)
    return policy_of(itinerary.policy).may_skip and skips <= itinerary.max_skips and not has_ends(blocks)


Handlers = Mapping[type, tuple[Callable[..., object], ...]]
"""Handlers of each event, and of each message with its sender, in their order."""


class Rules(Protocol):
    """What a source and a peer do differently with a request."""

    handlers: Handlers
    stages: Stages

    def local_node(self) -> LocalNode:
        """Return what this process can run itself."""

    def next_step(self, request: HeldRequest) -> bool:
        """Take a step that needs no policy, as after the last block; return whether there was one."""

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Act on a request that no reachable process can take."""

    def out_of_budget(self, request: HeldRequest) -> bool:
        """End a request whose time is over, or send it home; return whether it was."""

    def finish(self) -> float:
        """Follow up on the events of a turn; return the time of the next :class:`Tick` for this, or infinity."""

    def check(self) -> None:
        """Raise :class:`InvalidState` for an inconsistency; see ``Machine.validate``."""


class Stay(NamedTuple):
    """Wait as before for whatever the request waits for."""

    begins: bool
    """It has just begun to wait."""


Step = Choice | Stay
"""Result of a decision."""


@dataclass(slots=True, eq=False)
class Case:
    """A waiting request, and what it is decided by."""

    request: HeldRequest
    policy: Policy
    local: LocalNode
    candidates: Sequence[Neighbor] = ()
    """Peers that it may be handed to."""


class Decisions:
    """Decides the waiting requests of a process, at the end of each turn."""

    rules: Rules

    def __init__(self, turn: Turn, custody: Custody) -> None:
        self.count = 0
        self.reroutes = 0
        """Number of times that a request was decided again after a failure."""
        self._turn = turn
        self._custody = custody
        self._neighbors = turn.neighbors
        self._limits = turn.limits
        self._waiting = custody.waiting
        self._look_at = 0.0
        """Time of the next look at waiting requests without an event."""

    # Which requests are decided.

    def run(self) -> None:
        """Decide the requests that are ready, and those for which a neighbor may have room."""
        waiting = self._waiting
        if self._turn.now >= self._look_at and waiting:
            self._look_at_waiting()
        while waiting.may_have_room or waiting.ready:
            if waiting.may_have_room:
                waiting.use_room(self._room, self.decide)
                continue
            request = waiting.ready.popleft()
            if request.stage is Stage.WAITING:
                self.decide(request)

    def next_look(self) -> float:
        """Return the time of the next :meth:`run` without an event."""
        return self._look_at if self._waiting else INFINITY

    def wake_all(self) -> None:
        """Decide every waiting request again, because the reachable processes have changed."""
        held = self._custody.held.values()
        self._waiting.ready.extend(request for request in held if request.stage is Stage.WAITING)

    def _look_at_waiting(self) -> None:
        """Decide again the requests that wait for the end of a suspicion, refusal or pause, since no event marks it."""
        self._look_at = self._turn.now + self._limits.pause
        if self._neighbors.have_recovered():
            self.wake_all()
        else:
            self._waiting.decide_changed()
        for n in self._neighbors:
            self._waiting.note_room(n.name)

    def _room(self, name: str) -> int:
        """Return the number of further transfers that a neighbor can be sent."""
        n = self._neighbors.get(name)
        if n is None:
            return 0
        if n.hello.role != "peer":
            return n.window_left
        return n.credits if n.available else 0

    # One request.

    def decide(self, request: HeldRequest) -> None:
        """Let a waiting request run here, hand it on, or let it wait for whatever it needs."""
        self.count += 1
        if self.is_out_of_budget(request) or self._goes_home(request) or self.rules.next_step(request):
            return
        case = Case(request, policy_of(request.itinerary.policy), self.rules.local_node())
        self._take(
            case,
            self._after_too_many_hops(case)
            or case.policy.step_here(request.itinerary, case.local)
            or self._while_nobody_has_a_credit(case)
            or self._by_policy(case),
        )

    def _take(self, case: Case, step: Step) -> None:
        request = case.request
        if isinstance(step, RunHere):
            self.run_here(request, step.block)
        elif isinstance(step, SendTo):
            self._hand_on(request, step)
        elif isinstance(step, Wait):
            self._wait_for_credit(case, step.holders)
        elif isinstance(step, ReturnReason):
            self.rules.cannot_continue(request, step)
        elif step.begins:
            self._custody.wait_for(request, (), None)

    # Rules of a decision: each returns a step, or None for the next rule.

    def is_out_of_budget(self, request: HeldRequest) -> bool:
        """Return whether the budget of a request was over, so that it was ended or sent home."""
        return self._turn.now >= self._custody.budget_end(request) and self.rules.out_of_budget(request)

    def _goes_home(self, request: HeldRequest) -> bool:
        if request.returning:
            self.send_home(request)
        return bool(request.returning)

    def _after_too_many_hops(self, case: Case) -> ReturnReason | None:
        request, most = case.request, self._limits.hops
        hop = request.transfer.hop
        if request.upstream is None or hop < most or hop < most + 4 * request.itinerary.blocks:
            return None
        return ReturnReason.HOPS

    def _while_nobody_has_a_credit(self, case: Case) -> Stay | None:
        """Look for candidates; let a request wait that was decided before its time, while no candidate has a credit."""
        request = case.request
        case.candidates = self.reachable(request)
        if request.waiting_since is None or request.check_at <= self._turn.now or case.local.blocks:
            return None
        if any(n.credits > 0 for n in case.candidates):
            return None
        return Stay(begins=request.check_at == INFINITY)

    def _by_policy(self, case: Case) -> Step:
        request, itinerary = case.request, case.request.itinerary
        if request.avoid or itinerary.avoid:
            case.candidates = self._without_avoided(request, case.candidates)
        since = request.waiting_since
        patient = since is None or self._turn.now - since < self._limits.credit_wait
        choice = case.policy.next_step(
            itinerary, case.local, case.candidates, patient=patient, tie_break=request.tie_break
        )
        if isinstance(choice, ReturnReason):
            return self._while_others_advance(case, choice) or self._back_out(request, choice) or choice
        if isinstance(choice, SendTo) and itinerary.via_source and request.upstream is not None:
            return ReturnReason.VIA_SOURCE
        return choice

    def _while_others_advance(self, case: Case, reason: ReturnReason) -> Wait | None:
        """Wait for a credit where no other process would find one sooner."""
        waits = reason is ReturnReason.CREDIT and self._may_wait_on(case.request, case.candidates)
        return Wait() if waits else None

    def _back_out(self, request: HeldRequest, reason: ReturnReason) -> Step | None:
        """Hand a request back to a process that may reach a holder of which no neighbor knows."""
        itinerary = request.itinerary
        if reason is not ReturnReason.UNREACHABLE or itinerary.via_source or itinerary.track is not None:
            return None
        way = self.way_out(request)
        n = self._neighbors.get(way) if way not in itinerary.relays else None
        if n is None or n not in self.reachable(request):
            return None
        if n.credits > 0:
            return SendTo(way, relay=True)
        may_wait = request.upstream is None or self._may_wait_on(request, [n])
        return Wait((way,)) if may_wait else ReturnReason.CREDIT

    # Candidates.

    def reachable(self, request: HeldRequest) -> list[Neighbor]:
        """Return the peers that may be handed a request: those of the bundle that it demands, if any.

        A source that names a peer hands it to that one.
        """
        candidates, demanded = self._neighbors.candidates(), request.bundle_id
        if request.upstream is None and request.itinerary.hand_to:
            candidates = [n for n in candidates if n.name == request.itinerary.hand_to]
        return [n for n in candidates if n.bundle_id == demanded] if demanded else candidates

    def _without_avoided(self, request: HeldRequest, candidates: Sequence[Neighbor]) -> Sequence[Neighbor]:
        """Return the candidates without those to avoid, as far as others can take the request."""
        request.avoid = {name: until for name, until in request.avoid.items() if until > self._turn.now}
        candidates = [n for n in candidates if n.name not in request.avoid]
        others = [n for n in candidates if n.name not in request.itinerary.avoid]
        if request.upstream is not None or any(n.credits > 0 for n in self.able_to_run(request, others)):
            return others
        return candidates

    def _hand_on(self, request: HeldRequest, choice: SendTo) -> None:
        itinerary = request.itinerary
        if choice.relay:
            itinerary = msgspec.structs.replace(itinerary, relays=(*itinerary.relays, self._turn.name))
        self.offer(request, choice.holder, itinerary)

    def run_here(self, request: HeldRequest, block: int) -> None:
        """Queue a waiting request for the engine of this process, which runs ``block`` next."""
        self._custody.transition(request, Stage.QUEUED, f"block {block}", block)

    def offer(self, request: HeldRequest, to: str, itinerary: Itinerary) -> None:
        """Send a waiting request to a neighbor; a copy stays here."""
        self._custody.transition(request, Stage.OFFERED, to, to, itinerary)

    def way_out(self, request: HeldRequest) -> str:
        """Return a process that may reach a holder of which no neighbor knows, or "".

        In a source that is the process that brought the request home from beyond its reach, in a peer the latest holder
        of the tokens that is linked and leads beyond the neighbors: none where all peers are linked with all.
        """
        itinerary, neighbors = request.itinerary, self._neighbors
        if request.trail is not None:
            stuck = self._turn.bands.permitted(itinerary.remaining)
            if may_skip(itinerary, stuck) and request.reason == ReturnReason.UNREACHABLE:
                return ""
            return "" if request.avoid.get(request.way_out, 0.0) >= request.deadline else request.way_out
        passed = {request.upstream, *itinerary.relays, *itinerary.avoid, *request.avoid}
        for visit in reversed(itinerary.visits):
            n = neighbors.get(visit.holder)
            if n is not None and n.name not in passed and neighbors.leads_beyond(n):
                return n.name
        return ""

    # The way home of tokens that a peer cannot continue with.

    def return_home(self, request: HeldRequest, reason: str) -> None:
        """Begin to send a waiting request back to its source."""
        request.returning = reason
        # Relays on the way here may relay them on the way home as well.
        request.itinerary = msgspec.structs.replace(request.itinerary, relays=())
        self.send_home(request)

    def send_home(self, request: HeldRequest) -> None:
        """Offer tokens to their source, to a neighbor that reaches it, or back the way they came."""
        now, limits, source = self._turn.now, self._limits, request.itinerary.source
        n = self._neighbors.get(source)
        if n is not None and n.window_left > 0:
            self.offer(request, source, request.itinerary)
        elif n is not None:  # a slow link; what waits for it must not be taken for lost
            self.send_progress([request])
            self._custody.wait_for(request, (source,), now + limits.look_again)
        elif way := self._way_home(request):
            self._hand_on(request, SendTo(way, relay=True))
        else:
            self._custody.wait(request, "no way home", now + limits.pause)

    def _way_home(self, request: HeldRequest) -> str:
        """Return a neighbor that reaches the source, or else the earliest reachable holder of the tokens, or "".

        The one before that was its neighbor, so each such step is one nearer to the source.
        """
        source, relays, now = request.itinerary.source, request.itinerary.relays, self._turn.now
        usable = {
            n.name: n
            for n in self._neighbors.candidates()
            if n.name not in relays and request.avoid.get(n.name, 0.0) <= now
        }
        ways = [name for name, n in usable.items() if n.state and source in n.state.reaches]
        if ways:
            return request.upstream if request.upstream in ways else min(ways)
        return next((visit.holder for visit in request.itinerary.visits if visit.holder in usable), "")

    def canceled_on_way_home(self, request: HeldRequest, sender: str) -> None:
        """Believe that a request is canceled if that is said by the only way home, which could as well drop it."""
        neighbors = self._neighbors.by_name
        if request.itinerary.source in neighbors or self._way_home(request):
            return
        if request.upstream is not None and request.upstream in neighbors:
            self._turn.send(request.upstream, Release(request.transfer, sender))
        self._custody.end(request, f"canceled, says {sender}, the only way home")

    # Waiting for credits.

    def _may_wait_on(self, request: HeldRequest, candidates: Iterable[Neighbor]) -> bool:
        """Return whether the source has no better choice and the awaited peers make progress.

        Without a link to the source, the source reaches nothing that this process does not reach sooner. Without
        progress, two processes may wait for each other's credit: returned requests make room.
        """
        if request.upstream is None or request.itinerary.source in self._neighbors.by_name:
            return False
        now = self._turn.now
        since = now if request.waiting_since is None else request.waiting_since
        until = since + self._limits.keep_share * (self._custody.budget_end(request) - since)
        moved_at = max((n.moved_at for n in candidates), default=0.0)
        return now < min(until, max(since, moved_at) + self._limits.away_floor)

    def _wait_for_credit(self, case: Case, holders: tuple[str, ...]) -> None:
        """Wait for a credit of ``holders``; without any, for one of a candidate that could run a block now."""
        request = case.request
        limits, now, since = self._limits, self._turn.now, request.waiting_since
        until = (now if since is None else since) + limits.credit_wait
        if until <= now:
            until = now + limits.look_again
        if request.upstream is not None:
            self.send_progress([request])
            until = min(until, now + limits.look_again)
        or_change = bool(request.avoid or request.itinerary.avoid)
        if not holders:
            able = self.able_to_run(request, case.candidates)
            holders = tuple(n.name for n in able if not n.credits)
            or_change = or_change or len(holders) < len(able)  # it prefers to wait, as long as things are as they are
        request.reason = ReturnReason.CREDIT
        self._custody.wait_for(request, holders, until, or_change=or_change)

    def able_to_run(self, request: HeldRequest, candidates: Iterable[Neighbor]) -> list[Neighbor]:
        """Return the candidates with a block that may run now; if there are none, relays to such candidates."""
        itinerary, candidates = request.itinerary, list(candidates)
        first = not policy_of(itinerary.policy).may_reorder
        wanted = itinerary.remaining[:1] if first else self._turn.bands.permitted(itinerary.remaining)
        holders = [n for n in candidates if not n.blocks.isdisjoint(wanted)]
        if holders or itinerary.via_source:
            return holders
        return [n for n in candidates if n.name not in itinerary.relays and n.leads_to(wanted)]

    def others_could_run(self, request: HeldRequest, without: Iterable[str]) -> bool:
        """Return whether a process other than these has a block that may run now, or leads to one."""
        wanted = self._turn.bands.permitted(request.itinerary.remaining)
        return any(
            n.name not in without and (not n.blocks.isdisjoint(wanted) or n.leads_to(wanted))
            for n in self.reachable(request)
        )

    def has_only_holder(self, request: HeldRequest) -> bool:
        """Return whether no other process could continue a request that its next holder keeps."""
        if request.returning:
            return request.downstream == request.itinerary.source
        wanted = self._turn.bands.permitted(request.itinerary.remaining)
        here = self.rules.local_node().blocks
        return here.isdisjoint(wanted) and not self.others_could_run(request, (request.downstream,))

    def send_progress(self, requests: Iterable[HeldRequest]) -> None:
        """Send PROGRESS to the keepers of the copies before, unless one was sent a moment ago."""
        now, every = self._turn.now, self._limits.progress_every
        for request in requests:
            before = request.upstream
            if before is not None and now - request.progress_at >= every and before in self._neighbors.by_name:
                request.progress_at = now
                self._turn.send(before, Progress(request.transfer, request.itinerary.blocks_done))
