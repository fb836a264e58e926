"""Runs of many sites, in this process or in several."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from ls_edge.core.errors import LsEdgeError
from ls_edge.evaluation.simulation_summary import SiteOutcome
from ls_edge.runtime.fleet.simulation.site_run import simulate_site
from ls_edge.runtime.fleet.simulation.sites import Site


def simulate_sites(
    sites: Sequence[Site], jobs: int = 1, on_step: Callable[[int, int], None] = lambda _done, _total: None
) -> list[SiteOutcome]:
    """Run all sites, in ``jobs`` processes.

    ``on_step`` is called with the numbers of ended and of all requests. Raise :class:`LsEdgeError` if a
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
        # In the main thread, an interrupt would leave a process half started, which then fails or never ends.
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
    except BaseException:  # the outcomes of running sites are no longer needed
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[index] for index in range(len(sites))]


def _follow_parent() -> None:
    """Ignore Ctrl-C, which the parent process handles, and exit when that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
