"""The routing machine of a source: it admits requests, keeps their furthest tokens and alone ends them.

A request has one current item: the stem's tokens, or those of the last RETURN that got further. The item is never
given up before the request ends: when its next holder has passed it on it is ``AWAY``, watched through MOVED messages,
and routed again when both the holder and the keeper of the copy before are lost, or when there is no news for too long.

A request ends with the first answer that comes back; later ones are counted and dropped. What comes back is believed
only as far as the request allows it: what was asked for (policy, skips, the order of blocks) is known here and not
taken from the wire, and a request is known by random bits that nobody has who was not handed it. When nothing that
remains can be reached, the source skips (at most ``max_skips`` blocks, after a short wait for holders to come back),
and at the end of the budget it answers from the furthest tokens if that many skips are allowed, else with an error.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from ls_edge.errors import BudgetExceeded, NotFinite, Overloaded, RequestError
from ls_edge.evaluation.run_summary import Rejection
from ls_edge.order_costs import OrderCosts
from ls_edge.runtime.protocol.messages import (
    MAX_AVOID,
    MAX_BUDGET_US,
    Accept,
    Cancel,
    Itinerary,
    Moved,
    RequestId,
    TransferId,
)
from ls_edge.runtime.routing.custody import Item, Machine, Stage
from ls_edge.runtime.routing.events import (
    Abandon,
    Answer,
    Arrived,
    Event,
    Fail,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    Received,
    Returned,
    Send,
    Submit,
)
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.base import Choice, ReturnToSource

_MOST_ENDED = 256
"""Requests in one CANCEL."""
_MOST_HANDS = 64
"""Names of processes that had a request that are kept."""
_ANSWERED = 4096
"""Requests that are remembered after their end, to count the answers that come later."""
_HOLDERS_NOT_FINITE = 2
"""Peers that must have found a request's numbers not to be finite before it ends with an error."""


@dataclass(eq=False)
class _Request:
    number: int
    asked: Itinerary
    """As it was submitted: what is believed of what comes back must fit it."""
    item: Item
    attempts: int = 1
    shunned: tuple[str, ...] = ()
    """Who has given it back as it was, or never."""
    not_finite: list[str] = field(default_factory=list)
    """Who has given it back because numbers were not finite, or tokens that were not."""
    hands: dict[str, None] = field(default_factory=dict)
    """Who has accepted it, said MOVED or brought it back, in this order."""
    before: str = ""
    holder: str = ""
    reason: str = ""
    """Why the item could not go on, when it last could not."""
    watch_returns: bool = False


class SourceMachine(Machine):
    """Routing of a process that has the images."""

    def __init__(self, name: str, *, limits: Limits, rng: random.Random, costs: OrderCosts | None = None) -> None:
        """``rng`` draws what identifies requests too: in a process it has to be a source of secrets."""
        super().__init__(name, limits=limits, rng=rng, costs=costs)
        self.requests: dict[int, _Request] = {}
        self.rejected: dict[str, Rejection] = {}
        """Answers and returns that cannot be true, by who sent them; a new mapping with each."""
        self.duplicates: Counter[int] = Counter()
        """Answers that came after the first one, by request."""
        self.head_us = 0
        """What the head usually takes; kept at the end of every budget. The caller sets it."""
        self._seen: dict[int, float] = {}
        self._by_id: dict[RequestId, _Request] = {}
        self._answered: dict[RequestId, int] = {}
        self._ended: dict[RequestId, float] = {}
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
        transfer = TransferId(self._rng.randbytes(16), self._rng.getrandbits(64), 0)
        item = Item(transfer, event.itinerary, event.tokens, event.deadline, None, self._now, event.request)
        self.items[transfer] = item
        request = _Request(event.request, event.itinerary, item, watch_returns=event.watch_returns)
        self.requests[event.request] = self._by_id[transfer.request] = request
        self._wait(item, None)
        self._ready.append(item)

    def _on_message(self, event: Received) -> None:
        message = event.message
        if not isinstance(message, Moved):
            super()._on_message(event)
            return
        request = self._by_id.get(message.transfer.request)
        if request is None:
            return
        item = request.item
        new = event.sender != request.holder
        request.before, request.holder = message.before, event.sender
        _note_hands(request, message.before, event.sender)
        if item.stage is Stage.AWAY and new:  # who says it again and again has no more time for it
            self._watch(item)
        elif item.stage is Stage.CUSTODY and item.next == message.before:
            self._unoffer(item)
            self._released(item, event.sender)

    def _on_run(self, event: Arrived) -> None:
        run = event.run
        self._out.append(Send(event.sender, Accept(run.transfer, 1)))
        request = self._by_id.get(run.transfer.request)
        if request is None:
            number = self._answered.get(run.transfer.request)
            if number is None:
                self._reject(event.sender, "tokens of a request that it was never given")
            elif not run.itinerary.remaining:
                self.duplicates[number] += 1
            return
        lie = _what_cannot_be(request.asked, run.itinerary)
        if lie:
            self._reject(event.sender, lie, request)
            self._pass_over(request, event.sender)
            if request.item.next == event.sender and request.item.sent is not None:
                self._route_again(request.item, f"{event.sender} gave back what cannot be")
            return
        if not event.finite or run.returning == "not finite":
            self._on_not_finite(request, event)
            return
        old = request.item
        itinerary = _restored(request.asked, run.itinerary)
        gained = itinerary.blocks_done - old.itinerary.blocks_done
        if gained < 0:
            return
        _note_hands(request, event.sender)
        tokens = event.tokens
        if gained == 0 and itinerary.remaining:
            self._pass_over(request, event.sender)
            # Nothing new: what was sent out is kept, and not what is said to be the same.
            itinerary, tokens = old.itinerary, old.tokens
        for holder in _holders(itinerary) if gained else ():
            n = self.neighbours.get(holder)
            if n is not None:
                n.got_on()
        transfer = TransferId(run.transfer.request, self._rng.getrandbits(64), 0)
        item = Item(transfer, itinerary, tokens, old.deadline, None, self._now, old.tie_break, avoid=old.avoid)
        self._drop(old)
        self.items[transfer] = request.item = item
        request.before = request.holder = ""
        request.reason = run.returning
        if request.watch_returns:
            told = _restored(request.asked, run.itinerary)
            self._out.append(Returned(request.number, event.sender, told, event.tokens))
        self._wait(item, None)
        self._ready.append(item)

    def _reject(self, sender: str, why: str, request: _Request | None = None) -> None:
        count = self.rejected[sender].count if sender in self.rejected else 0
        self.rejected = {**self.rejected, sender: Rejection(count + 1, why)}
        self._out.append(Note("disbelieved", sender, None if request is None else request.item.request, why))

    def _pass_over(self, request: _Request, name: str) -> None:
        """Offer nothing for a while to who gave a request back as it was, or made of it what cannot be."""
        n = self.neighbours.get(name)
        if n is not None:
            n.turn_down(self._now, self.limits)
            self._shun(request, name, n.passed_until)

    def _shun(self, request: _Request, name: str, until: float) -> None:
        """Offer a request to others until then, and tell its holders not to hand it on to ``name``."""
        request.item.avoid[name] = until
        if name not in request.shunned:
            request.shunned = (*request.shunned, name)[-MAX_AVOID:]

    def _with_visit(self, item: Item, itinerary: Itinerary) -> Itinerary:
        shunned = self._by_id[item.request].shunned
        return msgspec.structs.replace(itinerary, avoid=shunned) if shunned else itinerary

    def _on_not_finite(self, request: _Request, event: Arrived) -> None:
        """Numbers are not finite: have one other holder try, then end the request and say whose they were."""
        name = event.sender
        request.not_finite.append(name)
        item = request.item
        self._out.append(Note("not finite", name, item.request, "NaN or infinity in what it computed"))
        self._shun(request, name, item.deadline)
        wanted = frozenset(item.itinerary.remaining)
        others = [c for c in self._reachable() if c.name not in item.avoid and wanted & (c.blocks | c.reach_blocks)]
        if others and len(request.not_finite) < _HOLDERS_NOT_FINITE:
            self._route_again(item, "numbers that are not finite")
        else:
            self._fail(request, _not_finite(request))

    def _fail(self, request: _Request, error: RequestError) -> None:
        self._out.append(Fail(request.number, error, request.item.itinerary, request.attempts))
        self._end_request(request)

    def _take(self, item: Item, choice: Choice) -> None:
        assert isinstance(choice, ReturnToSource)
        request = self._by_id[item.request]
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
        # Who is passed over for a while does not say when that ends.
        held_back = bool(item.avoid) or any(n.passed_until > self._now for n in self.neighbours)
        self._wait(item, self._now + self.limits.look_again if held_back else None)

    def _waits_for_credit(self, item: Item) -> None:
        self._by_id[item.request].reason = "credit"

    def _may_skip(self, item: Item) -> bool:
        it = item.itinerary
        return policy_of(it.policy).may_skip and len(it.skipped) + len(it.remaining) <= it.max_skips

    def _answer(self, request: _Request) -> None:
        item = request.item
        itinerary = item.itinerary.skip_rest()
        self._out.append(Answer(request.number, itinerary, item.tokens, request.attempts, tuple(request.hands)))
        self._end_request(request, soon=request.attempts == 1 and not itinerary.skipped)

    def _end_request(self, request: _Request, *, soon: bool = False) -> None:
        """Forget a request and tell the peers; ``soon`` will do where hardly any work can be left of it."""
        item = request.item
        del self.requests[request.number], self._by_id[item.request]
        self._drop(item)
        self._answered[item.request] = request.number
        if len(self._answered) > _ANSWERED:
            del self._answered[next(iter(self._answered))]
        self._ended[item.request] = item.deadline
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
        budget = min(MAX_BUDGET_US, max(0, round((max(self._ended.values()) - self._now) * 1e6)))
        cancel = Cancel(tuple(self._ended), budget)
        self._out += [Send(n.name, cancel) for n in self.neighbours if n.hello.role == "peer"]
        self._ended.clear()
        self._cancel_at = float("inf")

    def _end(self, item: Item) -> float:
        return item.deadline - self.limits.way_back - self.head_us / 1e6

    def _over_budget(self, item: Item) -> bool:
        if self._now < self._end(item):
            return False
        request = self._by_id[item.request]
        it = item.itinerary
        if not it.remaining or self._may_skip(item):
            self._answer(request)
            return True
        if request.not_finite:
            self._fail(request, _not_finite(request))
            return True
        left = ", ".join(map(str, it.remaining))
        if request.reason == "credit":
            error: BudgetExceeded | Overloaded = Overloaded(
                f"request {request.number}: no peer had a credit for blocks {left} within the budget; "
                "send more slowly, or raise the peers' credits or the budget"
            )
        else:
            why = "had no reachable holder" if request.reason == "unreachable" else "were not run in time"
            error = BudgetExceeded(
                f"request {request.number}: blocks {left} {why} within the budget and at most {it.max_skips} may "
                "be skipped; check the peers, or raise --budget-ms or --max-skips"
            )
        self._fail(request, error)
        return True

    # Watching what is away.

    def _accepted(self, item: Item) -> None:
        _note_hands(self._by_id[item.request], item.next)

    def _released(self, item: Item, holder: str) -> None:
        request = self._by_id[item.request]
        if not request.holder:
            request.before, request.holder = item.next, holder
        item.stage = Stage.AWAY
        self._watch(item)

    def _watch(self, item: Item) -> None:
        request = self._by_id[item.request]
        n = self.neighbours.get(request.holder)
        left = max(0.0, self._end(item) - self._now)
        usual = n.hop_deadline(self.limits, left) if n else 0.0
        item.keep_until = self._now + self.limits.keep_share * left
        news_by = self._now + max(self.limits.away_floor, 2 * usual)
        item.check_at = min(news_by, item.keep_until, item.keep_end, self._end(item))

    def _late(self, item: Item) -> None:
        """What is away has given no news for too long, or is kept by somebody for too long."""
        if item.stage is not Stage.AWAY:
            return
        request = self._by_id[item.request]
        if request.holder and request.holder != item.next:
            self._shun(request, request.holder, self._now + self.limits.away_floor)
        else:
            self._pass_over(request, item.next)
        self._route_again(item, "no news of it for too long")

    def _lost(self, name: str) -> None:
        for request in list(self.requests.values()):
            if request.item.stage is not Stage.AWAY or name not in (request.before, request.holder):
                continue
            other = request.before if name == request.holder else request.holder
            if other not in self.neighbours.by_name:
                self._route_again(request.item, f"{name} and {other} were lost")

    def _route_again(self, item: Item, why: str) -> None:
        request = self._by_id[item.request]
        request.attempts += 1
        request.before = request.holder = ""
        super()._route_again(item, why)


def _what_cannot_be(asked: Itinerary, told: Itinerary) -> str:
    """Why what came back cannot be what became of a request; nothing where it can.

    That each block of the model stands in it once, and who serves which block, is checked on arrival.
    """
    if told.track is not None:
        return "a track of a wave, which belongs to a peer"
    policy = policy_of(asked.policy)
    if told.skipped and (asked.on_straggler != "skip" or not policy.runs_in_waves):
        return f"blocks {_listed(told.skipped)} left out, which only its source may do"
    if len(told.skipped) > asked.max_skips:
        return f"{len(told.skipped)} blocks left out where {asked.max_skips} may be"
    if not policy.runs_in_waves and any(len(wave) != 1 for wave in told.waves):
        return f"blocks side by side under the policy {asked.policy}"
    ran = tuple(block for wave in told.waves for track in wave for block, _ in track)
    if not policy.may_reorder and ran != asked.remaining[: len(ran)]:
        return f"blocks in the order {_listed(ran)} under the policy {asked.policy}"
    return ""


def _note_hands(request: _Request, *names: str) -> None:
    for name in names:
        if len(request.hands) < _MOST_HANDS:
            request.hands[name] = None


def _not_finite(request: _Request) -> NotFinite:
    names = ", ".join(dict.fromkeys(request.not_finite))
    return NotFinite(
        f"request {request.number}: NaN or infinity in what {names} computed; check the image, and the bundle with "
        "'ls-edge verify'"
    )


def _holders(itinerary: Itinerary) -> set[str]:
    return {holder for wave in itinerary.waves for track in wave for _, holder in track}


def _listed(blocks: tuple[int, ...]) -> str:
    return ", ".join(map(str, blocks))


def _restored(asked: Itinerary, told: Itinerary) -> Itinerary:
    """What a request has been through by what came back, with everything else as it was asked for."""
    ran = {block for wave in told.waves for track in wave for block, _ in track}
    gone = ran.union(told.skipped)
    remaining = tuple(block for block in asked.remaining if block not in gone)
    return msgspec.structs.replace(
        asked, waves=told.waves, skipped=told.skipped, remaining=remaining, visits=told.visits, relays=()
    )
