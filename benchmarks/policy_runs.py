"""Sources that answer the same images in turn, over two peers with a core each, for ``tracks``.

If this process cannot choose cores, the system does: see :func:`two_cores`.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.common import BenchmarkError, local_cluster, median, ms, wait_for
from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.records import RequestRecord
from ls_edge.runtime.source.source import Source

PEERS = ("ann", "ben")
SINGLE = "one peer"
AGAIN = "one peer again"
PAUSE_S = 0.002
"""Pause between an answer and the next image, in seconds."""

Settings = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Policy and other settings, by name of the run."""
SINGLE_PEER: Settings = {SINGLE: ("nearest", {})}
Open = Callable[[PeersFile, str, Mapping[str, Any]], Source]


@dataclass
class PolicyRun:
    """A source and its answers."""

    source: Source
    records: list[RequestRecord] = field(default_factory=list)

    def ask(self, image: np.ndarray, label: int | None = None) -> None:
        """Submit one image and wait for the answer."""
        time.sleep(PAUSE_S)
        self.records.append(self.source.submit(image, label=label).result().record)


def two_cores() -> list[int]:
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


def pin(pids: Iterable[int], cores: Sequence[int]) -> None:
    """Pin all threads of each process to its core, if it has one; threads that they start later inherit it."""
    for pid, core in zip(pids, cores, strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})


def parallel(waves: Sequence[int]) -> Settings:
    """Return the name of the policy with this number of waves."""
    return {f"{n} wave{'s'[: n > 1]}": ("parallel", {"waves": n}) for n in waves}


def open_local_runs(
    stack: contextlib.ExitStack, path: Path, cores: Sequence[int], wanted: Settings
) -> dict[str, PolicyRun]:
    """Open runs over two peers on the loopback, each with all blocks and its own core."""
    bundle = Bundle.open(path)
    peers = stack.enter_context(local_cluster(path, dict.fromkeys(PEERS, range(bundle.num_blocks))))
    pin((process.pid for process in peers.processes.values()), cores)

    def opened(file: PeersFile, policy: str, more: Mapping[str, Any]) -> Source:
        return Source.open(file, bundle, policy=policy, **more)

    return open_runs(stack, peers.file, opened, {**SINGLE_PEER, **wanted})


def open_runs(stack: contextlib.ExitStack, file: PeersFile, opened: Open, wanted: Settings) -> dict[str, PolicyRun]:
    """Open a source for each setting; :data:`SINGLE` and :data:`AGAIN` use only the first peer."""
    first = msgspec.structs.replace(file, peers=file.peers[:1])
    runs = {}
    for name, (policy, more) in wanted.items():
        here = first if name in (SINGLE, AGAIN) else file
        source = stack.enter_context(opened(here, policy, {"budget_ms": 60_000.0, "max_skips": 0, **more}))
        if missing := source.wait_ready(60.0):
            raise BenchmarkError(f"no peer serves blocks {missing}")
        runs[name] = PolicyRun(source)
    for name, policy_run in runs.items():
        wait_for(partial(_linked, policy_run.source), f"peers of {name} that reach one another")
    return runs


def _linked(source: Source) -> bool:
    """Return whether all of a source's peers are warm and reach each other."""
    names = {peer.name for peer in source.peers.peers}
    return all(view.warm and names - {view.name} <= set(view.reaches) for view in source.snapshot.peers.values())


def results_of(runs: Mapping[str, PolicyRun], leave_out: int, base: str = SINGLE) -> dict[str, dict[str, Any]]:
    """Return for each run its latency, the ratio to ``base``, the splits, and the reasons against splitting."""
    basis = [record.latency_us / 1e3 for record in runs[base].records]
    result = {}
    for name, policy_run in runs.items():
        records = policy_run.records[leave_out:]
        rows = [track for record in records for visit in record.visits for track in visit.tracks]
        shapes = Counter(shape(record) for record in records)
        away = [t for record in records for v in record.visits for t in v.tracks if t.blocks and t.holder != v.holder]
        whys = Counter(t.why for t in rows if t.why)
        result[name] = {
            "ms": ms([record.latency_us / 1e6 for record in records]),
            "ratio": ratio([record.latency_us / 1e3 for record in policy_run.records], basis, leave_out),
            "shapes": dict(shapes.most_common(5)),
            "why_not": {
                why: {
                    "times": times,
                    "expected_ms": p50([t.expected_us / 1e3 for t in rows if t.why == why]),
                }
                for why, times in whys.items()
            },
            "away": {
                "expected_ms": p50([t.expected_us / 1e3 for t in away]),
                "took_ms": p50([(t.end_us - t.begin_us) / 1e3 for t in away]),
                "trip_ms": p50([(t.end_us - t.begin_us - t.queue_us - t.engine_us) / 1e3 for t in away]),
                "queue_ms": p50([t.queue_us / 1e3 for t in away]),
                "engine_ms": p50([t.engine_us / 1e3 for t in away]),
            },
            "sum_ms": {
                key: p50([sum(getattr(v, f"{key}_us") for v in r.visits) / 1e3 for r in records])
                for key in ("queue", "engine", "wait", "codec")
            }
            | {key: p50([getattr(r, f"{key}_us") / 1e3 for r in records]) for key in ("stem", "head", "hop")},
        }
    return result


def shape(record: RequestRecord) -> str:
    """Return the blocks of each track: ``6+6`` for one wave, ``3+3 3+3`` for two; a single track is one number."""
    waves = () if record.is_plain else record.waves
    return " ".join("+".join(str(len(track)) for track in wave) for wave in waves) or "one track"


def ratio(ours: Sequence[float], theirs: Sequence[float], leave_out: int) -> float:
    """Return the median over rounds of the ratio within a round; the first rounds do not count."""
    return round(median([a / b for a, b in zip(ours[leave_out:], theirs[leave_out:], strict=True)]), 4)


def p50(values: Sequence[float]) -> float | None:
    """Return the median, or None."""
    return round(median(values), 3) if values else None


def top1(found: Sequence[tuple[int | None, int | None]]) -> float:
    """Return the share of predictions that equal the labels."""
    return round(float(np.mean([prediction == label for prediction, label in found])), 4)


def cells(policy_run: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return the cells of a row: time, ratio, splits, and reasons against splitting."""
    times = policy_run["ms"]
    shapes = ", ".join(f"{what} ({n})" for what, n in list(policy_run["shapes"].items())[:2])
    whys = ", ".join(
        f"{why} ({w['times']} times, {w['expected_ms']:.1f} ms expected)" for why, w in policy_run["why_not"].items()
    )
    return (
        f"{times['p50']:.2f} ({times['p10']:.2f} to {times['p90']:.2f})", f"{policy_run['ratio']:.3f}", shapes, whys
    )  # fmt: skip
