"""Requests of one site in simulated time, and their outcomes.

Runs the routing machines of peers and sources, with the times of engines and links from profiles. Without a rate,
a fixed number of requests is in flight, and the next one is submitted when one ends (a closed loop). With a rate,
requests arrive at random times (a Poisson process) and wait if too many are in flight.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator

import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.core.records import hops_of
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, SiteOutcome
from ls_edge.runtime.fleet.planning.problem import Placement, PlanningProblem
from ls_edge.runtime.fleet.simulation.sites import Site
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.simulator.churn import ChurnProcess
from ls_edge.runtime.simulator.simulation import Simulation
from ls_edge.runtime.source.arrivals import poisson_arrivals

_CONTROL_S = 0.0002
"""Transfer time of messages without tokens."""
_GREET_S = 0.4
"""Simulated seconds in which all processes exchange their states."""
_SETTLE_S = 1.0
"""Simulated seconds before the first request, in which heartbeats detect the devices that are down at the start."""
_REPORT_EVERY = 50


def simulate_site(site: Site, on_step: Callable[[int], None] = lambda _over: None) -> SiteOutcome:
    """Simulate the requests of one site; the same site gives the same outcome.

    ``on_step`` is called repeatedly with the number of requests that have ended.
    """
    return _SiteRun(site).run(on_step)


def simulation_of(problem: PlanningProblem, placement: Placement, seed: int) -> Simulation:
    """Return the simulation of a placement after all processes have exchanged their states."""
    held = {name: parts for name, parts in placement.items() if parts}
    devices = problem.processes
    links_s = {name: max(0.0, device.visit_ms - device.runtime_ms) / 1e3 for name, device in devices.items()}
    sim = Simulation(
        held,
        blocks=problem.num_blocks,
        seed=seed,
        latency=_CONTROL_S,
        block_seconds={name: devices[name].block_ms / 1e3 for name in held},
        transfers=lambda sender, to: (links_s[sender] + links_s[to]) / 2,
        wire={name: device.wire_ms / 1e3 for name, device in devices.items()},
        max_batch={name: devices[name].max_batch for name in held},
        image_share=problem.image_share,
        logits_share=problem.logits_share,
        engine_seconds=lambda name, parts, images: devices[name].weight(parts) * devices[name].call_ms(images) / 1e3,
        call_seconds={name: device.runtime_ms / 1e3 for name, device in devices.items()},
        bands=Bands(problem.num_blocks, tuple(band[0] for band in problem.bands[1:])),
    )
    sim.run(_GREET_S)
    return sim


class _SiteRun:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._rng = random.Random(f"{site.settings.seed} {site.number}")
        self._sim = simulation_of(site.problem, site.placement, self._rng.getrandbits(32))
        self._sim.on_end = self._end
        self._source_s, self._source_free = site.problem.source_ms(site.placement) / 1e3, 0.0
        self._budget_s = site.settings.budget_ms / 1e3
        self._submitted = self._under_way = self._over = 0
        self._waiting: deque[int] = deque()
        """Requests that wait because too many are in flight."""
        self._sent: list[int] = []
        """Number of the request, by its number in the simulation."""
        self._start = 0.0
        """Time of the first request; losses begin earlier."""
        self._used = [name for name, parts in site.placement.items() if parts]
        self._outcome = SiteOutcome(
            submitted_s=np.zeros(site.requests),
            latency_s=np.zeros(site.requests),
            states=np.full(site.requests, FAILED, dtype=np.uint8),
            devices=Counter(site.kinds[name] for name in self._used),
        )

    def run(self, on_step: Callable[[int], None]) -> SiteOutcome:
        sim, site, outcome = self._sim, self._site, self._outcome
        churn = None
        if site.churn is not None:
            churn = ChurnProcess(sim, site.churn, self._used, self._rng)
            sim.run(_SETTLE_S)
            churn.changes.clear()
        outcome.up = [(0.0, len(self._used) - (len(churn.down) if churn is not None else 0))]
        for name in sim.busy:
            sim.busy[name] = 0.0
        self._start = sim.now
        if site.rate is None:
            for _ in range(min(site.concurrency, site.requests)):
                self._submit()
        else:
            self._submit_next(poisson_arrivals(site.rate, self._rng))
        reported = 0
        while self._over < site.requests:
            sim.run_next()
            if self._over >= reported + _REPORT_EVERY:
                reported = self._over
                on_step(reported)
        on_step(self._over)
        outcome.seconds = float((outcome.submitted_s + outcome.latency_s).max())
        for at, change in churn.changes if churn is not None else ():
            outcome.losses += change < 0
            outcome.up.append((min(at - self._start, outcome.seconds), outcome.up[-1][1] + change))
        for name, seconds in sim.busy.items():
            outcome.busy_s[site.kinds[name]] += seconds
        return outcome

    def _submit_next(self, arrivals: Iterator[float]) -> None:
        def submit() -> None:
            self._submit()
            self._submit_next(arrivals)

        if self._submitted < self._site.requests:
            self._sim.at(max(0.0, self._start + next(arrivals) - self._sim.now), submit)

    def _submit(self) -> None:
        number = self._submitted
        self._submitted += 1
        self._outcome.submitted_s[number] = self._sim.now - self._start
        self._waiting.append(number)
        self._begin_waiting()

    def _begin_waiting(self) -> None:
        """Begin waiting requests; those ahead of a request have earlier deadlines, so it begins by its own."""
        while self._waiting and self._under_way < self._site.concurrency:
            self._under_way += 1
            self._begin(self._waiting.popleft())

    def _begin(self, number: int) -> None:
        """Run stem and head, one request at a time, then send the tokens; the time of the head counts in advance."""
        now = self._sim.now
        left = self._budget_s - (now - self._start - float(self._outcome.submitted_s[number]))
        wait = max(0.0, self._source_free - now) + self._source_s
        self._source_free = now + wait if wait <= left else self._source_free  # one that is late does not run
        self._sim.at(min(wait, left), lambda: self._send(number, left - wait))

    def _send(self, number: int, budget: float) -> None:
        if budget <= 0:
            self._close(number, FAILED, "BudgetExceeded")
            return
        self._sent.append(number)
        self._sim.submit(policy=self._site.settings.policy, budget=budget, max_skips=self._site.settings.max_skips)

    def _end(self, end: Complete | Fail) -> None:
        self._sim.notes.clear()
        self._sim.outcomes.pop(end.request)
        self._sim.ended.pop(end.request)
        number, outcome = self._sent[end.request], self._outcome
        outcome.retries += max(0, end.attempts - 1)
        if isinstance(end, Fail):
            self._close(number, FAILED, type(end.error).__name__)
            return
        skipped = len(end.itinerary.skipped)
        outcome.skipped += skipped
        outcome.most_skipped = max(outcome.most_skipped, skipped)
        outcome.hops += hops_of(end.itinerary.visits)
        self._close(number, DEGRADED if skipped else WHOLE)

    def _close(self, number: int, state: int, error: str = "") -> None:
        outcome = self._outcome
        outcome.states[number] = state
        outcome.latency_s[number] = self._sim.now - self._start - outcome.submitted_s[number]
        if error:
            outcome.errors[error] += 1
        self._under_way -= 1
        self._over += 1
        if self._site.rate is None and self._submitted < self._site.requests:
            self._submit()
        self._begin_waiting()
