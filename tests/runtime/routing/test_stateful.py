"""Whatever happens in whatever order, every request gets exactly one outcome, and answers say what was computed."""

import itertools

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ls_edge.core.bands import Bands
from ls_edge.runtime.routing.peer.peer_rules import PeerRules
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.simulator.simulation import SOURCE
from tests.faults.consistency import validate
from tests.faults.simulation import FaultySimulation

BLOCKS = 6
NAMES = ("a", "b", "c", "d")
BUDGET = 3.0

names = st.sampled_from(NAMES)


def ran(outcome):
    return [block for wave in outcome.itinerary.waves for track in wave for block, _ in track]


class Faults(RuleBasedStateMachine):
    @initialize(
        placement=st.lists(st.sets(st.integers(0, BLOCKS - 1), min_size=1), min_size=4, max_size=4),
        seed=st.integers(0, 2**16),
        credit=st.integers(1, 4),
        batch=st.integers(1, 3),
        failures=st.sampled_from([0.0, 0.0, 0.02, 0.2]),
        cuts=st.sampled_from([(), (1,), (1, 5), (2, 4), (3,), tuple(range(1, BLOCKS))]),
        turn=st.sampled_from([0.0, 0.0005, 0.003]),
    )
    def start(self, placement, seed, credit, batch, failures, cuts, turn):
        limits = Limits(credits=credit, custody=2 * credit)
        held = {name: sorted(blocks) for name, blocks in zip(NAMES, placement, strict=True)}
        self.held = held
        self.bands = Bands(BLOCKS, cuts)
        self.sim = FaultySimulation(
            held, blocks=BLOCKS, seed=seed, limits=limits, max_batch=batch, bands=self.bands, validate=True, turn=turn
        )
        self.sim.run(0.05)
        self.sim.send_failures = failures
        self.asked = {}

    def process(self, name):
        return self.sim.processes[name]

    @rule(
        policy=st.sampled_from(["nearest", "sequential", "random", "fastest", "parallel", "parallel", "parallel"]),
        count=st.integers(1, 6),
        skips=st.integers(0, 3),
        via=st.booleans(),
        waves=st.integers(1, 4),
        on_straggler=st.sampled_from(["later", "skip"]),
    )
    def submit(self, policy, count, skips, via, waves, on_straggler):
        for _ in range(count):
            request = self.sim.submit(
                policy=policy,
                budget=BUDGET,
                max_skips=skips,
                via_source=via and policy != "parallel",
                waves_wanted=waves,
                on_straggler=on_straggler,
            )
            self.asked[request] = (policy, skips)

    @rule(seconds=st.sampled_from([0.001, 0.004, 0.02, 0.3, 1.0]))
    def wait(self, seconds):
        self.sim.run(seconds)

    @rule(name=names)
    def kill_or_restart(self, name):
        if self.process(name).alive:
            self.sim.kill(name)
        else:
            self.sim.restart(name)

    @rule(name=names)
    def stop_or_continue(self, name):
        if self.process(name).alive:
            (self.sim.cont if self.process(name).stopped else self.sim.stop)(name)

    @rule(name=names, hangs=st.booleans())
    def engine(self, name, hangs):
        if self.process(name).alive:
            self.sim.hang_engine(name, hangs=hangs)

    @rule(name=names)
    def drain(self, name):
        if self.process(name).alive and not self.process(name).stopped:
            self.sim.drain(name)

    @rule(a=st.sampled_from((SOURCE, *NAMES)), b=names)
    @precondition(lambda self: hasattr(self, "sim"))
    def cut_or_restore(self, a, b):
        if a != b:
            (self.sim.restore if self.sim.is_cut(a, b) else self.sim.cut)(a, b)

    @invariant()
    def bounded(self):
        if not hasattr(self, "sim"):
            return
        for process in self.sim.processes.values():
            machine = process.machine
            if isinstance(machine.rules, PeerRules):
                limits = machine.limits
                assert len(machine.held) <= 2 * limits.credits + limits.custody

    def teardown(self):
        if not hasattr(self, "sim"):
            return
        self.sim.run(BUDGET + 0.5)
        assert not self.sim.source.rules.requests
        assert not self.sim.source.held
        assert set(self.sim.outcomes) == set(self.asked)
        for request, outcomes in self.sim.outcomes.items():
            policy, skips = self.asked[request]
            assert len(outcomes) == 1
            outcome = outcomes[0]
            order = ran(outcome)
            assert len(set(order)) == len(order)
            assert len(outcome.itinerary.skipped) <= skips
            assert not self.bands.fault(outcome.itinerary.arrangement, outcome.itinerary.remaining)
            if isinstance(outcome, Complete):
                assert sorted([*order, *outcome.itinerary.skipped]) == list(range(BLOCKS))
                assert outcome.tokens == tuple(order)
                assert bool(outcome.why_skipped) == bool(outcome.itinerary.skipped)
                assert all(b in self.held[h] for w in outcome.itinerary.waves for t in w for b, h in t)
                if policy == "sequential":
                    assert order == list(range(BLOCKS))
            else:
                assert isinstance(outcome, Fail)
        self.sim.run(BUDGET)
        for process in self.sim.processes.values():
            if process.alive and not process.stopped:
                assert not process.machine.held
                validate(process.machine)
        self.recovers()

    def recovers(self):
        """With everything mended, all is answered in full, in trained order."""
        self.sim.send_failures = 0.0
        for name in NAMES:
            process = self.process(name)
            if process.alive:
                self.sim.kill(name)
        for a, b in itertools.combinations((SOURCE, *NAMES), 2):
            if self.sim.is_cut(a, b):
                self.sim.restore(a, b)
        for name in NAMES:
            self.sim.restart(name)
        self.sim.run(0.3)
        held = {block for blocks in self.held.values() for block in blocks}
        if held != set(range(BLOCKS)):
            return
        requests = [self.sim.submit(policy="sequential", budget=BUDGET) for _ in range(3)]
        self.sim.settle()
        for request in requests:
            (outcome,) = self.sim.outcomes[request]
            assert isinstance(outcome, Complete)
            assert ran(outcome) == list(range(BLOCKS))


TestFaults = Faults.TestCase
TestFaults.settings = settings(
    max_examples=150, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
