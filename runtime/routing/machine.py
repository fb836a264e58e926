"""Routing machine of a process: events in, instructions out, without clock, sockets or threads.

Peers, sources and the simulator run the same machine. An object with the rules of a source or a peer
(``source/source_rules.py``, ``peer/peer_rules.py``) has a dispatch table with the handlers of events and the actions of
stages. Held requests and their transitions are in ``state/custody.py``, the choice of the next block and holder in
``decisions.py``, the checks of what other processes claim in ``claims.py``, all tuned numbers in ``state/limits.py``.

A request takes these steps:

It arrives. The rules accept the tokens and hold them (WAITING), or refuse them. ``Decisions.decide`` asks the policy: a
block runs here (QUEUED, RUNNING), or ``Decisions.offer`` sends the tokens to the next holder and keeps a copy
(OFFERED). On ACCEPT (CUSTODY), ``on_accept`` releases the copy of the previous holder. When the next holder has passed
the request on, ``passed_on`` drops the copy here (ENDED); a source, and the joiner of a track, watch the request until
it comes back (AWAY). So two processes have the tokens at any time, and the source has the furthest tokens that came
back.

The next holder may fail in these ways:

- It is *killed*: its link ends, and ``on_down`` reroutes the copies that it had. If the keeper of the previous copy
  dies too, the source starts again from its own copy.
- It *hangs*: ``on_progress`` extends the deadline of a hop with each sign of life, as long as the queue and the blocks
  of the holder explain that no block has run (``Custody.counts_until``). ``check_hop`` suspects a holder without
  progress, avoids it and reroutes the request; it does the same if a holder keeps the request for too long, unless no
  other process could continue. A source reroutes a request without news
  (``SourceRules._on_silence``). A peer whose own engine hangs decides the requests again that wait for it
  (``EngineWork.look_at``).
- It *refuses*: ``on_refuse`` decides again, and pauses offers to a process that refuses without need. If nobody has a
  credit, the request waits for a while (``Decisions._wait_for_credit``).
- It *lies*: replies count only from the receiver of the transfer (``_sent_to``), announced times and progress only
  within bounds. A source ignores an ``implausible_return`` and runs its own copy again.
- It is *out of reach*: ``Decisions.decide`` hands the tokens to a neighbor that leads to a holder. Tokens that come
  back from there go out again the same way (``Decisions.way_out``), and home the same way if no neighbor reaches the
  source (``Decisions.send_home``).

At the end of the budget, ``Rules.out_of_budget`` sends a request home in time, and the source answers from the tokens
that it has, or fails the request.

A rerouted request gets a new random branch, which distinguishes it from late messages about the old one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import msgspec

from ls_edge.core.records import MICROSECONDS
from ls_edge.runtime.protocol.messages import Accept, Progress, Refuse, RefuseReason, Release
from ls_edge.runtime.routing.claims import (
    avoid_also,
    believable,
    is_from_next_holder,
    is_unwilling,
    shows_further_block,
)
from ls_edge.runtime.routing.decisions import Decisions, Rules
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import (
    Event,
    Forward,
    Instruction,
    NeighborDown,
    NeighborState,
    NeighborUp,
    NoteKind,
    Received,
    Unsendable,
    in_order,
)
from ls_edge.runtime.routing.state.held_request import AWAY, CUSTODY, ENDED, INFINITY, OFFERED, HeldRequest
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.turn import Turn

MTU = "large packets do not pass (MTU)"

R = TypeVar("R", bound=Rules)


class Machine(Generic[R]):
    """Routing of one process, with the ``rules`` of a source or a peer."""

    def __init__(
        self,
        name: str,
        rules: Callable[[Machine[R]], R],
        *,
        limits: Limits,
        rng: random.Random,
        model: Model,
    ) -> None:
        """``rng`` draws branches; seed it in a test, never in a process."""
        self.turn = Turn(name, limits, model, rng)
        self.custody = Custody(self.turn)
        self.decisions = Decisions(self.turn, self.custody)
        self.neighbors = self.turn.neighbors
        self.held = self.custody.held
        """Requests that this process holds."""
        self.limits = limits
        self._next = INFINITY
        """Time of the next ``Tick`` if no event comes before."""
        self.rules = self.decisions.rules = rules(self)
        self.custody.follow(self.rules.stages)

    # The interface of the process around it.

    def handle_all(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Handle the events of a turn, decide once at its end, and return the instructions in their order.

        ``now`` never decreases.
        """
        turn, handlers = self.turn, self.rules.handlers
        if now > turn.now:
            turn.now = turn.neighbors.now = now
        turn.instructions = []
        reach, is_news = turn.neighbors.reach_version, False
        for event in events:
            kind = type(event)
            is_news |= kind is not NeighborState
            for handle in handlers[kind]:
                handle(event)
        if self._next <= turn.now:
            self._check_due()
        elif not (is_news or self.custody.waiting or turn.neighbors.reach_version != reach):
            return []  # the load of a neighbor only matters to later decisions
        self.decisions.run()
        self._next = min(self.rules.finish(), self.custody.timers.next, self.decisions.next_look())
        return in_order(turn.instructions)

    def may_act_on(self, event: NeighborState) -> bool:
        """Return whether a STATE, alone in a turn, may do more than inform later decisions."""
        n, state = self.neighbors.get(event.name), event.state
        if n is None or n.state is None or n.strikes or not n.was_available or self.custody.waiting:
            return True
        serves = state.warm and not state.draining and not state.stuck
        return not serves or (state.reach_blocks, state.far_blocks) != (n.state.reach_blocks, n.state.far_blocks)

    def next_check(self) -> float | None:
        """Return the time of the next ``Tick`` if no event comes before; None without one."""
        return None if self._next == INFINITY else self._next

    # Replies of the next holder: it accepts the request, refuses it, works on it, passes it on.

    def on_received(self, event: Received) -> None:
        """Handle a message, or ignore it if it has no handler."""
        for handle in self.rules.handlers.get(type(event.message), ()):
            handle(event.sender, event.message)

    def _sent_to(self, sender: str, message: Accept | Refuse | Progress | Release) -> HeldRequest | None:
        """Return the request that a message is about if its sender has that request, else None."""
        request = self.custody.sent.get(message.transfer)
        return request if is_from_next_holder(request, sender) else None

    def on_accept(self, sender: str, message: Accept) -> None:
        """Keep a copy of an accepted request, and release the previous copy."""
        seconds = self._learn(sender, message)
        request = self._sent_to(sender, message)
        if request is None or request.stage is not OFFERED:
            return
        self.custody.transition(request, CUSTODY, f"{sender} accepted")
        before = request.upstream
        if before is not None and before in self.neighbors.by_name:
            link_us = min(round(seconds * 1e6), MICROSECONDS - 1)
            self.turn.send(before, Release(request.transfer, sender, link_us))
        if request.trail is not None:
            request.trail.accepted(sender)
        if request.returning and sender == request.itinerary.source:
            self.neighbors.cuts.pop(sender, None)
            self.custody.end(request, "home")

    def on_refuse(self, sender: str, message: Refuse) -> None:
        """Decide a refused request again."""
        self._learn(sender, message)
        request = self._sent_to(sender, message)
        if request is None:
            return
        self.custody.decide_again(request, f"{sender} refused: {message.reason}")
        n, busy = self.neighbors.get(sender), message.reason == RefuseReason.BUSY
        if n is not None and not busy:
            n.refused_until = self.turn.now + self.limits.pause
        if n is not None and is_unwilling(message):
            n.back_off()
            if message.reason == RefuseReason.LOSES_TOKENS:
                self.neighbors.pause(n)
                self.turn.note(NoteKind.SUSPECT, sender, why=f"it cannot send tokens here: {MTU}")
            request.avoid[sender] = n.backoff_until
            if not busy:
                self.avoid(request, sender, n.backoff_until)
        elif busy and (request.returning or sender == self.decisions.keeper_of(request)):  # neither needs a credit
            request.avoid[sender] = self.turn.now + self.limits.pause
        if request.returning and message.reason == RefuseReason.CANCELED:
            self.decisions.canceled_on_way_home(request, sender)

    def on_progress(self, sender: str, message: Progress) -> None:
        """Give the next holder more time, unless it keeps the request for too long and others could continue."""
        request, n = self._sent_to(sender, message), self.neighbors.get(sender)
        if request is None or n is None:
            return
        now, end = self.turn.now, self.custody.budget_end(request)
        if shows_further_block(request, message):
            if request.stage is CUSTODY:
                n.ran_after((now - request.ran_at) / (message.blocks_done - request.most_done))
            request.most_done, request.ran_at = message.blocks_done, now
            request.keep_until = now + self.limits.keep_share * (end - now)
        if now >= self.custody.counts_until(request, end) and not self.decisions.has_only_holder(request):
            return
        n.clear_suspicion()
        self.custody.extend(request, end)
        if request.open_track is not None:
            self.decisions.send_progress([request.open_track.wave.request])

    def on_release(self, sender: str, message: Release) -> None:
        """Drop the copy of a request that the next holder has passed on."""
        request = self._sent_to(sender, message)
        n = self.neighbors.get(sender)
        if request is None:
            return
        if n is not None:
            n.clear_suspicion()
        self.passed_on(request, message.holder)

    def passed_on(self, request: HeldRequest, holder: str) -> None:
        """Drop the copy of a request that ``holder`` has now; a source and a joiner watch the request."""
        n = self.neighbors.get(request.downstream)
        if request.trail is None:
            if n is not None:
                n.reset_back_off()
        elif not request.trail.holder:
            request.trail.before, request.trail.holder = request.downstream, holder
        if request.upstream is None:
            self.custody.transition(request, AWAY, f"passed on to {holder}")
        else:
            self.custody.end(request, f"passed on to {holder}")

    def _learn(self, name: str, message: Accept | Refuse) -> float:
        """Record the credits in a reply to a transfer; return the seconds that the transfer took."""
        n = self.neighbors.get(name)
        took = self.neighbors.answered(message.transfer, name)
        if n is None or took is None:
            return 0.0
        n.reported_credits = message.credits
        if isinstance(message, Accept):
            n.accepted_after(took)
        self.custody.waiting.note_room(name)
        return took

    # Failures of the next holder: its link ends, it cannot be sent to, it is silent, it keeps the request.

    def on_down(self, event: NeighborDown) -> None:
        """Reroute the requests of a process that is lost."""
        name, linked = event.name, self.neighbors.by_name
        n = linked.pop(name, None)
        if n is None:
            return
        self.neighbors.forget_transfers(n)
        self.neighbors.reach_version += 1
        why = f"{event.why}, as each time that tokens are sent: {MTU}"
        self.turn.note(NoteKind.LOST, name, why=why if name in self.neighbors.losing_tokens else event.why)
        for request in [request for request in self.custody.sent.values() if request.downstream == name]:
            self.reroute(request, f"{name} was lost: {event.why}")
        self.custody.waiting.decide_for_credit_of(name)
        for request, other in self.custody.left_by(name):
            if other not in linked:
                self.reroute(request, f"{name} and {other} were lost")

    def on_unsendable(self, event: Unsendable) -> None:
        """Decide a request again after a pause if it could not be sent."""
        failed, again = event.failed, self.turn.now + self.limits.backoff_base
        n = self.neighbors.get(failed.to)
        if n is not None:
            n.refused_until = again
        request = self.custody.sent.get(failed.transfer) if isinstance(failed, Forward) else None
        if request is not None:
            self.custody.wait(request, "could not be sent", again)

    def _check_due(self) -> None:
        """Check the requests that are due."""
        for request in self.custody.timers.due(self.turn.now):
            if request.stage is not ENDED and not self.decisions.is_out_of_budget(request):
                on_due = self.rules.stages[request.stage].on_due
                if on_due is not None:
                    on_due(request)

    def check_hop(self, request: HeldRequest) -> None:
        """Check a transfer: whether it is late or kept for too long, and whether PROGRESS is due."""
        name, now, end = request.downstream, self.turn.now, self.custody.budget_end(request)
        n = self.neighbors.get(name)
        if now >= request.hop_at:
            if n is not None:
                n.suspect()
            self.custody.waiting.decide_for_credit_of(name)
            why = "no progress within the hop's deadline"
            self.turn.note(NoteKind.SUSPECT, name, request.request, why)
            self.avoid(request, name)
            self.reroute(request, f"{name} showed no progress")
        elif now < min(request.keep_until, request.keep_end):
            # The keeper of the previous copy must not suspect this process while the next holder is late.
            self.decisions.send_progress([request])
            self.custody.check_hop(request, end)
        elif self.decisions.has_only_holder(request):
            left = max(self.limits.hop_floor, self.limits.keep_share * (end - now))
            request.keep_until = request.keep_end = now + left
            self.custody.check_hop(request, end)
        else:
            if n is not None:
                n.back_off()
            self.avoid(request, name, request.deadline)
            self.reroute(request, f"{name} kept it for too long")

    def reroute(self, request: HeldRequest, why: str) -> None:
        """Decide a request again whose next holder is lost or shows no progress."""
        self.decisions.reroutes += 1
        request.reroutes += 1
        request.failure = "late" if request.downstream in self.neighbors.by_name else "lost"
        if request.trail is not None:
            request.trail.before = request.trail.holder = ""
        self.turn.note(NoteKind.REROUTED, request.downstream, request.request, why)
        self.custody.decide_again(request, why)

    def avoid(self, request: HeldRequest, name: str, until: float = 0.0) -> None:
        """Do not offer a request to a process until ``until``, and name the process to the next holders."""
        if request.open_track is not None:
            request = request.open_track.wave.request
        request.avoid[name] = until
        itinerary = request.itinerary
        if name in itinerary.avoid:
            return
        beyond = self.neighbors.leads_beyond
        known = {
            n.name: n.blocks.union(n.reach_blocks, *n.far_blocks) if beyond(n) else n.blocks for n in self.neighbors
        }
        left = set(itinerary.remaining) - self.rules.local_node().blocks
        avoid = avoid_also(itinerary.avoid, name, left, known)
        request.itinerary = msgspec.structs.replace(itinerary, avoid=avoid)

    # Changes of neighbors.

    def on_up(self, event: NeighborUp) -> None:
        """Record a process that has a link now, or its new description."""
        hello = event.hello
        known = self.neighbors.get(hello.name)
        if known is not None and known.hello.incarnation != hello.incarnation:
            self.on_down(NeighborDown(hello.name, "came back as a new process"))
        self.neighbors.add(hello)
        self.decisions.wake_all()

    def on_state(self, event: NeighborState) -> None:
        """Record a STATE, and decide the requests again that it may concern."""
        reach = self.neighbors.reach_version
        is_new = self.neighbors.update(event.name, believable(event.state))
        if self.neighbors.reach_version != reach:
            self.decisions.wake_all()
        else:
            if is_new:
                self.custody.waiting.decide_changed()
            self.custody.waiting.note_room(event.name)
