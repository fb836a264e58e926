"""Fleet of boards that are emulated by sleeping, so that the cores of this machine are not the limit.

- *plan*: four boards of two kinds. Predicted throughput and latency of the plan and of simple placements, compared with
  measurements of peers with each placement; and one board with the whole model, in one process.
- *slow board*: three boards; one is three times slower and sometimes stalls. The policy ``sequential`` as a pipeline of
  equal parts and with two holders per block, compared with ``fastest`` on the latter and with the plan.
- *push*: three boards, two holders per block; latency of requests while a bundle is pushed to the boards, compared with
  before and after.

Images are noise, in memory. Contenders take turns; ratios are taken within rounds, results are medians over rounds.
Peers have keys, as they do off the loopback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.common import (
    BenchmarkError,
    bundle_of,
    images_for,
    in_turn,
    median,
    new_table,
    ready_source,
    report_progress,
)
from ls_edge.core.bundle import Bundle
from ls_edge.core.records import RequestRecord
from ls_edge.device.profile import DeviceProfile, LinksDocument
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.profiling import MeasuredDevice, profile_bundle
from ls_edge.runtime.clients.link_prober import LinkProber
from ls_edge.runtime.fleet.emulated_boards import EmulatedBoard, emulated_boards, emulated_profile
from ls_edge.runtime.fleet.planning.document import PlanDocument, plan_document
from ls_edge.runtime.fleet.planning.from_profiles import NamedProfile, PlanningInputs, problem_of
from ls_edge.runtime.fleet.planning.planner import plan_placement
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import load_secret
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

BAR = 1.5
"""Smallest throughput of ``fastest`` and of the plan with a slow board, relative to ``sequential``."""
BAND = 0.2
"""Largest relative difference between plan and measurement."""
NICENESS = -15
STALL_MS, STALL_PART = 200.0, 0.02
PIPELINE, SEQUENTIAL = "sequential, equal parts", "sequential, two holders"
LAPTOP = "laptop"

Placement = Mapping[str, Sequence[int]]


def run(quick: bool) -> dict[str, Any]:
    """Run all three parts."""
    path = bundle_of("vit_digits", {"depth": 6 if quick else 8})
    slowdown, count, rounds = (10.0, 12, 1) if quick else (50.0, 160, 2)
    with raised_priority() as raised:
        return {
            "raised_priority": raised,
            "plan": _plan(path, slowdown, count, rounds, quick=quick),
            "slow_board": _slow_board(path, 5.0 if quick else 20.0, count, rounds if quick else 3, quick=quick),
            "push": _push(quick=quick),
        }


# Plan.


def _plan(path: Path, slowdown: float, count: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    report_progress("  four boards of two kinds")
    kinds = ("orin-nano", "orin-nano-super") if quick else ("orin-nano",) * 2 + ("orin-nano-super",) * 2
    boards = emulated_boards(kinds, slowdown)
    here = profile_bundle(Bundle.open(path), MeasuredDevice("here"), duration=0.5, threads=1)
    profiles = {board.name: emulated_profile(here, board) for board in boards}
    paces = {board.name: Faults(least_ms=board.block_ms) for board in boards}
    document, links = _planned(path, profiles, paces)
    wanted = () if quick else ("round_robin", "equal_split", "trained_order")  # starting the processes takes long
    placements = {"plan": document.expected} | {
        name: results for name in wanted if (results := document.baselines[name]) is not None
    }
    rows: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        fleets = _Fleets(stack, path, paces)
        sources = {
            name: fleets.source(results.placement or document.placement, results.policy or "nearest")
            for name, results in placements.items()
        }
        rates: dict[str, list[float]] = {name: [] for name in sources}
        alone: dict[str, list[float]] = {name: [] for name in sources}
        for source in sources.values():
            _answers(source, max(4, count // 8), 4)
        for _, name in in_turn(tuple(sources), rounds):
            rates[name].append(_rate(_answers(sources[name], count, document.concurrency)))
            alone[name] += [record.latency_us / 1e3 for record in _answers(sources[name], max(5, count // 8), 1)]
    for name, results in placements.items():
        measured = {"throughput": median(rates[name]), "latency_ms": median(alone[name])}
        planned = {"throughput": results.throughput, "latency_ms": results.latency_ms}
        rows[name] = {
            "policy": results.policy, "planned": planned, "measured": _rounded(measured),
            "ratio": {key: round(measured[key] / value, 3) for key, value in planned.items() if value},
        }  # fmt: skip
    single = document.baselines["single"]
    assert single is not None
    assert single.device is not None
    board = next(board for board in boards if board.name == single.device)
    rows["single"] = {
        "policy": None, "planned": {"throughput": single.throughput, "latency_ms": single.latency_ms},
        "measured": _single(path, board, max(5, count // 8)),
    }  # fmt: skip
    best = max(row["measured"]["throughput"] for name, row in rows.items() if name != "plan")
    ratio = rows["plan"]["ratio"]
    return {
        "boards": list(profiles), "slowdown": slowdown, "images": count, "rounds": rounds,
        "concurrency": document.concurrency, "recommendation": document.recommendation, "reason": document.reason,
        "placement": {name: list(blocks) for name, blocks in document.placement.items()}, "rows": rows,
        "runtime_ms": {call.peer: call.mean_ms for call in links.calls},
        "plan_over_best_baseline": round(rows["plan"]["measured"]["throughput"] / best, 3),
        "holds": all(abs(value - 1) <= BAND for value in ratio.values()),
    }  # fmt: skip


def _planned(
    path: Path, profiles: Mapping[str, DeviceProfile], paces: Mapping[str, Faults]
) -> tuple[PlanDocument, LinksDocument]:
    """Return the plan for throughput, from profiles and from links measured with equal parts of the model."""
    bundle = Bundle.open(path)
    names = list(profiles)
    equal = {name: part.tolist() for name, part in zip(names, np.array_split(range(bundle.num_blocks), len(names)))}  # noqa: B905
    with (
        fleet_of_boards(path, equal, paces) as fleet,
        LinkProber(fleet.cluster.file, bundle, keys=fleet.keys) as prober,
    ):
        links = prober.measure(transfers=10, wait=30.0)
    inputs = PlanningInputs(
        tuple(NamedProfile(name, Path(name), one) for name, one in profiles.items()), links=links,
        objective="throughput",
    )  # fmt: skip
    problem, assumed = problem_of(bundle, inputs)
    # Stem and head stay at the source: only blocks are paced as boards would run them.
    devices = tuple(dataclasses.replace(device, ends_size=math.inf) for device in problem.devices)
    problem = dataclasses.replace(problem, devices=devices)
    planned = plan_placement(problem, "throughput")
    return plan_document(problem, "throughput", planned, assumed, bundle_id=bundle.manifest.bundle_id), links


def _single(path: Path, board: EmulatedBoard, count: int) -> dict[str, float]:
    """Measure stem, paced blocks and head in one process, one image after the other."""
    took = []
    with Pipeline.open(Bundle.open(path), threads=1) as pipeline:
        images = images_for(pipeline.bundle, 1)
        for _ in range(count):
            began = time.perf_counter()
            ends = pipeline.profile(images)[1]
            computed = sum(max(board.block_ms / 1e3, block) for block in ends[1:-1]) + ends[0] + ends[-1]
            time.sleep(max(0.0, began + computed - time.perf_counter()))
            took.append(time.perf_counter() - began)
    return _rounded({"throughput": len(took) / sum(took), "latency_ms": median(took) * 1e3})


# Slow board.


def _slow_board(path: Path, block_ms: float, count: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    report_progress("  three boards, one slow")
    bundle = Bundle.open(path)
    slow = Faults(least_ms=3 * block_ms, stall_ms=STALL_MS, stall_part=STALL_PART)
    paces = {"ann": Faults(least_ms=block_ms), "ben": slow, "cleo": Faults(least_ms=block_ms)}
    parts = [part.tolist() for part in np.array_split(range(bundle.num_blocks), 3)]
    two = {name: sorted({*parts[i], *parts[(i + 1) % 3]}) for i, name in enumerate(paces)}
    contenders: dict[str, tuple[Placement, str]] = {
        SEQUENTIAL: (two, "sequential"),
        "fastest, two holders": (two, "fastest"),
    }
    concurrency = 16
    if not quick:  # starting processes takes most of a quick run
        here = profile_bundle(bundle, MeasuredDevice("here"), duration=0.3, threads=1)
        boards = {name: EmulatedBoard(name, _usual_ms(pace), "this benchmark") for name, pace in paces.items()}
        document, _ = _planned(path, {name: emulated_profile(here, board) for name, board in boards.items()}, paces)
        contenders = {PIPELINE: (dict(zip(paces, parts, strict=True)), "sequential"), **contenders}
        contenders["plan"] = (document.placement, document.policy or "nearest")
        concurrency = document.concurrency
    with contextlib.ExitStack() as stack:
        fleets = _Fleets(stack, path, paces)
        sources = {name: fleets.source(placement, policy) for name, (placement, policy) in contenders.items()}
        for source in sources.values():
            _answers(source, max(4, count // 8), 4)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        took: dict[str, list[float]] = {name: [] for name in contenders}
        for _, name in in_turn(tuple(contenders), rounds):
            records = _answers(sources[name], count, concurrency)
            rates[name].append(_rate(records))
            took[name] += [record.latency_us / 1e3 for record in records]
    bases = [name for name in (PIPELINE, SEQUENTIAL) if name in rates]
    return {
        "block_ms": {name: pace.least_ms for name, pace in paces.items()},
        "stalls": {"ms": STALL_MS, "part_of_calls": STALL_PART}, "images": count, "rounds": rounds,
        "concurrency": concurrency,
        "placements": {
            name: {who: list(held) for who, held in placement.items()} for name, (placement, _) in contenders.items()
        },
        "policies": {name: policy for name, (_, policy) in contenders.items()},
        "images_per_s": {name: round(median(values), 2) for name, values in rates.items()},
        "bound_images_per_s": round(sum(1e3 / _usual_ms(pace) for pace in paces.values()) / bundle.num_blocks, 2),
        "latency_ms": {name: _percentiles(values) for name, values in took.items()},
        "over": {
            base: {name: _over(rates[name], rates[base]) for name in rates if name not in bases} for base in bases
        },
        "bar": BAR,
    }  # fmt: skip


def _usual_ms(pace: Faults) -> float:
    """Return the mean time of a block, including stalls, as a profile would show it."""
    return pace.least_ms + pace.stall_part * pace.stall_ms


# Push.


def _push(*, quick: bool) -> dict[str, Any]:
    report_progress("  requests while a bundle is pushed")
    model, args = ("vit_digits", {"depth": 6}) if quick else ("vit_small_patch32_224", {"depth": 6})
    before, after = bundle_of(model, args, "fp16"), bundle_of(model, args)
    old, new = Bundle.open(before), Bundle.open(after)
    if old.manifest.model_id != new.manifest.model_id:
        raise BenchmarkError("the two precisions are of different models; remove the cache of bundles")
    parts = [part.tolist() for part in np.array_split(range(new.num_blocks), 3)]
    two = {name: sorted({*parts[i], *parts[(i + 1) % 3]}) for i, name in enumerate(("ann", "ben", "cleo"))}
    stretch = 2.0 if quick else 12.0
    with tempfile.TemporaryDirectory() as folder:
        cluster = FaultyCluster(Path(folder) / "fleet", before, two, sources=[LAPTOP], keys=True, stores=True)
        for name in two:
            cluster.set_faults(name, Faults(least_ms=8.0))
        with cluster:
            cluster.wait_settled(timeout=60.0)
            fleet = BoardFleet(cluster, before)
            fleet.push(before)
            with fleet.source(policy="fastest", max_skips=0) as source, _Load(source, 2) as load:
                load.run(stretch)
                began = time.monotonic()
                fleet.push(after)
                ended = time.monotonic()
                load.run(stretch)
    idle = [ms for at, ms in load.took if at < began or at > ended]
    busy = [ms for at, ms in load.took if began <= at <= ended]
    ratio = {key: round(_percentiles(busy)[key] / _percentiles(idle)[key], 3) for key in ("p50", "p95")}
    return {
        "model": new.manifest.model, "push_seconds": round(ended - began, 2),
        "without": _percentiles(idle), "with": _percentiles(busy),
        "requests": {"without": len(idle), "with": len(busy)},
        "failed": load.failed, "degraded": load.degraded, "with_over_without": ratio,
    }  # fmt: skip


class _Load:
    """Load of one source with ``at_once`` requests in flight, until the end of the context."""

    def __init__(self, source: Source, at_once: int) -> None:
        self.took: list[tuple[float, float]] = []
        """Time of submission and latency in ms of each answer."""
        self.failed = self.degraded = 0
        self._source, self._images = source, images_for(source.bundle, 8)
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(at_once)]

    def run(self, seconds: float) -> None:
        """Keep up the load for ``seconds``."""
        time.sleep(seconds)

    def _ask(self) -> None:
        number = 0
        while not self._over.is_set():
            began = time.monotonic()
            number += 1
            future = self._source.submit(self._images[number % 8])
            if future.exception() is not None:
                self.failed += 1
                continue
            self.degraded += future.result().degraded
            self.took.append((began, (time.monotonic() - began) * 1e3))

    def __enter__(self) -> _Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


# Shared by the three parts.


@contextlib.contextmanager
def raised_priority() -> Iterator[bool]:
    """Raise the priority of this process and its children; yield whether the system allows it.

    Boards have their cores to themselves, so other processes should not affect the results.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, min(before, NICENESS))
    except OSError:  # needs root
        yield False
        return
    try:
        yield True
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)


@dataclass
class BoardFleet:
    """Peers that are as slow as boards."""

    cluster: FaultyCluster
    path: Path

    @property
    def keys(self) -> Any:
        """Keys of the source."""
        secret = self.cluster.secret_key(LAPTOP)
        assert secret is not None
        return load_secret(secret)

    @contextlib.contextmanager
    def source(self, **settings: Any) -> Iterator[Source]:
        """Open a source."""
        with ready_source(
            self.cluster.path, self.path, secret_key=self.cluster.secret_key(LAPTOP), **settings
        ) as source:
            yield source

    def push(self, bundle: Path) -> None:
        """Push a bundle to all peers."""
        words = [sys.executable, "-m", "ls_edge", "push", "--peers", str(self.cluster.path), "--bundle", str(bundle)]
        words += ["--secret-key", str(self.cluster.secret_key(LAPTOP))]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode:
            raise BenchmarkError(f"push ended with {done.returncode}: {done.stderr.strip()}")


@contextlib.contextmanager
def fleet_of_boards(path: Path, placement: Placement, paces: Mapping[str, Faults]) -> Iterator[BoardFleet]:
    """Start warm peers with keys on the loopback, each as slow as its board."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = FaultyCluster(folder, path, placement, sources=[LAPTOP], keys=True)
        for name in placement:
            cluster.set_faults(name, paces[name])
        with cluster:
            cluster.wait_warm(timeout=120.0)
            yield BoardFleet(cluster, path)


class _Fleets:
    """Peers and sources of each placement, started on demand, until the end of a stack."""

    def __init__(self, stack: contextlib.ExitStack, path: Path, paces: Mapping[str, Faults]) -> None:
        self._stack, self._path, self._paces = stack, path, paces
        self._made: dict[str, BoardFleet] = {}

    def source(self, placement: Placement, policy: str) -> Source:
        used = {name: list(blocks) for name, blocks in sorted(placement.items()) if blocks}
        if str(used) not in self._made:
            self._made[str(used)] = self._stack.enter_context(fleet_of_boards(self._path, used, self._paces))
        return self._stack.enter_context(self._made[str(used)].source(policy=policy, max_skips=0))


def _answers(source: Source, count: int, at_once: int) -> list[RequestRecord]:
    """Return ``count`` answers in the order of submission; raise an error if one skipped blocks."""
    images = images_for(source.bundle, 8)
    gate = threading.Semaphore(at_once)
    futures = []
    for index in range(count):
        gate.acquire()
        futures.append(source.submit(images[index % 8]))
        futures[-1].add_done_callback(lambda _: gate.release())
    answers = [future.result() for future in futures]
    if any(answer.degraded for answer in answers):
        raise BenchmarkError("an answer skipped blocks; is the machine overloaded?")
    return [answer.record for answer in answers]


def _rate(records: Sequence[RequestRecord]) -> float:
    """Return answers per second, from the first submission to the last answer."""
    began = min(record.submitted_us for record in records)
    ended = max(record.submitted_us + record.latency_us for record in records)
    return len(records) / (ended - began) * 1e6


def _over(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return round(median([a / b for a, b in zip(ours, theirs, strict=True)]), 3)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)), 2) if len(values) else float("nan") for q in (50, 95)}


def _rounded(results: Mapping[str, float]) -> dict[str, float]:
    return {key: round(value, 2) for key, value in results.items()}


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    plan = document["plan"]
    table = new_table(
        f"boards {', '.join(plan['boards'])}, {plan['slowdown']:g} times slower: planned and measured",
        (
            "placement",
            "policy",
            "images/s planned",
            "measured",
            "ratio",
            "ms of one image planned",
            "measured",
            "ratio",
        ),
    )
    for name, row in plan["rows"].items():
        cells = [name.replace("_", " "), str(row["policy"] or "")]
        for key in ("throughput", "latency_ms"):
            ratio = str(row.get("ratio", {}).get(key, ""))
            cells += [f"{row['planned'][key]:.1f}", f"{row['measured'][key]:.1f}", ratio]
        table.add_row(*cells)
    console.print(
        table, f"{plan['recommendation']}: {plan['reason']}",
        f"plan over the best baseline, measured: {plan['plan_over_best_baseline']}; within {BAND:.0%} of the plan: "
        f"{'holds' if plan['holds'] else 'missed'}", sep="\n",
    )  # fmt: skip
    slow = document["slow_board"]
    table = new_table(
        f"three boards, one three times slower with stalls; concurrency {slow['concurrency']}",
        ("", "policy", "images/s", "p50 ms", "p95 ms", *(f"over {base}" for base in slow["over"])),
    )
    for name, rate in slow["images_per_s"].items():
        times = slow["latency_ms"][name]
        over = [str(ratios.get(name, "")) for ratios in slow["over"].values()]
        table.add_row(name, slow["policies"][name], str(rate), str(times["p50"]), str(times["p95"]), *over)
    console.print(
        table, f"bar {slow['bar']}; engines that never wait would answer {slow['bound_images_per_s']} images/s"
    )
    push = document["push"]
    table = new_table(
        f"requests during a push of {push['push_seconds']} s, {push['model']}", ("", "requests", "p50 ms", "p95 ms")
    )
    for name in ("without", "with"):
        table.add_row(name, str(push["requests"][name]), str(push[name]["p50"]), str(push[name]["p95"]))
    over = push["with_over_without"]
    console.print(table, f"during over without: p50 {over['p50']}, p95 {over['p95']}; failed {push['failed']}")
