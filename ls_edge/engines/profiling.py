"""Measure the parts of a bundle on this device: the document of ``ls-edge profile``.

The parts are opened one after the other; then whole chains run for a while at each batch size. The state of the device
is read before and after, to tell whether it throttled, and why.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.core.parts import ENDS, part_name
from ls_edge.core.peers_file import EngineKind, is_name
from ls_edge.device import hardware
from ls_edge.device.profile import SCHEMA, BatchTimes, DeviceFacts, DeviceProfile, PartLoad, Times
from ls_edge.device.requirements import installed
from ls_edge.device.sensors import DeviceState, PowerMeter, PowerReading, Sensors, throttling
from ls_edge.engines.cuda_memory import CudaWorkspace
from ls_edge.engines.executor import Executor
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.engines.opening import OnStep, usable_threads
from ls_edge.engines.pipeline import Pipeline

IDLE_S = 1.0
"""Seconds for which the power of the idle device is measured; a longer time averages more, but users wait for it."""
_PACKAGES = ("ls-edge", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "pyzmq")


class Device:
    """The device that is measured: its facts and its sensors."""

    def __init__(self, name: str | None = None, sensors: Sensors | None = None) -> None:
        """``name`` is the name in plans, by default the host name; raise :class:`UsageError` if no peer may have it."""
        self.sensors = sensors or Sensors()
        named = platform.node().split(".")[0] if name is None else name
        if not is_name(named):
            raise UsageError(
                f"the device's name {named!r} is not allowed in peers.yaml; give one with --name: 1 to 63 letters, "
                "digits, dots, hyphens or underscores, a letter or digit first"
            )
        versions = {"python": platform.python_version(), "kernel": platform.release()}
        versions |= {package: found for package in _PACKAGES if (found := installed(package)) is not None}
        memory = hardware.memory_gib()
        self.facts = DeviceFacts(
            name=named,
            board=hardware.board(),
            cpu=hardware.cpu_name(),
            cores=hardware.cores(),
            cpu_quota=hardware.cpu_quota(),
            gpus=[gpu.name for gpu in self.sensors.gpus()],
            memory_bytes=None if memory is None else round(memory[0] * 2**30),
            available_bytes=None if memory is None else round(memory[1] * 2**30),
            l4t=hardware.jetson_linux(self.sensors.root),
            power_mode=self.sensors.power_mode(),
            battery_wh=self.sensors.battery_wh(),
            versions=versions,
        )


def profile_bundle(
    bundle: Bundle,
    device: Device | None = None,
    *,
    batches: Sequence[int] = (1,),
    duration: float = 4.0,
    threads: int | None = None,
    provider: str | None = None,
    kind: EngineKind = "auto",
    on_step: OnStep = lambda _done, _total, _text: None,
) -> DeviceProfile:
    """Time a bundle on this device for about ``duration`` seconds at each batch size.

    Raises :class:`UsageError` for a batch or duration that is not positive, else as :meth:`Pipeline.open`.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1 or not 0 < duration < float("inf"):
        raise UsageError(f"cannot time batches {list(batches)} for {duration} seconds; give numbers above 0")
    device = device or Device()
    threads = usable_threads(threads)
    opened = bundle.num_blocks + 2
    steps = opened + len(sizes)
    before = device.sensors.state()
    on_step(0, steps, "idle")
    idle = _idle_power(device.sensors)
    resident = resident_bytes()
    marks: list[_Mark] = []

    def note(done: int, total: int, text: str) -> None:
        if done < total:
            on_step(done, steps, text)
        if (done, text) == (0, "stem"):
            marks.clear()  # the next choice of engine, after one that did not open
        marks.append((text, time.perf_counter(), resident_bytes()))

    measured: dict[int, tuple[BatchTimes, PowerReading | None]] = {}
    with Pipeline.open(
        bundle, threads=threads, provider=provider, kind=kind, max_batch=sizes[-1], on_step=note
    ) as pipeline:
        taken = taken_bytes(resident, pipeline.executor.workspace)
        for done, size in enumerate(sizes, opened):
            on_step(done, steps, f"batch {size}")
            measured[size] = _time_batch(pipeline, size, duration, device.sensors)
    on_step(steps, steps, "done")
    parts, (alone, power) = _loads(bundle, marks), measured[sizes[0]]
    return _document(
        bundle,
        device,
        before,
        power,
        engine=engine_name(pipeline.choice.kind),
        provider=pipeline.provider,
        threads=threads,
        batch={str(size): times for size, (times, _) in measured.items()},
        parts=parts,
        memory_bytes=max(sum(part.file_bytes for part in parts), taken),
        idle_watts=None if idle is None else idle.watts,
        energy_mj_per_image=alone.energy_mj_per_image,
    )


def profile_blocks(
    bundle: Bundle,
    executor: Executor,
    device: Device,
    *,
    max_batch: int,
    duration: float,
    call: Callable[[Callable[[], object]], None],
) -> DeviceProfile:
    """Time the open blocks of a peer for ``duration`` seconds at one image and at ``max_batch``.

    ``call`` runs a function on the thread that uses the engines. Idle power is unknown, and of the memory of engines
    that are open already only that of the GPU is known.
    """
    engine = next(iter(executor.engines.values()))
    before = device.sensors.state()
    timed: dict[str, BatchTimes] = {}
    readings: list[PowerReading | None] = []
    for size in sorted({1, max_batch}):
        with PowerMeter(device.sensors) as meter:
            timed[str(size)] = _time_blocks(bundle, executor, size, duration, call)
        readings.append(meter.reading)
    sizes = {name: bundle.part(name).bytes for name in map(part_name, executor.engines)}
    return _document(
        bundle,
        device,
        before,
        readings[0],
        engine=engine_name(engine.kind),
        provider=engine.provider,
        threads=getattr(engine, "threads", 1),
        batch=timed,
        parts=[PartLoad(name, 0.0, False, size, None) for name, size in sizes.items()],
        memory_bytes=max(sum(sizes.values()), taken_bytes(None, executor.workspace)),
        idle_watts=None,
        energy_mj_per_image=None,
    )


def _document(
    bundle: Bundle, device: Device, before: DeviceState, power: PowerReading | None, **measured: Any
) -> DeviceProfile:
    """Return the profile of a measurement that ends now; ``measured`` are further fields of it."""
    after, manifest = device.sensors.state(), bundle.manifest
    slowed_by = throttling(before, after)
    return DeviceProfile(
        schema=SCHEMA,
        bundle_id=manifest.bundle_id,
        model_id=manifest.model_id,
        model=manifest.model,
        precision=manifest.precision,
        device=device.facts,
        power_watts=None if power is None else power.watts,
        power_scope=None if power is None else power.scope,
        power_channels={} if power is None else power.channels,
        throttled=bool(slowed_by),
        throttled_by=slowed_by,
        before=before,
        after=after,
        **measured,
    )


def _time_blocks(
    bundle: Bundle, executor: Executor, size: int, duration: float, call: Callable[[Callable[[], object]], None]
) -> BatchTimes:
    blocks, tokens = [part for part in executor.engines if part not in ENDS], bundle.manifest.tokens
    if not blocks:
        raise EngineError("this peer serves no blocks, which alone are timed")
    noise = np.random.default_rng(0).standard_normal((size, tokens.count, tokens.dim)).astype(tokens.dtype)
    runs: list[list[float]] = []

    def run() -> None:
        seconds: list[float] = []
        executor.run(blocks, noise, None, seconds)
        runs.append(seconds)

    call(run)  # warm up
    runs.clear()
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(runs) < 3:
        call(run)
    times = dict(zip(blocks, (Times.of(list(part)) for part in zip(*runs, strict=True)), strict=True))
    usual = Times(*(median(values) for values in zip(*map(msgspec.structs.astuple, times.values()), strict=True)))
    blocks_ms = [times.get(block, usual) for block in range(bundle.num_blocks)]

    def visit(chosen: Sequence[int], given: np.ndarray) -> None:
        call(lambda: executor.run(chosen, given))

    visits = time_visits(bundle, blocks, size, duration / 4, visit)
    slowdown = _slowdown([sum(run) for run in runs])
    return BatchTimes(None, None, blocks_ms, None, len(runs), slowdown, None, None, visits)


def time_visits(
    bundle: Bundle,
    blocks: Sequence[int],
    size: int,
    duration: float,
    visit: Callable[[Sequence[int], np.ndarray], object],
) -> dict[str, Times]:
    """Time visits of 1, 2 and all ``blocks`` in turns, so that other load affects all; at least three of each."""
    tokens = bundle.manifest.tokens
    noise = np.random.default_rng(0).standard_normal((size, tokens.count, tokens.dim)).astype(tokens.dtype)
    seconds: dict[int, list[float]] = {count: [] for count in sorted({1, min(2, len(blocks)), len(blocks)})}
    for count in seconds:
        visit(blocks[:count], noise)  # warm up
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(seconds[1]) < 3:
        for count, times in seconds.items():
            began = time.perf_counter()
            visit(blocks[:count], noise)
            times.append(time.perf_counter() - began)
    return {str(count): Times.of(times) for count, times in seconds.items()}


def _slowdown(chains: Sequence[float]) -> float:
    third = max(1, len(chains) // 3)
    return round(median(chains[-third:]) / max(median(chains[:third]), 1e-9), 4)


def engine_name(kind: str) -> str:
    """Return the library that runs engines of a kind, with the version of ONNX Runtime."""
    return f"onnxruntime {onnxruntime_module().__version__}" if kind == "onnx" else "tensorrt"


_Mark = tuple[str, float, int | None]
"""Step of opening parts, and time and memory of this process at its beginning."""


def _loads(bundle: Bundle, marks: Sequence[_Mark]) -> list[PartLoad]:
    """Return time and memory of opening each part; one that shares the engine of another part took nothing."""
    built = {text.partition(":")[0] for text, *_ in marks if ":" in text}
    found: dict[str, PartLoad] = {}
    for (name, began, before), (_, ended, after) in itertools.pairwise(mark for mark in marks if ":" not in mark[0]):
        grew = None if before is None or after is None else max(0, after - before)
        load_ms, file_bytes = round((ended - began) * 1e3, 3), bundle.part(name).bytes
        found[name] = PartLoad(name, load_ms, name in built, file_bytes, grew)
    names = ["stem", *(f"block {index}" for index in range(bundle.num_blocks)), "head"]
    return [found.get(name) or PartLoad(name, 0.0, False, 0, 0) for name in names]


def _idle_power(sensors: Sensors) -> PowerReading | None:
    if not sensors.has_power:
        return None
    with PowerMeter(sensors) as meter:
        time.sleep(IDLE_S)
    return meter.reading


def time_parts(pipeline: Pipeline, size: int, duration: float) -> tuple[list[Times], list[float]]:
    """Run chains for about ``duration`` seconds, at least three.

    Return the times of stem, blocks and head, and the seconds of each chain.
    """
    images = noise_images(pipeline.bundle, size)
    runs: list[list[float]] = []
    end = time.perf_counter() + duration
    while time.perf_counter() < end or len(runs) < 3:
        runs.append(pipeline.profile(images)[1])
    return [Times.of(list(part)) for part in zip(*runs, strict=True)], [sum(run) for run in runs]


def noise_images(bundle: Bundle, batch: int) -> np.ndarray:
    """Return a batch of noise; the time of an engine does not depend on its input."""
    return np.random.default_rng(0).standard_normal((batch, 3, *bundle.manifest.image.size), dtype=np.float32)


def _time_batch(
    pipeline: Pipeline, size: int, duration: float, sensors: Sensors
) -> tuple[BatchTimes, PowerReading | None]:
    for _ in range(2):  # warm up
        logits = pipeline.forward(noise_images(pipeline.bundle, size))
    if not np.isfinite(logits).all():
        raise EngineError(f"{pipeline.bundle.folder} returns logits that are not finite; run 'ls-edge verify' on it")
    with PowerMeter(sensors) as meter:
        began = time.perf_counter()
        (stem, *blocks, head), chains = time_parts(pipeline, size, duration)
        seconds = time.perf_counter() - began
    power = meter.reading
    times = BatchTimes(
        stem_ms=stem,
        head_ms=head,
        blocks_ms=blocks,
        chain_ms=Times.of(chains),
        repeats=len(chains),
        slowdown=_slowdown(chains),
        power_watts=None if power is None else power.watts,
        energy_mj_per_image=None if power is None else round(power.watts * 1e3 * seconds / (size * len(chains)), 4),
        visits_ms=time_visits(pipeline.bundle, range(pipeline.num_blocks), size, duration / 4, pipeline.executor.run),
    )
    return times, power


def taken_bytes(resident: int | None, workspace: CudaWorkspace | None) -> int:
    """Return the growth of this process since then, and of the GPU's memory in use, which may be the same memory."""
    host = 0 if resident is None else max(0, (resident_bytes() or 0) - resident)
    if workspace is None:
        return host
    return max(host, workspace.taken_bytes()) if workspace.is_integrated else host + workspace.taken_bytes()


def resident_bytes() -> int | None:
    """Return the resident memory of this process, or None without /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
