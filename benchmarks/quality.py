"""Accuracy that the policy ``quality`` wins back if only some blocks are reachable, and its cost in time.

    python -m benchmarks quality --trained BUNDLE --data DATA

The bundle must be exported with ``--calibrate``. Two parts:

- ``reachable``: the routing machines in simulated time. Each of four peers holds a quarter of the blocks. Every link,
  including those of the source, is up or down at random, redrawn every four block times. The resulting orders of each
  policy are then computed with the bundle's engines on real images. Bar: ``quality`` wins back at least half of the
  accuracy that random orders lose compared with the trained order.
- ``peers``: the same placement with real processes on the loopback, all reachable; accuracy and latency of each policy,
  images answered in turn.

In the first part, a block takes as long as the bundle's block takes on this machine, and so does a message.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import BenchmarkError, local_cluster, new_table, report_progress
from benchmarks.policy_runs import Settings, open_runs, results_of, top1
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle
from ls_edge.core.order_costs import OrderCosts, read_order_costs
from ls_edge.core.peers_file import PeersFile
from ls_edge.data.datasets import ImageSet, image_warnings, match_classes, open_data
from ls_edge.data.preprocess import Preprocessor, iterate
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.routing.state.events import Complete
from ls_edge.runtime.simulator.simulation import SOURCE
from ls_edge.runtime.source.source import Source
from tests.faults.simulation import FaultySimulation
from tests.order_costs import cost

IMAGES = 2000
COURSES = 150
"""Simulated requests per policy; their orders are applied to the images in turn."""
PEERS = 4
TOSS = 4
"""Interval after which the links are redrawn, in block times."""
UP = 0.5
"""Probability that a link is up."""
HOP = 1.0
"""Time of a message, in block times."""
BUDGET = 10_000
"""Budget of a request, in block times."""
LEAST_BUDGET_S = 10.0
"""Smallest budget, in seconds: routing pauses for tens of milliseconds, however short a block is."""
BAR = 0.5
POLICY_SETTINGS: Settings = {
    "random": ("random", {}),
    "nearest": ("nearest", {}),
    "fastest": ("fastest", {}),
    "quality, weight 1": ("quality", {"latency_weight": 1.0}),
    "quality, weight 0": ("quality", {"latency_weight": 0.0}),
}


def run(quick: bool, *, trained: Path | None, data: str) -> dict[str, Any]:
    """Return the results of both parts."""
    if trained is None:
        raise BenchmarkError("quality needs --trained BUNDLE, one exported with --calibrate")
    bundle = Bundle.open(trained)
    costs = read_order_costs(bundle.manifest.order_costs, bundle.num_blocks)
    if costs is None:
        raise BenchmarkError(f"{trained} has no order_costs; export it again with --calibrate DATA")
    images = open_data(data, "eval")
    for warning in image_warnings(images, bundle.manifest.trained_on):
        report_progress(f"  warning: {warning}")
    images = match_classes(images.take(min(20 if quick else IMAGES, len(images))), bundle.manifest.classes)
    if not images.classes:
        raise BenchmarkError(f"{data} has no labels, which accuracy needs; name a folder of class folders or a tar")
    placement = place(bundle.num_blocks, random.Random(0))
    return {
        "bundle": trained.name, "model": bundle.manifest.model, "method": bundle.manifest.method, "data": data,
        "images": len(images), "placement": {name: list(held) for name, held in placement.items()},
        "reachable": _reachable(bundle, costs, images, placement),
        "peers": _peers(bundle, trained, images, placement),
    }  # fmt: skip


def place(blocks: int, rng: random.Random) -> dict[str, tuple[int, ...]]:
    """Return a placement on four peers, with one holder per block."""
    order = list(range(blocks))
    rng.shuffle(order)
    return {f"peer-{index}": tuple(sorted(order[index::PEERS])) for index in range(PEERS)}


def _reachable(
    bundle: Bundle, costs: OrderCosts, images: ImageSet, placement: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    with Pipeline.open(bundle, threads=1) as chain:
        arrays = [(array, image.label) for _, image, array in iterate(images, Preprocessor(bundle.manifest.image))]
        _, parts = chain.profile(arrays[0][0][None])
        _, parts = chain.profile(arrays[0][0][None])
        block_s = statistics.median(parts[1:-1])

        def accuracy(orders: Sequence[Sequence[int]]) -> float:
            answers = (
                (int(np.argmax(chain.forward(array[None], order)[0])), label)
                for (array, label), order in zip(arrays, itertools.cycle(orders), strict=False)
            )
            return top1(list(answers))

        found: dict[str, Any] = {"trained order": {"top1": accuracy([range(bundle.num_blocks)])}}
        for name, (policy, more) in POLICY_SETTINGS.items():
            report_progress(f"  {name}")
            orders, seconds = courses(
                placement,
                bundle.bands,
                costs,
                policy,
                more.get("latency_weight", 1.0),
                min(COURSES, len(arrays)),
                block_s,
            )
            found[name] = {
                "top1": accuracy(orders),
                "expected_loss": round(statistics.fmean(cost(costs, order) for order in orders), 4),
                "ms": round(statistics.median(seconds) * 1e3, 3),
            }
    gap = found["trained order"]["top1"] - found["random"]["top1"]
    for name in POLICY_SETTINGS:
        row = found[name]
        row["won_back"] = round((row["top1"] - found["random"]["top1"]) / gap, 3) if gap > 0 else None
        row["time_over_fastest"] = round(row["ms"] / found["fastest"]["ms"], 3)
    best = found["quality, weight 0"]["won_back"]
    return {
        "block_ms": round(block_s * 1e3, 3), "gap": round(gap, 4), "policy_runs": found, "bar": BAR,
        "holds": None if best is None else best >= BAR,
    }  # fmt: skip


def courses(
    placement: dict[str, tuple[int, ...]],
    bands: Bands,
    costs: OrderCosts,
    policy: str,
    latency_weight: float,
    requests: int,
    block_s: float,
) -> tuple[list[list[int]], list[float]]:
    """Simulate requests one after the other while links come and go; return their orders and times."""
    simulation = FaultySimulation(
        placement,
        blocks=len(costs.skip),
        seed=1,
        latency=HOP * block_s,
        block_seconds=block_s,
        bands=bands,
        costs=costs,
    )
    simulation.run(1.0)
    rng = random.Random(2)
    names = (*placement, SOURCE)
    pairs = [(a, b) for a in names for b in names if a < b]
    down: set[tuple[str, str]] = set()
    orders: list[list[int]] = []
    times: list[float] = []
    for _ in range(requests):
        request = simulation.submit(
            policy=policy, latency_weight=latency_weight, budget=max(BUDGET * block_s, LEAST_BUDGET_S)
        )
        start = simulation.now
        while not simulation.outcomes[request]:
            for pair in pairs:
                up = rng.random() < UP
                if up and pair in down:
                    simulation.restore(*pair)
                    down.discard(pair)
                elif not up and pair not in down:
                    simulation.cut(*pair)
                    down.add(pair)
            simulation.run(TOSS * block_s)
        outcome = simulation.outcomes[request][0]
        if not isinstance(outcome, Complete):
            raise BenchmarkError(f"a simulated request of {policy} failed: {outcome}")
        orders.append([block for wave in outcome.itinerary.waves for track in wave for block, _ in track])
        times.append(simulation.ended[request] - start)
    return orders, times


def _peers(bundle: Bundle, path: Path, images: ImageSet, placement: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    report_progress("  real peers")

    def opened(file: PeersFile, policy: str, more: Any) -> Source:
        return Source.open(file, bundle, policy=policy, **more)

    with contextlib.ExitStack() as stack:
        peers = stack.enter_context(local_cluster(path, placement))
        runs = open_runs(stack, peers.file, opened, POLICY_SETTINGS)
        started = time.monotonic()
        for index, image, array in iterate(images, next(iter(runs.values())).source.preprocess):
            for name in list(runs) if index % 2 == 0 else reversed(runs):
                runs[name].ask(array, image.label)
        seconds = time.monotonic() - started
    results = results_of(runs, len(images) // 10, base="fastest")
    return {
        "seconds": round(seconds, 1),
        "policy_runs": {
            name: {
                "top1": top1([(r.prediction, r.label) for r in policy_run.records]),
                "ms": results[name]["ms"], "time_over_fastest": results[name]["ratio"],
                "hops": round(statistics.fmean(len(r.visits) for r in policy_run.records), 2),
            }
            for name, policy_run in runs.items()
        },
    }  # fmt: skip


def show(document: dict[str, Any], console: Console) -> None:
    """Print both tables."""
    found, real = document["reachable"], document["peers"]
    title = f"{document['bundle']} on {document['images']} images of {document['data']}"
    columns = ("", "top-1", "won back", "ms", "over fastest")
    first = new_table(f"{title}: links come and go, times simulated", columns)
    second = new_table("all peers reachable, real processes", ("", "top-1", "ms", "over fastest", "hops"))
    first.add_row("trained order", f"{found['policy_runs']['trained order']['top1']:.2%}")
    for name in POLICY_SETTINGS:
        row, there = found["policy_runs"][name], real["policy_runs"][name]
        won = "" if row["won_back"] is None else f"{row['won_back']:.2f}"
        first.add_row(name, f"{row['top1']:.2%}", won, f"{row['ms']:.2f}", f"{row['time_over_fastest']:.2f}")
        second.add_row(
            name, f"{there['top1']:.2%}", f"{there['ms']['p50']:.2f}", f"{there['time_over_fastest']:.2f}",
            f"{there['hops']}",
        )  # fmt: skip
    verdict = {True: "holds", False: "missed", None: "no gap to win back"}[found["holds"]]
    console.print(first, f"bar: half of the gap of {found['gap']:.2%} won back: {verdict}", second, highlight=False)
