"""ONNX Runtime's execution providers: names, memory, and the options that make them exact.

Answers must be the same on every device (guarantee R2), so float32 must remain float32: by default, NVIDIA's libraries
round products to TF32 (10 bits), and OpenVINO computes in half precision on GPUs and in bfloat16 on newer CPUs. The
options are explained in ONNX Runtime's documentation of each provider.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import os
from pathlib import Path
from typing import Any

from ls_edge.core.errors import EngineError
from ls_edge.engines.engine import Signature, first_line
from ls_edge.engines.tensorrt.build import PLAIN, EngineOptions
from ls_edge.engines.tensorrt.cache import EngineCache, default_folder

log = logging.getLogger("ls_edge.engines")

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
_SHORT = {"cpu": CPU, "cuda": CUDA, "tensorrt": TENSORRT}
_MEMORY = {
    CUDA: "cuda",
    TENSORRT: "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "DmlExecutionProvider": "dml",
    "CANNExecutionProvider": "cann",
    "WebGpuExecutionProvider": "webgpu",
}
"""Memory of each provider by its name in ``OrtValue``; all other providers use CPU memory."""
_LIBRARIES = {CUDA: "libonnxruntime_providers_cuda.so", TENSORRT: "libonnxruntime_providers_tensorrt.so"}


def full_name(provider: str) -> str:
    """Return ONNX Runtime's name for ``cpu``, ``cuda``, and ``tensorrt``; return other names unchanged."""
    return _SHORT.get(provider.lower(), provider)


def memory_of(provider: str) -> str:
    """Return ONNX Runtime's name for the memory of inputs and outputs, such as ``cpu`` or ``cuda``."""
    return _MEMORY.get(provider, "cpu")


def providers_of(
    provider: str,
    *,
    options: EngineOptions = PLAIN,
    signature: Signature | None = None,
    stream: int | None = None,
    onnx_sha256: str = "",
) -> list[tuple[str, dict[str, str]]]:
    """Return the providers of a session with their options: ``provider``, its fallbacks for single nodes, and the CPU.

    ``signature`` and ``options`` determine TensorRT's batch profile and the memory limit of the session, which has its
    own arena; ``stream`` is the CUDA stream that all sessions of a thread share. TensorRT caches built engines only if
    ``onnx_sha256``, the digest of the file, is given. Raise :class:`EngineError` if the cache folder cannot be used, or
    if TensorRT would choose the precision of layers.
    """
    # By default, the arena grows by doubling, which a board with shared memory cannot afford.
    cuda = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}
    if stream is not None:
        cuda["user_compute_stream"] = str(stream)
    if options.gpu_mem_limit is not None:
        cuda["gpu_mem_limit"] = str(options.gpu_mem_limit)
    if provider == CPU:
        return [(CPU, {})]
    if provider == CUDA:
        return [(CUDA, cuda), (CPU, {})]
    if provider == TENSORRT:
        # Nodes that TensorRT does not support run on CUDA, not on the CPU.
        return [(TENSORRT, _tensorrt(options, signature, onnx_sha256)), (CUDA, cuda), (CPU, {})]
    if provider == "OpenVINOExecutionProvider":
        return [(provider, {"precision": "FP32" if options.precision == "fp32" else "ACCURACY"}), (CPU, {})]
    return [(provider, {}), (CPU, {})]


def switch_off_tf32() -> None:
    """Disable TF32 for NVIDIA's libraries in this process; ONNX Runtime's TensorRT provider has no option for it.

    The libraries read the environment variable on first use.
    """
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"


@functools.cache
def preload(ort: Any) -> None:
    """Load pip's CUDA libraries once, since ONNX Runtime may not find them; log the output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(Exception):
        ort.preload_dlls()  # new in 1.21
    log.debug("preloading CUDA libraries", extra={"text": " ".join(said.getvalue().split())})


def why_not(ort: Any, provider: str) -> str:
    """Return the loader's error for the library of a provider, or an empty string if it loads."""
    library = _LIBRARIES.get(provider)
    if library is None:
        return ""
    folder = Path(ort.__file__).parent / "capi"
    try:
        ctypes.CDLL(str(folder / "libonnxruntime_providers_shared.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / library))
    except OSError as error:
        return first_line(error)
    return ""


def _tensorrt(wanted: EngineOptions, signature: Signature | None, onnx_sha256: str) -> dict[str, str]:
    """Return the options of ONNX Runtime's TensorRT provider, which spells booleans ``True`` and ``False``.

    The provider names cached engines after the graph, not after the weights (ONNX Runtime's issue 6455), so without the
    prefix, blocks that differ only in weights would load each other's engines.
    """
    if wanted.precision != "fp32":
        raise EngineError(
            f"{TENSORRT} also runs LayerNorm and softmax of {wanted.precision} parts in half precision; use engine: "
            "tensorrt, which follows the types in the file, or provider: cuda"
        )
    folder = EngineCache(default_folder().with_name("onnxruntime-tensorrt")).folder  # private to this user
    options = {
        "trt_engine_cache_enable": str(bool(onnx_sha256)),
        "trt_engine_cache_path": str(folder),
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": str(folder),
    }
    if onnx_sha256:
        options["trt_engine_cache_prefix"] = onnx_sha256
    if wanted.gpu_mem_limit is not None:
        options["trt_max_workspace_size"] = str(wanted.gpu_mem_limit)
    if signature is not None:
        for which, batch in (("min", 1), ("opt", 1), ("max", wanted.max_batch)):
            shapes = (f"{t.name}:{'x'.join(map(str, t.shape(batch)))}" for t in signature.inputs)
            options[f"trt_profile_{which}_shapes"] = ",".join(shapes)
    return options
