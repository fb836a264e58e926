"""Build of a TensorRT engine from an ONNX part, on the device that will run it.

Supports TensorRT 10.3 (JetPack 6) to 11, and TensorRT for RTX from 1.2, which builds without a GPU. The network is
strongly typed: the ONNX file determines which numbers are float16, int8, or float32 (``export --precision``). TF32 is
disabled, since float32 must give the same results on every device. There is one profile for single images and one that
is tuned for the largest batch. Identical blocks share TensorRT's timing cache, so only the first build takes long; the
others take seconds.

Not run on hardware yet. The tests build parts with TensorRT for RTX, check names and signatures against the Python
bindings of TensorRT 10.3, 10.16, 11.0, and 11.4, and run the rest on doubles of CUDA and TensorRT (``tests/doubles``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError
from ls_edge.device.hardware import model
from ls_edge.device.requirements import numbers
from ls_edge.engines.cuda.runtime import CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS, cuda_runtime
from ls_edge.engines.engine import first_line, refuse_weights_elsewhere
from ls_edge.engines.tensorrt.cache import EngineCache, EngineKey, OnStatus, TensorRTDevice

log = logging.getLogger("ls_edge.engines")

LEAST_MAX_BATCH = 8
"""Lower limit of the largest batch, which an engine supports if it was built without ``max_batch``."""
PROGRESS_EVERY_S = 5.0
"""Minimum time between two status lines of a build."""
NO_REASON = "it gave no reason"
WORKSPACE = 1 << 30
"""Bytes that kernels may use while they run, unless ``gpu_mem_limit`` is lower."""


def tensorrt_name() -> str | None:
    """Return the module of TensorRT or, without it, of TensorRT for RTX; None if neither is installed."""
    names = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
    # a folder without code that is called tensorrt has no origin
    return next((name for name in names if getattr(importlib.util.find_spec(name), "origin", None)), None)


def tensorrt_module() -> Any:
    """Import TensorRT; raise :class:`EngineError` if it is missing, does not load, or has an unsupported version."""
    name = tensorrt_name()
    if name is None:
        raise EngineError(
            "tensorrt is not installed; follow NVIDIA's instructions for this device, or run with --engine onnx"
        )
    try:
        trt = importlib.import_module(name)
        version = numbers(trt.__version__)
    except Exception as error:
        raise EngineError(f"{name} does not load ({first_line(error)}); run with --engine onnx") from error
    least, beyond, shown = ((1, 2), (2,), "1.2 to 1") if is_rtx(trt) else ((10, 3), (12,), "10.3 to 11")
    if not least <= version < beyond:
        raise EngineError(
            f"{name} is version {trt.__version__}, this ls-edge supports {shown}; update JetPack or TensorRT, or "
            "run with --engine onnx"
        )
    return trt


def is_rtx(trt: Any) -> bool:
    """Return whether a module is TensorRT for RTX, whose engines run on every RTX GPU."""
    return "rtx" in trt.__name__


def this_device() -> TensorRTDevice:
    """Return TensorRT and the GPU of this machine; raise :class:`EngineError` if one is missing."""
    if tensorrt_name() is not None:
        cuda_runtime()  # raises before the library is loaded, which takes 80 MiB
    trt, cuda = tensorrt_module(), cuda_runtime()
    number = cuda.call("cudaGetDevice", doing="looking for a GPU")
    name = cuda.call("cudaGetDeviceProperties", number, doing="looking at the GPU").decode(errors="replace")
    major, minor, multiprocessors = map(cuda.attribute, (CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTIPROCESSORS))
    if is_rtx(trt) and major < 8:
        raise EngineError(
            f"TensorRT for RTX needs compute capability 8.0, {name} has {major}.{minor}; run with --engine onnx"
        )
    return TensorRTDevice(trt.__version__, name.strip(), f"{major}.{minor}", multiprocessors, model())


def build_target() -> TensorRTDevice:
    """Return what engines are built for: this machine or, with TensorRT for RTX, any RTX GPU; raise as this_device."""
    trt = tensorrt_module()
    return TensorRTDevice(f"RTX {trt.__version__}", "any RTX GPU", "8.0", 0) if is_rtx(trt) else this_device()


@dataclass(frozen=True)
class EngineOptions:
    """Everything that an engine depends on besides its file and the device; made by :meth:`of`."""

    max_batch: int = LEAST_MAX_BATCH
    gpu_mem_limit: int | None = None
    """Bytes of GPU working memory for all engines that are opened together."""

    @classmethod
    def of(cls, max_batch: int | None = None, gpu_mem_limit: int | None = None) -> EngineOptions:
        """Return the options for batches up to ``max_batch``, rounded up to 8, 16, 32, ... to need fewer builds."""
        largest = LEAST_MAX_BATCH
        while largest < (max_batch or 1):
            largest *= 2
        return cls(largest, gpu_mem_limit)


PLAIN = EngineOptions()
"""Options of a float32 part without limits."""


def key_of(onnx_sha256: str, device: TensorRTDevice, options: EngineOptions) -> EngineKey:
    """Return the cache key of the engine of a part."""
    return EngineKey(
        **msgspec.structs.asdict(device),
        onnx_sha256=onnx_sha256,
        profiles=((1, 1, options.max_batch),)
        if device.tensorrt.startswith("RTX")
        else ((1, 1, 1), (2, options.max_batch, options.max_batch)),
        workspace=min(WORKSPACE, options.gpu_mem_limit or WORKSPACE),
    )


@dataclass(frozen=True)
class BuiltPart:
    """A built engine of a part, in the cache."""

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
    """Return the engine of a part for this device from the cache, or build it; log and report the progress.

    ``ls-edge build`` and peers get all engines from here. Raise :class:`EngineError` if TensorRT, CUDA, or a GPU is
    missing, if the part cannot be built, or, with ``must_keep``, if the engine cannot be written.
    """
    key = key_of(bundle.part(part).sha256, build_target(), options)
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


@functools.cache
def tensorrt_logger(trt: Any) -> Any:
    """Return the TensorRT logger of this process; its method ``take()`` returns the first error since the last call.

    The first error is the cause of the others. A second logger would be warned about, and ignored by some versions.
    """
    errors = (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR)

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.first = ""

        def take(self) -> str:
            """Return and clear the first error."""
            first, self.first = self.first, ""
            return first

        def log(self, severity: Any, msg: str) -> None:
            text, is_error = first_line(ValueError(msg)), severity in errors
            if is_error:
                self.first = self.first or text
            if is_error or severity == trt.ILogger.Severity.WARNING:
                log.debug("TensorRT", extra={"text": text})

    return Logger()


def tensorrt_object(trt: Any, kind: str) -> Any:
    """Return a ``Builder`` or ``Runtime``; raise :class:`EngineError` if TensorRT cannot create it."""
    logger = tensorrt_logger(trt)
    logger.take()
    try:
        made = getattr(trt, kind)(logger)
    except (AttributeError, TypeError):  # raised by the bindings for a null pointer; the lean runtime has no Builder
        made = None
    why = logger.take()
    if made is not None and not why:
        return made
    # Where CUDA does not start, 10.16 to 11.4 return an object whose first use crashes, and so does its destructor.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    raise EngineError(
        f"TensorRT {trt.__version__} does not start ({why or NO_REASON}); end other programs, install a newer driver, "
        "or run with --engine onnx"
    )


@functools.cache
def tensorrt_runtime(trt: Any) -> Any:
    """Return the TensorRT runtime of this process, which must outlive all engines."""
    return tensorrt_object(trt, "Runtime")


@contextlib.contextmanager
def _progress_monitor(trt: Any, report: OnStatus) -> Iterator[Any]:
    """Yield an object for TensorRT's callbacks that reports phases and steps, at most every few seconds.

    TensorRT prints and discards exceptions from callbacks, including those from Python's signal handlers. Here, the
    first exception stops the build and is raised when the context ends.
    """

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}
            self.reported = time.monotonic()
            self.raised: BaseException | None = None

        def keep(self, function: Callable[..., object], *arguments: object) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # noqa: BLE001  raised at the end
                self.raised = self.raised or error

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:  # noqa: ARG002
            self.steps[phase_name] = num_steps

        def step_complete(self, phase_name: str, step: int) -> bool:
            now = time.monotonic()
            if now - self.reported >= PROGRESS_EVERY_S:
                self.reported = now
                self.keep(report, f"{phase_name}, step {step + 1} of {self.steps.get(phase_name, step + 1)}")
            return self.raised is None

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    monitor, handlers = Monitor(), dict[int, Callable[[int, FrameType | None], object]]()
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: monitor.keep(handlers[number], number, frame))
    try:
        yield monitor
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if monitor.raised is not None:
        raise monitor.raised


def build(
    raw: bytes, part: str, key: EngineKey, timing: bytes, report: OnStatus = lambda _: None
) -> tuple[bytes, bytes]:
    """Build ``raw`` for ``key``; return the serialized engine and the updated timing cache.

    ``report`` receives the progress every few seconds. Raise :class:`EngineError` with the name of the part if TensorRT
    cannot read or build it.
    """
    trt = tensorrt_module()
    logger = tensorrt_logger(trt)
    logger.take()
    builder = tensorrt_object(trt, "Builder")
    # TensorRT 10 needs this flag; TensorRT 11, in which all networks are strongly typed, ignores it.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(raw):
        hint = "; int8 for TensorRT is exported with --engine tensorrt" if b"DynamicQuantizeLinear" in raw else ""
        raise EngineError(
            f"{part}: TensorRT {key.tensorrt} cannot read the file ({_parser_reason(parser) or logger.take()}); "
            f"run with --engine onnx{hint}"
        )
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, key.workspace)
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # for hardware reports; does not slow engines down
    config.clear_flag(trt.BuilderFlag.TF32)
    for batches in key.profiles:
        profile = builder.create_optimization_profile()
        for index in range(network.num_inputs):
            tensor = network.get_input(index)
            profile.set_shape(tensor.name, *((batch, *tuple(tensor.shape)[1:]) for batch in batches))
        config.add_optimization_profile(profile)
    if is_rtx(trt):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # allocations cannot be captured in graphs
    else:
        cache = config.create_timing_cache(timing)
        if cache is None or not config.set_timing_cache(cache, False):  # measured on another device
            config.set_timing_cache(config.create_timing_cache(b""), False)
    with _progress_monitor(trt, report) as config.progress_monitor:
        plan = builder.build_serialized_network(network, config)
    why = logger.take() or NO_REASON
    if plan is None:
        raise EngineError(
            f"{part}: TensorRT {key.tensorrt} could not build an engine for {key.gpu} "
            f"({why}); run with --engine onnx, a smaller max_batch, or a larger gpu_mem_limit"
        )
    return bytes(plan), b"" if is_rtx(trt) else bytes(config.get_timing_cache().serialize())


def _parser_reason(parser: Any) -> str:
    """Return operator, node, and reason of the parser's first error; the reason is its last line of its own."""
    if not parser.num_errors:
        return ""
    error = parser.get_error(0)
    lines = [line for line in error.desc().splitlines() if "catchCudaError" not in line]
    return f"{error.node_operator()} {error.node_name()}: {lines[-1][:200] if lines else NO_REASON}".lstrip(" :")
