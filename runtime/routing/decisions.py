"""Decisions about waiting requests: the next block and holder by policy, within the credits of the neighbors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import msgspec

from ls_edge.core.parts import has_ends
from ls_edge.runtime.protocol.messages import Itinerary, Progress, Release, ReturnReason
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.policy import Choice, Policy, RunHere, SendTo, Wait
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.custody import Custody, Stages
from ls_edge.runtime.routing.state.events import NoteKind
from ls_edge.runtime.routing.state.held_request import INFINITY, OFFERED, QUEUED, WAITING, HeldRequest
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.routing.state.turn import Turn


def may_skip(itinerary: Itinerary, blocks: tuple[int, ...]) -> bool:
    """Return whether these blocks may be skipped as well; stem and head never may."""
    skips = len(itinerary.skipped) + len(blocks)
    return policy_of(itinerary.policy).may_skip and skips <= itinerary.max_skips and not has_ends(blocks)


Handlers = Mapping[type, tuple[Callable[..., object], ...]]
"""Handlers of each event in their order, and of each message, which get its sender too."""


class Rules(Protocol):
    """Rules that differ between sources and peers."""

    handlers: Handlers
    stages: Stages

    def local_node(self) -> LocalNode:
        """Return the blocks that this process can run."""

    def next_step(self, request: HeldRequest) -> bool:
        """Take the next step if it needs no policy, as after the last block; return whether it was taken."""

    def cannot_continue(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Handle a request that no reachable process can take."""

    def out_of_budget(self, request: HeldRequest) -> bool:
        """End a request at the end of its budget, or send it home; return whether it did either."""

    def finish(self) -> float:
        """Finish a turn; return when the next one is due if no event comes first, or infinity."""


class Stay(NamedTuple):
    """Continue to wait as before."""

    begins: bool
    """Whether the request has just begun to wait."""


class Decisions:
    """Decisions about the waiting requests of a process, made at the end of each turn."""

    rules: Rules

    def __init__(self, turn: Turn, custody: Custody) -> None:
        self.count = 0
        self.reroutes = 0
        """Number of decisions that a failure of the next holder caused."""
        self._turn = turn
        self._custody = custody
        self._neighbors = turn.neighbors
        self._limits = turn.limits
        self._waiting = custody.waiting
        self._look_at = 0.0
        """Time at which to check waiting requests without an event."""

    # Choice of the requests to decide.

    def run(self) -> None:
        """Decide requests that are ready, and requests for which a neighbor may have room."""
        waiting = self._waiting
        if self._turn.now >= self._look_at and waiting:
            self._look_at_waiting()
        while waiting.may_have_room or waiting.ready:
            if waiting.may_have_room:
                waiting.use_room(self._room, self.decide)
                continue
            request = waiting.ready.popleft()
            if request.stage is WAITING:
                self.decide(request)

    def next_look(self) -> float:
        """Return the time of the next :meth:`run` if there is no event before, or infinity."""
        return self._look_at if self._waiting else INFINITY

    def wake_all(self) -> None:
        """Decide all waiting requests again, since the reachable processes have changed."""
        held = self._custody.held.values()
        self._waiting.ready.extend(request for request in held if request.stage is WAITING)

    def _look_at_waiting(self) -> None:
        """Decide requests again that may wait for the end of a suspicion or pause, which raises no event."""
        self._look_at = self._turn.now + self._limits.pause
        if self._neighbors.have_recovered():
            self.wake_all()
        else:
            self._waiting.decide_changed()
        for n in self._neighbors:
            self._waiting.note_room(n.name)

    def _room(self, name: str) -> int:
        """Return the number of further transfers that may be sent to a neighbor."""
        n = self._neighbors.get(name)
        if n is None:
            return 0
        if n.hello.role != "peer":
            return n.window_left
        return n.credits if n.available else 0

    # Decision of one request.

    def decide(self, request: HeldRequest) -> None:
        """Run a waiting request here, hand it on, send it home, or let it wait."""
        self.count += 1
        if self.is_out_of_budget(request):
            return
        if request.returning:
            self.send_home(request)
            return
        if self.rules.next_step(request):
            return
        policy, local = policy_of(request.itinerary.policy), self.rules.local_node()
        candidates: Sequence[Neighbor] = ()
        step: Choice | Stay | None = self._after_too_many_hops(request) or policy.step_here(request.itinerary, local)
        if step is None:
            candidates, keeper = self.reachable(request), self.keeper_of(request)
            if keeper:
                candidates = [n.with_credit() if n.name == keeper else n for n in candidates]
            step = self._while_nobody_has_a_credit(request, local, candidates)
        if step is None:
            if request.avoid or request.itinerary.avoid:
                candidates = self._without_avoided(request, candidates)
            step = self._by_policy(request, policy, local, candidates)
        if isinstance(step, RunHere):
            self.run_here(request, step.block)
        elif isinstance(step, SendTo):
            self._hand_on(request, step)
        elif isinstance(step, Wait):
            self._wait_for_credit(request, candidates, step.holders)
        elif isinstance(step, ReturnReason):
            self.rules.cannot_continue(request, step)
        elif step.begins:
            self._custody.wait_for(request, (), None)

    # Rules of a decision: each returns a step, or None for the next rule.

    def is_out_of_budget(self, request: HeldRequest) -> bool:
        """End a request or send it home if its budget is over; return whether it did either."""
        return self._turn.now >= self._custody.budget_end(request) and self.rules.out_of_budget(request)

    def _after_too_many_hops(self, request: HeldRequest) -> ReturnReason | None:
        hop, most = request.transfer.hop, self._limits.hops
        if request.upstream is None or hop < most or hop < most + 4 * request.itinerary.blocks:
            return None
        return ReturnReason.HOPS

    def _while_nobody_has_a_credit(
        self, request: HeldRequest, local: LocalNode, candidates: Sequence[Neighbor]
    ) -> Stay | None:
        """Keep a request waiting until it is due, while no candidate has a credit."""
        if request.waiting_since is None or request.check_at <= self._turn.now or local.blocks:
            return None
        if any(n.credits > 0 for n in candidates):
            return None
        names = request.waits_for
        if names and any(n.name not in names for n in self.able_to_run(request, candidates)):
            return None  # it is new or available again, and its next credit would not end the wait
        return Stay(begins=request.check_at == INFINITY)

    def _by_policy(
        self, request: HeldRequest, policy: Policy, local: LocalNode, candidates: Sequence[Neighbor]
    ) -> Choice:
        itinerary, since = request.itinerary, request.waiting_since
        patient = since is None or self._turn.now - since < self._credit_wait(candidates)
        if itinerary.via_source and request.upstream is not None:  # another holder may be out of the source's reach
            choice = policy.next_step(itinerary, local, (), patient=patient)
            return choice if isinstance(choice, RunHere) else ReturnReason.VIA_SOURCE
        choice = policy.next_step(itinerary, local, candidates, patient=patient, tie_break=request.tie_break)
        if choice is ReturnReason.CREDIT:
            step = self._past_full_holders(request, policy, local, candidates)
            return step or (Wait() if self._may_wait_on(request, candidates) else choice)
        if choice is ReturnReason.UNREACHABLE:
            return self._back_out(request) or choice
        return choice

    def _past_full_holders(
        self, request: HeldRequest, policy: Policy, local: LocalNode, candidates: Sequence[Neighbor]
    ) -> SendTo | None:
        """Hand a request to a neighbor that leads to other holders: those in sight may never have a credit."""
        wanted, beyond = self._wanted(request), self._neighbors.leads_beyond
        relays = [n for n in candidates if n.blocks.isdisjoint(wanted) and beyond(n)]
        choice = policy.next_step(request.itinerary, local, relays, patient=False) if relays else None
        return choice if isinstance(choice, SendTo) else None

    def _back_out(self, request: HeldRequest) -> Choice | None:
        """Hand a request back to a process that may reach a holder unknown to the neighbors."""
        itinerary = request.itinerary
        if itinerary.via_source or itinerary.track is not None:
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
        """Return the peers to which a request may be handed, with respect to its bundle."""
        candidates, demanded = self._neighbors.candidates(), request.bundle_id
        return [n for n in candidates if n.bundle_id == demanded] if demanded else candidates

    def keeper_of(self, request: HeldRequest) -> str:
        """Return the neighbor that takes tokens back without a credit, since they replace its copy, or "".

        Otherwise peers that need one another could fill up, each with tokens that wait for a credit of the other. In a
        full mesh, sources leave them room instead.
        """
        return "" if request.owner in self._neighbors.by_name else request.relay and str(request.upstream)

    def _without_avoided(self, request: HeldRequest, candidates: Sequence[Neighbor]) -> Sequence[Neighbor]:
        """Return the candidates without processes to avoid, if others can take the request."""
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
        self._custody.transition(request, QUEUED, f"block {block}", block)

    def offer(self, request: HeldRequest, to: str, itinerary: Itinerary) -> None:
        """Send a waiting request to a neighbor, and keep a copy."""
        self._custody.transition(request, OFFERED, to, (to, itinerary))

    def way_out(self, request: HeldRequest) -> str:
        """Return a process that may reach a holder unknown to the neighbors, or "".

        In a source, it is the process that returned the request from out of the source's reach. In a peer, it is the
        latest linked holder of the tokens that has links to other processes: none in a full mesh.
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

    # Way home of tokens that a peer cannot continue with.

    def return_home(self, request: HeldRequest, reason: str) -> None:
        """Start to send a waiting request back to its source."""
        request.returning, request.waiting_since = reason, None
        # Processes that relayed the tokens on their way here may do so again.
        request.itinerary = msgspec.structs.replace(request.itinerary, relays=())
        self.send_home(request)

    def send_home(self, request: HeldRequest) -> None:
        """Offer tokens to their source, to a neighbor that reaches it, or back along their path.

        Drop them if there is no such way for a while: if their source exists, it has its own copy.
        """
        now, limits, source = self._turn.now, self._limits, request.itinerary.source
        n, since = self._neighbors.get(source), request.waiting_since
        if n is not None and n.window_left > 0:
            self.offer(request, source, request.itinerary)
        elif n is not None and not n.loses_tokens:  # a slow link: the copy that waits for it must not count as lost
            self.send_progress([request])
            self._custody.wait_for(request, (source,), now + limits.look_again)
        elif self._has_no_source(request):
            self.drop(request, self._turn.name, "its source was never linked")
        elif way := self._way_home(request):
            self._hand_on(request, SendTo(way, relay=True))
        elif since is not None and now - since >= limits.away_floor and not self._neighbors.reach(source):
            self.drop(request, self._turn.name, "no way home")
        else:
            self.send_progress([request])
            self._custody.wait(request, "no way home", now + limits.pause)

    def _way_home(self, request: HeldRequest) -> str:
        """Return a neighbor that reaches the source, or else the earliest holder that is a neighbor, or "".

        Each holder was a neighbor of the previous one, so every such step leads closer to the source. A later holder
        may be a dead end, so tokens wait for a process that has refused them for the moment.
        """
        source, itinerary, until = request.itinerary.source, request.itinerary, request.avoid
        near = {
            n.name: n
            for n in self._neighbors.candidates()
            if n.name not in itinerary.relays and until.get(n.name, 0.0) < request.deadline
        }
        ways = [name for name, n in near.items() if n.state and source in n.state.reaches]
        ways = ways or [visit.holder for visit in itinerary.visits if visit.holder in near][:1]
        usable = [name for name in ways if until.get(name, 0.0) <= self._turn.now]
        return request.upstream if request.upstream in usable else min(usable, default="")

    def _has_no_source(self, request: HeldRequest) -> bool:
        """Return whether this process was the first to hold a request, but never heard of its source.

        While such work waited for a way home, it took the room of tokens that have one. After a restart, the source may
        be about to link again. No guarantee depends on these tokens: the source has seen its link to this process end,
        and has sent its own copy again.
        """
        source, visits = request.itinerary.source, request.itinerary.visits
        is_first = not visits or visits[0].holder == self._turn.name
        return is_first and source not in self._neighbors.once_near and not self._neighbors.reach(source)

    def canceled_on_way_home(self, request: HeldRequest, sender: str) -> None:
        """End a request if the only way home claims that it is canceled; that process could drop it anyway."""
        request.avoid[sender] = request.deadline
        if request.itinerary.source not in self._neighbors.by_name and not self._way_home(request):
            self.drop(request, sender, f"canceled according to {sender}, the only way home")

    def drop(self, request: HeldRequest, holder: str, why: str) -> None:
        """End a request and make the previous holder drop its copy, too."""
        self._turn.note(NoteKind.DROPPED, request.itinerary.source, request.request, why)
        if request.upstream is not None and request.upstream in self._neighbors.by_name:
            self._turn.send(request.upstream, Release(request.transfer, holder))
        self._custody.end(request, why)

    # Waiting for credits.

    def _may_wait_on(self, request: HeldRequest, candidates: Iterable[Neighbor]) -> bool:
        """Return whether a request may wait longer for a credit than the usual time.

        It may if this process has no link to the source, which then has no better choice, and if the candidates make
        progress. Without progress, two processes may be waiting for each other's credit; sending requests home makes
        room.
        """
        if request.upstream is None or request.itinerary.source in self._neighbors.by_name:
            return False
        now = self._turn.now
        since = now if request.waiting_since is None else request.waiting_since
        until = since + self._limits.keep_share * (self._custody.budget_end(request) - since)
        if not self._neighbors.reach(request.itinerary.source):  # the source may not exist
            until = min(until, since + self._limits.hop_most)
        moved_at = max((n.moved_at for n in candidates), default=0.0)
        return now < min(until, max(since, moved_at) + self._limits.away_floor)

    def _wait_for_credit(self, request: HeldRequest, candidates: Sequence[Neighbor], holders: tuple[str, ...]) -> None:
        """Wait for a credit of ``holders``, by default of all candidates that could run a block now."""
        limits, now, since = self._limits, self._turn.now, request.waiting_since
        until = (now if since is None else since) + self._credit_wait(candidates)
        if until <= now:
            until = now + limits.look_again
        if request.upstream is not None:
            self.send_progress([request])
            until = min(until, now + limits.look_again)
        or_change = bool(request.avoid or request.itinerary.avoid)
        if not holders:
            able = self.able_to_run(request, candidates)
            holders = tuple(n.name for n in able if not n.credits)
            or_change = or_change or len(holders) < len(able)  # it waits by choice, until something changes
        request.reason = ReturnReason.CREDIT
        self._custody.wait_for(request, holders, until, or_change=or_change)

    def _credit_wait(self, candidates: Iterable[Neighbor]) -> float:
        """Return how long to wait for the credit of a preferred holder.

        On a slow link, a transfer in flight frees a credit sooner than tokens would arrive by another way.
        """
        slowest = max((n.usual_link_us for n in candidates), default=0.0) / 1e6
        return max(self._limits.credit_wait, min(slowest, self._limits.hop_most))

    def able_to_run(self, request: HeldRequest, candidates: Iterable[Neighbor]) -> list[Neighbor]:
        """Return the candidates with a block that may run now; if there are none, relays to such holders."""
        itinerary, candidates, wanted = request.itinerary, list(candidates), self._wanted(request)
        holders = [n for n in candidates if not n.blocks.isdisjoint(wanted)]
        if holders or itinerary.via_source:
            return holders
        return [n for n in candidates if n.name not in itinerary.relays and n.leads_to(wanted)]

    def _wanted(self, request: HeldRequest) -> tuple[int, ...]:
        """Return the blocks that may run now."""
        return policy_of(request.itinerary.policy).wanted(request.itinerary, self._turn.bands)

    def others_could_run(self, request: HeldRequest, without: Iterable[str]) -> bool:
        """Return whether another process has a block that may run now, or leads to a holder out of sight."""
        wanted, beyond = self._wanted(request), self._neighbors.leads_beyond
        others = [n for n in self.reachable(request) if n.name not in without]
        return any(not n.blocks.isdisjoint(wanted) or (n.leads_to(wanted) and beyond(n)) for n in others)

    def has_only_holder(self, request: HeldRequest) -> bool:
        """Return whether no other process could continue a request that its next holder has."""
        if request.returning:
            return request.downstream == request.itinerary.source
        here = self.rules.local_node().blocks
        return here.isdisjoint(self._wanted(request)) and not self.others_could_run(request, (request.downstream,))

    def send_progress(self, requests: Iterable[HeldRequest]) -> None:
        """Send PROGRESS to the keepers of the previous copies, at most once per ``Limits.progress_every``."""
        now, every = self._turn.now, self._limits.progress_every
        for request in requests:
            before = request.upstream
            if before is not None and now - request.progress_at >= every and before in self._neighbors.by_name:
                request.progress_at = now
                self._turn.send(before, Progress(request.transfer, request.itinerary.blocks_done))
