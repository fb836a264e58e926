"""The routing machine of a source: it admits requests, keeps their furthest tokens and alone ends them.

A request has one current item: the stem's tokens, or those of the last RETURN that got further. The item is never
given up before the request ends: when its next holder has passed it on it is ``AWAY``, watched through MOVED messages,
and routed again when both the holder and the keeper of the copy before are lost, or when there is no news for too long.

A request ends with the first answer that comes back; later ones are counted and dropped. When nothing that remains can
be reached, the source skips (at most ``max_skips`` blocks, after a short wait for holders to come back), and at the end
of the budget it answers from the furthest tokens if that many skips are allowed, else with an error.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import msgspec

from ls_edge.errors import BudgetExceeded, Overloaded
from ls_edge.runtime.routing.candidates import Costs
from ls_edge.runtime.routing.events import (
    Abandon,
    Answer,
    Arrived,
    Event,
    Fail,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Received,
    Returned,
    Send,
    Submit,
)
from ls_edge.runtime.routing.machine import Item, Machine, Stage
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policy import Choice, GiveBack
from ls_edge.runtime.wire import Accept, Cancel, Moved, Ticket

_MOST_ENDED = 256
"""Requests in one CANCEL."""


@dataclass(eq=False)
class _Request:
    item: Item
    attempts: int = 1
    before: str = ""
    holder: str = ""
    reason: str = ""
    """Why the item could not go on, when it last could not."""
    watch_returns: bool = False


class SourceMachine(Machine):
    """Routing of a process that has the images."""

    def __init__(
        self, name: str, session: bytes, *, limits: Limits, rng: random.Random, costs: Costs | None = None
    ) -> None:
        super().__init__(name, limits=limits, rng=rng, costs=costs)
        self.session = session
        self.requests: dict[int, _Request] = {}
        self.duplicates: Counter[int] = Counter()
        """Answers that came after the first one, by request."""
        self.head_us = 0
        """What the head usually takes; kept at the end of every budget. The caller sets it."""
        self._seen: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        self._cancel_at = float("inf")

    def last_seen(self, block: int) -> float:
        """When a peer that serves ``block`` could last be reached, directly or through another; never: -inf."""
        return self._seen.get(block, float("-inf"))

    def _on(self, event: Event) -> None:
        if isinstance(event, (NeighbourDown, NeighbourState)):
            self._note_reachable()
        if isinstance(event, Submit):
            self._on_submit(event)
        elif isinstance(event, Abandon):
            request = self.requests.get(event.request)
            if request is not None:
                self._end_request(request)
        else:
            super()._on(event)
            if isinstance(event, (NeighbourUp, NeighbourState)):
                self._note_reachable()

    def _note_reachable(self) -> None:
        for n in self.neighbours:
            state = n.state
            if n.hello.role == "peer" and state is not None and state.warm and not state.draining and not state.stuck:
                for block in (*n.hello.blocks, *state.reach_blocks):
                    self._seen[block] = self._now

    def _on_submit(self, event: Submit) -> None:
        ticket = Ticket(self.session, event.request, self._rng.getrandbits(64), 0)
        item = Item(ticket, event.itinerary, event.tokens, event.deadline, None, self._now)
        self.items[ticket] = item
        self.requests[event.request] = _Request(item, watch_returns=event.watch_returns)
        self._wait(item, None)
        self._ready.append(item)

    def _on_message(self, event: Received) -> None:
        message = event.message
        if not isinstance(message, Moved):
            super()._on_message(event)
            return
        request = self.requests.get(message.ticket.request)
        if request is None or message.ticket.session != self.session:
            return
        request.before, request.holder = message.before, message.holder
        item = request.item
        if item.stage is Stage.AWAY:
            self._watch(item)
        elif item.stage is Stage.CUSTODY and item.next == message.before:
            self._unoffer(item)
            self._released(item)

    def _on_run(self, event: Arrived) -> None:
        run = event.run
        self._out.append(Send(event.sender, Accept(run.ticket, 1)))
        request = self.requests.get(run.ticket.request) if run.ticket.session == self.session else None
        if request is None:
            if not run.itinerary.remaining and run.ticket.session == self.session:
                self.duplicates[run.ticket.request] += 1
            return
        old = request.item
        if run.itinerary.blocks_done < old.itinerary.blocks_done:
            return
        ticket = Ticket(self.session, run.ticket.request, self._rng.getrandbits(64), run.ticket.hop)
        itinerary = msgspec.structs.replace(
            run.itinerary, relays=(), source=self.name, policy=old.itinerary.policy, max_skips=old.itinerary.max_skips
        )
        item = Item(ticket, itinerary, event.tokens, old.deadline, None, self._now)
        self._drop(old)
        self.items[ticket] = request.item = item
        request.before = request.holder = ""
        request.reason = run.returning
        if request.watch_returns:
            self._out.append(Returned(run.ticket.request, event.sender, itinerary, event.tokens))
        self._wait(item, None)
        self._ready.append(item)

    def _take(self, item: Item, choice: Choice) -> None:
        assert isinstance(choice, GiveBack)
        request = self.requests[item.ticket.request]
        if choice.reason == "done":
            self._answer(request)
            return
        request.reason = choice.reason
        if choice.reason == "unreachable" and self._may_skip(item):
            skip_at = max(self.last_seen(block) for block in item.itinerary.remaining) + self.limits.skip_grace
            if skip_at <= self._now:
                self._answer(request)
            else:
                self._wait(item, skip_at)
            return
        self._wait(item, None)

    def _waits_for_credit(self, item: Item) -> None:
        self.requests[item.ticket.request].reason = "credit"

    def _may_skip(self, item: Item) -> bool:
        it = item.itinerary
        return it.policy != "sequential" and len(it.skipped) + len(it.remaining) <= it.max_skips

    def _answer(self, request: _Request) -> None:
        item = request.item
        itinerary = item.itinerary.skip_rest()
        self._out.append(Answer(item.ticket.request, itinerary, item.tokens, request.attempts))
        self._end_request(request, soon=request.attempts == 1 and not itinerary.skipped)

    def _end_request(self, request: _Request, *, soon: bool = False) -> None:
        """Forget a request and tell the peers; ``soon`` will do where hardly any work can be left of it."""
        item = request.item
        del self.requests[item.ticket.request]
        self._drop(item)
        self._ended[item.ticket.request] = item.deadline
        self._cancel_at = min(self._cancel_at, self._now + (self.limits.cancel_every if soon else 0.0))
        if len(self._ended) >= _MOST_ENDED:
            self._cancel_at = self._now

    def next_check(self) -> float | None:
        """See :meth:`Machine.next_check`; ended requests of which the peers do not know yet count too."""
        due = super().next_check()
        if not self._ended:
            return due
        return self._cancel_at if due is None else min(due, self._cancel_at)

    def _after(self) -> None:
        if not self._ended or self._now < self._cancel_at:
            return
        budget = max(0, round((max(self._ended.values()) - self._now) * 1e6))
        cancel = Cancel(self.session, tuple(self._ended), budget)
        self._out += [Send(n.name, cancel) for n in self.neighbours if n.hello.role == "peer"]
        self._ended.clear()
        self._cancel_at = float("inf")

    def _end(self, item: Item) -> float:
        return item.deadline - self.limits.way_back - self.head_us / 1e6

    def _over_budget(self, item: Item) -> bool:
        if self._now < self._end(item):
            return False
        request = self.requests[item.ticket.request]
        it = item.itinerary
        if not it.remaining or self._may_skip(item):
            self._answer(request)
            return True
        left = ", ".join(map(str, it.remaining))
        if request.reason == "credit":
            error: BudgetExceeded | Overloaded = Overloaded(
                f"request {item.ticket.request}: no peer had a credit for blocks {left} within the budget; "
                "send more slowly, or raise the peers' credits or the budget"
            )
        else:
            why = "had no reachable holder" if request.reason == "unreachable" else "were not run in time"
            error = BudgetExceeded(
                f"request {item.ticket.request}: blocks {left} {why} within the budget and at most {it.max_skips} may "
                "be skipped; check the peers, or raise --budget-ms or --max-skips"
            )
        self._out.append(Fail(item.ticket.request, error, it, request.attempts))
        self._end_request(request)
        return True

    # Watching what is away.

    def _released(self, item: Item) -> None:
        item.stage = Stage.AWAY
        self._watch(item)

    def _watch(self, item: Item) -> None:
        request = self.requests[item.ticket.request]
        n = self.neighbours.get(request.holder)
        usual = n.hop_deadline(self.limits) if n else 0.0
        item.check_at = min(self._now + max(self.limits.away_floor, 2 * usual), self._end(item))

    def _late(self, item: Item) -> None:
        if item.stage is Stage.AWAY:
            self._route_again(item, "no news of it for too long")

    def _lost(self, name: str) -> None:
        for request in list(self.requests.values()):
            if request.item.stage is not Stage.AWAY or name not in (request.before, request.holder):
                continue
            other = request.before if name == request.holder else request.holder
            if other not in self.neighbours.by_name:
                self._route_again(request.item, f"{name} and {other} were lost")

    def _route_again(self, item: Item, why: str) -> None:
        request = self.requests[item.ticket.request]
        request.attempts += 1
        request.before = request.holder = ""
        super()._route_again(item, why)
