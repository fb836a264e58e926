"""Simulation of many sites, in this process, in several, or by any executor."""

from __future__ import annotations

import functools
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace

from ls_edge.core.errors import LsEdgeError
from ls_edge.evaluation.simulation_summary import SiteOutcome, whole_share
from ls_edge.runtime.fleet.simulation.site_run import simulate_site
from ls_edge.runtime.fleet.simulation.sites import Site

MOST_ROUNDS = 1000
MOST_REQUESTS = 10_000_000
"""Maximum rounds of :func:`simulate_fleet`, and requests of all of them; one round may have more."""
ROUNDS_ALIKE = 64
"""Rounds after which a fleet with whole answers to all requests, or none, is not simulated further."""


def submit_sites(
    sites: Sequence[Site], executor: Executor | None
) -> Callable[[Callable[[int], None]], list[SiteOutcome]]:
    """Submit all sites, and return a function that waits for their outcomes and reports the number of ended requests.

    Without an executor, that function runs the sites in this process.
    """
    for site in sites:
        site.check()
    if executor is None:
        return functools.partial(_run_here, sites)
    # In the main thread, an interrupt would leave a process half started, which then fails or never ends.
    with ThreadPoolExecutor(1) as starter:
        submitted = starter.submit(lambda: [executor.submit(simulate_site, site) for site in sites]).result()

    def wait(on_step: Callable[[int], None]) -> list[SiteOutcome]:
        requests = {future: site.requests for future, site in zip(submitted, sites, strict=True)}
        done = 0
        on_step(done)
        try:
            for future in as_completed(requests):
                future.result()
                done += requests[future]
                on_step(done)
            return [future.result() for future in submitted]
        except BrokenProcessPool:
            raise LsEdgeError(
                "a process of the simulation ended unexpectedly, perhaps for lack of memory; try fewer --jobs"
            ) from None

    return wait


def _run_here(sites: Sequence[Site], on_step: Callable[[int], None]) -> list[SiteOutcome]:
    found: list[SiteOutcome] = []
    done = 0
    for site in sites:
        found.append(simulate_site(site, lambda over, before=done: on_step(before + over)))  # type: ignore[misc]
        done += site.requests
    return found


def simulate_fleet(
    sites: Sequence[Site],
    executor: Executor | None = None,
    on_step: Callable[[int, int], None] = lambda _done, _total: None,
    *,
    grow: Callable[[Sequence[SiteOutcome]], float] | None = None,
    most: int = MOST_ROUNDS,
) -> list[SiteOutcome]:
    """Run all sites, and repeat that until ``grow`` returns 1, or for ``most`` rounds.

    The sites are tasks of ``executor``, or run in this process; outcomes and number of rounds are the same. ``on_step``
    is called with the numbers of ended and of all requests. ``grow`` returns the factor by which the number of outcomes
    should grow; by default, it grows until the interval is as narrow as :attr:`FleetSettings.until`. Each round has its
    own random numbers. Raise :class:`LsEdgeError` if a process ends unexpectedly.
    """
    wants = grow or functools.partial(_narrower, sites)
    outcomes: list[SiteOutcome] = []
    rounds, wanted = 0, 1
    while rounds < wanted:
        numbers = range(rounds * len(sites), wanted * len(sites))
        more = [replace(sites[number % len(sites)], number=number) for number in numbers]
        before = sum(len(one.states) for one in outcomes)
        total = before + sum(site.requests for site in more)
        outcomes += submit_sites(more, executor)(lambda done, b=before, t=total: on_step(b + done, t))  # type: ignore[misc]
        rounds = wanted
        most = min(most, MOST_REQUESTS * rounds // sum(len(one.states) for one in outcomes))
        wanted = min(most, math.ceil(wants(outcomes) * rounds))
    return outcomes


def _narrower(sites: Sequence[Site], outcomes: Sequence[SiteOutcome]) -> float:
    settings = sites[0].settings
    if settings.until is None or (found := whole_share(outcomes, settings)).spread <= settings.until:
        return 1.0
    if found.more_hours is None:
        return 2.0 if len(outcomes) < ROUNDS_ALIKE * len(sites) else 1.0
    return min(2.0, 1 + found.more_hours / found.hours)


@contextmanager
def process_pool(jobs: int) -> Iterator[Executor | None]:
    """Open an executor of ``jobs`` processes; None for a single one."""
    if jobs == 1:
        yield None
        return
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _follow_parent)
    try:
        yield pool
    except BaseException:  # nobody needs the outcomes of running sites any more
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _follow_parent() -> None:
    """Ignore Ctrl-C, which the parent process handles, and exit when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
