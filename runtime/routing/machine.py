"""The routing machine of a process: events in, instructions out, without clock, socket or thread.

Peers, sources and the simulator run the same machine. What a source and a peer do differently is in two small objects,
which the machine asks (``decisions.Rules``): ``source/source_rules.py`` and ``peer/peer_rules.py``. The table of
transitions and the held requests are in ``state/custody.py``, the choice of the next block and holder in
``decisions.py``, the checks of what others claim in ``claims.py``, every tuned number in ``state/limits.py``.

What happens to a request, in order:

It arrives. A role takes tokens in: it accepts and holds them (WAITING), or refuses them. ``Decisions.decide`` lets the
policy choose: a block runs here (QUEUED, RUNNING), or ``Decisions.offer`` sends the tokens to the next holder (OFFERED)
and keeps a copy. ``on_accept`` tells the holder before that it may forget its own copy (CUSTODY). When the next holder
has passed the request on in its turn, ``passed_on`` drops our copy (ENDED); a source, and the joiner of a track, watch
it until it comes back (AWAY). So two processes have the tokens at any time, and the source has the
furthest ones.

The next holder is *killed*: its link ends, and ``on_down`` sends every copy that it had another way (``reroute``). If
the keeper of the copy before dies with it, the source starts again from its own.

It *hangs*: ``on_progress`` extends the deadline of a hop with each sign of life. ``look_at_hop`` suspects a holder
that is silent, avoids it (``avoid``) and reroutes the request; one that reports progress but keeps the request for too
long is treated alike, unless it is the only holder. A source gives a request up that it has no news of
(``SourceRules._on_lost``). An engine of our own that hangs is found by ``EngineWork.look_at``, and what waits for it
goes on.

It *refuses*: ``on_refuse`` decides again, and pauses offers to a process that refuses without need. Without a credit
anywhere, ``Decisions._wait_for_credit`` waits, for a while.

It *lies*: answers count only from the process that the transfer went to (``_sent_to``), announced times within bounds,
and progress within limits. A source uses nothing of an ``implausible_return``, and runs its own copy again.

It is *reached through a relay*: where no neighbor has a block that may run, ``Decisions.decide`` hands the tokens to a
neighbor that leads to one. What comes back from beyond goes out again the way that it came (``Decisions.way_out``),
and home the way that it came where nobody reaches the source (``Decisions.send_home``).

Its budget ends: ``Rules.out_of_budget`` sends it home in time, and the source answers from what it has or fails.

A request that is routed again gets a new random branch, which distinguishes it from late messages of the old one.
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
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest, Stage
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.turn import Turn

R = TypeVar("R", bound=Rules)


class Machine(Generic[R]):
    """Routing of one process; ``rules`` are those of a source or a peer."""

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
        """The requests that this process holds."""
        self.limits = limits
        self._next = INFINITY
        """Time of the next :class:`Tick` if nothing else happens before."""
        self.rules = self.decisions.rules = rules(self)
        self.custody.follow(self.rules.stages)

    # The interface of the process around it.

    def handle_all(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Handle the events of a turn, decide once after all of them, and return instructions in their order.

        ``now`` never decreases.
        """
        turn, handlers = self.turn, self.rules.handlers
        turn.begin(now)
        for event in events:
            for handle in handlers[type(event)]:
                handle(event)
        if self._next <= turn.now:
            self._look_at_late()
        self.decisions.run()
        self._next = min(self.rules.finish(), self.custody.timers.next, self.decisions.next_look())
        return in_order(turn.instructions)

    def next_check(self) -> float | None:
        """Return the time of the next :class:`Tick` if nothing else happens before."""
        return None if self._next == INFINITY else self._next

    def validate(self) -> None:
        """Raise ``held_request.InvalidState`` if internal state is inconsistent; for tests, after each event."""
        self.custody.check()
        self.rules.check()

    # The next holder answers: it takes the request over, refuses it, works on it, passes it on.

    def on_received(self, event: Received) -> None:
        """Handle a message; a process ignores the ones that only others handle."""
        for handle in self.rules.handlers.get(type(event.message), ()):
            handle(event.sender, event.message)

    def _sent_to(self, sender: str, message: Accept | Refuse | Progress | Release) -> HeldRequest | None:
        """Return the request that a message is about, if it went to the sender."""
        request = self.custody.sent.get(message.transfer)
        return request if is_from_next_holder(request, sender) else None

    def on_accept(self, sender: str, message: Accept) -> None:
        """Keep a copy of a request that the next holder has accepted, and release the one before."""
        seconds = self._learn(sender, message)
        request = self._sent_to(sender, message)
        if request is None or request.stage is not Stage.OFFERED:
            return
        self.custody.transition(request, Stage.CUSTODY, f"{sender} accepted")
        before = request.upstream
        if before is not None and before in self.neighbors.by_name:
            link_us = min(round(seconds * 1e6), MICROSECONDS - 1)
            self.turn.send(before, Release(request.transfer, sender, link_us))
        if request.trail is not None:
            request.trail.accepted(sender)
        if request.returning and sender == request.itinerary.source:
            self.custody.end(request, "home")

    def on_refuse(self, sender: str, message: Refuse) -> None:
        """Decide a request again that its next holder refused."""
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
            request.avoid[sender] = n.backoff_until
            if not busy:
                self.avoid(request, sender, n.backoff_until)
        if request.returning and message.reason == RefuseReason.CANCELED:
            self.decisions.canceled_on_way_home(request, sender)

    def on_progress(self, sender: str, message: Progress) -> None:
        """Give the holder more time; without further blocks only as long as :attr:`Limits.keep_share` allows."""
        request = self._sent_to(sender, message)
        if request is None:
            return
        n, now, end = self.neighbors.get(sender), self.turn.now, self.custody.budget_end(request)
        if n is not None:
            n.clear_suspicion()
        if shows_further_block(request, message):
            if n is not None and request.stage is Stage.CUSTODY:
                n.ran_after((now - request.ran_at) / (message.blocks_done - request.most_done))
                request.ran_at = now
            request.most_done = message.blocks_done
            request.keep_until = now + self.limits.keep_share * (end - now)
        self.custody.extend(request, end)
        if request.open_track is not None:
            self.decisions.send_progress([request.open_track.wave.request])

    def on_release(self, sender: str, message: Release) -> None:
        """Let go of a copy, since the next holder has passed the request on."""
        request = self._sent_to(sender, message)
        n = self.neighbors.get(sender)
        if request is None:
            return
        if n is not None:
            n.clear_suspicion()
        self.passed_on(request, message.holder)

    def passed_on(self, request: HeldRequest, holder: str) -> None:
        """Let go of a copy, since the next holder has handed the request to ``holder``; a source and a joiner watch."""
        n = self.neighbors.get(request.downstream)
        if request.trail is None:
            if n is not None:
                n.reset_back_off()
        elif not request.trail.holder:
            request.trail.before, request.trail.holder = request.downstream, holder
        if request.upstream is None:
            self.custody.transition(request, Stage.AWAY, f"passed on to {holder}")
        else:
            self.custody.end(request, f"passed on to {holder}")

    def _learn(self, name: str, message: Accept | Refuse) -> float:
        """Note the credits that an answer to a transfer reports; return the seconds of the transfer."""
        n = self.neighbors.get(name)
        took = self.neighbors.answered(message.transfer, name)
        if n is None or took is None:
            return 0.0
        n.reported_credits = message.credits
        if isinstance(message, Accept):
            n.accepted_after(took)
        self.custody.waiting.note_room(name)
        return took

    # The next holder fails: its link ends, the transfer cannot be sent, it is silent, it keeps the request.

    def on_down(self, event: NeighborDown) -> None:
        """Reroute whatever a process has that is lost."""
        name, linked = event.name, self.neighbors.by_name
        if linked.pop(name, None) is None:
            return
        self.neighbors.reach_version += 1
        self.turn.note(NoteKind.LOST, name, why=event.why)
        for request in [request for request in self.custody.sent.values() if request.downstream == name]:
            self.reroute(request, f"{name} was lost: {event.why}")
        self.custody.waiting.decide_for_credit_of(name)
        for request, other in self.custody.left_by(name):
            if other not in linked:
                self.reroute(request, f"{name} and {other} were lost")

    def on_unsendable(self, event: Unsendable) -> None:
        """Decide a request again that could not be sent, after a pause."""
        failed, again = event.failed, self.turn.now + self.limits.backoff_base
        n = self.neighbors.get(failed.to)
        if n is not None:
            n.refused_until = again
        request = self.custody.sent.get(failed.transfer) if isinstance(failed, Forward) else None
        if request is not None:
            self.custody.wait(request, "not sendable", again)

    def _look_at_late(self) -> None:
        """Look at the requests whose time has come."""
        for request in self.custody.timers.due(self.turn.now):
            if request.stage is not Stage.ENDED and not self.decisions.is_out_of_budget(request):
                on_time = self.rules.stages[request.stage].on_time
                if on_time is not None:
                    on_time(request)

    def look_at_hop(self, request: HeldRequest) -> None:
        """Check a transfer: it is late, is kept for too long, or its own keeper waits for PROGRESS."""
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
            # The keeper of the copy before must not suspect us while the next holder is late.
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
        """Send our copy another way, because the next holder is lost or shows no progress."""
        self.decisions.reroutes += 1
        request.reroutes += 1
        request.failure = "late" if request.downstream in self.neighbors.by_name else "lost"
        if request.trail is not None:
            request.trail.before = request.trail.holder = ""
        self.turn.note(NoteKind.REROUTED, request.downstream, request.request, why)
        self.custody.decide_again(request, why)

    def avoid(self, request: HeldRequest, name: str, until: float = 0.0) -> None:
        """Do not offer a request to a process until then, and name the process to the next holders."""
        if request.open_track is not None:
            request = request.open_track.wave.request
        request.avoid[name] = until
        itinerary = request.itinerary
        if name in itinerary.avoid:
            return
        known = {n.name: n.blocks for n in self.neighbors}
        left = set(itinerary.remaining) - self.rules.local_node().blocks
        avoid = avoid_also(itinerary.avoid, name, left, known)
        request.itinerary = msgspec.structs.replace(itinerary, avoid=avoid)

    # Neighbors come and change.

    def on_up(self, event: NeighborUp) -> None:
        """Note a process that has a link now, or what it says of itself again."""
        hello = event.hello
        known = self.neighbors.get(hello.name)
        if known is not None and known.hello.incarnation != hello.incarnation:
            self.on_down(NeighborDown(hello.name, "came back as a new process"))
        self.neighbors.add(hello)
        self.decisions.wake_all()

    def on_state(self, event: NeighborState) -> None:
        """Note a STATE, and decide the requests again that it may concern."""
        reach = self.neighbors.reach_version
        is_new = self.neighbors.update(event.name, believable(event.state))
        if self.neighbors.reach_version != reach:
            self.decisions.wake_all()
        else:
            if is_new:
                self.custody.waiting.decide_changed()
            self.custody.waiting.note_room(event.name)
