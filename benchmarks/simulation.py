"""Simulated fleets: what they cost, and how close they are to real peers.

- *cost*: 64 boards at four sites, each lost every hour for three minutes. Device-seconds per CPU second with one
  request a second for 100 boards, and CPU time per request with 200 a second, also of boards with half of the model.
- *scale*: 1,000 boards for an hour and 10,000 for ten minutes, in two processes: time and memory.
- *reality*: five placements by three policies on four boards that are emulated by sleeping, while one is killed and
  another is stopped; the simulation gets the times at which they were lost and back, and the same arrivals, budget
  and skips. Blocks take long, so that pauses of this machine matter little. Simulated results are medians of seeds.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import resource
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import bundle_of, images_for, median, new_table, report_progress
from benchmarks.fleet import BoardFleet, fleet_of_boards, raised_priority
from ls_edge.core.bundle import Bundle
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
from ls_edge.evaluation.simulation_summary import DEGRADED, FAILED, WHOLE, FleetSettings
from ls_edge.runtime.clients.link_prober import LinkProber
from ls_edge.runtime.fleet.emulated_boards import EmulatedBoard, emulated_profile
from ls_edge.runtime.fleet.planning.from_profiles import NamedProfile, PlanningInputs, problem_of
from ls_edge.runtime.fleet.planning.problem import PlannedDevice, PlanningProblem
from ls_edge.runtime.fleet.simulation.site_pool import process_pool, simulate_fleet
from ls_edge.runtime.fleet.simulation.site_run import simulate_site
from ls_edge.runtime.fleet.simulation.sites import Site, sites_of
from ls_edge.runtime.simulator.churn import Churn
from ls_edge.runtime.simulator.traces import Trace
from ls_edge.runtime.source.arrivals import poisson_arrivals
from tests.faults.engines import Faults

CHURN = Churn(3600.0, 180.0)
BOARD = PlannedDevice("board", 4.0, 12, visit_ms=1.6, wire_ms=0.6, runtime_ms=0.6, runtime_mean_ms=0.6)
SOURCE = PlannedDevice("source", 1.0, 0, stem_ms=1.0, visit_ms=1.0, wire_ms=0.6)
A_BOARD = 0.01
"""Images per second for each board."""
BARS = {"device_seconds": 20_000, "ms_a_request": 0.45, "minutes": 10, "megabytes": 4096, "reality": 0.15}
BLOCK_MS, BLOCKS = 80.0, 8
RATE, BUDGET_MS, SKIPS = 2.0, 10_000.0, 2
SETTLE_S = 1.0
"""Simulated time between the beginning of a trace and the first request."""
SEEDS = 5
BOARDS = ("ann", "ben", "cleo", "dan")
POLICIES = ("nearest", "fastest", "sequential")
PLACEMENTS: Mapping[str, Mapping[str, Sequence[int]]] = {
    "the whole model, twice": {"ann": range(8), "ben": range(8)},
    "halves, twice": {"ann": range(4), "ben": range(4), "cleo": range(4, 8), "dan": range(4, 8)},
    "halves, overlapping": {"ann": range(4), "ben": range(2, 6), "cleo": range(4, 8), "dan": (0, 1, 6, 7)},
    "three quarters each": {"ann": range(6), "ben": range(2, 8), "cleo": (0, 1, 4, 5, 6, 7), "dan": (*range(4), 6, 7)},
    "one whole, others parts": {"ann": range(8), "ben": range(4), "cleo": range(4, 8), "dan": range(2, 6)},
}


def run(quick: bool) -> dict[str, Any]:
    """Run all parts."""
    with raised_priority():
        return {"bars": BARS, "cost": _cost(quick), "scale": _scale(quick), "reality": _reality(quick)}


# Cost and scale.


def _sites(devices: int, rate: float, requests: int, capacity: int = 12) -> list[Site]:
    problem = PlanningProblem((dataclasses.replace(BOARD, capacity=capacity),), 12, source=SOURCE)
    settings = FleetSettings(devices=devices, requests=requests, rate=rate, max_skips=3, outage_s=CHURN.down)
    return sites_of(problem, settings, churn=[CHURN])[0]


def _cost(quick: bool) -> dict[str, Any]:
    report_progress("  cost")
    kinds = {
        "device_seconds": (64 * A_BOARD, 2304, 12),
        "ms_a_request": (200.0, 20_000, 12),
        "ms_a_request_in_halves": (200.0, 8000, 6),
    }
    found: dict[str, list[float]] = {key: [] for key in kinds}
    for turn in range(1 if quick else 3):
        for key, (rate, requests, capacity) in kinds.items():
            sites = _sites(64, rate, requests // 20 if quick else requests, capacity)
            before = time.process_time()
            outcomes = simulate_fleet(sites)
            taken = time.process_time() - before
            seconds = sum(one.seconds * len(site.kinds) for one, site in zip(outcomes, sites, strict=True))
            asked = sum(site.requests for site in sites)
            found[key].append(seconds / taken if key == "device_seconds" else 1e3 * taken / asked)
            report_progress(f"    {turn} {key}: {found[key][-1]:.3g}")
    return {key: {"median": median(values), "runs": values} for key, values in found.items()}


def _scale(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for devices, seconds in ((20, 60.0), (40, 60.0)) if quick else ((1000, 600.0), (1000, 3600.0), (10_000, 600.0)):
        report_progress(f"  {devices:,} boards for {seconds / 60:g} minutes")
        rate = devices * A_BOARD
        began, used = time.monotonic(), _cpu_s()
        with process_pool(2) as pool:
            outcomes = simulate_fleet(_sites(devices, rate, round(rate * seconds)), pool)
        states = np.concatenate([one.states for one in outcomes])
        own, child = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        rows.append(
            {
                "devices": devices, "minutes": seconds / 60, "requests": len(states),
                "lost": sum(sum(one.losses.values()) for one in outcomes), "whole": float((states == WHOLE).mean()),
                "seconds": time.monotonic() - began, "cpu_s": _cpu_s() - used, "megabytes": (own + 2 * child) / 1024,
            }
        )  # fmt: skip
    return rows


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usages)


# Reality.


def _reality(quick: bool) -> list[dict[str, Any]]:
    path = bundle_of("vit_digits", {"depth": BLOCKS})
    bundle = Bundle.open(path)
    here = profile_bundle(bundle, MeasuredDevice("here"), duration=0.3, threads=1)
    boards = [EmulatedBoard(name, BLOCK_MS, "this benchmark") for name in BOARDS]
    profiles = tuple(NamedProfile(board.name, Path(board.name), emulated_profile(here, board)) for board in boards)
    paces = {name: Faults(least_ms=BLOCK_MS) for name in BOARDS}
    rows = []
    for name, placement in list(PLACEMENTS.items())[: 1 if quick else None]:
        report_progress(f"  {name}")
        parts = {board: list(blocks) for board, blocks in placement.items()}
        with fleet_of_boards(path, parts, paces) as fleet:
            with LinkProber(fleet.cluster.file, bundle, keys=fleet.keys) as prober:
                links = prober.measure(transfers=5, wait=30.0)
            used = tuple(one for one in profiles if one.name in parts)
            problem, _ = problem_of(bundle, PlanningInputs(used, links=links, batch=1))
            for policy in POLICIES[: 1 if quick else None]:
                seconds = 8.0 if quick else 90.0
                drawn = poisson_arrivals(RATE, random.Random(f"{name} {policy}"))
                arrivals = list(itertools.takewhile(lambda at, last=seconds: at < last, drawn))  # type: ignore[misc]
                real, trace = _real(fleet, bundle, policy, arrivals, seconds)
                held = {board: tuple(blocks) for board, blocks in parts.items()}
                simulated = _simulated(problem, held, policy, trace, arrivals)
                ratios = {key: real[key] / simulated[key] for key in ("throughput", "p50", "p95")}
                rows.append(
                    {"placement": name, "policy": policy, "real": real, "simulated": simulated, "ratios": ratios}
                )
    return rows


def _real(
    fleet: BoardFleet, bundle: Bundle, policy: str, arrivals: Sequence[float], seconds: float
) -> tuple[dict[str, Any], Trace]:
    """Run requests while the second board is killed and the first one stopped; return also when they were lost."""
    stopped, killed = list(fleet.cluster.bundles)[:2]
    events: list[tuple[float, str, str]] = []
    images = images_for(bundle, 8)
    futures: list[Future[Any]] = []
    with fleet.source(policy=policy, max_skips=SKIPS, budget_ms=BUDGET_MS) as source:
        for index in range(8):
            source.submit(images[index]).result()
        began = time.monotonic()

        def lose() -> None:
            cluster = fleet.cluster
            for share, name, kind in ((0.1, killed, "kill"), (0.6, stopped, "stop")):
                time.sleep(max(0.0, began + share * seconds - time.monotonic()))
                events.append((time.monotonic() - began, name, kind))
                cluster.signal(name, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
                time.sleep(0.15 * seconds)
                if kind == "kill":
                    cluster.start(name)
                    cluster.wait_warm(name, timeout=60.0)
                else:
                    cluster.signal(name, signal.SIGCONT)
                events.append((time.monotonic() - began, name, "up"))

        with ThreadPoolExecutor(1) as others:
            losses = others.submit(lose)
            for at in arrivals:
                time.sleep(max(0.0, began + at - time.monotonic()))
                futures.append(source.submit(images[len(futures) % 8]))
            wait(futures)
            losses.result()
    known = [future.result() for future in futures if future.exception() is None]
    ends = [(one.record.submitted_us + one.record.latency_us) / 1e6 for one in known]
    found = {
        "requests": len(futures),
        "throughput": len(known) / (max(ends) - min(one.record.submitted_us for one in known) / 1e6),
        **_percentiles([one.record.latency_us / 1e3 for one in known]),
        "degraded": sum(one.degraded for one in known) / len(futures),
        "failed": 1 - len(known) / len(futures),
    }
    changes = {name: [(0.0, "up")] for name in fleet.cluster.bundles}
    for at, name, state in events:
        changes[name].append((at + SETTLE_S, state))
    return found, Trace(tuple(map(tuple, changes.values())), 1e6, 2.0)


def _simulated(
    problem: PlanningProblem,
    placement: dict[str, tuple[int, ...]],
    policy: str,
    trace: Trace,
    arrivals: Sequence[float],
) -> dict[str, Any]:
    """Return medians over seeds of requests at the same times, and the extremes of each."""
    runs = []
    kinds = {device.name: device.name for device in problem.devices}
    requests = len(arrivals)
    for seed in range(SEEDS):
        settings = FleetSettings(
            devices=len(kinds), requests=requests, policy=policy, max_skips=SKIPS, budget_ms=BUDGET_MS, seed=seed
        )
        site = Site(0, problem, placement, kinds, requests, 64, RATE, settings, [trace])
        one = simulate_site(site, arrivals=arrivals)
        answered = one.states != FAILED
        runs.append(
            {
                "throughput": one.throughput or 0.0,
                **_percentiles(1e3 * one.latency_s[answered]),
                "degraded": float((one.states == DEGRADED).mean()),
                "failed": float((one.states == FAILED).mean()),
            }
        )
    return {key: median([run[key] for run in runs]) for key in runs[0]} | {
        "range": {key: [min(run[key] for run in runs), max(run[key] for run in runs)] for key in runs[0]}
    }


def _percentiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95)}


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    cost, bars = document["cost"], document["bars"]
    for key, one in cost.items():
        runs = ", ".join(f"{value:,.3g}" for value in one["runs"])
        console.print(f"{key.replace('_', ' ')}: {one['median']:,.3g} ({runs}); bar {bars.get(key, '-')}")
    table = new_table("scale", ("boards", "minutes", "requests", "lost", "whole", "seconds", "CPU seconds", "MB"))
    for row in document["scale"]:
        table.add_row(
            f"{row['devices']:,}", f"{row['minutes']:g}", f"{row['requests']:,}", f"{row['lost']:,}",
            f"{row['whole']:.4%}", f"{row['seconds']:.0f}", f"{row['cpu_s']:.0f}", f"{row['megabytes']:.0f}",
        )  # fmt: skip
    console.print(table)
    keys = ("throughput", "p50", "p95", "degraded")
    table = new_table(
        "real peers, and medians of the simulation", ("placement", "policy", *keys, "real / simulated"),
        left=("placement", "policy"),
    )  # fmt: skip
    missed = 0
    for row in document["reality"]:
        both = [f"{row['real'][key]:.3g} / {row['simulated'][key]:.3g}" for key in keys]
        ratios = [row["ratios"][key] for key in keys[:3]]
        missed += sum(abs(ratio - 1) > bars["reality"] for ratio in ratios)
        missed += abs(row["real"]["degraded"] - row["simulated"]["degraded"]) > bars["reality"]
        table.add_row(row["placement"], row["policy"], *both, " ".join(f"{ratio:.2f}" for ratio in ratios))
    console.print(table, f"{missed} of {4 * len(document['reality'])} differ by more than {bars['reality']:.0%}")
