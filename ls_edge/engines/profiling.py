"""Measure the parts of a bundle on this device: the document of ``ls-edge bench --out``.

The parts are opened one after the other; then whole chains run for a while at each batch size. The state of the device
is read before and after, to detect throttling and its causes.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.logs import OnProgress, ignore_progress
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import EngineKind, is_name
from ls_edge.device import hardware
from ls_edge.device.profile import SCHEMA, BatchTimes, DeviceFacts, DeviceProfile, PartLoad
from ls_edge.device.requirements import installed
from ls_edge.device.sensors import DeviceState, PowerMeter, PowerReading, Sensors, throttling
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.cuda.runtime import MULTIPROCESSORS
from ls_edge.engines.executor import Executor
from ls_edge.engines.measuring import library_of, resident_bytes, taken_bytes, time_batch, time_blocks
from ls_edge.engines.opening import usable_threads
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.providers import CPU

_PACKAGES = ("ls-edge", "numpy", "onnxruntime", "onnxruntime-gpu", "tensorrt", "pyzmq")


class MeasuredDevice:
    """Facts and sensors of the device that is measured."""

    def __init__(self, name: str | None = None, sensors: Sensors | None = None) -> None:
        """Name the device, by default after the host; raise :class:`UsageError` if no peer may have this name."""
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
            gpus=[gpu.name for gpu in self.sensors.gpus() if gpu.name],
            memory_bytes=None if memory is None else round(memory[0] * 2**30),
            available_bytes=None if memory is None else round(memory[1] * 2**30),
            l4t=hardware.jetson_linux(self.sensors.root),
            power_mode=self.sensors.power_mode(),
            versions=versions,
        )


def profile_bundle(
    bundle: Bundle,
    device: MeasuredDevice | None = None,
    *,
    batches: Sequence[int] = (1,),
    duration: float = 4.0,
    threads: int | None = None,
    provider: str | None = None,
    kind: EngineKind = "auto",
    on_step: OnProgress = ignore_progress,
) -> DeviceProfile:
    """Time a bundle on this device for about ``duration`` seconds at each batch size.

    Raise :class:`UsageError` for a batch or duration that is not positive, and the errors of :meth:`Pipeline.open`.
    """
    sizes = sorted(set(batches))
    if not sizes or sizes[0] < 1 or not 0 < duration < float("inf"):
        raise UsageError(f"cannot time batches {list(batches)} for {duration} seconds; give numbers above 0")
    device = device or MeasuredDevice()
    threads = usable_threads(threads)
    steps = bundle.num_blocks + 2 + len(sizes)
    before = device.sensors.state()
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
        parts, workspace = _loads(bundle, marks), pipeline.executor.workspace
        taken = taken_bytes(sum(part.file_bytes for part in parts), resident, workspace)
        facts = msgspec.structs.replace(device.facts, multiprocessors=_multiprocessors(workspace))
        for done, size in enumerate(sizes, bundle.num_blocks + 2):
            on_step(done, steps, f"batch {size}")
            measured[size] = time_batch(pipeline, size, duration, device.sensors, visits_s=duration / 4)
    alone, power = measured[sizes[0]]
    return _document(
        bundle,
        device,
        before,
        power,
        facts,
        engine=library_of(pipeline.choice.kind),
        provider=pipeline.provider,
        threads=threads,
        batch={str(size): times for size, (times, _) in measured.items()},
        parts=parts,
        memory_bytes=taken,
        energy_mj_per_image=alone.energy_mj_per_image,
    )


def profile_blocks(
    bundle: Bundle,
    executor: Executor,
    device: MeasuredDevice,
    *,
    max_batch: int,
    duration: float,
    call: Callable[[Callable[[], object]], None],
) -> DeviceProfile:
    """Time the open blocks of a peer for ``duration`` seconds, with one image and with ``max_batch``.

    ``call`` runs a function on the thread that owns the engines. Since the engines are already open, only their GPU
    memory is known. The memory that they take counts as available: a plan replaces them.
    """
    engine = next(iter(executor.engines.values()))
    before = device.sensors.state()
    timed: dict[str, BatchTimes] = {}
    readings: list[PowerReading | None] = []
    for size in sorted({1, max_batch}):
        with PowerMeter(device.sensors) as meter:
            timed[str(size)] = time_blocks(bundle, executor, size, duration, call)
        readings.append(meter.reading)
    owners: dict[int, int] = {}
    sizes = {
        part_name(part): bundle.part(part_name(part)).bytes * (owners.setdefault(id(one), part) == part)
        for part, one in executor.engines.items()
    }
    on_cpu = engine.provider == CPU
    memory = {name: sum(bundle.memory_of([name])) if size and on_cpu else size for name, size in sizes.items()}
    workspace, free = executor.workspace, device.facts.available_bytes
    taken = taken_bytes(sum(memory.values()), None, workspace)
    if free is not None and (workspace is None or workspace.cuda.is_integrated()):
        free += taken
    return _document(
        bundle,
        device,
        before,
        readings[0],
        msgspec.structs.replace(device.facts, multiprocessors=_multiprocessors(workspace), available_bytes=free),
        engine=library_of(engine.kind),
        provider=engine.provider,
        threads=getattr(engine, "threads", 1),
        batch=timed,
        parts=[PartLoad(name, 0.0, False, size, memory[name]) for name, size in sizes.items()],
        memory_bytes=taken,
        energy_mj_per_image=None,
    )


def _document(
    bundle: Bundle,
    device: MeasuredDevice,
    before: DeviceState,
    power: PowerReading | None,
    facts: DeviceFacts,
    **measured: Any,
) -> DeviceProfile:
    """Return the profile of a measurement that ends now; ``measured`` contains its other fields."""
    after, manifest = device.sensors.state(), bundle.manifest
    slowed_by = throttling(before, after)
    return DeviceProfile(
        schema=SCHEMA,
        bundle_id=manifest.bundle_id,
        model_id=manifest.model_id,
        model=manifest.model,
        precision=manifest.precision,
        device=facts,
        power_watts=None if power is None else power.watts,
        power_scope=None if power is None else power.scope,
        power_channels={} if power is None else power.channels,
        throttled=bool(slowed_by),
        throttled_by=slowed_by,
        before=before,
        after=after,
        **measured,
    )


def _multiprocessors(workspace: CudaWorkspace | None) -> int | None:
    return None if workspace is None else workspace.cuda.attribute(MULTIPROCESSORS)


_Mark = tuple[str, float, int | None]
"""Step of opening parts, with the time and the memory of this process at its start."""


def _loads(bundle: Bundle, marks: Sequence[_Mark]) -> list[PartLoad]:
    """Return the time and memory of opening each part; both are 0 for a part that shares the engine of another."""
    built = {text.partition(":")[0] for text, *_ in marks if ":" in text}
    found: dict[str, PartLoad] = {}
    for (name, began, before), (_, ended, after) in itertools.pairwise(mark for mark in marks if ":" not in mark[0]):
        grew = None if before is None or after is None else max(0, after - before)
        load_ms, file_bytes = round((ended - began) * 1e3, 3), bundle.part(name).bytes
        found[name] = PartLoad(name, load_ms, name in built, file_bytes, grew)
    names = ["stem", *(f"block {index}" for index in range(bundle.num_blocks)), "head"]
    return [found.get(name) or PartLoad(name, 0.0, False, 0, 0) for name in names]
