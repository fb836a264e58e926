"""The routing machines, one course of events after the other: what they say, and what they hold meanwhile."""

import random

import pytest

from ls_edge.errors import BudgetExceeded, Overloaded
from ls_edge.runtime.routing.events import (
    Abandon,
    Answer,
    Arrived,
    Compute,
    Computed,
    ComputeFailed,
    Drain,
    Fail,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    Received,
    Send,
    Submit,
    TellState,
    Tick,
    Unsendable,
    Warm,
)
from ls_edge.runtime.routing.machine import Stage
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.peer import PeerMachine
from ls_edge.runtime.routing.source import SourceMachine
from ls_edge.runtime.wire import (
    Accept,
    Cancel,
    Hello,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    Release,
    Run,
    State,
    Ticket,
    VisitRow,
)

SESSION = b"s" * 16
BLOCKS = 4
ALL_BY_A = ((tuple((block, "a") for block in range(BLOCKS)),),)
BY_X = ((((0, "x"), (1, "x")),),)


def ticket(request=0, branch=1, hop=1):
    return Ticket(SESSION, request, branch, hop)


def run_of(one=None, *, remaining=(0, 1, 2, 3), policy="nearest", budget=5.0, skips=0, returning="", **more):
    itinerary = Itinerary("laptop", policy, tuple(remaining), skips, **more)
    return Run(one or ticket(), round(budget * 1e6), itinerary, "raw", 1, 1, returning)


class Driver:
    """A machine with a clock of its own; what it said last stands in ``said``."""

    def __init__(self, machine):
        self.machine = machine
        self.now = 100.0
        self.said = []

    def __call__(self, event, after=0.0):
        self.now += after
        self.said = self.machine.handle(event, self.now)
        return self.said

    def meets(self, name, blocks=(), *, role="peer", incarnation=1, **state):
        self(NeighbourUp(Hello(name, role, incarnation, 0, "m", "b", tuple(blocks))))
        if role == "peer":
            self.hears_state(name, **state)

    def hears_state(self, name, credit=9, **changes):
        base = {"warm": True, "draining": False, "stuck": False, "queue": 0, "calls": 0, "block_us": 1000}
        self(NeighbourState(name, State(credits=credit, **{**base, **changes})))

    def hears(self, name, message, after=0.0):
        return self(Received(name, message), after)

    def gets(self, name, run, tokens=()):
        return self(Arrived(name, run, tokens))

    def computes(self, compute, after=0.001):
        outputs = tuple((*tokens, *compute.blocks) for tokens in compute.tokens)
        return self(Computed(compute.blocks, compute.tickets, outputs, 1000), after)

    def passes(self, seconds, step=0.01):
        """Let time pass in small steps; returns all that was said."""
        collected = []
        end = self.now + seconds
        while self.now < end:
            collected += self(Tick(), step)
        self.said = collected
        return collected

    def sent(self, kind, to=None):
        return [
            s.message for s in self.said if isinstance(s, Send) and isinstance(s.message, kind) and to in (None, s.to)
        ]

    def only(self, kind):
        (found,) = [s for s in self.said if isinstance(s, kind)]
        return found

    def notes(self):
        return [note.what for note in self.said if isinstance(note, Note)]


@pytest.fixture
def peer():
    """A warm peer ``a`` that serves blocks 0 and 1, one an engine call, linked with the source ``laptop``."""
    return new_peer()


def new_peer(blocks=(0, 1), limits=None, **options):
    driver = Driver(PeerMachine("a", blocks, limits=limits or Limits(chain=0), rng=random.Random(0), **options))
    driver(Warm(1000))
    driver.meets("laptop", role="source")
    return driver


@pytest.fixture
def source():
    """A source without peers."""
    return Driver(SourceMachine("laptop", SESSION, limits=Limits(), rng=random.Random(0)))


def submits(source, request=0, *, budget=5.0, max_skips=0, policy="nearest", tokens=(), **more):
    itinerary = Itinerary("laptop", policy, tuple(range(BLOCKS)), max_skips, **more)
    return source(Submit(request, itinerary, tokens, source.now + budget))


# A peer: taking tokens, running its blocks, handing on.


def test_a_peer_accepts_runs_all_its_blocks_hands_on_and_releases(peer):
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of())
    assert peer.sent(Accept, "laptop") == [Accept(ticket(), 7)]
    peer.computes(peer.only(Compute))
    assert peer.sent(Progress, "laptop") == [] or peer.sent(Progress)[0].blocks_done == 1
    peer.computes(peer.only(Compute), after=0.03)
    assert peer.sent(Progress, "laptop") == [Progress(ticket(), 2)]
    (onward,) = peer.sent(Run, "b")
    assert onward.ticket == ticket(hop=2)
    assert onward.itinerary.waves == ((((0, "a"), (1, "a")),),)
    assert onward.itinerary.remaining == (2, 3)
    assert onward.itinerary.visits[0].blocks == (0, 1)
    assert [s.tokens for s in peer.said if isinstance(s, Send) and s.message is onward] == [(0, 1)]
    assert not peer.sent(Release)
    peer.hears("b", Accept(onward.ticket, 8))
    assert peer.sent(Release, "laptop") == [Release(ticket())]
    assert [item.stage for item in peer.machine.items.values()] == [Stage.CUSTODY]
    peer.hears("b", Release(onward.ticket))
    assert peer.machine.idle
    assert not peer.machine._sent


def test_the_last_block_goes_home_with_what_is_done(peer):
    peer.gets("b", run_of(remaining=(1,), waves=((((0, "b"), (2, "b"), (3, "b")),),)))
    peer.computes(peer.only(Compute))
    (home,) = peer.sent(Run, "laptop")
    assert (home.returning, home.itinerary.remaining) == ("done", ())
    peer.hears("laptop", Accept(home.ticket, 1))
    assert peer.machine.idle


def test_the_slot_is_how_many_blocks_have_run(peer):
    peer.gets("laptop", run_of(remaining=(1,), waves=((((0, "b"), (2, "b"), (3, "b")),),)))
    assert peer.only(Compute).slots == (3,)


def test_the_source_is_told_who_holds_a_request_that_came_from_a_peer(peer):
    peer.meets("b", [2])
    peer.gets("b", run_of())
    assert peer.sent(Moved, "laptop") == [Moved(ticket(), "a", "b")]


@pytest.mark.parametrize(
    ("prepare", "reason"),
    [
        (lambda p: p(Drain()), "draining"),
        (lambda p: p.hears("laptop", Cancel(SESSION, 0, 10**6)), "cancelled"),
        (lambda p: setattr(p.machine, "warm", False), "cold"),
        (lambda p: [p.gets("laptop", run_of(ticket(n + 1))) for n in range(16)], "busy"),
    ],
    ids=["draining", "cancelled", "cold", "busy"],
)
def test_a_peer_says_why_it_does_not_take_tokens(peer, prepare, reason):
    prepare(peer)
    held = len(peer.machine.items)
    peer.gets("laptop", run_of())
    assert [message.reason for message in peer.sent(Refuse, "laptop")] == [reason]
    assert len(peer.machine.items) == held


def test_the_same_transfer_twice_is_accepted_twice_and_run_once(peer):
    peer.gets("laptop", run_of())
    peer.gets("laptop", run_of())
    assert len(peer.sent(Accept)) == 1
    assert not [s for s in peer.said if isinstance(s, Compute)]
    assert len(peer.machine.items) == 1


def test_credits_count_what_is_held_and_custody_apart():
    peer = new_peer(limits=Limits(credits=2, custody=3))
    peer.meets("b", [2, 3])
    for number in range(3):
        peer.gets("x", run_of(ticket(number), remaining=(2, 3), waves=BY_X))
        (onward,) = peer.sent(Run, "b")
        assert peer.machine.credits == min(1, 3 - number)
        peer.hears("b", Accept(onward.ticket, 5))
    assert peer.machine.credits == 0
    peer.gets("x", run_of(ticket(9)))
    assert peer.sent(Refuse)[0].reason == "busy"
    for sent in list(peer.machine._sent):
        peer.hears("b", Release(sent))
    assert peer.machine.credits == 2


def test_half_of_the_credits_are_for_transfers_from_peers():
    peer = new_peer(limits=Limits(credits=4))
    for number in range(2):
        peer.gets("laptop", run_of(ticket(number)))
        assert peer.sent(Accept, "laptop")[0].credits == 1 - number
    peer.gets("laptop", run_of(ticket(2)))
    assert peer.sent(Refuse, "laptop")[0].reason == "busy"
    peer.gets("x", run_of(ticket(3)))
    assert peer.sent(Accept, "x")[0].credits == 1
    assert (peer.machine.state("peer").credits, peer.machine.state("source").credits) == (1, 0)


def test_the_end_of_credits_and_their_return_are_told_at_once():
    peer = new_peer(limits=Limits(credits=1))
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert TellState() in peer.said
    (onward,) = peer.sent(Run, "b")
    peer.hears("b", Accept(onward.ticket, 5))
    assert TellState() in peer.said


def test_requests_at_one_block_run_as_a_batch_whatever_their_slots():
    peer = new_peer(max_batch=3)
    peer.gets("laptop", run_of(ticket(0), remaining=(0, 2, 3), waves=((((1, "x"),),),)), ("first",))
    first = peer.only(Compute)
    assert first.slots == (1,)
    peer.gets("laptop", run_of(ticket(1)), ("second",))
    peer.gets("laptop", run_of(ticket(2), remaining=(0, 3), waves=((((1, "x"), (2, "x")),),)), ("third",))
    peer.gets("laptop", run_of(ticket(3), remaining=(1, 2, 3), waves=((((0, "x"),),),)), ("other block",))
    peer.computes(first)
    batch = peer.only(Compute)
    assert (batch.blocks[0], batch.slots) == (0, (0, 2))
    assert batch.tokens == (("second",), ("third",))
    peer.computes(batch)
    items = {item.ticket.request: item for item in peer.machine.items.values()}
    assert items[1].itinerary.remaining == (1, 2, 3)
    assert items[2].itinerary.remaining == (3,)
    assert items[2].tokens == ("third", 0)


def test_blocks_that_would_follow_anyway_run_in_one_engine_call():
    peer = new_peer((0, 1, 3), Limits(chain=0.0025))
    peer.gets("laptop", run_of())
    first = peer.only(Compute)
    assert first.blocks == (0, 1)
    peer.computes(first)
    (item,) = peer.machine.items.values()
    assert item.itinerary.waves == ((((0, "a"), (1, "a")),),)
    assert item.tokens == (0, 1)
    assert peer.only(Compute).blocks == (3,)
    longer = new_peer((0, 1, 2, 3), Limits(chain=0.0035))
    longer.gets("laptop", run_of())
    assert longer.only(Compute).blocks == (0, 1, 2)


def test_sources_take_turns_at_the_engine():
    peer = new_peer()
    order = []
    for number in range(3):
        peer.gets("laptop", run_of(Ticket(b"1" * 16, number, 0, 0)))
        compute = [s for s in peer.said if isinstance(s, Compute)] or []
        order += compute
    peer.gets("laptop", run_of(Ticket(b"2" * 16, 0, 0, 0)))
    ran = [order[0].tickets[0].session[:1]]
    current = order[0]
    for _ in range(3):
        peer.computes(current)
        current = peer.only(Compute)
        ran.append(current.tickets[0].session[:1])
    assert ran[:2] == [b"1", b"2"]


# A peer: what goes wrong at the next holder.


def handed_on(peer):
    """The peer has offered a request to ``b``; returns that transfer's ticket."""
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    return peer.sent(Run)[0].ticket


def two_holders(peer):
    peer.meets("b", [2, 3])
    peer.meets("c", [2, 3], wait_us=10)
    return handed_on(peer)


@pytest.mark.parametrize("accepted", [False, True], ids=["offered", "in custody"])
def test_a_next_holder_that_is_lost_costs_a_new_branch_to_another(peer, accepted):
    sent = two_holders(peer)
    if accepted:
        peer.hears("b", Accept(sent, 5))
    peer(NeighbourDown("b", "killed"))
    assert peer.notes() == ["lost", "rerouted"]
    (again,) = peer.sent(Run, "c")
    assert again.ticket.key == sent.key
    assert again.ticket.branch != sent.branch
    assert again.itinerary.remaining == (2, 3)


@pytest.mark.parametrize("accepted", [False, True], ids=["offered", "in custody"])
def test_a_next_holder_without_progress_is_suspected_and_passed_by(peer, accepted):
    sent = two_holders(peer)
    if accepted:
        peer.hears("b", Accept(sent, 5))
    peer.passes(0.2)
    assert not peer.sent(Run)
    peer.passes(0.1)
    assert peer.notes()[:2] == ["suspect", "rerouted"]
    assert len(peer.sent(Run, "c")) == 1
    assert not peer.machine.neighbours.get("b").available(peer.now)


def test_progress_keeps_a_next_holder_from_suspicion(peer):
    sent = two_holders(peer)
    peer.hears("b", Accept(sent, 5))
    for done in range(5):
        assert not [note for note in peer.passes(0.2) if isinstance(note, Note)]
        peer.hears("b", Progress(sent, done))
    assert peer.machine.neighbours.get("b").available(peer.now)


def test_a_slow_engine_has_a_longer_deadline(peer):
    peer.meets("b", [2, 3], block_us=200_000)
    sent = handed_on(peer)
    peer.hears("b", Accept(sent, 5))
    peer.passes(1.9)
    assert peer.notes() == []
    peer.passes(0.2)
    assert peer.notes()[0] == "suspect"


def test_suspicion_doubles_and_ends_with_progress(peer):
    peer.meets("b", [2, 3])
    machine = peer.machine.neighbours
    until = []
    for _ in range(7):
        machine.suspect("b", peer.now)
        until.append(round(machine.get("b").suspected_until - peer.now, 3))
    assert until == [0.3, 0.6, 1.2, 2.4, 4.8, 5.0, 5.0]
    peer.hears_state("b", calls=0)
    assert not machine.get("b").available(peer.now)
    peer.hears_state("b", calls=1)
    assert machine.get("b").available(peer.now)


@pytest.mark.parametrize("reason", ["busy", "cold", "draining"])
def test_a_refusal_sends_the_tokens_elsewhere(peer, reason):
    sent = two_holders(peer)
    peer.hears("b", Refuse(sent, reason, 0))
    assert len(peer.sent(Run, "c")) == 1
    assert peer.machine.neighbours.get("b").offers == 0


def test_a_refusal_because_it_is_cancelled_ends_it(peer):
    peer.hears("b", Refuse(two_holders(peer), "cancelled"))
    assert peer.machine.idle


def test_a_message_from_somebody_else_about_a_transfer_counts_for_nothing(peer):
    sent = two_holders(peer)
    for message in (Accept(sent, 1), Release(sent), Refuse(sent, "cancelled"), Progress(sent, 4)):
        peer.hears("c", message)
        assert [item.stage for item in peer.machine.items.values()] == [Stage.OFFERED]


def test_what_cannot_be_sent_is_tried_again_soon(peer):
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    (run,) = peer.sent(Run, "b")
    peer(Unsendable("b", run))
    assert not peer.sent(Run)
    peer.passes(0.1)
    assert len(peer.sent(Run, "b")) == 1


def test_a_neighbour_that_came_back_as_a_new_process_has_lost_what_it_held(peer):
    sent = two_holders(peer)
    peer.hears("b", Accept(sent, 5))
    peer(NeighbourUp(Hello("b", "peer", 2, 0, "m", "b", (2, 3))))
    assert peer.notes() == ["lost", "rerouted"]
    assert len(peer.sent(Run, "c")) == 1


# A peer: waiting, giving back, relaying.


def test_waiting_for_credit_is_bounded_and_ends_at_the_source(peer):
    peer.meets("b", [2, 3], credit=0)
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert not peer.sent(Run)
    peer.passes(0.2)
    assert not peer.sent(Run)
    peer.passes(0.1)
    (home,) = peer.sent(Run, "laptop")
    assert (home.returning, home.itinerary.remaining) == ("credit", (2, 3))


def test_a_credit_that_comes_meanwhile_is_used_at_once(peer):
    peer.meets("b", [2, 3], credit=0)
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    peer.hears_state("b", credit=1)
    assert len(peer.sent(Run, "b")) == 1


def test_who_reaches_nobody_hands_back_to_the_source(peer):
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert [message.returning for message in peer.sent(Run, "laptop")] == ["unreachable"]


def test_without_the_source_what_goes_home_goes_by_who_reaches_it(peer):
    peer.meets("b", [], reaches=("laptop",))
    peer.meets("c", [], reaches=("laptop",))
    peer(NeighbourDown("laptop", "cut"))
    peer.gets("c", run_of(remaining=(2, 3), waves=BY_X))
    (home,) = peer.sent(Run, "c")
    assert home.returning == "unreachable"
    assert home.itinerary.relays == ("a",)


def test_who_relayed_them_here_may_relay_them_home(peer):
    peer.meets("r", [], reaches=("laptop",))
    peer(NeighbourDown("laptop", "cut"))
    peer.gets("r", run_of(remaining=(2, 3), relays=("r",), waves=BY_X))
    assert [message.returning for message in peer.sent(Run, "r")] == ["unreachable"]


def test_without_anybody_who_reaches_the_source_they_go_back_the_way_they_came(peer):
    peer.meets("b", [2])
    peer.meets("c", [2])
    peer(NeighbourDown("laptop", "cut"))
    visits = tuple(VisitRow(name, (), 0, 0, 0) for name in ("x", "c", "b"))
    peer.gets("b", run_of(remaining=(3,), waves=BY_X, visits=visits, skipped=(2,)))
    (home,) = peer.sent(Run, "b")
    assert (home.returning, home.itinerary.relays) == ("unreachable", ("a",))
    peer.gets("b", run_of(ticket(1), remaining=(3,), visits=visits, relays=("b",), returning="unreachable"))
    assert len(peer.sent(Run, "c")) == 1


def test_a_relay_passes_on_without_running(peer):
    peer.gets("b", run_of(remaining=(2, 3), returning="budget"))
    assert not [s for s in peer.said if isinstance(s, Compute)]
    assert [message.returning for message in peer.sent(Run, "laptop")] == ["budget"]


def test_tokens_go_back_in_time(peer):
    """With a block and the way back no longer in the budget, what is there goes home."""
    peer.meets("b", [2, 3], credit=0)
    peer.gets("laptop", run_of(remaining=(2, 3), budget=0.1, waves=BY_X))
    peer.passes(0.09)
    assert not peer.sent(Run)
    peer.passes(0.02, step=0.001)
    assert [message.returning for message in peer.sent(Run, "laptop")] == ["budget"]
    peer.passes(0.1)
    assert peer.machine.idle


def test_via_source_every_hop_goes_through_the_source(peer):
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), via_source=True, waves=BY_X))
    assert [message.returning for message in peer.sent(Run, "laptop")] == ["via source"]
    assert not peer.sent(Run, "b")


# A peer: its own engine.


def test_an_engine_that_hangs_gives_its_queue_to_others(peer):
    peer.meets("b", [0, 1, 2, 3], wait_us=10**6)
    peer.gets("laptop", run_of(ticket(0)))
    hanging = peer.only(Compute)
    peer.gets("laptop", run_of(ticket(1)))
    peer.passes(0.3)
    assert "engine is stuck" in peer.notes()
    assert [message.ticket.request for message in peer.sent(Run, "b")] == [1]
    assert peer.machine.state().stuck
    assert peer.machine.credits == 0
    peer.computes(hanging)
    assert "engine is back" in peer.notes()
    assert not peer.machine.state().stuck
    assert peer.machine.credits > 0


def test_a_block_that_fails_is_not_tried_again_here(peer):
    peer.meets("b", [0, 1, 2, 3], wait_us=10**6)
    peer.gets("laptop", run_of())
    failed = peer.only(Compute)
    peer(ComputeFailed(failed.blocks[0], failed.tickets, "out of memory"))
    assert "engine failed" in peer.notes()
    assert peer.machine.failed_blocks == {0: "out of memory"}
    (onward,) = peer.sent(Run, "b")
    assert onward.itinerary.remaining == (0, 1, 2, 3)


def test_draining_finishes_then_gives_back_then_leaves_nothing(peer):
    peer.gets("laptop", run_of(ticket(0)))
    running = peer.only(Compute)
    peer.gets("laptop", run_of(ticket(1)))
    peer(Drain())
    assert peer.machine.state().draining
    assert peer.machine.credits == 0
    while True:
        peer.computes(running)
        following = [s for s in peer.said if isinstance(s, Compute)]
        for message in peer.sent(Run, "laptop"):
            peer.hears("laptop", Accept(message.ticket, 1))
        if not following:
            break
        (running,) = following
    assert peer.machine.idle


def test_a_drain_that_takes_too_long_gives_back_what_waits_for_the_engine(peer):
    peer.gets("laptop", run_of(ticket(0), budget=60))
    peer.gets("laptop", run_of(ticket(1), budget=60))
    peer.machine.limits = Limits(hop_floor=60)
    peer(Drain())
    peer.passes(2.1, step=0.05)
    assert [(m.ticket.request, m.returning) for m in peer.sent(Run, "laptop")] == [(1, "unreachable")]


# A peer: what nobody waits for any more.


@pytest.mark.parametrize("stage", ["queued", "running", "offered", "custody"])
def test_cancel_frees_what_is_held_wherever_it_stands(peer, stage):
    peer.meets("b", [2, 3])
    sent = None
    if stage == "queued":
        peer.gets("laptop", run_of(ticket(9)))
    if stage in ("queued", "running"):
        peer.gets("laptop", run_of())
    else:
        sent = handed_on(peer)
        if stage == "custody":
            peer.hears("b", Accept(sent, 1))
    peer.hears("laptop", Cancel(SESSION, 0, 10**6))
    assert not [item for item in peer.machine.items.values() if item.ticket.request == 0]
    assert not peer.machine._sent
    assert peer.machine.neighbours.get("b").offers == 0
    if sent is not None:
        peer.hears("b", Release(sent))
        assert not peer.said


def test_the_result_of_a_cancelled_block_is_dropped(peer):
    peer.gets("laptop", run_of())
    running = peer.only(Compute)
    peer.hears("laptop", Cancel(SESSION, 0, 10**6))
    peer.computes(running)
    assert not peer.sent(Run)
    assert peer.machine.idle
    peer.gets("laptop", run_of(ticket(1)))
    assert peer.only(Compute).tickets == (ticket(1),)


def test_tombstones_are_bounded():
    peer = new_peer(limits=Limits(tombstones=100))
    for request in range(1000):
        peer.hears("laptop", Cancel(SESSION, request, 10**9))
    assert len(peer.machine._tombstones) <= 101
    peer.gets("laptop", run_of(ticket(999)))
    assert peer.sent(Refuse)[0].reason == "cancelled"


def test_tombstones_end_with_their_budget():
    peer = new_peer()
    for request in range(255):
        peer.hears("laptop", Cancel(SESSION, request, 1000))
    peer.now += 1
    peer.hears("laptop", Cancel(SESSION, 255, 1000))
    assert len(peer.machine._tombstones) == 1


def test_what_belongs_to_a_source_that_is_gone_is_dropped_after_a_while(peer):
    peer.gets("laptop", run_of(remaining=(2, 3), budget=60, waves=BY_X))
    peer(NeighbourDown("laptop", "killed"))
    peer.passes(0.9)
    assert len(peer.machine.items) == 1
    peer.passes(0.2)
    assert peer.machine.idle
    assert "dropped" in peer.notes()


def test_but_not_while_a_neighbour_reaches_it(peer):
    peer.meets("b", [], credit=0, reaches=("laptop",), draining=True)
    peer.gets("laptop", run_of(remaining=(2, 3), budget=60, waves=BY_X))
    peer(NeighbourDown("laptop", "cut"))
    peer.passes(3, step=0.05)
    assert len(peer.machine.items) == 1


# A source.


def test_a_source_keeps_the_tokens_until_the_answer_and_cancels_everywhere(source):
    source.meets("a", [0, 1, 2, 3])
    source.meets("b", [0], wait_us=10)
    submits(source, tokens=("stem",))
    (run,) = source.sent(Run, "a")
    source.hears("a", Accept(run.ticket, 8))
    source.hears("a", Release(run.ticket))
    assert [item.stage for item in source.machine.items.values()] == [Stage.AWAY]
    done = run_of(
        run.ticket._replace(hop=5), remaining=(), returning="done", waves=(((*((b, "a") for b in range(4)),),),)
    )
    source.gets("a", done, ("last",))
    answer = source.only(Answer)
    assert (answer.request, answer.tokens, answer.attempts) == (0, ("last",), 1)
    assert len(source.sent(Accept, "a")) == 1
    assert {s.to for s in source.said if isinstance(s, Send) and isinstance(s.message, Cancel)} == {"a", "b"}
    assert not source.machine.items
    assert not source.machine.requests


def test_a_later_answer_is_accepted_counted_and_dropped(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source)
    (run,) = source.sent(Run, "a")
    for branch in range(3):
        source.gets(
            "a", run_of(run.ticket._replace(hop=5, branch=branch), remaining=(), returning="done", waves=ALL_BY_A)
        )
    assert source.sent(Accept, "a")
    assert not [s for s in source.said if isinstance(s, Answer)]
    assert source.machine.duplicates == {0: 2}


def test_an_answer_of_another_session_is_dropped(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source)
    source.gets("a", run_of(Ticket(b"x" * 16, 0, 0, 0), remaining=(), returning="done", waves=ALL_BY_A))
    assert not [s for s in source.said if isinstance(s, Answer)]
    assert source.machine.requests
    assert not source.machine.duplicates


def away(source):
    """A request that ``a`` has passed on to ``b``."""
    source.meets("a", [0, 1])
    source.meets("b", [2, 3])
    source.meets("c", [0, 1, 2, 3], credit=0)
    submits(source, budget=60)
    (run,) = source.sent(Run, "a")
    source.hears("a", Accept(run.ticket, 8))
    source.hears("a", Release(run.ticket))
    source.hears("b", Moved(run.ticket._replace(hop=2), "b", "a"))
    source.hears_state("c")
    return run


def test_one_of_holder_and_keeper_lost_is_no_matter_for_the_source(source):
    for name in ("a", "b"):
        one = Driver(SourceMachine("laptop", SESSION, limits=Limits(), rng=random.Random(0)))
        away(one)
        one(NeighbourDown(name, "killed"))
        assert one.notes() == ["lost"]
        assert not one.sent(Run)


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_holder_and_keeper_both_lost_start_a_new_branch_from_the_stem(source, order):
    run = away(source)
    for name in order:
        source(NeighbourDown(name, "killed"))
    assert source.notes() == ["lost", "rerouted"]
    (again,) = source.sent(Run, "c")
    assert again.itinerary.remaining == (0, 1, 2, 3)
    assert again.ticket.branch != run.ticket.branch
    assert source.machine.requests[0].attempts == 2


def test_no_news_for_too_long_starts_a_new_branch(source):
    away(source)
    source.passes(0.9)
    assert not source.sent(Run)
    source.hears("b", Moved(ticket(), "b", "a"))
    source.passes(0.9)
    assert not source.sent(Run)
    source.passes(0.2)
    assert len(source.sent(Run)) == 1


def test_moved_that_overtakes_release_counts_as_one(source):
    source.meets("a", [0, 1])
    source.meets("b", [2, 3])
    submits(source)
    (run,) = source.sent(Run, "a")
    source.hears("a", Accept(run.ticket, 8))
    source.hears("b", Moved(run.ticket._replace(hop=2), "b", "a"))
    assert [item.stage for item in source.machine.items.values()] == [Stage.AWAY]


def test_what_comes_back_further_goes_on_and_what_is_behind_is_dropped(source):
    source.meets("a", [0, 1])
    submits(source, budget=60)
    (run,) = source.sent(Run, "a")
    source.hears("a", Accept(run.ticket, 8))
    further = run_of(
        run.ticket._replace(hop=4), remaining=(2, 3), returning="unreachable", waves=((((0, "a"), (1, "a")),),)
    )
    source.gets("a", further, ("further",))
    source.gets("a", run_of(run.ticket._replace(hop=9), remaining=(1, 2, 3), waves=((((0, "a"),),),)), ("behind",))
    assert [item.tokens for item in source.machine.items.values()] == [("further",)]
    source.meets("b", [2, 3])
    (onward,) = [s for s in source.said if isinstance(s, Send) and isinstance(s.message, Run)]
    assert (onward.to, onward.tokens) == ("b", ("further",))
    assert onward.message.itinerary.remaining == (2, 3)


def test_a_skip_waits_a_moment_for_the_holder_to_come_back(source):
    source.meets("a", [0, 1, 2])
    source.meets("b", [3])
    source(NeighbourDown("b", "killed"))
    submits(source, max_skips=1)
    (run,) = source.sent(Run, "a")
    waves = ((((0, "a"), (1, "a"), (2, "a")),),)
    back = run_of(run.ticket._replace(hop=2), remaining=(3,), skips=1, returning="unreachable", waves=waves)
    source.gets("a", back, ("far",))
    assert not [s for s in source.said if isinstance(s, Answer)]
    source.passes(0.15)
    assert not [s for s in source.said if isinstance(s, Answer)]
    source.passes(0.1)
    answer = source.only(Answer)
    assert (answer.itinerary.skipped, answer.tokens) == ((3,), ("far",))


def test_the_budget_ends_in_an_answer_where_skips_allow_it_else_in_an_error(source):
    source.meets("a", [0, 1, 2], credit=0)
    submits(source, 0, budget=0.5, max_skips=0)
    submits(source, 1, budget=0.5, max_skips=4)
    said = source.passes(0.5)
    fails = {s.request: s for s in said if isinstance(s, Fail)}
    answers = {s.request: s for s in said if isinstance(s, Answer)}
    assert isinstance(fails[0].error, (Overloaded, BudgetExceeded))
    assert "blocks 0, 1, 2, 3" in str(fails[0].error)
    assert answers[1].itinerary.skipped == (0, 1, 2, 3)
    assert source.now - 100.0 < 0.52


@pytest.mark.parametrize(("credit", "error"), [(0, Overloaded), (None, BudgetExceeded)], ids=["saturated", "alone"])
def test_the_error_says_what_was_missing(source, credit, error):
    if credit is not None:
        source.meets("a", range(4), credit=credit)
    submits(source, budget=0.5)
    said = source.passes(0.6)
    (fail,) = [s for s in said if isinstance(s, Fail)]
    assert type(fail.error) is error


def test_abandoned_requests_are_cancelled_and_give_no_outcome(source):
    source.meets("a", [0, 1, 2, 3])
    submits(source)
    source(Abandon(0))
    assert len(source.sent(Cancel, "a")) == 1
    assert not source.machine.requests
    assert not source.machine.items
    source(Abandon(0))
    assert not source.said
