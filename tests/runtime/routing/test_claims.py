"""A member with a key that lies: it may spoil the work that it is given, not that of others, and nothing hangs.

Routing machines in simulated time: two honest peers hold every block, a third holds every block too and does what the
test says. What is checked on arrival, before routing sees a message, is in ``test_hostile.py``.
"""

import random

import msgspec
import pytest

from ls_edge.core.bands import Bands
from ls_edge.core.errors import NotFinite
from ls_edge.runtime.protocol.messages import (
    Accept,
    Cancel,
    Hello,
    Itinerary,
    Moved,
    Progress,
    Refuse,
    Release,
    State,
    TrackRef,
    TransferId,
)
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.source.source_rules import source_machine
from ls_edge.runtime.routing.state.candidates import Model
from ls_edge.runtime.routing.state.events import (
    Arrived,
    Complete,
    Compute,
    Computed,
    ComputeFailed,
    Fail,
    Forward,
    NeighborDown,
    Received,
    Send,
)
from ls_edge.runtime.routing.state.held_request import Stage
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.routing.state.neighbors import Neighbors
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults import liar as lying
from tests.faults.lies import LIES as CHAOS_LIES
from tests.faults.simulation import FaultySimulation
from tests.runtime.routing.driver import ALL_BY_A, BY_X, Driver, cancel, new_peer, request_id, run_of, submits, transfer

BLOCKS = 4
ALL = tuple(range(BLOCKS))
SIDE_BY_SIDE = ((((0, "a"), (1, "a")), ((2, "b"), (3, "b"))),)


class Liar(Machine):
    """A peer that looks idle, and answers each RUN by what :meth:`lie` gives."""

    def __init__(self, lie, **says):
        bands = Bands(BLOCKS)
        super().__init__(
            "liar",
            lambda liar: lying.LyingRules(liar, range(BLOCKS), self.state),
            limits=Limits(),
            rng=random.Random(7),
            model=Model(bands),
        )
        self.name = "liar"
        self.lie = lie
        self.says = says
        self.given = []
        self.ticks = 0
        self.now = 0.0

    def state(self, name=""):
        honest = State(True, False, False, 16, 0, self.ticks, 1, reaches=(SOURCE, "a", "b"), reach_blocks=ALL)
        return msgspec.structs.replace(honest, **self.says)

    def handle_all(self, events, now):
        return [one for event in events for one in self.answer(event, now)]

    def answer(self, event, now):
        self.now = max(self.now, now)
        self.instructions = []
        self.ticks += 1
        if isinstance(event, Arrived):
            self.given.append(event)
            self.instructions += list(self.lie(self, event))
        elif self.given and hasattr(self.lie, "later"):
            self.instructions += list(self.lie.later(self))
        elif not isinstance(event, Received):
            super().handle_all([event], now)
        return [one for one in self.instructions if isinstance(one, (Send, Forward))]

    def next_check(self):
        return self.now + 0.05 if self.given and hasattr(self.lie, "later") else None


def accepts(liar, event):
    yield Send(event.sender, Accept(event.run.transfer, 16))


def refuses(reason):
    def lie(liar, event):
        yield Send(event.sender, Refuse(event.run.transfer, reason, 16))

    return lie


def home(event, why="done", **changes):
    itinerary = msgspec.structs.replace(event.run.itinerary, **changes)
    transfer = event.run.transfer._replace(hop=event.run.transfer.hop + 1)
    return Forward(event.run.itinerary.source, transfer, event.run.budget_us, itinerary, event.tokens, why)


def returns(why, **changes):
    def lie(liar, event):
        yield Send(event.sender, Accept(event.run.transfer, 16))
        yield home(event, why, **changes)

    return lie


class Keeps:
    """Accepts, and says for ever that all is well."""

    def __init__(self, *, release=False, growth=0):
        self.release = release
        self.growth = growth

    def __call__(self, liar, event):
        yield Send(event.sender, Accept(event.run.transfer, 16))
        if self.release:
            yield Send(event.sender, Release(event.run.transfer, "b"))

    def later(self, liar):
        for event in liar.given[-40:]:
            if self.release:
                yield Send(SOURCE, Moved(event.run.transfer, "a"))
            else:
                done = event.run.itinerary.blocks_done + min(self.growth, liar.ticks)
                yield Send(event.sender, Progress(event.run.transfer, done))


SKIPPED = {"remaining": (), "skipped": tuple(range(BLOCKS))}
LIES = {
    "refuses as busy, with credits": (refuses("busy"), {}),
    "refuses as canceled": (refuses("canceled"), {}),
    "refuses as not finite": (refuses("not finite"), {}),
    "refuses for no known reason": (refuses("because"), {}),
    "is silent": (lambda liar, event: (), {}),
    "accepts and is silent": (accepts, {}),
    "accepts and is silent, its engine being very slow": (accepts, {"block_us": 2**32 - 1, "wait_us": 0}),
    "makes progress for ever": (Keeps(), {}),
    "makes progress for ever and says so": (Keeps(growth=3), {}),
    "says that it has passed everything on": (Keeps(release=True), {}),
    "returns everything as it was": (returns("unreachable"), {}),
    "returns everything for lack of time": (returns("budget"), {}),
    "returns everything for lack of credit": (returns("credit"), {}),
    "finds nothing finite": (returns("not finite"), {}),
    "leaves all blocks out": (returns("done", **SKIPPED, max_skips=BLOCKS), {}),
    "makes a track of it": (returns("done", remaining=(), track=TrackRef(1, 0, 4, SOURCE)), {}),
    "makes two tracks of it": (
        returns("done", remaining=(), waves=SIDE_BY_SIDE),
        {},
    ),
}


@pytest.mark.parametrize("policy", ["nearest", "fastest", "sequential", "parallel"])
@pytest.mark.parametrize(("lie", "says"), LIES.values(), ids=LIES)
def test_requests_are_answered_by_the_honest(lie, says, policy):
    sim = FaultySimulation({"a": range(BLOCKS), "b": range(BLOCKS), "liar": range(BLOCKS)}, blocks=BLOCKS, seed=3)
    liar = sim.processes["liar"].machine = Liar(lie, **says)
    sim.run(0.3)
    requests = []
    for _ in range(30):
        requests.append(sim.submit(policy=policy, budget=10.0))
        sim.run(0.1)
    sim.settle()
    for request in requests:
        (outcome,) = sim.outcomes[request]
        assert isinstance(outcome, Complete), outcome
        ran = [step for wave in outcome.itinerary.waves for track in wave for step in track]
        if outcome.itinerary.waves != SIDE_BY_SIDE:
            assert outcome.tokens == tuple(block for block, _ in ran)
        assert sorted(block for block, _ in ran) == list(range(BLOCKS))
        assert not outcome.itinerary.skipped
    assert liar.given or "block_us" in says  # an engine that is very slow may be left alone
    assert len(liar.given) < 20 * len(requests)
    sim.run(12.0)
    for name in ("a", "b"):
        machine = sim.processes[name].machine
        assert not machine.held
        assert machine.rules.credits == machine.limits.credits


@pytest.mark.parametrize("policy", ["parallel", "fastest"])
@pytest.mark.parametrize("reason", ["canceled", "not finite", "because", "busy", "draining"])
def test_a_peer_that_refuses_everything_delays_no_request_of_a_fresh_cluster(reason, policy):
    """Honest holders gave whole requests back as canceled, and were avoided in favor of the liar."""
    for seed in range(2):
        for liars in (["liar"], ["0", "z"]):
            sim = FaultySimulation(dict.fromkeys(["a", "b", *liars], ALL), blocks=BLOCKS, seed=seed, latency=0.005)
            for name in liars:
                sim.processes[name].machine = Liar(refuses(reason))
            sim.run(0.3)
            for _ in range(6):
                began = sim.now
                request = sim.submit(policy=policy, budget=2.0)
                sim.settle()
                (outcome,) = sim.outcomes[request]
                assert isinstance(outcome, Complete), outcome
                assert sim.ended[request] - began < 0.25
            assert all(sim.processes[name].machine.given for name in liars)


@pytest.mark.parametrize("policy", ["nearest", "parallel"])
@pytest.mark.parametrize("accept", [True, False])
@pytest.mark.parametrize("block_us", [50_000, 1_000_000, 2**32 - 1])
def test_an_announced_slowness_does_not_extend_the_wait_for_a_silent_holder(block_us, accept, policy):
    """It cost a quarter of the budget, several times in one request."""
    for budget in (10.0, 60.0):
        for liars in (["liar"], ["0", "z"]):
            sim = FaultySimulation(dict.fromkeys(["a", "b", *liars], ALL), blocks=BLOCKS, seed=1)
            for name in liars:
                sim.processes[name].machine = Liar(accepts if accept else lambda *_: (), block_us=block_us)
            sim.run(0.3)
            for _ in range(6):
                began = sim.now
                request = sim.submit(policy=policy, budget=budget)
                sim.settle()
                assert isinstance(sim.outcomes[request][0], Complete)
                assert sim.ended[request] - began < (0.35 if len(liars) == 1 else 0.85)


@pytest.mark.parametrize("seconds", [0.4, 1.0])
def test_a_slow_honest_holder_gets_time(seconds):
    sim = FaultySimulation({"a": (0, 1), "b": (2, 3), "c": (0, 1), "d": (2, 3)}, blocks=BLOCKS, block_seconds=seconds)
    sim.run(0.3)
    for _ in range(6):
        sim.submit(budget=30.0)
        sim.run(seconds)
    sim.settle()
    assert all(isinstance(outcome, Complete) for (outcome,) in sim.outcomes.values())
    assert not [note for _, _, note in sim.notes if note.what == "rerouted"]


def test_one_that_returns_everything_is_not_asked_all_the_time():
    """One request went to it 1,149 times in three seconds, because it always looked idle."""
    sim = FaultySimulation({"liar": range(BLOCKS)}, blocks=BLOCKS)
    liar = sim.processes["liar"].machine = Liar(returns("unreachable"))
    sim.run(0.3)
    request = sim.submit(budget=3.0)
    sim.run(4.0)
    (outcome,) = sim.outcomes[request]
    assert isinstance(outcome, Fail)
    assert len(liar.given) < 30


@pytest.mark.parametrize("policy", ["nearest", "fastest"])
@pytest.mark.parametrize("seed", range(1))
def test_messages_of_a_former_holder_change_nothing(policy, seed):
    """It handed a request on, and sends old RUNs, returns, and answers to transfers that are not its own."""
    sim = FaultySimulation(
        {"a": (0, 1), "b": (2, 3), "c": range(BLOCKS), "liar": range(BLOCKS)}, blocks=BLOCKS, seed=seed, validate=True
    )
    liar = sim.processes["liar"].machine = lying.Liar(
        "liar", ALL, BLOCKS, CHAOS_LIES["former"], lambda *_: None, ("spoilt",), seed=seed
    )
    sim.run(0.3)
    requests = []
    for _ in range(20):
        requests.append(sim.submit(policy=policy, budget=10.0))
        sim.run(0.05)
    sim.settle()
    for request in requests:
        (outcome,) = sim.outcomes[request]
        assert isinstance(outcome, Complete), outcome
        ran = [step for wave in outcome.itinerary.waves for track in wave for step in track]
        assert sorted(outcome.tokens) == list(ALL) == sorted(block for block, _ in ran)
        assert "liar" not in {holder for _, holder in ran}
    assert liar.counts.received > len(requests) // 4
    sim.kill("liar")
    sim.run(12.0)
    for name in "abc":
        machine = sim.processes[name].machine
        assert not machine.held
        assert machine.rules.credits == machine.limits.credits


# A source.


@pytest.fixture
def source():
    """A source with the peers ``a`` and ``b``, each with all blocks."""
    one = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    for name in ("a", "b"):
        one.meets(name, range(BLOCKS))
    return one


def given(source, name="a", **how):
    """Submit a request; its first RUN, which went to ``name``."""
    other = "b" if name == "a" else "a"
    source.hears_state(other, wait_us=10**6)
    submits(source, **how)
    (run,) = source.sent(Forward, name)
    source.hears(name, Accept(run.transfer, 8))
    return run


def test_a_process_without_the_tokens_cannot_answer(source):
    run = given(source)
    for forged in (request_id(0), bytes(16), b"f" * 16):
        source.gets("b", run_of(TransferId(forged, 0, 1), remaining=(), returning="done", waves=ALL_BY_A))
        assert not [s for s in source.said if isinstance(s, Complete)]
    assert {name: one.count for name, one in source.machine.rules.rejected.items()} == {"b": 3}
    source.gets("a", run_of(run.transfer, remaining=(), returning="done", waves=ALL_BY_A))
    assert [s.request for s in source.said if isinstance(s, Complete)] == [0]


def passed_on_twice(source):
    """``a`` handed a request to ``b``, and ``b`` to ``c``; its first RUN."""
    run = given(source)
    source.meets("c", range(BLOCKS))
    source.hears("b", Moved(run.transfer._replace(hop=2), "a"))
    source.hears("c", Moved(run.transfer._replace(hop=3), "b"))
    return run


def answers(source, name, run):
    source.gets(name, run_of(run.transfer, remaining=(), returning="done", waves=ALL_BY_A))
    return [s.request for s in source.said if isinstance(s, Complete)]


def test_a_holder_cannot_answer_a_request_that_its_next_holder_has_passed_on(source):
    run = passed_on_twice(source)
    assert answers(source, "a", run) == []
    assert source.machine.rules.ended.duplicates == {0: 1}
    assert answers(source, "c", run) == [0]
    assert answers(source, "a", run) == []
    assert source.machine.rules.ended.duplicates == {0: 2}


def test_a_holder_that_keeps_its_copy_can_answer(source):
    assert answers(source, "b", passed_on_twice(source)) == [0]


def test_and_who_is_given_it_again(source):
    run = passed_on_twice(source)
    source.hears("a", Moved(run.transfer._replace(hop=4), "c"))
    assert answers(source, "a", run) == [0]


def test_and_who_brings_what_a_holder_without_a_link_sends_home(source):
    run = passed_on_twice(source)
    source(NeighborDown("c", "cut"))
    assert answers(source, "a", run) == [0]


def test_request_ids_cannot_be_guessed_from_others(source):
    ids = set()
    for number in range(50):
        submits(source, number)
        ids |= {item.request for item in source.machine.held.values()}
    assert len(ids) == 50
    assert len({one[:4] for one in ids}) == len(ids)
    assert all(len(one) == 16 for one in ids)


def test_moved_from_who_holds_nothing_changes_nothing(source):
    """It defeated recovery: the source watched a process that had nothing."""
    run = given(source)
    source.hears("b", Moved(TransferId(b"g" * 16, 1, 3), "a"))
    (item,) = source.machine.held.values()
    assert item.stage is Stage.CUSTODY
    source(NeighborDown("a", "killed"))
    assert len(source.sent(Forward, "b")) == 1
    assert source.sent(Forward, "b")[0].transfer.request == run.transfer.request


def test_the_request_itself_is_not_taken_from_the_wire(source):
    run = given(source, policy="fastest", max_skips=0)
    told = run_of(
        run.transfer, remaining=(3, 2), returning="credit", waves=((((0, "a"), (1, "a")),),), policy="random", skips=4,
        on_straggler="skip",
    )  # fmt: skip
    source.gets("a", told, ("far",))
    (item,) = source.machine.held.values()
    it = item.itinerary
    assert (it.policy, it.max_skips, it.on_straggler) == ("fastest", 0, "later")
    assert it.remaining == (2, 3)


def test_a_source_that_is_told_canceled_goes_on(source):
    run = given(source)
    source.gets("a", run_of(run.transfer, returning="canceled"))
    assert len(source.sent(Forward, "b")) == 1


def test_unchanged_returned_tokens_do_not_replace_the_sent_ones(source):
    """A member could put other tokens under a request without a trace, and the honest who ran them were named."""
    submits(source, tokens=("mine",))
    (run,) = source.sent(Forward, "a")
    source.gets("a", run_of(run.transfer, returning="unreachable"), ("other",))
    assert [s.tokens for s in source.said if isinstance(s, Forward)] == [("mine",)]


def test_an_answer_says_whose_hands_it_went_through_whatever_they_say(source):
    run = given(source)
    source.hears("b", Moved(run.transfer._replace(hop=2), "far"))
    source.gets("b", run_of(run.transfer, returning="done", remaining=(), waves=ALL_BY_A))
    assert source.only(Complete).seen_holders == ("a", "far", "b")


def test_not_finite_from_two_holders_ends_the_request_and_names_them(source):
    run = given(source)
    source.gets("a", run_of(run.transfer, returning="not finite"))
    (again,) = source.sent(Forward, "b")
    source.hears("b", Accept(again.transfer, 8))
    source(Arrived("b", run_of(again.transfer, returning="done", remaining=(), waves=ALL_BY_A), (), finite=False))
    fail = source.only(Fail)
    assert isinstance(fail.error, NotFinite)
    assert "a, b" in str(fail.error)
    assert not source.machine.rules.requests


@pytest.mark.parametrize("again", ["late", "twice"])
def test_not_finite_twice_from_one_member_counts_once(source, again):
    run = given(source)
    source.gets("a", run_of(run.transfer, returning="not finite"))
    (other,) = source.sent(Forward, "b")
    if again == "late":
        source.hears("b", Accept(other.transfer, 8))
    source.gets("a", run_of(run.transfer._replace(hop=2), returning="not finite"))
    assert source.machine.rules.requests
    source.gets("b", run_of(other.transfer, returning="done", remaining=(), waves=ALL_BY_A))
    assert source.only(Complete).attempts == 2


def test_not_finite_from_the_only_holder_ends_the_request_at_once():
    source = Driver(source_machine("laptop", limits=Limits(), rng=random.Random(0)))
    source.meets("a", range(BLOCKS))
    submits(source)
    (run,) = source.sent(Forward)
    source.gets("a", run_of(run.transfer, returning="not finite"))
    assert isinstance(source.only(Fail).error, NotFinite)


# A peer.


def test_nobody_cancels_the_requests_of_others():
    peer = new_peer()
    peer.meets("phone", role="source")
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of())
    for stranger in ("phone", "b"):
        peer.hears(stranger, cancel(0, seconds=600))
    assert len(peer.machine.held) == 1
    peer.gets("laptop", run_of(transfer(branch=7)))
    assert peer.sent(Accept, "laptop")
    peer.hears("laptop", cancel(0))
    assert not peer.machine.held


def test_work_for_a_source_that_does_not_exist_is_forgotten_and_leaves_room():
    peer = new_peer()
    peer.meets("b", [2, 3])
    for number in range(40):
        peer.gets("b", run_of(transfer(100 + number), source="ghost", budget=600, remaining=(2, 3), waves=BY_X))
    peer.gets("laptop", run_of(transfer(1)))
    assert peer.sent(Accept, "laptop")
    assert len(peer.machine.held) <= 16 + 2 + 1  # its credits, what is on its way to b, and the one of the laptop
    peer.passes(1.5)
    assert not [item for item in peer.machine.held.values() if item.owner == "ghost"]


def test_a_source_behind_a_relay_that_died_is_noticed_too():
    """Its work stayed until its budget ended, since only lost links were looked at."""
    peer = new_peer()
    peer.meets("r", [], reaches=("phone",))
    peer.gets("r", run_of(transfer(5), source="phone", budget=600, remaining=(2, 3), waves=BY_X))
    peer.passes(2.0)
    assert len(peer.machine.held) == 1
    peer.hears_state("r", reaches=())
    peer.passes(1.5)
    assert not peer.machine.held
    assert "dropped" in peer.notes()


def test_one_source_leaves_room_for_the_next_whatever_it_is_called():
    peer = new_peer()
    peer.meets("b", [])
    for number in range(20):
        alias = f"greedy.{number:08x}"
        peer.meets(alias, role="source")
        peer.gets(alias, run_of(transfer(number), source=alias, budget=600, remaining=(2, 3), waves=BY_X))
        peer.gets("b", run_of(transfer(100 + number), source=alias, budget=600, remaining=(2, 3), waves=BY_X))
    peer.gets("laptop", run_of(transfer(999)))
    assert not peer.sent(Refuse)
    assert peer.sent(Accept, "laptop")


def test_nobody_takes_the_share_of_a_source_in_its_name():
    peer = new_peer()
    peer.meets("b", [])
    for number in range(200):
        run = run_of(transfer(number), budget=600, remaining=(2, 3), waves=BY_X)
        peer.gets("b", run)
        peer.gets("b", msgspec.structs.replace(run, transfer=transfer(1000 + number), returning="unreachable"))
    assert len(peer.machine.held) <= 16 + 64
    peer.gets("laptop", run_of(transfer(999)))
    assert peer.sent(Accept, "laptop")


def test_sources_share_the_credits_equally():
    peer = new_peer()
    peer.meets("b", [])
    peer.meets("phone", role="source")
    peer.gets("phone", run_of(transfer(50), source="phone", budget=600))
    for number in range(16):
        peer.gets("b", run_of(transfer(number), budget=600))
    held = [item.owner for item in peer.machine.held.values()]
    assert held.count("laptop") == 8


def test_a_pause_of_the_engine_does_not_turn_a_peer_into_a_black_hole():
    """One engine call of 15 s made it return everything for lack of time, and nothing ever corrected that."""
    peer = new_peer()
    peer.gets("laptop", run_of(transfer(0), budget=60))
    peer.machine.rules.engine.times.block_us = 1000
    compute = peer.only(Compute)
    outputs = tuple((*tokens, *compute.blocks) for tokens in compute.tokens)
    peer(Computed(compute.blocks, compute.transfers, outputs, 15_000_000), 15.0)
    assert peer.machine.rules.engine.times.block_us < 2000
    peer.machine.rules.engine.times.block_us = 1_500_000
    peer.gets("laptop", run_of(transfer(1), budget=1.0))
    assert peer.sent(Accept, "laptop")
    assert not peer.sent(Forward, "laptop")


def test_an_engine_time_that_somebody_announces_is_believed_within_bounds():
    limits = Limits()
    neighbors = Neighbors("me", limits)
    for name, engine in (("b", "onnx"), ("c", "onnx"), ("d", "tensorrt")):
        n = neighbors.add(Hello(name, "peer", 1, 0, "m", "b", engine=engine))
        n.reported(State(True, False, False, 9, 0, 0, 2**32 - 1, 2**32 - 1), 0.0)
    assert neighbors.hop_deadline("b") == 0.25
    neighbors.get("b").ran_after(0.2)
    assert neighbors.hop_deadline("b") == neighbors.hop_deadline("c") == pytest.approx(0.8)  # of the same kind
    assert neighbors.hop_deadline("d") == 0.25
    neighbors.get("b").ran_after(60.0)
    assert neighbors.hop_deadline("b") == pytest.approx(1.28)
    neighbors.get("b").suspect()
    assert neighbors.hop_deadline("b") == 0.25
    neighbors.get("b").ran_after(0.2)
    neighbors.get("b").reported(State(True, False, False, 9, 0, 0, 1000), 0.0)
    assert neighbors.hop_deadline("b") == 0.25  # it says itself that it is fast


def test_one_odd_image_does_not_take_a_block_out_of_service():
    peer = new_peer()
    for number in range(3):
        peer.gets("laptop", run_of(transfer(number)))
        compute = peer.only(Compute)
        peer(ComputeFailed(0, compute.transfers, "NaN", not_finite=True))
        (back,) = peer.sent(Forward, "laptop")
        assert back.returning == "not finite"
        peer.hears("laptop", Accept(back.transfer, 1))
        assert (0 in peer.machine.rules.engine.failed_blocks) == (number == 2)


def test_the_others_of_a_batch_go_on():
    peer = new_peer(max_batch=2)
    peer.meets("b", [2, 3])
    for number in range(3):
        peer.gets("laptop", run_of(transfer(number)))
    while len(peer.calls[0].transfers) == 1:
        peer.computes_next()
    odd, other = peer.calls[0].transfers
    blocks = peer.calls[0].blocks
    rest = Computed(blocks, (other,), (blocks,), 1000)
    peer(ComputeFailed(0, (odd,), "NaN", not_finite=True, rest=rest))
    assert [(m.transfer.request, m.returning) for m in peer.sent(Forward, "laptop")] == [(odd.request, "not finite")]
    (item,) = [item for item in peer.machine.held.values() if item.request == other.request]
    assert item.tokens == blocks
    assert not peer.machine.rules.engine.failed_blocks


def test_odd_requests_in_batches_with_fine_ones_never_fail_a_block():
    engine = new_peer([0], max_batch=2).machine.rules.engine
    fine = Computed((0,), (transfer(99),), ((0,),), 1000)
    for number in range(9):
        odd = tuple(map(transfer, range(number, 2 * number + 1)))
        assert not engine.count_failure(ComputeFailed(0, odd, "NaN", not_finite=True, rest=fine))
    alone = [engine.count_failure(ComputeFailed(0, (transfer(n),), "NaN", not_finite=True)) for n in range(3)]
    assert alone == [False, False, True]


def test_a_call_that_succeeds_begins_the_count_of_failures_again():
    engine = new_peer([0]).machine.rules.engine
    failed = ComputeFailed(0, (transfer(1),), "out of memory")
    assert [engine.count_failure(failed) for _ in range(2)] == [False, False]
    engine.measure(Computed((0,), (transfer(2),), ((0,),), 1000), 1.0)
    assert [engine.count_failure(failed) for _ in range(3)] == [False, False, True]


def test_tokens_that_are_not_finite_are_refused():
    peer = new_peer()
    peer(Arrived("laptop", run_of(), (), finite=False))
    assert [message.reason for message in peer.sent(Refuse)] == ["not finite"]


def test_tokens_do_not_bounce_for_ever():
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.gets("b", run_of(transfer(hop=64 + 16), remaining=(2, 3), waves=BY_X))
    assert [message.returning for message in peer.sent(Forward, "laptop")] == ["hops"]


def test_a_process_that_waits_for_the_next_holder_is_not_suspected():
    """The deadline of who keeps the copy before fired first, and hit the wrong process."""
    peer = new_peer()
    peer.meets("b", [2, 3])
    peer.gets("laptop", run_of(remaining=(2, 3), waves=BY_X))
    assert peer.sent(Forward, "b")
    said = peer.passes(0.24)
    told = [s for s in said if isinstance(s, Send) and isinstance(s.message, Progress) and s.to == "laptop"]
    assert len(told) >= 2
    peer.passes(0.05)
    assert peer.notes()[0] == "suspect"


def test_a_slow_link_carries_a_few_transfers_at_a_time():
    peer = new_peer((0,))
    peer.meets("b", [1, 2, 3], credit=9)
    for number in range(6):
        peer.gets("laptop", run_of(transfer(number), remaining=(1, 2, 3), waves=((((0, "x"),),),)))
    assert sum(item.stage is Stage.OFFERED for item in peer.machine.held.values()) == 2
    first = next(iter(list(peer.machine.custody.sent)))
    peer.hears("b", Accept(first, 9), after=0.2)
    n = peer.machine.neighbors.get("b")
    assert n.usual_link_us > 150_000
    assert n.credits <= 1


def test_tombstones_cost_the_same_however_many_there_are():
    """They were rebuilt on each event at multiples of 256."""
    peer = new_peer(limits=Limits(tombstones=1000))
    for number in range(1024):
        peer.hears("laptop", Cancel((request_id(number),), 10**8))
    tombstones = peer.machine.rules.tombstones.until
    peer.passes(0.05)
    assert len(tombstones) == 1000
    for _ in range(10):
        peer.hears("laptop", Cancel(tuple(map(request_id, range(1000))), 10**8))
        assert len(tombstones) == 1000
    peer.passes(101, step=1.0)
    peer.hears("laptop", Cancel((request_id(0),), 10**8))
    assert len(tombstones) == 1


def test_itineraries_know_to_whom_they_belong():
    plain = Itinerary("laptop", "nearest", (0,), 0)
    assert plain.owner == "laptop"
    assert msgspec.structs.replace(plain, source="a", track=TrackRef(1, 0, 0, "laptop")).owner == "laptop"
