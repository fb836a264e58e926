"""Times and memory of open engines, by part, chain, and visit; for ``bench`` and running peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import msgspec
import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.core.parts import ENDS, HEAD, STEM, part_name
from ls_edge.device.profile import BatchTimes, Times
from ls_edge.device.sensors import PowerMeter, PowerReading, Sensors
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.executor import Executor
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.reference import noise_images, noise_tokens, sample

LEAST_RUNS = 3
"""Minimum number of timed runs, however long they take."""


def time_calls(calls: Sequence[Callable[[], object]], duration: float, *, most_runs: int = 1) -> list[list[float]]:
    """Warm up, then run calls in turns for ``duration`` seconds; return the seconds of each run, by call.

    The turns alternate in direction, so that other load affects all calls. With ``most_runs`` above 1, a call runs up
    to that many times per turn, after one run that is not timed: unlike in a service, the caches still contain the
    weights of another call.
    """
    began = time.perf_counter()
    for call in calls:
        call()
    once = time.perf_counter() - began
    runs = min(most_runs, max(1, int(duration / (4 * once))))
    seconds: list[list[float]] = [[] for _ in calls]
    turn = list(zip(calls, seconds, strict=True))
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(seconds[0]) < LEAST_RUNS:
        for call, times in turn:
            if most_runs > 1:
                call()
            for _ in range(runs):
                began = time.perf_counter()
                call()
                times.append(time.perf_counter() - began)
        turn.reverse()
    return seconds


def time_batch(
    pipeline: Pipeline, size: int, duration: float, sensors: Sensors, *, visits_s: float
) -> tuple[BatchTimes, PowerReading | None]:
    """Time chains part by part for ``duration`` seconds, and visits for ``visits_s``; also return the power."""
    images = noise_images(pipeline.bundle, size)
    if not np.isfinite(pipeline.forward(images)).all():
        raise EngineError(f"{pipeline.bundle.folder} returns logits that are not finite; run 'ls-edge verify' on it")
    runs: list[list[float]] = []
    with PowerMeter(sensors) as meter:
        began = time.perf_counter()
        time_calls([lambda: runs.append(pipeline.profile(images)[1])], duration)
        seconds = time.perf_counter() - began
    power, chains = meter.reading, [sum(run) for run in runs]
    stem, *blocks, head = (Times.of(list(part)) for part in zip(*runs[1:], strict=True))
    times = BatchTimes(
        stem_ms=stem,
        head_ms=head,
        blocks_ms=blocks,
        chain_ms=Times.of(chains[1:]),
        repeats=len(chains) - 1,
        slowdown=_slowdown(chains[1:]),
        power_watts=None if power is None else power.watts,
        energy_mj_per_image=None if power is None else round(power.watts * 1e3 * seconds / (size * len(chains)), 4),
        visits_ms=time_visits(pipeline.bundle, range(pipeline.num_blocks), size, visits_s, pipeline.executor.run),
    )
    return times, power


def time_blocks(
    bundle: Bundle, executor: Executor, size: int, duration: float, call: Callable[[Callable[[], object]], None]
) -> BatchTimes:
    """Time the open blocks of a peer; ``call`` runs a function on the thread that owns the engines."""
    blocks = [part for part in executor.engines if part not in ENDS]
    if not blocks:
        raise EngineError("this peer serves no blocks; only blocks are timed")
    noise = noise_tokens(bundle, size)
    runs: list[list[float]] = []

    def run() -> None:
        seconds: list[float] = []
        executor.run(blocks, noise, None, seconds)
        runs.append(seconds)

    time_calls([lambda: call(run)], duration)
    times = dict(zip(blocks, (Times.of(list(part)) for part in zip(*runs[1:], strict=True)), strict=True))
    usual = Times(*(median(values) for values in zip(*map(msgspec.structs.astuple, times.values()), strict=True)))
    blocks_ms = [times.get(block, usual) for block in range(bundle.num_blocks)]

    def visit(chosen: Sequence[int], given: np.ndarray) -> None:
        call(lambda: executor.run(chosen, given))

    visits = time_visits(bundle, blocks, size, duration / 4, visit)
    slowdown = _slowdown([sum(run) for run in runs[1:]])
    return BatchTimes(None, None, blocks_ms, None, len(runs) - 1, slowdown, None, None, visits)


def time_visits(
    bundle: Bundle,
    blocks: Sequence[int],
    size: int,
    duration: float,
    visit: Callable[[Sequence[int], np.ndarray], object],
) -> dict[str, Times]:
    """Time visits of 1, 2 and all ``blocks``."""
    noise = noise_tokens(bundle, size)
    counts = sorted({1, min(2, len(blocks)), len(blocks)})
    seconds = time_calls([partial(visit, blocks[:count], noise) for count in counts], duration)
    return {str(count): Times.of(times) for count, times in zip(counts, seconds, strict=True)}


def _slowdown(chains: Sequence[float]) -> float:
    third = max(1, len(chains) // 3)
    return round(median(chains[-third:]) / max(median(chains[:third]), 1e-9), 4)


def reference_outputs(
    bundle: Bundle, run: Callable[[Sequence[int], np.ndarray, np.ndarray | None], np.ndarray]
) -> dict[str, np.ndarray]:
    """Return some output values of each part and of the whole chain, on noise that is the same on every machine.

    Blocks that take a slot run in the one that has their index.
    """
    image, tokens, blocks = noise_images(bundle, 1), noise_tokens(bundle, 1), range(bundle.num_blocks)
    outputs = {"stem": run((STEM,), image, None)}
    outputs |= {part_name(block): run((block,), tokens, np.array([block])) for block in blocks}
    outputs |= {"head": run((HEAD,), tokens, None), "chain": run((STEM, *blocks, HEAD), image, None)}
    return {name: sample(found) for name, found in outputs.items()}


def library_of(kind: str) -> str:
    """Return the library that runs engines of a kind, with the version of ONNX Runtime."""
    return f"onnxruntime {onnxruntime_module().__version__}" if kind == "onnx" else "tensorrt"


def taken_bytes(files: int, resident: int | None, workspace: CudaWorkspace | None) -> int:
    """Return the growth of this process since ``resident``, plus the growth of GPU memory if that is separate.

    The result is at least ``files``, the size of the open parts, since a process that reuses freed memory does not
    grow.
    """
    host = 0 if resident is None else (resident_bytes() or 0) - resident
    if workspace is None:
        return max(files, host)
    taken = workspace.taken_bytes()
    return max(files, host, taken) if workspace.cuda.is_integrated() else max(files, max(0, host) + taken)


def resident_bytes() -> int | None:
    """Return the resident memory of this process in bytes, or None without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
