"""Decisions about waiting requests, made at the end of each turn.

A decision is a list of rules (``decide`` in the rules of a source and of a peer). Each is a pure function of a
:class:`Case` and returns a step, or None for the next rule; only the step is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import msgspec

from ls_edge.core.parts import has_ends
from ls_edge.runtime.protocol.messages import Itinerary, ReturnReason
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.policy import Policy, RunHere, SendTo, Wait
from ls_edge.runtime.routing.reach import able_to_run, candidates_for, without_avoided
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.custody import Custody, Holder
from ls_edge.runtime.routing.state.held_request import INFINITY, OFFERED, QUEUED, WAITING, HeldRequest
from ls_edge.runtime.routing.state.hop import MOST
from ls_edge.runtime.routing.state.limits import LOOK, LOOK_AGAIN
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.routing.state.turn import Turn


def may_skip(itinerary: Itinerary, blocks: tuple[int, ...]) -> bool:
    """Return whether these blocks may be skipped as well; stem and head never may."""
    skips = len(itinerary.skipped) + len(blocks)
    return policy_of(itinerary.policy).may_skip and skips <= itinerary.max_skips and not has_ends(blocks)


CREDIT_WAIT = 0.25
"""Wait for the credit of a preferred holder. 1/4: no effect; a longer wait keeps the order but costs time."""
Handlers = Mapping[type, tuple[Callable[..., object], ...]]
"""Handlers of each event in their order, and of each message, which get its sender too."""

# Steps, besides those of policies: RunHere, SendTo, and a ReturnReason if nobody can continue.


class Hold(NamedTuple):
    """Wait for a credit of ``holders``, with ``or_change`` or without holders for any change, until a time."""

    holders: tuple[str, ...] = ()
    until: float | None = None
    or_change: bool = False
    reason: str = ""
    """Reason (``ReturnReason``) why the request has to wait, if it is worth an error message."""


class Stay(NamedTuple):
    """Continue to wait as before."""


class OutOfBudget(NamedTuple):
    """End the request at the end of its budget, or send it home."""


class Case:
    """A request to decide, and what its rules read; most decisions need only a part of it."""

    def __init__(self, decisions: Decisions, request: HeldRequest) -> None:
        self.request = request
        self.itinerary = request.itinerary
        self.policy: Policy = policy_of(request.itinerary.policy)
        self.turn = decisions.turn
        self.now = decisions.turn.now
        self._decisions = decisions

    @cached_property
    def local(self) -> LocalNode:
        """Blocks that this process can run."""
        return self._decisions.rules.local_node()

    @cached_property
    def linked(self) -> list[Neighbor]:
        """Peers to which the request may be handed."""
        return candidates_for(self.turn, self.request)

    @property
    def candidates(self) -> Sequence[Neighbor]:
        """The same, without processes to avoid if others can take the request."""
        if self.request.avoid or self.itinerary.avoid:
            return without_avoided(self.turn, self.request, self.linked)
        return self.linked

    @property
    def budget_end(self) -> float:
        """End of the budget here."""
        return self._decisions.rules.budget_end(self.request)

    @property
    def room(self) -> int:
        """Number of further requests that this process may hold, so that tracks of a wave do not exceed its memory."""
        return self.turn.limits.credits + self.turn.limits.custody - len(self._decisions.held)

    @property
    def credit_wait(self) -> float:
        """Time to wait for the credit of a preferred holder; on a slow link, as long as a transfer takes."""
        slowest = max((n.link.usual_us for n in self.candidates), default=0.0) / 1e6
        return max(CREDIT_WAIT, min(slowest, MOST))


Rule = Callable[[Case], Any]
"""Pure function that returns a step, or None for the next rule."""
Actions = Mapping[type, Callable[[HeldRequest, Any], object]]
"""Execution of each kind of step."""


class Rules(Holder, Protocol):
    """Differences between sources and peers."""

    handlers: Handlers
    decide: tuple[Rule, ...]
    """Rules of a decision, in their order."""
    actions: Actions
    """Execution of each kind of step: :attr:`Decisions.actions`, and those of its own rules and of ``ReturnReason``."""
    waits_s: float
    """Maximum time until a request that waits for a credit is decided again without an event."""

    def local_node(self) -> LocalNode:
        """Return the blocks that this process can run."""

    def outgoing(self, request: HeldRequest, itinerary: Itinerary) -> Itinerary:
        """Return the itinerary of a request that leaves this process."""

    def out_of_budget(self, request: HeldRequest) -> None:
        """End a request at the end of its budget, or send it home."""

    def passed_on(self, request: HeldRequest, holder: str) -> None:
        """Drop the copy of a request that ``holder`` has now, or watch the request."""

    def finish(self) -> float:
        """Finish a turn; return when the next one is due if no event comes first, or infinity."""


# Rules.


def budget_is_over(case: Case) -> OutOfBudget | None:
    """End what cannot be continued in time."""
    return OutOfBudget() if case.now >= case.budget_end else None


def block_here(case: Case) -> RunHere | None:
    """Run the next block here, if that depends on no other process."""
    return case.policy.step_here(case.itinerary, case.local)


def nobody_has_a_credit(case: Case) -> Hold | Stay | None:
    """Keep a request waiting until it is due."""
    request = case.request
    if request.waiting_since is None or request.check_at <= case.now or case.local.blocks:
        return None
    if any(n.credits > 0 for n in case.linked):
        return None
    names = request.waits_for
    if names and any(n.name not in names for n in able_to_run(case.turn, request, case.linked)):
        return None  # it is new or available again, and its next credit would not end the wait
    return Hold() if request.check_at == INFINITY else Stay()


def follow_policy(case: Case) -> RunHere | SendTo | Wait | ReturnReason:
    """Let the policy choose."""
    since = case.request.waiting_since
    patient = since is None or case.now - since < case.credit_wait
    return case.policy.next_step(
        case.itinerary, case.local, case.candidates, patient=patient, tie_break=case.request.tie_break
    )


class Decisions:
    """Decisions about the waiting requests of a process."""

    rules: Rules
    """Rules of the source or peer, set by :class:`.machine.Machine`."""

    def __init__(self, turn: Turn, custody: Custody) -> None:
        self.turn = turn
        self.held = custody.held
        self._custody = custody
        self._waiting = custody.waiting
        self._look_at = 0.0
        """Time at which to check waiting requests without an event."""
        self.actions: Actions = {
            RunHere: self._run_here,
            SendTo: self._hand_on,
            Wait: self._wait_for_credit,
            Hold: self._hold,
            OutOfBudget: self._end,
        }

    def _run_here(self, request: HeldRequest, step: RunHere) -> None:
        self.run_here(request, step.block)

    def _end(self, request: HeldRequest, _step: OutOfBudget) -> None:
        self.rules.out_of_budget(request)

    # Choice of the requests to decide.

    def run(self) -> None:
        """Decide requests that are ready, and requests for which a neighbor may have room."""
        waiting = self._waiting
        if self.turn.now >= self._look_at and waiting:
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
        """Decide requests again that may wait for the end of a pause, which raises no event."""
        self._look_at = self.turn.now + LOOK
        if self.turn.neighbors.have_recovered():
            self.wake_all()
        else:
            self._waiting.decide_changed()
        for n in self.turn.neighbors:
            self._waiting.note_room(n.name)

    def _room(self, name: str) -> int:
        """Return the number of further transfers that may be sent to a neighbor."""
        n = self.turn.neighbors.get(name)
        if n is None:
            return 0
        if n.is_source:
            return n.window_left
        return n.credits if n.available else 0

    # Decision of one request, and its steps.

    def decide(self, request: HeldRequest) -> None:
        """Apply the rules to a waiting request, and take the step of the first one that has one."""
        case = Case(self, request)
        for rule in self.rules.decide:
            step = rule(case)
            if step is not None:
                if not isinstance(step, Stay):
                    self.rules.actions[type(step)](request, step)
                return

    def _hand_on(self, request: HeldRequest, step: SendTo) -> None:
        itinerary = request.itinerary
        if step.relay:
            itinerary = msgspec.structs.replace(itinerary, relays=(*itinerary.relays, self.turn.name))
        self.offer(request, step.holder, itinerary)

    def _hold(self, request: HeldRequest, step: Hold) -> None:
        if step.reason:
            request.reason = step.reason
        if step.until is not None:
            self.turn.send_progress([request])
        self._custody.wait_for(request, step.holders, step.until, or_change=step.or_change)

    def _wait_for_credit(self, request: HeldRequest, step: Wait) -> None:
        """Wait for a credit of the holders of a step, by default of all candidates that could run a block now."""
        case, now, since = Case(self, request), self.turn.now, request.waiting_since
        until = (now if since is None else since) + case.credit_wait
        if until <= now:
            until = now + LOOK_AGAIN
        holders, or_change = step.holders, bool(request.avoid or request.itinerary.avoid)
        if not holders:
            able = able_to_run(self.turn, request, case.candidates)
            holders = tuple(n.name for n in able if not n.credits)
            or_change = or_change or len(holders) < len(able)  # it waits by choice, until something changes
        until = min(until, now + self.rules.waits_s)
        self._hold(request, Hold(holders, until, or_change, ReturnReason.CREDIT))

    def run_here(self, request: HeldRequest, block: int) -> None:
        """Queue a waiting request for the engine of this process, which runs ``block`` next."""
        self._custody.transition(request, QUEUED, f"block {block}", block)

    def offer(self, request: HeldRequest, to: str, itinerary: Itinerary) -> None:
        """Send a waiting request to a neighbor, and keep a copy."""
        self._custody.transition(request, OFFERED, to, (to, self.rules.outgoing(request, itinerary)))
