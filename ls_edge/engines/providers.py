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
from pathlib import Path
from typing import Any

from ls_edge.engines.engine import first_line
from ls_edge.engines.tensorrt.build import PLAIN, EngineOptions

log = logging.getLogger("ls_edge.engines")

CPU, CUDA, OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"
NOT_USED = ("AzureExecutionProvider", "TensorrtExecutionProvider")
"""Providers that send tensors to a web service, or choose the precision of layers."""
SHORT = {"cpu": CPU, "cuda": CUDA}
"""Providers by their short names."""
_MEMORY = {
    CUDA: "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "DmlExecutionProvider": "dml",
    "CANNExecutionProvider": "cann",
    "WebGpuExecutionProvider": "webgpu",
}
"""Memory of each provider by its name in ``OrtValue``; all other providers use CPU memory."""


def memory_of(provider: str) -> str:
    """Return ONNX Runtime's name for the memory of inputs and outputs, such as ``cpu`` or ``cuda``."""
    return _MEMORY.get(provider, "cpu")


def providers_of(
    provider: str, *, options: EngineOptions = PLAIN, threads: int | None = None, stream: int | None = None
) -> list[tuple[str, dict[str, str]]]:
    """Return the providers of a session with their options: ``provider``, and the CPU for single nodes.

    ``options`` has the memory limit of the session, which has its own arena; ``stream`` is the CUDA stream that all
    sessions of a thread share. OpenVINO's device follows its name: ``OpenVINOExecutionProvider:GPU``.
    """
    name, _, device = provider.partition(":")
    chosen: dict[str, str] = {}
    if name == CUDA:
        # By default, the arena grows by doubling, which a board with shared memory cannot afford.
        chosen = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC", "arena_extend_strategy": "kSameAsRequested"}
        if stream is not None:
            chosen["user_compute_stream"] = str(stream)
        if options.gpu_mem_limit is not None:
            chosen["gpu_mem_limit"] = str(options.gpu_mem_limit)
    elif name == OPENVINO:
        chosen = {"device_type": device or "CPU", "precision": "ACCURACY"}  # the types of the file, on every device
        if threads is not None:
            chosen["num_of_threads"] = str(threads)
    return [(name, chosen), *([] if name == CPU else [(CPU, {})])]


@functools.cache
def preload(ort: Any) -> None:
    """Load pip's CUDA libraries once, since ONNX Runtime may not find them; log the output."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(Exception):
        ort.preload_dlls()  # new in 1.21
    log.debug("preloading CUDA libraries", extra={"text": " ".join(said.getvalue().split())})


def why_not(ort: Any, provider: str) -> str:
    """Return the loader's error for the library of a provider, or an empty string if it loads."""
    folder = Path(ort.__file__).parent / "capi"
    try:
        for library in ("shared", "cuda") if provider == CUDA else ():
            ctypes.CDLL(str(folder / f"libonnxruntime_providers_{library}.so"), ctypes.RTLD_GLOBAL)
    except OSError as error:
        return first_line(error)
    return ""
