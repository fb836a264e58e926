"""A fleet in simulated time: sites of devices that come and go, and the outcome of every request.

A site is a source and the devices of its ``peers.yaml``, all linked to each other. Sites are independent, so a large
fleet is many small simulations, which may run in several processes; each depends only on its number and the seed. They
run the routing machines of peers and sources (:mod:`~ls_edge.runtime.simulator.simulation`) and simulate engines,
links and losses with the times of profiles.

Without a rate, requests run in a closed loop: each site keeps a number of them in flight and submits the next when one
ends. With a rate, they arrive at random times (a Poisson process) and wait if too many are in flight.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import multiprocessing.connection
import os
import random
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass

import numpy as np

from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.parts import shown_parts
from ls_edge.core.records import hops_of
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, SimulationContext, SiteOutcome
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.planning.scoring import requests_at_once, simulation_of
from ls_edge.runtime.routing.state.events import Complete, Fail
from ls_edge.runtime.simulator.churn import Churn, ChurnProcess
from ls_edge.runtime.source.arrivals import poisson_arrivals

SITE_SIZE = 16
"""Devices per site. All peers of a site exchange their states, so the time grows with the square."""
REPLICAS = 2
"""Holders of a block if memory has room for them; with one holder, each loss costs blocks."""
_SETTLE_S = 1.0
"""Simulated seconds between the first losses and the first request: until heartbeats have found who is down."""
_STEP_S = 0.05
_BUDGET_OVER = "BudgetExceeded"


@dataclass(frozen=True)
class FleetSettings:
    """Settings of a simulated fleet."""

    devices: int
    requests: int
    policy: str = "nearest"
    max_skips: int = 0
    budget_s: float = 10.0
    replicas: int | None = None
    """Least number of holders of a block; None for :data:`REPLICAS` if memory allows it."""
    concurrency: int | None = None
    """Concurrent requests per site; None for as many as keep its devices busy."""
    rate: float | None = None
    """Images per second of the whole fleet; None for a closed loop."""
    site_size: int = SITE_SIZE
    churn: Churn | None = None
    seed: int = 0


@dataclass(frozen=True)
class Site:
    """One site: its devices, their blocks, and its requests."""

    number: int
    problem: PlanningProblem
    placement: dict[str, tuple[int, ...]]
    kinds: dict[str, str]
    """Name of the profile by device."""
    requests: int
    concurrency: int
    rate: float | None
    """Images per second."""
    settings: FleetSettings
    costs: OrderCosts | None = None


def sites_of(
    problem: PlanningProblem, settings: FleetSettings, costs: OrderCosts | None = None
) -> tuple[list[Site], list[str]]:
    """Divide a fleet into sites of about equal size, plan each for throughput, and list the assumptions.

    ``problem`` has a device for each profile, and the devices of the fleet repeat them in turn, so all sites are
    similar. Raise :class:`UsageError` if a site has no room for the model.
    """
    count = len(problem.devices)
    if settings.devices < count:
        raise UsageError(
            f"--devices {settings.devices} is less than there are profiles ({count}); raise it, or leave profiles out"
        )
    number = math.ceil(settings.devices / settings.site_size)
    kinds = itertools.cycle(range(count))
    planned: dict[tuple[int, ...], tuple[PlanningProblem, dict[str, tuple[int, ...]], dict[str, str]]] = {}
    sites: list[Site] = []
    for site in range(number):
        size = settings.devices // number + (site < settings.devices % number)
        chosen = tuple(sorted(itertools.islice(kinds, size)))
        if chosen not in planned:
            planned[chosen] = _plan_site(problem, chosen, settings.replicas)
        requests = settings.requests // number + (site < settings.requests % number)
        if requests:
            own, placement, named = planned[chosen]
            at_once = settings.concurrency or requests_at_once(own, placement)
            rate = None if settings.rate is None else settings.rate * requests / settings.requests
            sites.append(Site(site, own, placement, named, requests, at_once, rate, settings, costs))
    return sites, _assumed(settings, sites, number, measured_links=bool(problem.links_ms))


def _assumed(settings: FleetSettings, sites: Sequence[Site], number: int, *, measured_links: bool) -> list[str]:
    assumed: list[str] = []
    if number > 1:
        assumed.append(
            f"{number:,} sites of up to {settings.site_size} devices, each with a source of its own (--site-size)"
        )
    if len(sites) < number:
        assumed.append(f"{number - len(sites):,} sites have no request and are left out")
    if measured_links and not all(site.problem.links_ms for site in sites):
        assumed.append("a link takes what those of both profiles took on average: sites have several devices of one")
    if settings.churn is None:
        assumed.append("no device is lost (--churn)")
    return assumed


def _plan_site(
    problem: PlanningProblem, chosen: Sequence[int], replicas: int | None
) -> tuple[PlanningProblem, dict[str, tuple[int, ...]], dict[str, str]]:
    """Return the problem of a site with a copy of each chosen device, its placement, and the profile of each device.

    Further devices of a profile are called ``NAME-2`` and so on. Measured links apply to a site without copies;
    otherwise a link takes the average of the links of both profiles.
    """
    devices: list[PlannedDevice] = []
    kinds: dict[str, str] = {}
    taken = {device.name for device in problem.devices}
    copies: Counter[int] = Counter()
    for index in chosen:
        copies[index] += 1
        kind = problem.devices[index].name
        name = kind
        if copies[index] > 1:
            name = next(n for i in itertools.count(copies[index]) if (n := f"{kind}-{i}") not in taken)
            taken.add(name)
        devices.append(dataclasses.replace(problem.devices[index], name=name))
        kinds[name] = kind
    same = len(devices) == len(problem.devices) and not (copies - Counter(range(len(problem.devices))))
    site = dataclasses.replace(problem, devices=tuple(devices), links_ms=problem.links_ms if same else {})
    least = REPLICAS if replicas is None else replicas
    site = dataclasses.replace(site, replicas=least)
    if replicas is None and not (site.fits(least) and least <= (problem.max_replicas or least)):
        site = dataclasses.replace(site, replicas=1)
    try:
        site.check("throughput")
    except UsageError as error:
        raise UsageError(f"a site of {len(devices)} devices: {error}, or raise --site-size") from None
    best = plan_placement(site, "throughput").best
    return site, {name: tuple(blocks) for name, blocks in best.placement.items()}, kinds


def simulate_site(site: Site, on_step: Callable[[int], None] = lambda _over: None) -> SiteOutcome:
    """Run the requests of one site; the same site gives the same outcome.

    ``on_step`` is called now and then with the number of requests that have ended.
    """
    return _SiteRun(site).run(on_step)


class _SiteRun:
    def __init__(self, site: Site) -> None:
        self._site = site
        self._rng = random.Random(f"{site.settings.seed} {site.number}")
        seed = self._rng.getrandbits(32)
        self._sim = simulation_of(site.problem, site.placement, seed, on_average=True, costs=site.costs)
        self._sim.on_end = self._end
        self._source_s, self._source_free = site.problem.source_ms(site.placement) / 1e3, 0.0
        self._submitted = self._under_way = self._over = 0
        self._waiting: deque[int] = deque()
        """Requests that wait because too many are in flight."""
        self._sent: list[int] = []
        """Number of the request by its number in the simulation."""
        self._outcome = SiteOutcome(
            submitted_s=np.zeros(site.requests),
            latency_s=np.zeros(site.requests),
            states=np.full(site.requests, FAILED, dtype=np.uint8),
            devices=Counter(site.kinds.values()),
            used=sum(bool(blocks) for blocks in site.placement.values()),
        )

    def run(self, on_step: Callable[[int], None]) -> SiteOutcome:
        sim, site, outcome = self._sim, self._site, self._outcome
        churn = self._begin_churn()
        outcome.up = [(0.0, outcome.used - (len(churn.down) if churn is not None else 0))]
        for name in sim.busy:
            sim.busy[name] = 0.0
        self._start = sim.now
        on_step(0)
        if site.rate is None:
            for _ in range(min(site.concurrency, site.requests)):
                self._submit()
        else:
            self._submit_next(poisson_arrivals(site.rate, self._rng))
        while self._over < site.requests:
            sim.run(_STEP_S)
            sim.notes.clear()
            on_step(self._over)
        outcome.seconds = float((outcome.submitted_s + outcome.latency_s).max())
        if churn is not None:
            outcome.losses = churn.losses
            for at, change in churn.changes:
                if at - self._start <= outcome.seconds:
                    outcome.up.append((at - self._start, outcome.up[-1][1] + change))
        for name, seconds in sim.busy.items():
            outcome.busy_s[site.kinds[name]] = outcome.busy_s.get(site.kinds[name], 0.0) + seconds
        return outcome

    def _begin_churn(self) -> ChurnProcess | None:
        if self._site.settings.churn is None:
            return None
        used = [name for name, blocks in self._site.placement.items() if blocks]
        churn = ChurnProcess(self._sim, self._site.settings.churn, used, self._rng)
        self._sim.run(_SETTLE_S)
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
        number, budget = self._submitted, self._site.settings.budget_s
        self._submitted += 1
        self._outcome.submitted_s[number] = self._sim.now - self._start
        self._waiting.append(number)
        self._begin_waiting()
        if self._waiting:
            self._sim.at(budget, lambda: self._expire(number))

    def _begin_waiting(self) -> None:
        while self._waiting and self._under_way < self._site.concurrency:
            self._under_way += 1
            self._begin(self._waiting.popleft())

    def _expire(self, number: int) -> None:
        if self._waiting and self._waiting[0] == number:  # those ahead of it came, and so ended, before it
            self._waiting.popleft()
            self._close(number, FAILED, _BUDGET_OVER)

    def _begin(self, number: int) -> None:
        """Run stem and head, one request after the other, and then send the tokens: the head counts as run before."""
        now = self._sim.now
        left = self._site.settings.budget_s - (now - self._start - float(self._outcome.submitted_s[number]))
        self._source_free = max(now, self._source_free) + self._source_s
        wait = self._source_free - now
        self._sim.at(min(wait, left), lambda: self._send(number, left - wait))

    def _send(self, number: int, budget: float) -> None:
        if budget <= 0:
            self._under_way -= 1
            self._close(number, FAILED, _BUDGET_OVER)
            return
        self._sent.append(number)
        self._sim.submit(policy=self._site.settings.policy, budget=budget, max_skips=self._site.settings.max_skips)

    def _end(self, end: Complete | Fail) -> None:
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
        self._close(number, DEGRADED if skipped else WHOLE)

    def _close(self, number: int, state: int, error: str = "") -> None:
        outcome = self._outcome
        outcome.states[number] = state
        outcome.latency_s[number] = self._sim.now - self._start - outcome.submitted_s[number]
        if error:
            outcome.errors[error] += 1
        self._over += 1
        if self._site.rate is None and self._submitted < self._site.requests:
            self._submit()
        self._begin_waiting()


def simulate_sites(
    sites: Sequence[Site], jobs: int = 1, on_step: Callable[[int, int], None] = lambda _done, _total: None
) -> list[SiteOutcome]:
    """Run all sites, in ``jobs`` processes.

    ``on_step`` is called with the number of requests that have ended, and of all. Raise :class:`LsEdgeError` if a
    process ends unexpectedly.
    """
    total = sum(site.requests for site in sites)
    if min(jobs, len(sites)) > 1:
        return _simulate_in_processes(sites, min(jobs, len(sites)), lambda done: on_step(done, total))
    found: list[SiteOutcome] = []
    done = 0
    for site in sites:
        found.append(simulate_site(site, lambda over, before=done: on_step(before + over, total)))  # type: ignore[misc]
        done += site.requests
    return found


def _simulate_in_processes(sites: Sequence[Site], jobs: int, on_step: Callable[[int], None]) -> list[SiteOutcome]:
    found: dict[int, SiteOutcome] = {}
    done = 0
    on_step(done)
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _follow_parent)
    try:
        # An interrupt in the main thread would leave a process half started, which then fails or never ends.
        with ThreadPoolExecutor(1) as starter:
            submitted = starter.submit(lambda: [pool.submit(simulate_site, site) for site in sites]).result()
        futures = {future: index for index, future in enumerate(submitted)}
        for future in as_completed(futures):
            index = futures.pop(future)
            found[index] = future.result()
            done += sites[index].requests
            on_step(done)
    except BrokenProcessPool:
        raise LsEdgeError(
            "a process of the simulation ended unexpectedly, perhaps for lack of memory; try fewer --jobs"
        ) from None
    except BaseException:  # nobody waits for the sites that are being run
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[index] for index in range(len(sites))]


def _follow_parent() -> None:
    """Leave Ctrl-C to the parent process, and end when it has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def simulation_context(
    sites: Sequence[Site], *, bundle_id: str, churn: str | None, assumptions: Sequence[str]
) -> SimulationContext:
    """Return the facts about a simulation that its outcomes do not contain."""
    settings = sites[0].settings
    return SimulationContext(
        bundle_id=bundle_id,
        devices=settings.devices,
        sites=len(sites),
        devices_per_site=max(len(site.kinds) for site in sites),
        seed=settings.seed,
        policy=settings.policy,
        replicas=min(site.problem.replicas for site in sites),
        concurrency=max(site.concurrency for site in sites),
        rate=settings.rate,
        placement={name: shown_parts(parts) for name, parts in sites[0].placement.items()},
        churn=churn,
        max_skips=settings.max_skips,
        budget_ms=settings.budget_s * 1e3,
        assumptions=list(assumptions),
    )
