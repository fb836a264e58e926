"""Build a TensorRT engine from an ONNX part, on the device that will run it.

Supports TensorRT 10.3, the version of JetPack 6, to 11. The network is strongly typed: the ONNX file says which numbers
are half, int8 or float (``export --precision``). One profile for single images and one tuned for the largest batch;
for float32 files TF32 is switched off, since answers must be the same on every device. Identical blocks share
TensorRT's timing cache, so the first takes long and the others seconds.

Not run on hardware yet: names and signatures are checked against the published Python bindings of TensorRT 10.3, 10.16,
11.0 and 11.4, and the tests run this code on doubles of CUDA and TensorRT (``tests/doubles``).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from dataclasses import dataclass
from typing import Any

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.device.requirements import numbers
from ls_edge.engines.cuda.runtime import CAPABILITY_MAJOR, CAPABILITY_MINOR, cuda_runtime
from ls_edge.engines.engine import first_line, refuse_weights_elsewhere
from ls_edge.engines.tensorrt.cache import EngineCache, EngineKey, OnStatus

log = logging.getLogger("ls_edge.engines")

LEAST_MAX_BATCH = 8
"""Smallest value of the largest batch: an engine that was built without knowing ``max_batch`` serves up to this."""
PROGRESS_EVERY_S = 5.0
"""Shortest time between two lines about one build."""
WORKSPACE = 1 << 30
"""Bytes that kernels may use while they run, unless ``gpu_mem_limit`` is less."""


@dataclass(frozen=True)
class TensorRTDevice:
    """TensorRT and the GPU that engines are built for."""

    tensorrt: str
    gpu: str
    capability: str

    def __str__(self) -> str:
        return f"TensorRT {self.tensorrt} on {self.gpu}"


def tensorrt_module() -> Any:
    """Import ``tensorrt``, version 10.3 to 11; raise :class:`EngineError` if it is missing."""
    if importlib.util.find_spec("tensorrt") is None:
        raise EngineError(
            "tensorrt is not installed; follow NVIDIA's instructions for this device, or use --engine onnx"
        )
    try:
        trt = importlib.import_module("tensorrt")
    except Exception as error:
        raise EngineError(f"tensorrt does not load ({first_line(error)}); use --engine onnx") from error
    if not (10, 3) <= numbers(trt.__version__) < (12,):
        raise EngineError(
            f"tensorrt is version {trt.__version__}, this ls-edge supports 10.3 to 11; update JetPack or TensorRT, or "
            "use --engine onnx"
        )
    return trt


def this_device() -> TensorRTDevice:
    """Return TensorRT and GPU of this machine; raise :class:`EngineError` if one is missing."""
    trt, cuda = tensorrt_module(), cuda_runtime()
    number = cuda.call("cudaGetDevice", doing="looking for a GPU")
    name = cuda.call("cudaGetDeviceProperties", number, doing="looking at the GPU").decode(errors="replace")
    major, minor = (
        cuda.call("cudaDeviceGetAttribute", attribute, number, doing="looking at the GPU")
        for attribute in (CAPABILITY_MAJOR, CAPABILITY_MINOR)
    )
    return TensorRTDevice(trt.__version__, name.strip(), f"{major}.{minor}")


@dataclass(frozen=True)
class EngineOptions:
    """Everything that an engine depends on besides file and device; made by :meth:`of`."""

    precision: str = "fp32"
    """Precision of the bundle: ``fp32``, ``fp16`` or ``int8``."""
    max_batch: int = LEAST_MAX_BATCH
    gpu_mem_limit: int | None = None
    """Bytes of GPU memory for working memory of all engines that are opened together."""

    @classmethod
    def of(cls, bundle: Bundle, max_batch: int | None = None, gpu_mem_limit: int | None = None) -> EngineOptions:
        """Return the options for batches up to ``max_batch``, rounded up to 8, 16, 32 ..., so that few serve all."""
        largest = LEAST_MAX_BATCH
        while largest < (max_batch or 1):
            largest *= 2
        return cls(bundle.manifest.precision, largest, gpu_mem_limit)

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the builder besides the file."""
        return ("strongly typed", *(("no tf32",) if self.precision == "fp32" else ()))


PLAIN = EngineOptions()
"""Options of a float32 part without limits."""


def key_of(onnx_sha256: str, device: TensorRTDevice, options: EngineOptions) -> EngineKey:
    """Return the key of the engine of a part in the cache."""
    return EngineKey(
        onnx_sha256=onnx_sha256,
        tensorrt=device.tensorrt,
        gpu=device.gpu,
        capability=device.capability,
        profiles=((1, 1, 1), (2, options.max_batch, options.max_batch)),
        workspace=min(WORKSPACE, options.gpu_mem_limit or WORKSPACE),
        flags=options.flags,
    )


def profile_of(batch: int) -> int:
    """Return the number of the profile of :func:`key_of` for a batch size."""
    return int(batch > 1)


@dataclass(frozen=True)
class BuiltPart:
    """An engine of a part, in the cache."""

    part: str
    key: EngineKey
    plan: bytes
    built: bool
    seconds: float


def build_part(
    bundle: Bundle,
    part: str,
    options: EngineOptions,
    *,
    cache: EngineCache | None = None,
    on_status: OnStatus = lambda _: None,
    must_keep: bool = True,
) -> BuiltPart:
    """Return the engine of a part for this device, from the cache or built now; log and report the progress.

    ``ls-edge build`` and peers get all engines from here. Raises :class:`EngineError` if TensorRT, CUDA or a GPU
    is missing, or the part cannot be built or, with ``must_keep``, written.
    """
    key = key_of(bundle.part(part).sha256, this_device(), options)
    cache = cache if cache is not None else EngineCache()
    raw = bundle.read(part)
    refuse_weights_elsewhere(raw, part)
    started = time.monotonic()
    building = False

    def report(text: str) -> None:
        nonlocal building
        building = True
        log.info("engine", extra={"part": part, "status": text})
        on_status(f"{part}: {text}")

    plan = cache.get(key, lambda timing: build(raw, part, key, timing, report), report, must_keep=must_keep)
    seconds = time.monotonic() - started
    if building:
        report(f"ready after {seconds:.0f} s")
    return BuiltPart(part, key, plan, building, seconds)


def tensorrt_logger(trt: Any) -> Any:
    """Return a logger that forwards TensorRT's warnings and errors, and keeps the last error as ``logger.last``."""

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.last = ""

        def log(self, severity: Any, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                self.last = first_line(ValueError(msg))
                log.error("TensorRT", extra={"text": self.last})
            elif severity == trt.ILogger.Severity.WARNING:
                log.debug("TensorRT", extra={"text": first_line(ValueError(msg))})

    return Logger()


def _progress_monitor(trt: Any, report: OnStatus) -> Any:
    """Return an object for TensorRT's callbacks that reports phases and steps, at most every few seconds."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.reported = time.monotonic()

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self.steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            now = time.monotonic()
            if now - self.reported >= PROGRESS_EVERY_S:
                self.reported = now
                report(f"{phase_name}, step {step + 1} of {self.steps.get(phase_name, step + 1)}")
            return True

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()


def build(
    raw: bytes, part: str, key: EngineKey, timing: bytes, report: OnStatus = lambda _: None
) -> tuple[bytes, bytes]:
    """Build ``raw`` for ``key``; return the serialized engine and the updated timing cache.

    ``report`` is called every few seconds with the progress. Raises :class:`EngineError` with the name of the part if
    TensorRT cannot read or build it.
    """
    trt = tensorrt_module()
    logger = tensorrt_logger(trt)
    builder = trt.Builder(logger)
    # TensorRT 10 needs this flag; 11, in which every network is strongly typed, ignores it
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(raw):
        errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        hint = (
            "; int8 for TensorRT is exported with --engine tensorrt"
            if "ynamicQuantize" in raw.decode("latin-1")
            else ""
        )
        raise EngineError(
            f"{part}: TensorRT {trt.__version__} cannot read the file ({first_line(ValueError(*errors[:1]))}); "
            f"use --engine onnx{hint}"
        )
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, key.workspace)
    if "no tf32" in key.flags:
        config.clear_flag(trt.BuilderFlag.TF32)
    for batches in key.profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            rest = tuple(tensor.shape)[1:]
            profile.set_shape(tensor.name, *((batch, *rest) for batch in batches))
        config.add_optimization_profile(profile)
    config.progress_monitor = _progress_monitor(trt, report)
    cache = config.create_timing_cache(timing)
    config.set_timing_cache(cache, False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(
            f"{part}: TensorRT {trt.__version__} could not build an engine for {key.gpu} "
            f"({logger.last or 'it gave no reason'}); use --engine onnx, a smaller max_batch, or a larger gpu_mem_limit"
        )
    return bytes(plan), bytes(config.get_timing_cache().serialize())
