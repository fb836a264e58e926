"""Custody of tokens: the part of routing that a peer and a source have in common.

A process holds *items*: tokens, their itinerary, and the transfer by which they came. Handing an item on takes three
steps, and a copy stays here until the last of them:

    WAITING   no holder, or no credit        -> OFFERED
    OFFERED   RUN sent, nothing heard yet    -> CUSTODY (ACCEPT) | WAITING (REFUSE, link lost, deadline: routed again)
    CUSTODY   accepted by the next           -> gone (RELEASE)   | WAITING (link lost, no progress: routed again)

An item that is routed again travels as a new random branch, so that what the old one may still bring is told apart.
What differs, running blocks and ending requests, is in ``peer.py`` and ``source.py``.

The machine knows no clock, socket or thread: :meth:`Machine.handle` takes an event and the time and returns
instructions. The same code runs in peers, sources and the simulator (``ls_edge.runtime.simulation.simulator``).
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import msgspec

from ls_edge.order_costs import OrderCosts
from ls_edge.records import TrackSpan
from ls_edge.runtime.protocol.messages import (
    MAX_BUDGET_US,
    Accept,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    Release,
    RequestId,
    ReturnReason,
    Run,
    TransferId,
)
from ls_edge.runtime.routing.candidates import Candidate, LocalNode
from ls_edge.runtime.routing.events import (
    Arrived,
    Event,
    Instruction,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    Received,
    Send,
    TellState,
    Tick,
    Unsendable,
)
from ls_edge.runtime.routing.neighbours import Limits, Neighbour, Neighbours
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.base import Choice, ReturnToSource, SendTo, Wait

REFUSED_S = 0.1
"""Seconds for which a process that refuses as cold or draining is asked nothing: it tells when that changes."""
_WOKEN = 4
"""Waiting items that are decided again when one transfer has been answered; all of them would cost too much time."""
_OFFERS = 1024
"""Transfers that are remembered until they are answered, to learn how long they take."""


def _turn(instruction: Instruction) -> int:
    """When an instruction is executed; those of one turn keep their order."""
    if isinstance(instruction, Send):
        message = instruction.message
        begins_track = isinstance(message, Run) and message.itinerary.track is not None and not message.returning
        return 0 if begins_track else 2
    return 2 if isinstance(instruction, (TellState, Note)) else 1


class Stage(Enum):
    """Where an item stands; ``QUEUED``, ``RUNNING`` and ``JOINING`` in peers, ``AWAY`` in sources."""

    WAITING = "waiting"
    QUEUED = "queued"
    RUNNING = "running"
    OFFERED = "offered"
    CUSTODY = "custody"
    AWAY = "away"
    JOINING = "joining"


@dataclass(eq=False)
class Item:
    """Tokens that this process holds."""

    transfer: TransferId
    itinerary: Itinerary
    tokens: Any = field(repr=False)
    deadline: float
    """When the request's budget ends, on this process's clock."""
    upstream: str | None
    """Who gets PROGRESS and RELEASE; None in the source."""
    arrived: float
    tie_break: int = 0
    """Decides between equal holders: counts up, so that they take turns."""
    stage: Stage = Stage.WAITING
    returning: str = ""
    """Why the tokens go back to the source; empty while they go forward."""
    next: str = ""
    sent: TransferId | None = None
    """The transfer by which they were handed on."""
    queued_at: float = 0.0
    check_at: float = float("inf")
    """When it has to be looked at in its present stage."""
    hop_at: float = float("inf")
    """When its next holder has shown no progress for too long."""
    keep_until: float = float("inf")
    """When its next holder has kept it for too long without a further block."""
    keep_end: float = float("inf")
    """When its next holder has kept it for too long in any case."""
    most_done: int = 0
    """Blocks that have run, as far as its next holder has said."""
    avoid: dict[str, float] = field(default_factory=dict)
    """Who has refused it or given it back as it was, and until when it is not offered to them."""
    waiting_since: float | None = None
    block: int = -1
    """What is queued or running."""
    ran: list[int] = field(default_factory=list)
    """Blocks that ran here."""
    engine_us: int = 0
    codec_us: int = 0
    reroutes: int = 0
    progress_at: float = 0.0
    """When the last PROGRESS was sent."""
    trouble: str = ""
    """Why the last holder of a track did not run it."""
    waves: int = 0
    """Waves that were begun here."""
    tracks: list[TrackSpan] = field(default_factory=list)
    """Tracks of these waves, for the trace."""
    wait_us: int = 0
    """Time for which tracks of others were waited for."""

    @property
    def request(self) -> RequestId:
        """The request."""
        return self.transfer.request

    @property
    def owner(self) -> str:
        """The source of the request."""
        return self.itinerary.owner


class Machine:
    """What :class:`~.peer.PeerMachine` and :class:`~.source.SourceMachine` have in common."""

    def __init__(self, name: str, *, limits: Limits, rng: random.Random, costs: OrderCosts | None = None) -> None:
        """``rng`` draws branches; seed it in a test, never in a process. ``costs`` are for the policy ``quality``."""
        self.costs = costs
        self.name = name
        self.limits = limits
        self.neighbours = Neighbours(limits)
        self.items: dict[TransferId, Item] = {}
        self.reroutes = 0
        """Items that were routed again after a failure."""
        self._rng = rng
        self._sent: dict[TransferId, Item] = {}
        self._offered: dict[TransferId, tuple[str, float]] = {}
        """To whom and when each transfer was offered that is not answered yet, given up ones included."""
        self._full: set[str] = set()
        """Neighbours to which something waits to be sent until one of the transfers on their way is answered."""
        self._credit_came = False
        self._candidates: list[Candidate] | None = None
        self._any_credit = False
        self._ready: deque[Item] = deque()
        self._out: list[Instruction] = []
        self._now = 0.0

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event in and return what to do, in the order in which it is to be done. ``now`` never goes back.

        Engines start before messages are written: the sockets' thread may take this core while it writes. Only tracks
        for others go first, since a wave waits for their transfer and not for the start of our own track.
        """
        self._now = max(self._now, now)
        self._out = []
        self._candidates = None
        self._on(event)
        if self._credit_came:
            self._credit_came = False
            self._wake_waiting(at_most=_WOKEN)
        self._candidates = None
        self._check_times()
        while self._ready:
            item = self._ready.popleft()
            if self.items.get(item.transfer) is item and item.stage is Stage.WAITING:
                self._decide(item)
        self._after()
        return sorted(self._out, key=_turn)

    def next_check(self) -> float | None:
        """When :class:`Tick` is due, if nothing else happens before."""
        times = [item.check_at for item in self.items.values() if item.check_at != float("inf")]
        return min(times, default=None)

    # What a peer and a source do differently.

    def _on_run(self, event: Arrived) -> None:
        raise NotImplementedError

    def _own(self, item: Item) -> LocalNode:  # noqa: ARG002
        return LocalNode(costs=self.costs, credit_wait=self.limits.credit_wait)

    def _take(self, item: Item, choice: Choice) -> None:
        """Carry out a choice that is neither SendTo nor Wait."""
        raise NotImplementedError

    def _released(self, item: Item, holder: str) -> None:
        """The next holder has passed an item on to ``holder``."""
        raise NotImplementedError

    def _accepted(self, item: Item) -> None:
        """The next holder has accepted."""

    def _over_budget(self, item: Item) -> bool:
        """Act on an item whose time is over; return whether it was."""
        raise NotImplementedError

    def _lost(self, name: str) -> None:
        """A neighbour is gone; items that were on their way to it are routed again already."""

    def _after(self) -> None:
        """Last thing before the instructions are returned."""

    def _on(self, event: Event) -> None:
        if isinstance(event, Received):
            self._on_message(event)
        elif isinstance(event, Arrived):
            self._on_run(event)
        elif isinstance(event, NeighbourState):
            if self.neighbours.update(event.name, event.state, self._now):
                self._wake_waiting()
        elif isinstance(event, NeighbourUp):
            self._on_up(event)
        elif isinstance(event, NeighbourDown):
            self._on_down(event)
        elif isinstance(event, Unsendable):
            self._on_unsendable(event)
        elif not isinstance(event, Tick):
            raise TypeError(f"{type(self).__name__} does not handle {event!r}")

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
            self._out.append(TellState())
        self._wake_waiting()

    def _on_down(self, event: NeighbourDown) -> None:
        if self.neighbours.by_name.pop(event.name, None) is None:
            return
        self._out += [Note("lost", event.name, why=event.why), TellState()]
        for item in [i for i in self._sent.values() if i.next == event.name]:
            self._route_again(item, f"{event.name} was lost: {event.why}")
        self._lost(event.name)

    def _on_unsendable(self, event: Unsendable) -> None:
        message = event.message
        n = self.neighbours.get(event.name)
        if n is not None:
            n.refused_until = self._now + 0.02
        if isinstance(message, Run):
            item = self._sent.get(message.transfer)
            if item is not None:
                self._unoffer(item)
                self._wait(item, self._now + 0.02)

    def _on_message(self, event: Received) -> None:
        message = event.message
        if isinstance(message, (Accept, Refuse)):
            self._learn(event.sender, message)
        item = self._sent.get(message.transfer) if isinstance(message, (Accept, Refuse, Progress, Release)) else None
        if item is None or item.next != event.sender:
            return
        if isinstance(message, (Progress, Release)):
            self.neighbours.advanced(event.sender)
        if isinstance(message, Accept):
            if item.stage is Stage.OFFERED:
                self._unoffer(item, keep=True)
                item.stage = Stage.CUSTODY
                self._extend(item)
                self._accepted(item)
        elif isinstance(message, Refuse):
            self._on_refuse(item, message)
        elif isinstance(message, Progress):
            self._on_progress(item, message)
        elif isinstance(message, Release):
            self._unoffer(item)
            self._released(item, message.holder)

    def _learn(self, name: str, message: Accept | Refuse) -> None:
        """Take in the credits that an answer to a transfer tells, and how long the transfer took."""
        n = self.neighbours.get(name)
        offered = self._offered.pop(message.transfer, None)
        if n is None or offered is None or offered[0] != name:
            return
        if n.state is not None:
            n.state = msgspec.structs.replace(n.state, credits=message.credits)
        if isinstance(message, Accept):
            n.accepted_after(self._now - offered[1], self._now)
        self._candidates = None
        if name in self._full:
            self._full.discard(name)
            self._credit_came = True

    def _on_progress(self, item: Item, message: Progress) -> None:
        """Give its holder more time; without further blocks only as long as :attr:`Limits.keep_share` says."""
        if item.most_done < message.blocks_done <= item.itinerary.blocks_done + len(item.itinerary.remaining):
            item.most_done = message.blocks_done
            item.keep_until = self._now + self.limits.keep_share * (self._end(item) - self._now)
        self._extend(item)

    def _on_refuse(self, item: Item, message: Refuse) -> None:
        name = item.next
        n = self.neighbours.get(name)
        self._unoffer(item)
        if n is not None:
            if message.reason != "busy":
                n.refused_until = self._now + REFUSED_S
            if message.reason not in ("draining", "cold") and (message.reason != "busy" or message.credits):
                # Busy without a credit is the usual way; anything else says that it takes nothing of this.
                n.turn_down(self._now, self.limits)
                item.avoid[name] = n.passed_until
        self._wait(item, None)
        self._ready.append(item)

    def _extend(self, item: Item) -> None:
        n = self.neighbours.get(item.next)
        accepted = item.stage is Stage.CUSTODY
        left = max(0.0, self._end(item) - self._now)
        patience = n.hop_deadline(self.limits, left, accepted=accepted) if n else self.limits.hop_floor
        # Each time that it had to be routed again it gets twice the time: on machines that are starved of computing
        # time, copies of everything would otherwise go round and make it worse.
        most = max(self.limits.hop_most, self.limits.hop_share * left) + (0.0 if accepted else self.limits.transfer)
        item.hop_at = self._now + min(patience * 2 ** min(item.reroutes, 6), most)
        self._check_hop(item)

    def _check_hop(self, item: Item) -> None:
        """Set when a transfer has to be looked at next."""
        item.check_at = min(item.hop_at, item.keep_until, item.keep_end, self._end(item))
        if item.stage is Stage.OFFERED and item.upstream is not None:
            item.check_at = min(item.check_at, self._now + self.limits.look_again)

    # Deciding and handing on.

    def _decide(self, item: Item) -> None:
        if self._over_budget(item):
            return
        if item.returning:
            self._send_home(item)
            return
        if not item.itinerary.remaining:
            self._take(item, ReturnToSource(ReturnReason.DONE))
            return
        if item.upstream is not None and item.transfer.hop >= self.limits.most_hops(item.itinerary.blocks):
            self._take(item, ReturnToSource(ReturnReason.HOPS))
            return
        since = item.waiting_since
        patient = since is None or self._now - since < self.limits.credit_wait
        own, candidates = self._own(item), self._reachable()
        if item.avoid or item.itinerary.avoid:
            item.avoid = {name: until for name, until in item.avoid.items() if until > self._now}
            avoid = item.avoid.keys() if item.upstream is None else item.avoid.keys() | set(item.itinerary.avoid)
            candidates = [c for c in candidates if c.name not in avoid]
        if since is not None and item.check_at > self._now and not own.blocks and not self._any_credit:
            return  # it was woken, its time has not come, and there is no credit anywhere
        choice = policy_of(item.itinerary.policy).next_step(
            item.itinerary,
            own,
            candidates,
            patient=patient,
            tie_break=item.tie_break,
        )
        if isinstance(choice, SendTo):
            if item.itinerary.via_source and item.upstream is not None:
                self._take(item, ReturnToSource(ReturnReason.VIA_SOURCE))
                return
            itinerary = item.itinerary
            if choice.relay:
                itinerary = msgspec.structs.replace(itinerary, relays=(*itinerary.relays, self.name))
            self._offer(item, choice.holder, itinerary)
        elif isinstance(choice, Wait):
            until = (self._now if since is None else since) + self.limits.credit_wait
            if item.upstream is not None:
                self._send_progress([item])
                until = min(until, self._now + self.limits.look_again)
            self._wait(item, until)
            self._full.update(c.name for c in candidates if not c.credits)
            self._waits_for_credit(item)
        else:
            self._take(item, choice)

    def _reachable(self) -> list[Candidate]:
        """The peers that may be handed tokens; made once for an event, and again when a credit was used."""
        if self._candidates is None:
            self._candidates = self.neighbours.candidates(self._now)
            self._any_credit = any(c.credits > 0 for c in self._candidates)
        return self._candidates

    def _waits_for_credit(self, item: Item) -> None:
        """An item has begun, or goes on, to wait for a credit."""

    def _send_home(self, item: Item) -> None:
        """Offer the tokens to the source, to a neighbour that reaches it, or back along the way that they came."""
        source = item.itinerary.source
        n = self.neighbours.get(source)
        if n is not None and n.window_open(self._now, self.limits):
            self._offer(item, source, item.itinerary)
            return
        if n is not None:  # a slow link; what waits for it must not be taken for lost
            self._full.add(source)
            self._send_progress([item])
            self._wait(item, self._now + self.limits.look_again)
            return
        ways = [n.name for n in self.neighbours if n.available(self._now) and n.state and source in n.state.reaches]
        ways = [name for name in ways if name not in item.itinerary.relays and item.avoid.get(name, 0.0) <= self._now]
        before = self._holder_before(item)
        if ways or before:
            itinerary = msgspec.structs.replace(item.itinerary, relays=(*item.itinerary.relays, self.name))
            way = item.upstream if item.upstream in ways else min(ways, default=before)
            self._offer(item, way, itinerary)
        else:
            self._wait(item, self._now + 0.1)

    def _holder_before(self, item: Item) -> str:
        """Who was on the tokens' way from the source, is not on their way back yet and can be reached; or nobody."""
        for visit in reversed(item.itinerary.visits):
            n = self.neighbours.get(visit.holder)
            if n is not None and n.available(self._now) and visit.holder not in item.itinerary.relays:
                return visit.holder
        return ""

    def _offer(self, item: Item, to: str, itinerary: Itinerary) -> None:
        n = self.neighbours.by_name[to]
        sent = item.transfer._replace(hop=item.transfer.hop + 1)
        if sent in self._sent or item.sent is not None:
            sent = sent._replace(branch=self._rng.getrandbits(64))
        n.offers += 1
        self._candidates = None
        item.stage, item.next, item.sent, item.waiting_since = Stage.OFFERED, to, sent, None
        self._sent[sent] = item
        self._offered[sent] = (to, self._now)
        if len(self._offered) > _OFFERS:
            del self._offered[next(iter(self._offered))]
        left = max(0.0, self._end(item) - self._now)
        item.keep_until, item.keep_end = (
            self._now + part * left for part in (self.limits.keep_share, self.limits.keep_most)
        )
        item.most_done = itinerary.blocks_done
        self._extend(item)
        budget = min(MAX_BUDGET_US, max(0, round((item.deadline - self._now) * 1e6)))
        # Codec and shape are the sender's to fill in: routing does not look at tokens.
        run = Run(sent, budget, self._with_visit(item, itinerary), "raw", 1, 1, item.returning)
        self._out.append(Send(to, run, item.tokens))

    def _with_visit(self, item: Item, itinerary: Itinerary) -> Itinerary:  # noqa: ARG002
        """The itinerary with what is known of it here: the time that was spent, or who is to be avoided."""
        return itinerary

    def _unoffer(self, item: Item, *, keep: bool = False) -> None:
        """Settle the account of an offer; unless ``keep``, forget the transfer."""
        n = self.neighbours.get(item.next)
        if n is not None and item.stage is Stage.OFFERED:
            n.offers = max(0, n.offers - 1)
        if not keep and item.sent is not None:
            self._sent.pop(item.sent, None)

    def _route_again(self, item: Item, why: str) -> None:
        """The next holder is lost or shows no progress: our copy takes another way."""
        self._unoffer(item)
        self.reroutes += 1
        item.reroutes += 1
        self._out.append(Note("rerouted", item.next, item.request, why))
        self._wait(item, None)
        self._ready.append(item)

    def _wait(self, item: Item, until: float | None) -> None:
        if item.waiting_since is None and until is not None:
            item.waiting_since = self._now
        item.stage = Stage.WAITING
        item.next = ""
        item.check_at = self._end(item) if until is None else min(until, self._end(item))

    def _end(self, item: Item) -> float:
        """When an item in its present stage has to be looked at because its budget ends."""
        raise NotImplementedError

    def _drop(self, item: Item) -> None:
        if item.sent is not None:
            self._unoffer(item)
        if self.items.get(item.transfer) is item:
            del self.items[item.transfer]

    def _wake_waiting(self, at_most: int | None = None) -> None:
        """Decide what waits again; of very much that waits, the oldest ``at_most``."""
        waiting = (item for item in self.items.values() if item.stage is Stage.WAITING)
        self._ready.extend(itertools.islice(waiting, at_most))

    def _check_times(self) -> None:
        late = [item for item in self.items.values() if item.check_at <= self._now]
        for item in late:
            if self.items.get(item.transfer) is not item or self._over_budget(item):
                continue
            if item.stage in (Stage.OFFERED, Stage.CUSTODY):
                self._late_hop(item)
            elif item.stage is Stage.WAITING:
                self._ready.append(item)
            else:
                self._late(item)

    def _late_hop(self, item: Item) -> None:
        """A transfer has to be looked at: it is late, is kept for too long, or its own keeper wants to hear of it."""
        name = item.next
        if self._now >= item.hop_at:
            self.neighbours.suspect(name, self._now)
            self._out.append(Note("suspect", name, item.request, "no progress within the hop's deadline"))
            self._route_again(item, f"{name} showed no progress")
        elif self._now >= min(item.keep_until, item.keep_end):
            if self._only_holder(item):
                left = max(self.limits.hop_floor, self.limits.keep_share * (self._end(item) - self._now))
                item.keep_until = item.keep_end = self._now + left
                self._check_hop(item)
            else:
                n = self.neighbours.get(name)
                if n is not None:
                    n.turn_down(self._now, self.limits)
                item.avoid[name] = item.deadline
                self._route_again(item, f"{name} kept it for too long")
        else:
            # Who keeps the copy before must not suspect us while it is the next holder who is late.
            self._send_progress([item])
            self._check_hop(item)

    def _only_holder(self, item: Item) -> bool:
        """Whether nobody else could go on with an item that its next holder keeps."""
        if item.returning:
            return item.next == item.itinerary.source
        others = [c for c in self._reachable() if c.name != item.next]
        wanted = frozenset(item.itinerary.remaining)
        return wanted.isdisjoint(self._own(item).blocks) and not any(
            wanted & (c.blocks | c.reach_blocks) for c in others
        )

    def _late(self, item: Item) -> None:
        """An item in one of the stages of a subclass has passed its ``check_at``."""

    def _send_progress(self, items: Iterable[Item]) -> None:
        for item in items:
            before = item.upstream
            due = self._now - item.progress_at >= self.limits.progress_every
            if due and before is not None and before in self.neighbours.by_name:
                item.progress_at = self._now
                self._out.append(Send(before, Progress(item.transfer, item.itinerary.blocks_done)))

    def _tell_source(self, item: Item, before: str) -> None:
        source = item.itinerary.source
        if source != before and source in self.neighbours.by_name:
            self._out.append(Send(source, Moved(item.transfer, before)))
