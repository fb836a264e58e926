"""Requests of one site in simulated time, and their outcomes.

Runs the routing machines of peers and sources, with the times of engines and links from profiles. Without a rate,
a fixed number of requests is in flight, and the next one is submitted when one ends (a closed loop). With a rate,
requests arrive at random times (a Poisson process) and wait if too many are in flight.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.records import hops_of
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, Power, SiteOutcome
from ls_edge.runtime.fleet.planning.scoring import simulation_of
from ls_edge.runtime.fleet.simulation.sites import Site, battery_of
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.simulator.churn import ChurnProcess
from ls_edge.runtime.source.arrivals import poisson_arrivals

_SETTLE_S = 1.0
"""Simulated seconds before the first request, in which heartbeats detect the devices that are down at the start."""
_REPORT_EVERY = 50
_BUDGET_OVER = "BudgetExceeded"
SOURCE_LOST = "SourceLost"


def simulate_site(
    site: Site, on_step: Callable[[int], None] = lambda _over: None, arrivals: Iterable[float] | None = None
) -> SiteOutcome:
    """Simulate the requests of one site; the same site gives the same outcome.

    ``on_step`` is called repeatedly with the number of requests that have ended. ``arrivals`` are recorded times of
    requests; by default, they are drawn.
    """
    return _SiteRun(site).run(on_step, arrivals)


class _SiteRun:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._rng = random.Random(f"{site.settings.seed} {site.number}")
        seed = self._rng.getrandbits(32)
        self._sim = simulation_of(site.problem, site.placement, seed, on_average=True)
        self._sim.on_end = self._end
        self._source_s, self._source_free = site.problem.source_ms(site.placement) / 1e3, 0.0
        self._budget_s = site.settings.budget_ms / 1e3
        self._submitted = self._under_way = self._over = self._answers = 0
        self._waiting: deque[int] = deque()
        """Requests that wait because too many are in flight."""
        self._sent: list[int] = []
        """Number of the request, by its number in the simulation."""
        self._open: dict[int, None] = {}
        """Requests that have not ended."""
        self._has_source = True
        self._start = math.inf
        """Time of the first request; losses begin earlier."""
        self._drawn = random.Random(f"{seed} orders")
        self._kept = math.ceil(site.settings.execute * site.requests / site.settings.requests)
        """Number of answers whose orders are kept."""
        self._outcome = SiteOutcome(
            submitted_s=np.zeros(site.requests),
            latency_s=np.zeros(site.requests),
            states=np.full(site.requests, FAILED, dtype=np.uint8),
            devices=Counter(site.kinds.values()),
            used=sum(bool(blocks) for blocks in site.placement.values()),
            power={
                site.kinds[one.name]: Power(one.watts, one.idle_watts, one.battery_wh) for one in site.problem.devices
            },
        )

    def run(self, on_step: Callable[[int], None], arrivals: Iterable[float] | None = None) -> SiteOutcome:
        sim, site, outcome = self._sim, self._site, self._outcome
        churn = self._begin_churn()
        lost_at = dict.fromkeys(churn.down if churn is not None else (), sim.now)
        outcome.up = [(0.0, outcome.used - len(lost_at))]
        for name in sim.busy:
            sim.busy[name] = 0.0
        sim.network.carried.clear()
        self._start = sim.now
        on_step(reported := 0)
        if site.rate is None:
            self._set_source(self._has_source)
        else:
            self._submit_next(poisson_arrivals(site.rate, self._rng) if arrivals is None else iter(arrivals))
        while self._over < site.requests:
            sim.run_next()
            if self._over >= reported + _REPORT_EVERY:
                reported = self._over
                on_step(reported)
        on_step(self._over)
        outcome.seconds = float((outcome.submitted_s + outcome.latency_s).max())
        if churn is not None:
            outcome.losses = churn.losses
            outcome.has_outage |= bool(churn.losses)
            self._count_lost(churn.changes, lost_at)
            for at, _, change in churn.changes:
                if at - self._start <= outcome.seconds:
                    outcome.up.append((at - self._start, outcome.up[-1][1] + change))
        for ends, size in sim.network.carried.items():
            outcome.link_bytes[" > ".join(ends)] = round(size * site.problem.token_bytes)
        for name, seconds in sim.busy.items():
            outcome.busy_s[site.kinds[name]] = outcome.busy_s.get(site.kinds[name], 0.0) + seconds
        return outcome

    def _count_lost(self, changes: Iterable[tuple[float, str, int]], lost_at: dict[str, float]) -> None:
        """Add up the times for which devices are lost, given the time of the loss of those that are at the start."""
        lost_s, kinds, end = self._outcome.lost_s, self._site.kinds, self._start + self._outcome.seconds
        for at, name, change in (*changes, *((end, name, 1) for name in self._site.kinds)):
            if change < 0:
                lost_at[name] = at
            elif name in lost_at:
                lost_s[kinds[name]] = lost_s.get(kinds[name], 0.0) + max(0.0, min(at, end) - lost_at.pop(name))

    def _begin_churn(self) -> ChurnProcess | None:
        if not self._site.churn:
            return None
        devices = self._site.problem.devices
        churn = ChurnProcess(
            self._sim,
            self._site.churn,
            [device.name for device in devices],
            self._rng,
            idle=[name for name, blocks in self._site.placement.items() if not blocks],
            batteries={device.name: battery for device in devices if (battery := battery_of(device)) is not None},
            site=self._site.number,
            on_source=self._set_source,
        )
        self._sim.run(_SETTLE_S)
        self._outcome.has_outage = bool(churn.losses)
        churn.losses.clear()
        churn.changes.clear()
        return churn

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
        self._open[number] = None
        if not self._has_source:
            self._close(number, FAILED, SOURCE_LOST)
            return
        self._waiting.append(number)
        self._begin_waiting()
        if self._waiting:
            self._sim.at(self._budget_s, lambda: self._expire(number))

    def _set_source(self, up: bool) -> None:
        """Fail all requests of a lost source; in a closed loop, a source that returns submits again."""
        self._has_source = up
        if up:
            is_loop = self._site.rate is None and self._sim.now >= self._start
            while is_loop and self._left and len(self._open) < self._site.concurrency:
                self._submit()
            return
        self._waiting.clear()
        self._under_way, self._source_free = 0, 0.0
        for number in list(self._open):
            self._close(number, FAILED, SOURCE_LOST)

    @property
    def _left(self) -> int:
        return self._site.requests - self._submitted

    def _begin_waiting(self) -> None:
        while self._waiting and self._under_way < self._site.concurrency:
            self._under_way += 1
            self._begin(self._waiting.popleft())

    def _expire(self, number: int) -> None:
        if self._waiting and self._waiting[0] == number:  # requests ahead of it came earlier, so they have ended
            self._waiting.popleft()
            self._close(number, FAILED, _BUDGET_OVER)

    def _begin(self, number: int) -> None:
        """Run stem and head, one request at a time, then send the tokens; the time of the head counts in advance."""
        now = self._sim.now
        left = self._budget_s - (now - self._start - float(self._outcome.submitted_s[number]))
        self._source_free = max(now, self._source_free) + self._source_s
        wait = self._source_free - now
        self._sim.at(min(wait, left), lambda: self._send(number, left - wait))

    def _send(self, number: int, budget: float) -> None:
        if number not in self._open:
            return
        if budget <= 0:
            self._under_way -= 1
            self._close(number, FAILED, _BUDGET_OVER)
            return
        self._sent.append(number)
        self._sim.submit(policy=self._site.settings.policy, budget=budget, max_skips=self._site.settings.max_skips)

    def _end(self, end: Complete | Fail) -> None:
        self._sim.notes.clear()
        self._sim.outcomes.pop(end.request)
        self._sim.ended.pop(end.request)
        self._under_way -= 1
        number, outcome = self._sent[end.request], self._outcome
        outcome.retries += max(0, end.attempts - 1)
        if isinstance(end, Fail):
            self._close(number, FAILED, type(end.error).__name__)
            return
        skipped = len(end.itinerary.skipped)
        outcome.skipped += skipped
        outcome.most_skipped = max(outcome.most_skipped, skipped)
        if end.why_skipped:
            outcome.reasons[end.why_skipped] += 1
        outcome.hops += hops_of(end.itinerary.visits)
        self._keep_order(end.itinerary.arrangement)
        self._close(number, DEGRADED if skipped else WHOLE)

    def _keep_order(self, order: Arrangement) -> None:
        """Keep a uniform sample of the orders of all answers (reservoir sampling)."""
        self._answers += 1
        if len(self._outcome.orders) < self._kept:
            self._outcome.orders.append(order)
        elif self._kept and (place := self._drawn.randrange(self._answers)) < self._kept:
            self._outcome.orders[place] = order

    def _close(self, number: int, state: int, error: str = "") -> None:
        outcome = self._outcome
        outcome.states[number] = state
        outcome.latency_s[number] = self._sim.now - self._start - outcome.submitted_s[number]
        if error:
            outcome.errors[error] += 1
        self._over += 1
        del self._open[number]
        if self._has_source and self._site.rate is None and self._left:
            self._submit()
        self._begin_waiting()
