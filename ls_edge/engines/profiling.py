"""Measure what a bundle takes on this device: the document of ``ls-edge profile``.

The parts are opened one after the other, then whole chains of them run for a while at each batch size. The state of the
device is read before and after; a device that throttled between the two is marked, with what it was slowed down by.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.core.peers_file import EngineKind, is_name
from ls_edge.device import hardware
from ls_edge.device.profile import SCHEMA, BatchTimes, DeviceFacts, DeviceProfile, PartLoad, Times
from ls_edge.device.sensors import PowerMeter, PowerReading, Sensors, throttling
from ls_edge.engines.engine import Engine
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.engines.opening import EngineChoice, EngineMemory, choose, open_engine, usable_threads
from ls_edge.engines.pipeline import Pipeline

IDLE_S = 1.0
"""For how long the power of the idle device is measured: longer averages more, and everybody waits for it."""
_PACKAGES = ("ls-edge", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "pyzmq")

OnStep = Callable[[int, int, str], None]
"""Called with steps that are done, all steps, and what comes next."""


def profile_bundle(
    bundle: Bundle,
    *,
    name: str | None = None,
    batches: Sequence[int] = (1,),
    duration: float = 4.0,
    threads: int | None = None,
    provider: str | None = None,
    kind: EngineKind = "auto",
    sensors: Sensors | None = None,
    on_step: OnStep = lambda _done, _total, _text: None,
) -> DeviceProfile:
    """Time a bundle on this device for about ``duration`` seconds at each batch size.

    ``name`` is what the device is called, its host name where it is left out. Raises :class:`UsageError` for a batch or
    duration that is not positive or a name that ``peers.yaml`` does not allow, else as :meth:`Pipeline.open`.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1 or not 0 < duration < float("inf"):
        raise UsageError(f"batches {list(batches)} for {duration} seconds cannot be timed; all must be above 0")
    facts = _facts(name, sensors := sensors or Sensors())
    threads = usable_threads(threads)
    choice = choose(bundle, kind, provider)
    steps = bundle.num_blocks + 2 + len(sizes)
    before = sensors.state()
    on_step(0, steps, "idle")
    idle = _idle_power(sensors)
    resident = _resident_bytes()
    pipeline, parts = _open(bundle, choice, sizes[-1], threads, lambda done, text: on_step(done, steps, text))
    with pipeline:
        taken = None if resident is None else (_resident_bytes() or 0) - resident
        timed: dict[str, BatchTimes] = {}
        power: PowerReading | None = None
        for size in sizes:
            on_step(bundle.num_blocks + 2 + len(timed), steps, f"batch {size}")
            timed[str(size)], reading = _time_batch(pipeline, size, duration, sensors)
            power = power if timed.keys() - {str(size)} else reading
        used = pipeline.provider
    on_step(steps, steps, "done")
    after = sensors.state()
    slowed_by = throttling(before, after)
    manifest = bundle.manifest
    return DeviceProfile(
        schema=SCHEMA, bundle_id=manifest.bundle_id, model_id=manifest.model_id, model=manifest.model, device=facts,
        engine=f"onnxruntime {onnxruntime_module().__version__}" if choice.kind == "onnx" else "tensorrt",
        provider=used,
        precision=manifest.precision, threads=threads, batch=timed, parts=parts,
        memory_bytes=max(sum(part.file_bytes for part in parts), taken or 0),
        power_watts=None if power is None else power.watts, idle_watts=None if idle is None else idle.watts,
        power_scope=None if power is None else power.scope, power_channels={} if power is None else power.channels,
        energy_mj_per_image=timed[str(sizes[0])].energy_mj_per_image,
        throttled=bool(slowed_by), throttled_by=slowed_by, before=before, after=after,
    )  # fmt: skip


def _facts(name: str | None, sensors: Sensors) -> DeviceFacts:
    named = platform.node().split(".")[0] if name is None else name
    if not is_name(named):
        raise UsageError(
            f"the device's name {named!r} cannot stand in peers.yaml; give one with --name: 1 to 63 letters, digits, "
            "dots, hyphens or underscores, a letter or digit first"
        )
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    memory = hardware.memory_gib()
    return DeviceFacts(
        name=named, board=hardware.board(), cpu=hardware.cpu_name(), cores=hardware.cores(),
        cpu_quota=hardware.cpu_quota(), gpus=[gpu.name for gpu in sensors.gpus()],
        memory_bytes=None if memory is None else round(memory[0] * 2**30),
        available_bytes=None if memory is None else round(memory[1] * 2**30),
        l4t=sensors.l4t(), power_mode=sensors.power_mode(), battery_wh=sensors.battery_wh(), versions=versions,
    )  # fmt: skip


def _idle_power(sensors: Sensors) -> PowerReading | None:
    if not sensors.has_power:
        return None
    with PowerMeter(sensors) as meter:
        time.sleep(IDLE_S)
    return meter.reading


def _open(
    bundle: Bundle, choice: EngineChoice, max_batch: int, threads: int, on_part: Callable[[int, str], None]
) -> tuple[Pipeline, list[PartLoad]]:
    """Open stem, blocks and head, each timed and with what the process grew by."""
    names = ["stem", *(f"block {index}" for index in range(bundle.num_blocks)), "head"]
    memory = EngineMemory(bundle, max_batch)
    engines: list[Engine] = []
    parts: list[PartLoad] = []
    try:
        for number, name in enumerate(names):
            on_part(len(engines), name)
            owner = bundle.owners[number - 1] + 1 if 0 < number < len(names) - 1 else number
            if owner < number:  # blocks that share their weights have one engine
                engines.append(engines[owner])
                parts.append(PartLoad(name, 0.0, False, 0, 0))
                continue
            built: list[str] = []
            resident, began = _resident_bytes(), time.perf_counter()
            engine = open_engine(
                bundle, name, kind=choice.kind, provider=choice.named_provider, threads=threads, memory=memory,
                on_status=built.append,
            )  # fmt: skip
            seconds, now = time.perf_counter() - began, _resident_bytes()
            engines.append(engine)
            grew = None if resident is None or now is None else max(0, now - resident)
            parts.append(PartLoad(name, round(seconds * 1e3, 3), bool(built), bundle.part(name).bytes, grew))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return Pipeline(bundle, engines[0], engines[1:-1], engines[-1]), parts


def _time_batch(
    pipeline: Pipeline, size: int, duration: float, sensors: Sensors
) -> tuple[BatchTimes, PowerReading | None]:
    """Run chains for about ``duration`` seconds, three at least; the first ones warm up and do not count."""
    side = pipeline.bundle.manifest.image.size
    images = np.random.default_rng(0).standard_normal((size, 3, *side), dtype=np.float32)
    for _ in range(2):
        logits = pipeline.profile(images)[0]
    if not np.isfinite(logits).all():
        raise EngineError(f"{pipeline.bundle.folder} gives logits that are not finite here; run 'ls-edge verify' on it")
    runs: list[list[float]] = []
    with PowerMeter(sensors) as meter:
        began = time.perf_counter()
        while time.perf_counter() < began + duration or len(runs) < 3:
            runs.append(pipeline.profile(images)[1])
        seconds = time.perf_counter() - began
    parts = [list(part) for part in zip(*runs, strict=True)]
    chains = [sum(run) for run in runs]
    third = max(1, len(chains) // 3)
    power = meter.reading
    times = BatchTimes(
        stem_ms=Times.of(parts[0]), head_ms=Times.of(parts[-1]), blocks_ms=[Times.of(part) for part in parts[1:-1]],
        chain_ms=Times.of(chains), repeats=len(runs),
        slowdown=round(median(chains[-third:]) / max(median(chains[:third]), 1e-9), 4),
        power_watts=None if power is None else power.watts,
        energy_mj_per_image=None if power is None else round(power.watts * 1e3 * seconds / (size * len(runs)), 4),
    )  # fmt: skip
    return times, power


def _resident_bytes() -> int | None:
    """Memory of this process that is in RAM; None where /proc does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            pages = int(statm.read().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
