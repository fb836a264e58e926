"""Throughput: peers compared with independent processes, and policies with a slow peer.

- *two peers*: a source and two peers of one engine thread, each with half of the blocks. Contenders are one process
  with two engine threads, and two processes of one thread that answer half of the images each and share nothing, the
  most that two cores can do. Also measured: two peers that both hold every block, and the minimal chain of ``chain``
  with half of the blocks in each process.
- *slow peer*: three peers, each block held by two of them; one is three times slower and sometimes stalls for 200 ms.
  The policies ``fastest`` and ``sequential`` in turn on the same peers.

Images are noise, in memory. In each round every contender answers a number of images with a fixed number of requests in
flight; filling and emptying the peers is not counted. Ratios are taken within rounds, results are medians over rounds.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.chain import minimal_chain
from benchmarks.common import (
    Child,
    bundle_of,
    images_for,
    in_turn,
    local_cluster,
    median,
    new_table,
    ready_source,
    report_progress,
)
from ls_edge.core.bundle import Bundle
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults

MODEL = "vit_small_patch16_224"
TWO_PEERS = {"deit_tiny_distilled_patch16_224": 0.90, "deit_small_distilled_patch16_224": 0.93}
"""Bar of two peers with half of the blocks each, relative to two independent processes, by model."""
BAR_ALL = 0.95
"""Bar of two peers that hold all blocks."""
SLOW = Faults(slow=3.0, stall_ms=200.0, stall_part=0.01)

Stretch = Callable[[int], float]
"""Function that answers a number of images and returns the seconds."""


def run(quick: bool) -> dict[str, Any]:
    """Run both parts."""
    tiny = bundle_of("vit_digits", {"depth": 6})
    bundle = tiny if quick else bundle_of(MODEL)
    rounds, count = (2, 12) if quick else (9, 80)
    two_peers = [(tiny, 0.9)] if quick else [(bundle_of(name), bar) for name, bar in TWO_PEERS.items()]
    return {
        "two_peers": [_two_peers(path, bar, 2 if quick else 5, 2 * count, quick=quick) for path, bar in two_peers],
        "slow_peer": _slow_peer(bundle, rounds if quick else 5, count),
    }


def _two_peers(path: Path, bar: float, rounds: int, count: int, *, quick: bool) -> dict[str, Any]:
    report_progress(f"  two peers, {path.name}")
    bundle = Bundle.open(path)
    half, blocks = bundle.num_blocks // 2, range(bundle.num_blocks)
    names = ("two peers", "two peers, all blocks", "two threads", "two processes", "minimal chain")
    with contextlib.ExitStack() as stack:
        stretches = {names[0]: stack.enter_context(_peers(path, {"ann": blocks[:half], "ben": blocks[half:]}, 8))}
        if not quick:  # starting processes takes most of a quick run
            stretches[names[1]] = stack.enter_context(_peers(path, {"ann": blocks, "ben": blocks}, 8))
        one = [stack.enter_context(Child("benchmarks.workers", "pipeline", str(path), "2"))]
        two = [stack.enter_context(Child("benchmarks.workers", "pipeline", str(path), "1")) for _ in range(2)]
        for child in (*one, *two):
            child.read()
        stretches |= {names[2]: workers(one), names[3]: workers(two)}
        pipeline = stack.enter_context(Pipeline.open(bundle, threads=1))
        chain = stack.enter_context(minimal_chain(path, pipeline, {"ann": blocks[:half], "ben": blocks[half:]}))
        stretches[names[4]] = functools.partial(chain.stretch, images_for(bundle, 8), in_flight=8)
        seconds = in_rounds(stretches, rounds, count)
    over = {name: ratio(seconds[name], seconds[names[3]]) for name in names if name in seconds and name != names[3]}
    bars = {names[0]: bar, names[1]: BAR_ALL}
    return {
        "model": bundle.manifest.model, "images": count, "rounds": rounds, "concurrency": 8,
        "images_per_s": {name: rate(values, count) for name, values in seconds.items()},
        "over_two_processes": over,
        "over_two_threads": {name: ratio(seconds[name], seconds[names[2]]) for name in names[:2] if name in seconds},
        "bars": bars,
        "holds": {name: over[name] >= bars[name] for name in bars if name in over},
    }  # fmt: skip


def _slow_peer(path: Path, rounds: int, count: int) -> dict[str, Any]:
    report_progress(f"  slow peer, {path.name}")
    bundle = Bundle.open(path)
    with contextlib.ExitStack() as stack:
        stretches = _policies(stack, path)
        seconds = in_rounds(stretches, rounds, count)
    return {
        "model": bundle.manifest.model, "images": count, "rounds": rounds, "concurrency": 8,
        "images_per_s": {name: rate(values, count) for name, values in seconds.items()},
        "fastest_over_sequential": ratio(seconds["fastest"], seconds["sequential"]),
        "slow": {"times": SLOW.slow, "stall_ms": SLOW.stall_ms, "part_of_calls": SLOW.stall_part},
    }  # fmt: skip


def _policies(stack: contextlib.ExitStack, path: Path) -> dict[str, Stretch]:
    """Open two sources of the same peers, one of which is slow."""
    peers = stack.enter_context(local_cluster(path, _two_holders(Bundle.open(path).num_blocks), kind=FaultyCluster))
    peers.set_faults("ben", SLOW)
    stretches = {}
    for policy in ("fastest", "sequential"):
        source = stack.enter_context(ready_source(peers.path, path, policy=policy))
        stretches[policy] = answering(source, images_for(source.bundle, 8), 8)
    return stretches


def _two_holders(blocks: int) -> dict[str, range | list[int]]:
    """Return a placement with each third of the blocks on two of three peers."""
    third = [range(blocks * i // 3, blocks * (i + 1) // 3) for i in range(3)]
    return {name: sorted({*third[i], *third[(i + 1) % 3]}) for i, name in enumerate(("ann", "ben", "cleo"))}


@contextlib.contextmanager
def _peers(path: Path, placement: Any, concurrency: int) -> Iterator[Stretch]:
    """Start peers and a source of them."""
    with local_cluster(path, placement) as peers, ready_source(peers.path, path) as source:
        yield answering(source, images_for(source.bundle, 8), concurrency)


def answering(source: Source, images: Sequence[Any], concurrency: int) -> Stretch:
    """Return a function that keeps that many requests in flight, and leaves out filling and emptying the peers."""

    def stretch(count: int) -> float:
        gate = threading.Semaphore(concurrency)
        answered: list[float] = []
        futures = []

        def on_answer(_: object) -> None:
            answered.append(time.perf_counter())
            gate.release()

        for index in range(count + 2 * concurrency):
            gate.acquire()
            future = source.submit(images[index % len(images)])
            future.add_done_callback(on_answer)
            futures.append(future)
        for future in futures:
            future.result()
        return answered[concurrency + count - 1] - answered[concurrency - 1]

    return stretch


def workers(children: Sequence[Child]) -> Stretch:
    """Return a function that lets each process answer an equal part of the images."""

    def stretch(count: int) -> float:
        started = time.perf_counter()
        for child in children:
            child.send(count // len(children))
        for child in children:
            child.read()
        return time.perf_counter() - started

    return stretch


def in_rounds(stretches: Mapping[str, Stretch], rounds: int, count: int) -> dict[str, list[float]]:
    """Return the seconds of ``count`` images by contender, measured in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in stretches}
    for stretch in stretches.values():
        stretch(max(2, count // 8))
    for _, name in in_turn(tuple(stretches), rounds):
        seconds[name].append(stretches[name](count))
    return seconds


def rate(seconds: Sequence[float], count: int) -> float:
    """Return the median of images per second."""
    return round(count / median(seconds), 2)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two throughputs."""
    return round(float(np.median(np.asarray(theirs) / np.asarray(ours))), 4)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    for two in document["two_peers"]:
        table = new_table(
            f"{two['model']}: images per second, concurrency {two['concurrency']}",
            ("", "images/s", "over two processes", "bar", "over two threads"),
        )
        for name, rate in two["images_per_s"].items():
            over, threads = (str(two[key].get(name, "")) for key in ("over_two_processes", "over_two_threads"))
            held = "" if name not in two["holds"] else ": holds" if two["holds"][name] else ": missed"
            bar = f"{two['bars'].get(name, '')}{held}"
            table.add_row(name, str(rate), over, bar, threads)
        console.print(table)
    slow = document["slow_peer"]
    table = new_table(f"{slow['model']}: three peers, one slow", ("policy", "images/s"))
    for name, rate in slow["images_per_s"].items():
        table.add_row(name, str(rate))
    console.print(table, f"fastest over sequential: {slow['fastest_over_sequential']}")
