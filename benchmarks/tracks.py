"""Latency of one image on two devices: policy ``parallel`` compared with one device that runs everything.

Two peers of one engine thread, each on its own core and with all blocks. In turn, request by request: a source that
knows the first peer only, and sources of both peers with 1, 2 and 3 waves. A ratio compares latencies of one round; the
result is the median over rounds. In the same rounds, two more processes on the same cores run engines only: all blocks
on one core, then half of them on both cores at the same time. *s* is the time of the half over the time of all, 0.5 on
two real cores. The bar is s + 0.1. If this process cannot choose cores, the system does.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.common import (
    Child,
    bundle_of,
    images_for,
    in_turn,
    local_cluster,
    median,
    ms,
    new_table,
    ready_source,
    report_progress,
    wait_for,
)
from ls_edge.core.bundle import Bundle
from ls_edge.core.records import RequestRecord
from ls_edge.runtime.source.source import Source

MODELS = ("vit_small_patch16_224", "vit_base_patch16_224")
PEERS = ("ann", "ben")
SINGLE = "one peer"
WAVES = {"1 wave": 1, "2 waves": 2, "3 waves": 3}
BAR = 0.1
"""Bar of the ratio beyond s."""
PAUSE_S = 0.002
"""Pause between an answer and the next image, in seconds."""


@dataclass
class _PolicyRun:
    """A source and its answers."""

    source: Source
    records: list[RequestRecord] = field(default_factory=list)

    def ask(self, image: np.ndarray) -> None:
        """Submit one image and wait for the answer."""
        time.sleep(PAUSE_S)
        self.records.append(self.source.submit(image).result().record)


def run(quick: bool) -> dict[str, Any]:
    """Measure ratios to one device, and times of halves of the blocks."""
    cores = _two_cores()
    paths = [bundle_of("vit_digits", {"depth": 6})] if quick else [bundle_of(model) for model in MODELS]
    return {"cores": cores, "two_cores": [_model(path, cores, 6 if quick else 60) for path in paths]}


def _model(path: Path, cores: Sequence[int], rounds: int) -> dict[str, Any]:
    report_progress(f"  two cores, {path.name}")
    bundle = Bundle.open(path)
    images = images_for(bundle, 8)
    engines: dict[str, list[float]] = {"all": [], "half": []}
    with contextlib.ExitStack() as stack:
        runs = _open_runs(stack, path, cores)
        children = [stack.enter_context(Child("benchmarks.workers", "blocks", str(path))) for _ in PEERS]
        for child in children:
            child.read()
        _pin((child.process.pid for child in children), cores)
        for index, name in in_turn((*runs, "engines"), rounds):
            if name != "engines":
                runs[name].ask(images[index % 8])
                continue
            time.sleep(PAUSE_S)
            chosen = children[index // 2 % 2]
            engines["all"] += _engines([chosen], bundle.num_blocks)
            engines["half"].append(_engines(children, bundle.num_blocks // 2)[children.index(chosen)])
    leave_out = rounds // 6
    s = _ratio(engines["half"], engines["all"], leave_out)
    results = _results(runs, leave_out)
    return {
        "model": bundle.manifest.model, "blocks": bundle.num_blocks, "rounds": rounds - leave_out,
        "engines_ms": {name: ms(values[leave_out:]) for name, values in engines.items()},
        "s": s, "bar": round(s + BAR, 4), "policy_runs": results,
        "holds": {name: each["ratio"] <= s + BAR for name, each in results.items() if name != SINGLE},
    }  # fmt: skip


def _engines(children: Sequence[Child], blocks: int) -> list[float]:
    """Return the seconds of a number of blocks on each core, all at the same time."""
    for child in children:
        child.send(blocks)
    return [child.read() for child in children]


def _two_cores() -> list[int]:
    """Return two cores that this process may use, of different physical cores if possible; empty if there are none.

    Without them, the system places the processes, and results are noisier.
    """
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = sorted(os.sched_getaffinity(0))
    first = usable[0]
    with contextlib.suppress(OSError):
        text = Path(f"/sys/devices/system/cpu/cpu{first}/topology/thread_siblings_list").read_text()
        siblings = {int(part) for part in text.strip().replace("-", ",").split(",")}
        usable = [first, *(core for core in usable if core not in siblings), *usable[1:]]
    return usable[:2] if len(usable) > 1 else []


def _pin(pids: Iterable[int], cores: Sequence[int]) -> None:
    """Pin all threads of each process to its core, if it has one; threads that they start later inherit it."""
    for pid, core in zip(pids, cores, strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})


def _open_runs(stack: contextlib.ExitStack, path: Path, cores: Sequence[int]) -> dict[str, _PolicyRun]:
    """Open a source of the first peer, and a source of both for each number of waves."""
    peers = stack.enter_context(local_cluster(path, dict.fromkeys(PEERS, "all")))
    _pin((process.pid for process in peers.processes.values()), cores)
    first = msgspec.structs.replace(peers.file, peers=peers.file.peers[:1])
    sources = {SINGLE: ready_source(first, path, max_skips=0)}
    for name, waves in WAVES.items():
        sources[name] = ready_source(peers.file, path, policy="parallel", waves=waves, max_skips=0)
    runs = {name: _PolicyRun(stack.enter_context(source)) for name, source in sources.items()}
    for name, policy_run in runs.items():
        wait_for(partial(_linked, policy_run.source), f"peers of {name} that reach one another")
    return runs


def _linked(source: Source) -> bool:
    """Return whether all of a source's peers are warm and reach each other."""
    names = {peer.name for peer in source.peers.peers}
    return all(view.warm and names - {view.name} <= set(view.reaches) for view in source.snapshot.peers.values())


def _results(runs: Mapping[str, _PolicyRun], leave_out: int) -> dict[str, dict[str, Any]]:
    """Return for each run its latency, the ratio to one peer, and the splits."""
    basis = [record.latency_us for record in runs[SINGLE].records]
    return {
        name: {
            "ms": ms([record.latency_us / 1e6 for record in policy_run.records[leave_out:]]),
            "ratio": _ratio([record.latency_us for record in policy_run.records], basis, leave_out),
            "shapes": dict(Counter(map(_shape, policy_run.records[leave_out:])).most_common(5)),
        }
        for name, policy_run in runs.items()
    }


def _shape(record: RequestRecord) -> str:
    """Return the blocks of each track: ``6+6`` for one wave, ``3+3 3+3`` for two; a single track is one number."""
    waves = () if record.is_plain else record.waves
    return " ".join("+".join(str(len(track)) for track in wave) for wave in waves) or "one track"


def _ratio(ours: Sequence[float], theirs: Sequence[float], leave_out: int) -> float:
    """Return the median over rounds of the ratio within a round; the first rounds do not count."""
    return round(median([a / b for a, b in zip(ours[leave_out:], theirs[leave_out:], strict=True)]), 4)


def show(document: dict[str, Any], console: Console) -> None:
    """Print the tables."""
    if not document["cores"]:
        console.print("processes are not pinned to cores: there are fewer than two, or the system does not allow it")
    for row in document["two_cores"]:
        table = new_table(
            f"{row['model']}, two peers on a core each, one image at a time",
            ("", "p50, ms (p10 to p90)", "ratio", "tracks of blocks", "bar"),
            left=("", "tracks of blocks"),
        )
        for name, policy_run in row["policy_runs"].items():
            times = policy_run["ms"]
            shapes = ", ".join(f"{shape} ({n})" for shape, n in list(policy_run["shapes"].items())[:2])
            bar = "" if name == SINGLE else "holds" if row["holds"][name] else "missed"
            took = f"{times['p50']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})"
            table.add_row(name, took, f"{policy_run['ratio']:.3f}", shapes, bar)
        engines = row["engines_ms"]
        console.print(
            table,
            f"engines only: all {engines['all']['p50']:.2f} ms, half on both cores {engines['half']['p50']:.2f} ms, "
            f"s {row['s']:.3f}; bar s + {BAR} = {row['bar']:.3f}",
            highlight=False,
        )
