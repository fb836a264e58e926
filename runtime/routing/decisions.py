"""What becomes of waiting requests: the next block and holder, by the policy, within the credits of the neighbors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import msgspec

from ls_edge.core.parts import has_ends
from ls_edge.runtime.protocol.messages import MINOR_OF_ENDS, Itinerary, Progress, Release, ReturnReason
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.policy import RunHere, SendTo, Wait
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import Arrived, Send
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest, Stage
from ls_edge.runtime.routing.state.neighbors import Neighbor


def may_skip(itinerary: Itinerary, blocks: tuple[int, ...]) -> bool:
    """Return whether these blocks may be left out in addition to those already skipped; stem and head never may."""
    skips = len(itinerary.skipped) + len(blocks)
    return policy_of(itinerary.policy).may_skip and skips <= itinerary.max_skips and not has_ends(blocks)


class Rules(Protocol):
    """What a source and a peer do differently with a request."""

    def take_in(self, event: Arrived) -> None:
        """Hold tokens that arrived and send ACCEPT, or send REFUSE."""

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


class Decisions:
    """Decides the waiting requests of a process, at the end of each event."""

    rules: Rules

    def __init__(self, custody: Custody) -> None:
        self.count = 0
        self._custody = custody
        self._neighbors = custody.neighbors
        self._limits = custody.limits
        self._waiting = custody.waiting
        self._look_at = 0.0
        """Time of the next look at waiting requests without an event."""
        self.reroutes = 0
        """Number of times that a request was decided again after a failure."""

    # Which requests are decided.

    def run(self) -> None:
        """Decide the requests that are ready, and those for which a neighbor may have room."""
        waiting = self._waiting
        if self._custody.now >= self._look_at and waiting:
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
        self._look_at = self._custody.now + self._limits.pause
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
        rules, limits, now = self.rules, self._limits, self._custody.now
        if self.is_out_of_budget(request):
            return
        if request.returning:
            self.send_home(request)
            return
        if rules.next_step(request):
            return
        itinerary, from_peer, hop = request.itinerary, request.upstream is not None, request.transfer.hop
        if from_peer and hop >= limits.hops and hop >= limits.hops + 4 * itinerary.blocks:
            rules.cannot_continue(request, ReturnReason.HOPS)
            return
        policy, local = policy_of(itinerary.policy), rules.local_node()
        here = policy.step_here(itinerary, local)
        if here is not None:
            self._custody.run_here(request, here.block)
            return
        candidates: Sequence[Neighbor] = self.reachable(request)
        since = request.waiting_since
        woken_early = since is not None and request.check_at > now and not local.blocks
        if woken_early and not any(n.credits > 0 for n in candidates):
            if request.check_at == INFINITY:  # it has just begun to wait
                self._custody.wait_for(request, (), None)
            return
        if request.avoid or itinerary.avoid:
            candidates = self._without_avoided(request, candidates)
        patient = since is None or now - since < limits.credit_wait
        choice = policy.next_step(itinerary, local, candidates, patient=patient, tie_break=request.tie_break)
        if isinstance(choice, RunHere):
            self._custody.run_here(request, choice.block)
        elif isinstance(choice, ReturnReason):
            self._find_way_out(request, choice, candidates)
        elif isinstance(choice, Wait):
            self._wait_for_credit(request, candidates, choice.holders)
        elif itinerary.via_source and from_peer:
            rules.cannot_continue(request, ReturnReason.VIA_SOURCE)
        else:
            self._hand_on(request, choice)

    def is_out_of_budget(self, request: HeldRequest) -> bool:
        """Return whether the budget of a request was over, so that it was ended or sent home."""
        return self._custody.now >= self._custody.budget_end(request) and self.rules.out_of_budget(request)

    def reachable(self, request: HeldRequest) -> list[Neighbor]:
        """Return the peers that may be handed a request: those of the bundle that it demands, if any.

        Stem and head are known only to those of a newer version. A source that names a peer hands it to that one.
        """
        candidates, demanded = self._neighbors.candidates(), request.bundle_id
        if request.upstream is None and request.itinerary.hand_to:
            candidates = [n for n in candidates if n.name == request.itinerary.hand_to]
        if has_ends(request.itinerary.remaining):
            candidates = [n for n in candidates if n.hello.minor >= MINOR_OF_ENDS]
        return [n for n in candidates if n.bundle_id == demanded] if demanded else candidates

    def _without_avoided(self, request: HeldRequest, candidates: Sequence[Neighbor]) -> Sequence[Neighbor]:
        """Return the candidates without those to avoid, as far as others can take the request."""
        request.avoid = {name: until for name, until in request.avoid.items() if until > self._custody.now}
        candidates = [n for n in candidates if n.name not in request.avoid]
        others = [n for n in candidates if n.name not in request.itinerary.avoid]
        if request.upstream is not None or any(n.credits > 0 for n in self.able_to_run(request, others)):
            return others
        return candidates

    def _hand_on(self, request: HeldRequest, choice: SendTo) -> None:
        itinerary = request.itinerary
        if choice.relay:
            itinerary = msgspec.structs.replace(itinerary, relays=(*itinerary.relays, self._custody.name))
        self._custody.offer(request, choice.holder, itinerary)

    def _find_way_out(self, request: HeldRequest, reason: ReturnReason, candidates: Sequence[Neighbor]) -> None:
        """Act on a request for which the policy finds no holder: wait, hand it back out, or give it up."""
        if reason is ReturnReason.CREDIT and self._may_wait_on(request, candidates):
            self._wait_for_credit(request, candidates, ())
            return
        itinerary = request.itinerary
        out_again = reason is ReturnReason.UNREACHABLE and not itinerary.via_source and itinerary.track is None
        way = self.way_out(request) if out_again else ""
        n = self._neighbors.get(way) if way not in itinerary.relays else None
        if n is None or n not in self.reachable(request):
            self.rules.cannot_continue(request, reason)
        elif n.credits > 0:
            self._hand_on(request, SendTo(way, relay=True))
        elif request.upstream is None or self._may_wait_on(request, [n]):
            self._wait_for_credit(request, [n], (way,))
        else:
            self.rules.cannot_continue(request, ReturnReason.CREDIT)

    def way_out(self, request: HeldRequest) -> str:
        """Return a process that may reach a holder of which no neighbor knows, or "".

        In a source that is the process that brought the request home from beyond its reach, in a peer the latest holder
        of the tokens that is linked and leads beyond the neighbors: none where all peers are linked with all.
        """
        itinerary, neighbors = request.itinerary, self._neighbors
        if request.trail is not None:
            stuck = self._custody.bands.permitted(itinerary.remaining)
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
        now, limits, source = self._custody.now, self._limits, request.itinerary.source
        n = self._neighbors.get(source)
        if n is not None and n.window_left > 0:
            self._custody.offer(request, source, request.itinerary)
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
        source, relays, now = request.itinerary.source, request.itinerary.relays, self._custody.now
        usable = {
            n.name: n
            for n in self._neighbors.candidates()
            if n.name not in relays and request.avoid.get(n.name, 0.0) <= now
        }
        ways = [name for name, n in usable.items() if n.state and source in n.state.reaches]
        if ways:
            return request.upstream if request.upstream in ways else min(ways)
        return next((visit.holder for visit in request.itinerary.visits if visit.holder in usable), "")

    def cancelled_on_way_home(self, request: HeldRequest, sender: str) -> None:
        """Believe that a request is cancelled if that is said by the only way home, which could as well drop it."""
        neighbors = self._neighbors.by_name
        if request.itinerary.source in neighbors or self._way_home(request):
            return
        if request.upstream is not None and request.upstream in neighbors:
            self._custody.instructions.append(Send(request.upstream, Release(request.transfer, sender)))
        self._custody.end(request, f"cancelled, says {sender}, the only way home")

    # Waiting for credits.

    def _may_wait_on(self, request: HeldRequest, candidates: Iterable[Neighbor]) -> bool:
        """Return whether the source has no better choice and the awaited peers make progress.

        Without a link to the source, the source reaches nothing that this process does not reach sooner. Without
        progress, two processes may wait for each other's credit: returned requests make room.
        """
        if request.upstream is None or request.itinerary.source in self._neighbors.by_name:
            return False
        now = self._custody.now
        since = now if request.waiting_since is None else request.waiting_since
        until = since + self._limits.keep_share * (self._custody.budget_end(request) - since)
        moved_at = max((n.moved_at for n in candidates), default=0.0)
        return now < min(until, max(since, moved_at) + self._limits.away_floor)

    def _wait_for_credit(self, request: HeldRequest, candidates: Sequence[Neighbor], holders: tuple[str, ...]) -> None:
        limits, now, since = self._limits, self._custody.now, request.waiting_since
        until = (now if since is None else since) + limits.credit_wait
        if until <= now:
            until = now + limits.look_again
        if request.upstream is not None:
            self.send_progress([request])
            until = min(until, now + limits.look_again)
        or_change = bool(request.avoid or request.itinerary.avoid)
        if not holders:
            able = self.able_to_run(request, candidates)
            holders = tuple(n.name for n in able if not n.credits)
            or_change = or_change or len(holders) < len(able)  # it prefers to wait, as long as things are as they are
        request.reason = ReturnReason.CREDIT
        self._custody.wait_for(request, holders, until, or_change=or_change)

    def able_to_run(self, request: HeldRequest, candidates: Iterable[Neighbor]) -> list[Neighbor]:
        """Return the candidates with a block that may run now; if there are none, relays to such candidates."""
        itinerary, candidates = request.itinerary, list(candidates)
        first = not policy_of(itinerary.policy).may_reorder
        wanted = itinerary.remaining[:1] if first else self._custody.bands.permitted(itinerary.remaining)
        holders = [n for n in candidates if not n.blocks.isdisjoint(wanted)]
        if holders or itinerary.via_source:
            return holders
        return [n for n in candidates if n.name not in itinerary.relays and n.leads_to(wanted)]

    def others_could_run(self, request: HeldRequest, without: Iterable[str]) -> bool:
        """Return whether a process other than these has a block that may run now, or leads to one."""
        wanted = self._custody.bands.permitted(request.itinerary.remaining)
        return any(
            n.name not in without and (not n.blocks.isdisjoint(wanted) or n.leads_to(wanted))
            for n in self.reachable(request)
        )

    def has_only_holder(self, request: HeldRequest) -> bool:
        """Return whether no other process could continue a request that its next holder keeps."""
        if request.returning:
            return request.downstream == request.itinerary.source
        wanted = self._custody.bands.permitted(request.itinerary.remaining)
        here = self.rules.local_node().blocks
        return here.isdisjoint(wanted) and not self.others_could_run(request, (request.downstream,))

    def send_progress(self, requests: Iterable[HeldRequest]) -> None:
        """Send PROGRESS to the keepers of the copies before, unless one was sent a moment ago."""
        now, every = self._custody.now, self._limits.progress_every
        for request in requests:
            before = request.upstream
            if before is not None and now - request.progress_at >= every and before in self._neighbors.by_name:
                request.progress_at = now
                self._custody.instructions.append(
                    Send(before, Progress(request.transfer, request.itinerary.blocks_done))
                )
