"""Build a TensorRT engine from an ONNX part, on the device that will run it.

For TensorRT 10 (JetPack 6 has 10.3) and 11. The network is strongly typed: which numbers are half, int8 or float is
written in the ONNX file (``export --precision``). One dynamic batch profile; for float32 files TF32 is switched off,
since answers must be the same on every device. Identical blocks share TensorRT's timing cache, so the first takes long
and the others seconds.

Not run on hardware yet: names and signatures are checked against the published Python bindings of TensorRT 10.3, 10.16,
11.0 and 11.4 (``tests/engines/test_tensorrt.py``), the cache with builders of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from ls_edge.engines.engine import first_line
from ls_edge.engines.tensorrt_cache import EngineKey
from ls_edge.errors import EngineError

MAX_BATCH = 8
"""Default of the largest batch of an engine; larger batches are run in turns."""
WORKSPACE = 1 << 30
"""Bytes that kernels may use while they run."""


@dataclass(frozen=True)
class Device:
    """What engines are built for."""

    tensorrt: str
    gpu: str
    capability: str

    def __str__(self) -> str:
        return f"TensorRT {self.tensorrt} on {self.gpu}"


def tensorrt_module() -> Any:
    """The package ``tensorrt``, version 10 or 11; raises :class:`EngineError` where it is not there."""
    if importlib.util.find_spec("tensorrt") is None:
        raise EngineError(
            "tensorrt is not installed; follow NVIDIA's instructions for this device, or use --engine onnx"
        )
    try:
        trt = importlib.import_module("tensorrt")
    except Exception as error:
        raise EngineError(f"tensorrt does not load ({first_line(error)}); use --engine onnx") from error
    if int(trt.__version__.split(".")[0]) not in (10, 11):
        raise EngineError(f"tensorrt is version {trt.__version__}, this ls-edge supports 10 and 11; use --engine onnx")
    return trt


def cuda_module() -> Any:
    """``cuda.bindings.runtime``; raises :class:`EngineError` where it is not there."""
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except Exception as error:
        raise EngineError(
            f"cuda-bindings does not load ({first_line(error)}), which TensorRT engines need; install it with "
            "pip install cuda-bindings, of the CUDA version that is here, or use --engine onnx"
        ) from error


def checked(cuda: Any, result: tuple[Any, ...], doing: str) -> Any:
    """The value of a CUDA call; raises :class:`EngineError` with CUDA's words where it failed."""
    error, *values = result
    if error != cuda.cudaError_t.cudaSuccess:
        _, text = cuda.cudaGetErrorString(error)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise EngineError(f"CUDA failed while {doing}: {words}; see 'ls-edge doctor', or use --engine onnx")
    return values[0] if values else None


def this_device() -> Device:
    """TensorRT and GPU of this machine; raises :class:`EngineError` where one is missing."""
    trt, cuda = tensorrt_module(), cuda_module()
    number = checked(cuda, cuda.cudaGetDevice(), "looking for a GPU")
    found = checked(cuda, cuda.cudaGetDeviceProperties(number), "looking at the GPU")
    name = found.name.decode(errors="replace") if isinstance(found.name, bytes) else str(found.name)
    return Device(trt.__version__, name.strip("\0 "), f"{found.major}.{found.minor}")


def flags_of(precision: str) -> tuple[str, ...]:
    """What the builder is given besides the file."""
    return ("strongly typed", *(("no tf32",) if precision == "fp32" else ()))


def key_of(onnx_sha256: str, device: Device, precision: str, max_batch: int) -> EngineKey:
    """Under what a part's engine is kept."""
    return EngineKey(
        onnx_sha256=onnx_sha256, tensorrt=device.tensorrt, gpu=device.gpu, capability=device.capability,
        profile=(1, 1, max_batch), flags=flags_of(precision),
    )  # fmt: skip


def build(raw: bytes, part: str, key: EngineKey, timing: bytes) -> tuple[bytes, bytes]:
    """Build ``raw`` for ``key``; return the serialised engine and the timing cache as it is afterwards.

    Raises :class:`EngineError` naming the part where TensorRT cannot read or build it.
    """
    trt = tensorrt_module()
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    # needed by TensorRT 10, accepted and without effect in 11, where every network is strongly typed
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
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, WORKSPACE)
    if "no tf32" in key.flags:
        config.clear_flag(trt.BuilderFlag.TF32)
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        rest = tuple(tensor.shape)[1:]
        profile.set_shape(tensor.name, *((batch, *rest) for batch in key.profile))
    config.add_optimization_profile(profile)
    cache = config.create_timing_cache(timing)
    config.set_timing_cache(cache, False)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise EngineError(
            f"{part}: TensorRT {trt.__version__} could not build an engine for {key.gpu} (its own words are above); "
            "use --engine onnx, or a smaller --max-batch"
        )
    return bytes(plan), bytes(config.get_timing_cache().serialize())
