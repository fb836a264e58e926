"""Custody of tokens: the part of routing that a peer and a source have in common.

A process *holds* requests: tokens, their itinerary, and the transfer by which they came. Handing one on takes three
steps, and a copy stays here until the last of them. ``CustodyMachine.transitions`` is the whole table; these are the
ones that every process has:

    NEW      -> WAITING   it was taken in
    WAITING  -> OFFERED   RUN sent
    OFFERED  -> CUSTODY   ACCEPT
    OFFERED  -> WAITING   REFUSE, link lost, not sendable, no progress: decided again
    CUSTODY  -> WAITING   link lost, no progress: decided again
    CUSTODY  -> AWAY      RELEASE, where this process still answers for it: in a source, and for a track of a joiner
    any      -> ENDED     RELEASE in a peer, CANCEL, end of the budget, outcome

A peer adds QUEUED, RUNNING and JOINING (``peer_routing.py``), a source AWAY -> WAITING (``source_routing.py``). A
request that is routed again gets a new random branch, which distinguishes it from late messages of the old one.

The machine has no clock, socket or thread: :meth:`CustodyMachine.handle` takes an event and the time and returns
instructions in the order in which they are to be executed. The same code runs in peers, sources and the simulator
(``ls_edge.runtime.fleet.simulation.simulator``).
"""

from __future__ import annotations

import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.records import MICROSECONDS
from ls_edge.runtime.protocol.messages import (
    MAX_AVOID,
    MAX_BUDGET_US,
    Accept,
    Itinerary,
    Progress,
    Refuse,
    RefuseReason,
    Release,
    ReturnReason,
    TransferId,
)
from ls_edge.runtime.routing.candidates import ONE_BAND, Candidate, LocalNode
from ls_edge.runtime.routing.credits import Occupancy, owner_of
from ls_edge.runtime.routing.events import (
    Arrived,
    Event,
    Forward,
    Instruction,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    NoteKind,
    Received,
    Send,
    Tick,
    Unsendable,
    execution_order,
)
from ls_edge.runtime.routing.held_request import INFINITY, HeldRequest, Stage
from ls_edge.runtime.routing.neighbours import Change, Limits, Neighbour, Neighbours
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.policy import Choice, ReturnToSource, RunHere, SendTo, Wait
from ls_edge.runtime.routing.waiting_requests import WaitingRequests

REFUSED_S = 0.1
"""Seconds without offers to a process that refuses as cold or draining; its STATE announces the end."""
_LOOK_EVERY = 0.1
"""Seconds between two looks at waiting requests that no event concerns."""
_UNSENDABLE_S = 0.02
"""Seconds until a transfer that could not be sent is decided again; shorter spins on a full link."""
_OFFERS = 1024
"""Limit on remembered transfers without an answer, from which link times are learned."""
_SPARE_CHECKS = 64
"""Outdated entries in the heap of times beyond four for each held request; more means rarer sweeps."""


class InvalidTransition(Exception):
    """A held request would change between two stages that the table does not connect."""

    def __init__(self, request: HeldRequest, to: Stage, why: str) -> None:
        super().__init__(f"{request.stage.value} -> {to.value} ({why}) is not a transition of\n{request.history()}")


class InvalidState(Exception):
    """Internal state is inconsistent; raised only by :meth:`CustodyMachine.validate`."""


class CustodyMachine(ABC):
    """Common part of ``PeerMachine`` and ``SourceMachine``.

    A subclass adds transitions and handlers to the tables and implements the abstract methods; it overrides nothing.
    Its parts (engine queue, waves, credits) use the public methods.
    """

    def __init__(
        self,
        name: str,
        *,
        limits: Limits,
        rng: random.Random,
        costs: OrderCosts | None = None,
        bands: Bands = ONE_BAND,
    ) -> None:
        """``rng`` draws branches; seed it in a test, never in a process.

        ``costs`` are for policies that need them; ``bands`` are the model's, the same for all processes.
        """
        self.bands = bands
        self.name = name
        self.limits = limits
        self.rng = rng
        self.costs = costs
        self.neighbours = Neighbours(limits)
        self.held: dict[TransferId, HeldRequest] = {}
        self.occupancy = Occupancy()
        self.reroutes = 0
        """Requests that were decided again after a failure."""
        self.decisions = 0
        """Number of decisions on waiting requests."""
        self.now = 0.0
        """The time of the event that is being handled."""
        self.instructions: list[Instruction] = []
        """Instructions that follow from the event so far."""
        self.transitions: dict[tuple[Stage, Stage], Callable[..., None]] = {
            (Stage.NEW, Stage.WAITING): self._enter_waiting,
            (Stage.WAITING, Stage.OFFERED): self._enter_offered,
            (Stage.OFFERED, Stage.CUSTODY): self._enter_custody,
            (Stage.OFFERED, Stage.WAITING): self._take_back_offer,
            (Stage.CUSTODY, Stage.WAITING): self._take_back_copy,
            (Stage.OFFERED, Stage.AWAY): self._leave_offer,
            (Stage.CUSTODY, Stage.AWAY): self._enter_away,
            (Stage.WAITING, Stage.ENDED): self._forget,
            (Stage.OFFERED, Stage.ENDED): self._end_offer,
            (Stage.CUSTODY, Stage.ENDED): self._end_copy,
            (Stage.AWAY, Stage.ENDED): self._forget,
        }
        self.event_handlers: dict[type, Callable[[Any], None]] = {
            Arrived: self._on_arrived,
            Received: self._on_received,
            Unsendable: self._on_unsendable,
            NeighbourUp: self._on_up,
            NeighbourDown: self._on_down,
            NeighbourState: self._on_state,
            Tick: lambda _tick: None,
        }
        self.message_handlers: dict[type, Callable[[str, Any], None]] = {
            Accept: self._on_accept,
            Refuse: self._on_refuse,
            Progress: self._on_progress,
            Release: self._on_release,
        }
        self._sent: dict[TransferId, HeldRequest] = {}
        self._offered: dict[TransferId, tuple[str, float]] = {}
        """Receiver and time of each unanswered transfer, including the ones that were given up."""
        self.waiting = WaitingRequests()
        self._candidates: dict[str, Candidate] | None = None
        """Candidates, made at most once for an event."""
        self._outdated: set[str] = set()
        """Names of candidates to make again, since the neighbour has changed."""
        self._ready: deque[HeldRequest] = deque()
        """Waiting requests that are decided at the end of the event."""
        self._checks: list[tuple[float, int, HeldRequest]] = []
        """A heap of the times at which held requests have to be looked at, with outdated entries."""
        self._numbers = itertools.count()
        self._look_at = 0.0
        """Time of the next look at waiting requests without an event."""

    # The interface of the process around it.

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Handle one event and return instructions in the order of their execution. ``now`` never decreases."""
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Instruction]:
        """Handle several events and decide once, after all of them; otherwise as :meth:`handle`."""
        self.now = max(self.now, now)
        self.instructions = []
        for event in events:
            self._candidates = None
            self.dispatch(event)
        self._candidates = None
        self._check_times()
        if self.occupancy.waiting and self.now >= self._look_at:
            self._look_at_waiting()
        while self.waiting.may_have_room or self._ready:
            if self.waiting.may_have_room:
                self.waiting.use_room(self._room, self._decide)
                continue
            request = self._ready.popleft()
            if request.stage is Stage.WAITING:
                self._decide(request)
        self._finish()
        return self.instructions if len(self.instructions) < 2 else sorted(self.instructions, key=execution_order)

    def dispatch(self, event: Event) -> None:
        """Apply one event, and decide nothing."""
        handler = self.event_handlers.get(type(event))
        if handler is None:
            raise TypeError(f"{type(self).__name__} does not handle {event!r}")
        self._before_event(event)
        handler(event)
        self._after_event(event)

    def next_check(self) -> float | None:
        """Return the time of the next :class:`Tick` if nothing else happens before."""
        checks = self._checks
        while checks and checks[0][2].check_at != checks[0][0]:
            heapq.heappop(checks)
        at = min(checks[0][0] if checks else INFINITY, self._other_check())
        if self.occupancy.waiting:
            at = min(at, self._look_at)
        return None if at == INFINITY else at

    @property
    def transfers(self) -> list[TransferId]:
        """Transfers whose answers still count."""
        return list(self._sent)

    def validate(self) -> None:
        """Raise :class:`InvalidState` if internal state is inconsistent; for tests, after each event."""
        self._expect(not self._ready, "requests are left to be decided")
        self._expect(Occupancy.recount(self.held.values()) == self.occupancy, f"counts are {self.occupancy}")
        offers = Counter(request.downstream for request in self.held.values() if request.stage is Stage.OFFERED)
        for n in self.neighbours:
            self._expect(
                n.offers == offers[n.name], f"{n.offers} offers to {n.name}, {offers[n.name]} are on their way"
            )
        entries = {(at, request.transfer) for at, _, request in self._checks}
        for transfer, request in self.held.items():
            on_its_way = request.stage in (Stage.OFFERED, Stage.CUSTODY)
            self._expect(request.transfer == transfer, "held under another transfer", request)
            self._expect((request.stage, Stage.ENDED) in self.transitions, "in a stage without an end", request)
            self._expect(request.check_at < INFINITY, "never looked at again", request)
            self._expect((request.check_at, transfer) in entries, "without an entry among the times", request)
            self._expect(on_its_way == (self._sent.get(request.sent or transfer) is request), "sent or not", request)
            self._expect(not on_its_way or request.downstream in self.neighbours.by_name, "no holder has it", request)
            self._expect(request.stage is not Stage.WAITING or not request.downstream, "waits downstream", request)
        for sent, request in self._sent.items():
            self._expect(request.sent == sent, "sent under another transfer", request)
            self._expect(self.held.get(request.transfer) is request, "sent and not held", request)
        for fault, waiting in self.waiting.faults(self.held.values()):
            self._expect(False, fault, waiting)
        self._validate_parts()

    def _expect(self, fact: bool, what: str, request: HeldRequest | None = None) -> None:
        if not fact:
            raise InvalidState(f"{self.name}: {what}" + (f"\n{request.history()}" if request is not None else ""))

    # What a peer and a source do differently.

    @abstractmethod
    def _on_arrived(self, event: Arrived) -> None:
        """Take tokens in, or refuse them."""

    @abstractmethod
    def local_node(self, request: HeldRequest) -> LocalNode:
        """Return what this process can run of a request itself."""

    @abstractmethod
    def _decide_locally(self, request: HeldRequest, local: LocalNode) -> bool:
        """Make a decision that needs no policy; return whether there was one."""

    @abstractmethod
    def _run_here(self, request: HeldRequest, block: int) -> None:
        """Run a block on the engine of this process."""

    @abstractmethod
    def _cannot_go_on(self, request: HeldRequest, reason: ReturnReason) -> None:
        """Act on a request that no reachable process can take."""

    @abstractmethod
    def _waits_on(self, request: HeldRequest, candidates: Iterable[Candidate]) -> bool:
        """Return whether a request waits for the credit of these even longer than ``Limits.credit_wait``."""

    @abstractmethod
    def _way_out(self, request: HeldRequest) -> str:
        """Return a process that may reach an unannounced holder, judging by the way of the request, or ""."""

    @abstractmethod
    def _accepted(self, request: HeldRequest) -> None:
        """Act on the ACCEPT of the next holder."""

    @abstractmethod
    def _released(self, request: HeldRequest, holder: str) -> None:
        """Act on the RELEASE of the next holder, which has passed the request on to ``holder``."""

    @abstractmethod
    def _watch(self, request: HeldRequest) -> None:
        """Set the next check of a request that is ``AWAY``."""

    @abstractmethod
    def _end(self, request: HeldRequest) -> float:
        """Return the time at which the budget ends a request in its present stage."""

    @abstractmethod
    def _over_budget(self, request: HeldRequest) -> bool:
        """End a request if its time is over; return whether it was."""

    @abstractmethod
    def _late(self, request: HeldRequest) -> None:
        """Act on a request that has passed its ``check_at`` in a stage of the subclass."""

    @abstractmethod
    def _annotated(self, request: HeldRequest, itinerary: Itinerary) -> Itinerary:
        """Return the itinerary with the time that the request spent in this process."""

    @abstractmethod
    def _validate_parts(self) -> None:
        """Validate the parts of the subclass; see :meth:`validate`."""

    def _before_event(self, event: Event) -> None:  # noqa: B027
        """Prepare for an event."""

    def _after_event(self, event: Event) -> None:  # noqa: B027
        """Follow up on an event, before anything is decided."""

    def _finish(self) -> None:  # noqa: B027
        """Follow up on what was decided."""

    def _other_check(self) -> float:
        """Return the time of the next Tick for other reasons than held requests, or infinity."""
        return INFINITY

    def _reach_changed(self) -> None:  # noqa: B027
        """Links, or what neighbours reach, have changed."""

    def _refused(self, request: HeldRequest, sender: str, message: Refuse) -> None:  # noqa: B027
        """Act on a request that waits again because its next holder refused it."""

    def _rerouted(self, request: HeldRequest) -> None:  # noqa: B027
        """Act on a request that is about to wait again because its next holder failed."""

    def _waits_for_credit(self, request: HeldRequest) -> None:  # noqa: B027
        """Act on a request that waits for a credit."""

    def _neighbour_lost(self, name: str) -> None:  # noqa: B027
        """Act on the loss of a neighbour; requests on their way to it already wait again."""

    def _track_forgotten(self, request: HeldRequest) -> None:  # noqa: B027
        """Act on an open track of this process whose tokens are not held any more."""

    # Transitions.

    def transition(self, request: HeldRequest, to: Stage, why: str, *arguments: Any) -> None:
        """Move a request to another stage: count it, note it in its story, and call the handler of the table."""
        before = request.stage
        handler = self.transitions.get((before, to))
        if handler is None:
            raise InvalidTransition(request, to, why)
        if before is Stage.WAITING:
            self.waiting.remove(request)
        request.story.append((self.now, before, to, why))
        request.stage = to
        self.occupancy.moved(request, before, to)
        handler(request, *arguments)

    def hold(self, request: HeldRequest, why: str) -> None:
        """Hold a new request; it waits and is not decided yet."""
        request.number = next(self._numbers)
        self.held[request.transfer] = request
        self.transition(request, Stage.WAITING, why, None)

    def wait(
        self,
        request: HeldRequest,
        until: float | None,
        why: str,
        *,
        credit_of: tuple[str, ...] = (),
        or_change: bool = False,
    ) -> None:
        """Make a request wait until a neighbour changes, or until ``until``, or the end of its budget.

        A request that waits already can wait for the ``credit_of`` some neighbours instead: it is decided in turn with
        others when one of them has room, and with ``or_change`` after any change as well.
        """
        if request.stage is not Stage.WAITING:
            self.transition(request, Stage.WAITING, why, until)
            return
        self._set_time(request, until)
        self.waiting.wait_for(request, credit_of, or_change=or_change)

    def decide_soon(self, request: HeldRequest) -> None:
        """Decide a waiting request at the end of this event."""
        self._ready.append(request)

    def offer(self, request: HeldRequest, to: str, itinerary: Itinerary) -> None:
        """Send a waiting request to a neighbour; a copy stays here."""
        self.transition(request, Stage.OFFERED, to, to, itinerary)

    def end(self, request: HeldRequest, why: str) -> None:
        """Forget a request and its transfers."""
        if request.stage is not Stage.ENDED:
            self.transition(request, Stage.ENDED, why)

    def set_check(self, request: HeldRequest, at: float) -> None:
        """Set the time of the next check of a request in its present stage."""
        if at == request.check_at:
            return
        request.check_at = at
        if len(self._checks) > 4 * len(self.held) + _SPARE_CHECKS:
            self._checks = [entry for entry in self._checks if entry[2].check_at == entry[0]]
            heapq.heapify(self._checks)
        if at < INFINITY:
            heapq.heappush(self._checks, (at, next(self._numbers), request))

    def _enter_waiting(self, request: HeldRequest, until: float | None) -> None:
        request.downstream = ""
        self.waiting.add(request)
        self._set_time(request, until)

    def _set_time(self, request: HeldRequest, until: float | None) -> None:
        """Set the time of the next check of a waiting request."""
        end = self._end(request)
        if until is None:
            self.set_check(request, end)
            return
        if request.waiting_since is None:
            request.waiting_since = self.now
        self.set_check(request, min(until, end))

    def _enter_offered(self, request: HeldRequest, to: str, itinerary: Itinerary) -> None:
        came = request.transfer
        sent = TransferId(came.request, came.branch, came.hop + 1)
        if sent in self._sent or request.sent is not None:
            sent = TransferId(came.request, self.rng.getrandbits(64), came.hop + 1)
        self.neighbours.by_name[to].offers += 1
        self._changed(to)
        request.downstream, request.sent, request.waiting_since = to, sent, None
        self._sent[sent] = request
        self._offered[sent] = (to, self.now)
        if len(self._offered) > _OFFERS:
            del self._offered[next(iter(self._offered))]
        end = self._end(request)
        left = max(0.0, end - self.now)
        request.keep_until = self.now + self.limits.keep_share * left
        request.keep_end = self.now + self.limits.keep_most * left
        request.most_done = itinerary.blocks_done
        self._extend(request, end)
        budget = min(MAX_BUDGET_US, max(0, round((request.deadline - self.now) * 1e6)))
        itinerary = self._annotated(request, itinerary)
        self.instructions.append(
            Forward(to, sent, budget, itinerary, request.tokens, request.returning, request.bundle_id)
        )

    def _enter_custody(self, request: HeldRequest) -> None:
        self._settle_offer(request)
        request.ran_at = self.now
        self._extend(request, self._end(request))

    def _take_back_offer(self, request: HeldRequest, until: float | None) -> None:
        self._settle_offer(request)
        self._take_back_copy(request, until)

    def _take_back_copy(self, request: HeldRequest, until: float | None) -> None:
        self._forget_transfer(request)
        self._enter_waiting(request, until)

    def _leave_offer(self, request: HeldRequest) -> None:
        self._settle_offer(request)
        self._enter_away(request)

    def _enter_away(self, request: HeldRequest) -> None:
        self._forget_transfer(request)
        self._watch(request)

    def _end_offer(self, request: HeldRequest) -> None:
        self._settle_offer(request)
        self._end_copy(request)

    def _end_copy(self, request: HeldRequest) -> None:
        self._forget_transfer(request)
        self._forget(request)

    def _forget(self, request: HeldRequest) -> None:
        del self.held[request.transfer]
        self.set_check(request, INFINITY)
        if request.open_track is not None:
            self._track_forgotten(request)

    def _settle_offer(self, request: HeldRequest) -> None:
        """Count one transfer less on its way to the next holder."""
        n = self.neighbours.get(request.downstream)
        if n is not None:
            n.offers -= 1
            self._changed(n.name)
            self.waiting.note_room(n.name)

    def _forget_transfer(self, request: HeldRequest) -> None:
        """Ignore further answers to the transfer by which a request was handed on."""
        if request.sent is not None:
            self._sent.pop(request.sent, None)

    # Events.

    def _on_up(self, event: NeighbourUp) -> None:
        hello = event.hello
        known = self.neighbours.get(hello.name)
        if known is not None and known.hello.incarnation != hello.incarnation:
            self._on_down(NeighbourDown(hello.name, "came back as a new process"))
            known = None
        if known is not None:
            known.hello = hello
        else:
            self.neighbours.by_name[hello.name] = Neighbour(hello)
        self._reach_changed()
        self._wake_all()

    def _on_down(self, event: NeighbourDown) -> None:
        if self.neighbours.by_name.pop(event.name, None) is None:
            return
        self.instructions.append(Note(NoteKind.LOST, event.name, why=event.why))
        self._reach_changed()
        for request in [request for request in self._sent.values() if request.downstream == event.name]:
            self.reroute(request, f"{event.name} was lost: {event.why}")
        self._ready.extend(self.waiting.for_credit_of(event.name))
        self._neighbour_lost(event.name)

    def _on_state(self, event: NeighbourState) -> None:
        change = self.neighbours.update(event.name, event.state, self.now)
        if change is Change.REACH:
            self._reach_changed()
            self._wake_all()
        else:
            if change is Change.LOAD:
                self._ready.extend(self.waiting.for_change())
            self.waiting.note_room(event.name)

    def _on_unsendable(self, event: Unsendable) -> None:
        failed = event.failed
        n = self.neighbours.get(failed.to)
        if n is not None:
            n.refused_until = self.now + _UNSENDABLE_S
        request = self._sent.get(failed.transfer) if isinstance(failed, Forward) else None
        if request is not None:
            self.wait(request, self.now + _UNSENDABLE_S, "not sendable")

    def _on_received(self, event: Received) -> None:
        handler = self.message_handlers.get(type(event.message))
        if handler is not None:
            handler(event.sender, event.message)

    def _sent_to(self, sender: str, message: Accept | Refuse | Progress | Release) -> HeldRequest | None:
        """Return the request that a message is about, if it went to the sender."""
        request = self._sent.get(message.transfer)
        return request if request is not None and request.downstream == sender else None

    def _on_accept(self, sender: str, message: Accept) -> None:
        seconds = self._learn(sender, message)
        request = self._sent_to(sender, message)
        if request is not None and request.stage is Stage.OFFERED:
            request.link_us = min(round(seconds * 1e6), MICROSECONDS - 1)
            self.transition(request, Stage.CUSTODY, f"{sender} accepted")
            self._accepted(request)

    def _on_refuse(self, sender: str, message: Refuse) -> None:
        self._learn(sender, message)
        request = self._sent_to(sender, message)
        if request is None:
            return
        n = self.neighbours.get(sender)
        self.wait(request, None, f"{sender} refused: {message.reason}")
        if n is not None:
            busy = message.reason == RefuseReason.BUSY
            if not busy:
                n.refused_until = self.now + REFUSED_S
            # Busy without a credit is usual. Any other reason means that it will not take this request.
            if message.credits if busy else message.reason not in (RefuseReason.DRAINING, RefuseReason.COLD):
                n.back_off(self.now, self.limits)
                request.avoid[sender] = n.backoff_until
                if not busy:
                    self.avoid(request, sender, n.backoff_until)
            self._changed(sender)
        self.decide_soon(request)
        self._refused(request, sender, message)

    def avoid(self, request: HeldRequest, name: str, until: float = 0.0) -> None:
        """Do not offer a request to a process until then, and name the process to the next holders.

        What these are told never leaves a block without a holder: the others get another chance first.
        """
        if request.open_track is not None:
            request = request.open_track.wave.request
        request.avoid[name] = until
        itinerary = request.itinerary
        if name in itinerary.avoid:
            return
        avoid = (*itinerary.avoid, name)[-MAX_AVOID:]
        if self._rules_out(avoid, request):
            avoid = () if self._rules_out((name,), request) else (name,)
        request.itinerary = msgspec.structs.replace(itinerary, avoid=avoid)

    def _rules_out(self, avoid: Collection[str], request: HeldRequest) -> bool:
        """Return whether every known holder of a remaining block is among the processes to avoid."""
        known = {block for n in self.neighbours for block in n.hello.blocks}
        left = {block for n in self.neighbours if n.name not in avoid for block in n.hello.blocks}
        return not known.intersection(request.itinerary.remaining) <= left | self.local_node(request).blocks

    def _on_progress(self, sender: str, message: Progress) -> None:
        """Give the holder more time; without further blocks only as long as :attr:`Limits.keep_share` allows."""
        request = self._sent_to(sender, message)
        if request is None:
            return
        self.neighbours.clear_suspicion(sender)
        end = self._end(request)
        if request.most_done < message.blocks_done <= request.itinerary.blocks_done + len(request.itinerary.remaining):
            n = self.neighbours.get(sender)
            if n is not None and request.stage is Stage.CUSTODY:
                n.ran_after((self.now - request.ran_at) / (message.blocks_done - request.most_done), self.limits)
                request.ran_at = self.now
            request.most_done = message.blocks_done
            request.keep_until = self.now + self.limits.keep_share * (end - self.now)
        self._extend(request, end)
        if request.open_track is not None:
            self.send_progress([request.open_track.wave.request])

    def _on_release(self, sender: str, message: Release) -> None:
        request = self._sent_to(sender, message)
        if request is not None:
            self.neighbours.clear_suspicion(sender)
            self._released(request, message.holder)

    def _learn(self, name: str, message: Accept | Refuse) -> float:
        """Note the credits that an answer to a transfer reports; return the seconds of the transfer."""
        n = self.neighbours.get(name)
        offered = self._offered.pop(message.transfer, None)
        if n is None or offered is None or offered[0] != name:
            return 0.0
        took = self.now - offered[1]
        n.reported_credits = message.credits
        if isinstance(message, Accept):
            n.accepted_after(took, self.now)
        self._changed(name)
        self.waiting.note_room(name)
        return took

    # Deciding and handing on.

    def _decide(self, request: HeldRequest) -> None:
        self.decisions += 1
        if self._over_budget(request):
            return
        local = self.local_node(request)
        if self._decide_locally(request, local):
            return
        itinerary, from_peer = request.itinerary, request.upstream is not None
        if not itinerary.remaining:
            self._cannot_go_on(request, ReturnReason.DONE)
            return
        limits, hop = self.limits, request.transfer.hop
        if from_peer and hop >= limits.hops and hop >= limits.most_hops(itinerary.blocks):
            self._cannot_go_on(request, ReturnReason.HOPS)
            return
        policy = policy_of(itinerary.policy)
        choice: Choice | None = policy.step_here(itinerary, local)
        if isinstance(choice, RunHere):
            self._run_here(request, choice.block)
            return
        since = request.waiting_since
        candidates = self.reachable(request)
        woken_early = since is not None and request.check_at > self.now and not local.blocks
        if woken_early and not any(c.credits > 0 for c in candidates):
            return
        if request.avoid or itinerary.avoid:
            request.avoid = {name: until for name, until in request.avoid.items() if until > self.now}
            candidates = [c for c in candidates if c.name not in request.avoid]
            others = [c for c in candidates if c.name not in itinerary.avoid]
            if from_peer or any(c.credits > 0 for c in self.able_to_run(request, others)):
                candidates = others
        patient = since is None or self.now - since < self.limits.credit_wait
        choice = policy.next_step(itinerary, local, candidates, patient=patient, tie_break=request.tie_break)
        if isinstance(choice, RunHere):
            self._run_here(request, choice.block)
        elif isinstance(choice, ReturnToSource):
            self._wait_or_return(request, choice.reason, candidates)
        elif isinstance(choice, Wait):
            self._wait_for_credit(request, candidates, choice.holders)
        elif itinerary.via_source and from_peer:
            self._cannot_go_on(request, ReturnReason.VIA_SOURCE)
        else:
            assert isinstance(choice, SendTo)
            if choice.relay:
                itinerary = msgspec.structs.replace(itinerary, relays=(*itinerary.relays, self.name))
            self.offer(request, choice.holder, itinerary)

    def _wait_or_return(self, request: HeldRequest, reason: ReturnReason, candidates: Sequence[Candidate]) -> None:
        """Act on a request for which the policy finds no holder: wait, hand it back out, or return it."""
        if reason is ReturnReason.CREDIT and self._waits_on(request, candidates):
            self._wait_for_credit(request, candidates, ())
            return
        itinerary = request.itinerary
        out_again = reason is ReturnReason.UNREACHABLE and not itinerary.via_source and itinerary.track is None
        way = self._way_out(request) if out_again else ""
        candidate = self.neighbours.candidate(way, self.now) if way and way not in itinerary.relays else None
        if candidate is None or not _suits(candidate, request):
            self._cannot_go_on(request, reason)
        elif candidate.credits > 0:
            self.offer(request, way, msgspec.structs.replace(itinerary, relays=(*itinerary.relays, self.name)))
        elif request.upstream is None or self._waits_on(request, [candidate]):
            self._wait_for_credit(request, [candidate], (way,))
        else:
            self._cannot_go_on(request, ReturnReason.CREDIT)

    def _wait_for_credit(self, request: HeldRequest, candidates: Sequence[Candidate], holders: tuple[str, ...]) -> None:
        since = request.waiting_since
        until = (self.now if since is None else since) + self.limits.credit_wait
        if until <= self.now:
            until = self.now + self.limits.look_again
        if request.upstream is not None:
            self.send_progress([request])
            until = min(until, self.now + self.limits.look_again)
        or_change = bool(request.avoid or request.itinerary.avoid)
        if not holders:
            able = self.able_to_run(request, candidates)
            holders = tuple(c.name for c in able if not c.credits)
            or_change = or_change or len(holders) < len(able)  # it prefers to wait, as long as things are as they are
        self.wait(request, until, "credit", credit_of=holders, or_change=or_change)
        self._waits_for_credit(request)

    def able_to_run(self, request: HeldRequest, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Return the candidates with a block that may run now; if there are none, relays to such candidates."""
        itinerary = request.itinerary
        first = not policy_of(itinerary.policy).may_reorder
        wanted = itinerary.remaining[:1] if first else self.bands.permitted(itinerary.remaining)
        holders = [c for c in candidates if not c.blocks.isdisjoint(wanted)]
        if holders or itinerary.via_source:
            return holders
        return [c for c in candidates if c.leads_to(wanted) and c.name not in itinerary.relays]

    def reachable(self, request: HeldRequest) -> list[Candidate]:
        """Return the peers that may be handed a request."""
        if self._candidates is None:
            self._candidates = self.neighbours.candidates(self.now)
        elif self._outdated:
            for name in self._outdated:
                candidate = self.neighbours.candidate(name, self.now)
                if candidate is None:
                    self._candidates.pop(name, None)
                else:
                    self._candidates[name] = candidate
        self._outdated.clear()
        candidates = list(self._candidates.values())
        return [c for c in candidates if _suits(c, request)] if request.bundle_id else candidates

    def leads_beyond(self, n: Neighbour) -> bool:
        """Return whether a neighbour is linked to a peer that this process is not. Names of sources are aliases."""
        known = self.neighbours.by_name
        others = () if n.state is None else n.state.reaches
        return any(name not in known and name != self.name and owner_of(name) == name for name in others)

    def _changed(self, name: str) -> None:
        """Note that a neighbour can take more or less than before."""
        if self._candidates is not None:
            self._outdated.add(name)

    def reroute(self, request: HeldRequest, why: str) -> None:
        """Send our copy another way, because the next holder is lost or shows no progress."""
        self.reroutes += 1
        request.reroutes += 1
        request.failure = "late" if request.downstream in self.neighbours.by_name else "lost"
        self._rerouted(request)
        self.instructions.append(Note(NoteKind.REROUTED, request.downstream, request.request, why))
        self.wait(request, None, why)
        self.decide_soon(request)

    def send_progress(self, requests: Iterable[HeldRequest]) -> None:
        """Send PROGRESS to the keepers of the copies before, unless one was sent a moment ago."""
        for request in requests:
            before = request.upstream
            due = self.now - request.progress_at >= self.limits.progress_every
            if due and before is not None and before in self.neighbours.by_name:
                request.progress_at = self.now
                self.instructions.append(Send(before, Progress(request.transfer, request.itinerary.blocks_done)))

    # Times.

    def _wake_all(self) -> None:
        """Decide every waiting request again, because the reachable processes have changed."""
        if self.occupancy.waiting:
            self._ready.extend(request for request in self.held.values() if request.stage is Stage.WAITING)

    def _look_at_waiting(self) -> None:
        """Decide again the requests that wait for the end of a suspicion, refusal or pause, since no event marks it."""
        self._look_at = self.now + _LOOK_EVERY
        if self.neighbours.have_recovered(self.now):
            self._wake_all()
        else:
            self._ready.extend(self.waiting.for_change())
        for n in self.neighbours:
            self.waiting.note_room(n.name)

    def _room(self, name: str) -> int:
        """Return the number of further transfers that a neighbour can be sent."""
        n = self.neighbours.get(name)
        if n is None:
            return 0
        if n.hello.role != "peer":
            return n.window_left(self.now, self.limits)
        return n.credits(self.now, self.limits) if n.available(self.now) else 0

    def _check_times(self) -> None:
        checks = self._checks
        if not checks or checks[0][0] > self.now:
            return
        due: dict[int, HeldRequest] = {}
        while checks and checks[0][0] <= self.now:
            at, _, request = heapq.heappop(checks)
            if request.check_at == at:
                due[request.number] = request
        for _, request in sorted(due.items()):
            if request.stage is Stage.ENDED or self._over_budget(request):
                pass
            elif request.stage in (Stage.OFFERED, Stage.CUSTODY):
                self._late_hop(request)
            elif request.stage is Stage.WAITING:
                self.decide_soon(request)
            else:
                self._late(request)
        for request in due.values():
            if request.check_at <= self.now:  # it is as it was, and is looked at again
                heapq.heappush(self._checks, (request.check_at, next(self._numbers), request))

    def _late_hop(self, request: HeldRequest) -> None:
        """Check a transfer: it is late, is kept for too long, or its own keeper waits for PROGRESS."""
        name = request.downstream
        if self.now >= request.hop_at:
            self.neighbours.suspect(name, self.now)
            self._changed(name)
            self._ready.extend(self.waiting.for_credit_of(name))
            why = "no progress within the hop's deadline"
            self.instructions.append(Note(NoteKind.SUSPECT, name, request.request, why))
            self.avoid(request, name)
            self.reroute(request, f"{name} showed no progress")
        elif self.now >= min(request.keep_until, request.keep_end):
            if self._only_holder(request):
                left = max(self.limits.hop_floor, self.limits.keep_share * (self._end(request) - self.now))
                request.keep_until = request.keep_end = self.now + left
                self._check_hop(request, self._end(request))
            else:
                n = self.neighbours.get(name)
                if n is not None:
                    n.back_off(self.now, self.limits)
                    self._changed(name)
                self.avoid(request, name, request.deadline)
                self.reroute(request, f"{name} kept it for too long")
        else:
            # The keeper of the copy before must not suspect us while the next holder is late.
            self.send_progress([request])
            self._check_hop(request, self._end(request))

    def _only_holder(self, request: HeldRequest) -> bool:
        """Return whether no other process could continue a request that its next holder keeps."""
        if request.returning:
            return request.downstream == request.itinerary.source
        others = [c for c in self.reachable(request) if c.name != request.downstream]
        wanted = frozenset(self.bands.permitted(request.itinerary.remaining))
        return wanted.isdisjoint(self.local_node(request).blocks) and not any(
            wanted & c.blocks or c.leads_to(wanted) for c in others
        )

    def _extend(self, request: HeldRequest, end: float) -> None:
        """Give the next holder time until its next sign of progress; ``end`` is that of :meth:`_end`."""
        accepted = request.stage is Stage.CUSTODY
        patience = self.neighbours.hop_deadline(request.downstream, accepted=accepted, failures=request.reroutes)
        request.hop_at = self.now + patience
        self._check_hop(request, end)

    def _check_hop(self, request: HeldRequest, end: float) -> None:
        """Set the time of the next check of a transfer; ``end`` is that of :meth:`_end`."""
        at = min(request.hop_at, request.keep_until, request.keep_end, end)
        if request.stage is Stage.OFFERED and request.upstream is not None:
            at = min(at, self.now + self.limits.look_again)
        self.set_check(request, at)


def _suits(candidate: Candidate, request: HeldRequest) -> bool:
    """Return whether a peer serves the bundle that a request demands, if any, and keeps the demand."""
    return not request.bundle_id or candidate.bundle_id == request.bundle_id
