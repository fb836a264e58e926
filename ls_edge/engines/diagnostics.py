"""Checks of the engine libraries: ONNX Runtime and its execution providers, TensorRT, and CUDA.

Each library performs a small task in a subprocess with a time limit; for example, a provider works if it multiplies two
matrices correctly.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from ls_edge.device import hardware
from ls_edge.device.diagnostics import (
    PROBE_LIMIT_S,
    Finding,
    ProbeResult,
    install_line,
    onnxruntime_builds,
    probe,
)
from ls_edge.device.requirements import (
    GPU_MEMORY_ADVICE,
    engine_advice,
    installed,
    jetpack_advice,
    jetpack_problem,
    numbers,
)
from ls_edge.engines.cuda.runtime import NO_DRIVER
from ls_edge.engines.providers import NOT_USED
from ls_edge.engines.tensorrt.build import tensorrt_name

# Written with the package onnx, which boards do not have; a test compares them with its output.
PRODUCT_MODEL = (
    "08083a450a110a01780a017812017922064d61744d756c12067371756172655a130a0178120e0a0c080112080a0208040a0208046213"
    "0a0179120e0a0c080112080a0208040a02080442040a00100d"
)
"""ONNX model, in hexadecimal, that multiplies its input ``x``, float32 ``[4, 4]``, by itself."""
LAYER_MODEL = (
    "08083a440a0e0a01780a0178120179220341646412067371756172655a140a0178120f0a0d080112090a031201420a02080462140a0179"
    "120f0a0d080112090a031201420a02080442040a00100d"
)
"""ONNX model, in hexadecimal, that adds its input ``x``, float32 ``[B, 4]``, to itself."""

_ORT_CODE = """
import json, onnxruntime
print(json.dumps({"version": onnxruntime.__version__, "all": onnxruntime.get_available_providers()}))
"""

_PROVIDER_CODE = """
import json, sys
import numpy
from ls_edge.engines.onnxruntime import open_session
session = open_session(bytes.fromhex(sys.argv[1]), "a product of matrices", provider=sys.argv[2], threads=1)
x = numpy.full((4, 4), 1 + 2.0 ** -12, numpy.float32)  # TF32 and half precision round this to 1: an error of 0.002
error = numpy.abs(session.run(None, {"x": x})[0] - x @ x).max()
print(json.dumps({"right": bool(error < 1e-2), "exact": bool(error < 1e-5)}))
"""

_TENSORRT_CODE = """
import json, sys
import numpy
from ls_edge.engines.cuda.memory import CudaWorkspace
from ls_edge.engines.engine import Signature, Tensor
from ls_edge.engines.tensorrt.build import EngineOptions, build, build_target, key_of, this_device
from ls_edge.engines.tensorrt.engine import TensorRTEngine
device = this_device()
signature = Signature((Tensor("x", "float32", (4,)),), Tensor("y", "float32", (4,)))
plan, _ = build(bytes.fromhex(sys.argv[1]), "a layer", key_of("", build_target(), EngineOptions(8)), b"")
engine = TensorRTEngine(plan, "a layer", signature, device, CudaWorkspace([signature], max_batch=8))
x = numpy.random.default_rng(0).standard_normal((3, 4), dtype=numpy.float32)
right = all(numpy.array_equal(engine.run({"x": x[:size]}), x[:size] + x[:size]) for size in (1, 1, 1, 3))
print(json.dumps({"device": str(device), "right": right, "graphs": engine.no_graphs}))
engine.close()
"""

_CUDA_CODE = """
import json
from ls_edge.engines.cuda.runtime import cuda_runtime
cuda = cuda_runtime()
print(json.dumps({"path": cuda.path, "runtime": cuda.release_of("Runtime"), "driver": cuda.release_of("Driver")}))
"""


def check_engines() -> Iterator[Finding]:
    """Check the engine libraries; report which one 'engine: auto' chooses and why it rejects better ones."""
    found = list(_check_each_engine())
    yield from found
    by_name = {finding.what: finding for finding in found}
    passed_over: list[str] = []
    for name in ("TensorRT", "CUDAExecutionProvider", "CPUExecutionProvider"):
        finding = by_name.get(f"engine {name}")
        if finding is not None and (finding.status == "ok" or "loads and computes" in finding.detail):
            reasons = f" (not {'; not '.join(passed_over)})" if passed_over else ""
            yield Finding("ok", "engine auto", f"takes {name}{reasons}")
            return
        passed_over.append(f"{name}: {'not installed' if finding is None else finding.detail}")


def _check_each_engine() -> Iterator[Finding]:
    """Check that an engine library is installed and that each of its execution providers computes."""
    builds = onnxruntime_builds()
    has_ort = importlib.util.find_spec("onnxruntime") is not None
    has_tensorrt = tensorrt_name() is not None
    if not has_ort and not has_tensorrt:
        yield Finding(
            "warn",
            "engines",
            "neither ONNX Runtime nor TensorRT is installed, so nothing can be served or run",
            engine_advice(),
        )
    if has_ort:
        yield from check_onnxruntime(builds[0] if builds else "onnxruntime")
    yield from check_tensorrt()
    yield from check_cuda()


def check_tensorrt(root: Path = hardware.ROOT) -> Iterator[Finding]:
    """Check that TensorRT builds and runs a layer, and that the environment sees the one of the system."""
    what, name = "engine TensorRT", tensorrt_name()
    is_jetson = hardware.jetson_linux(root) is not None
    outside = next(iter(sorted(root.glob("usr/lib/python3*/dist-packages/tensorrt"))), None)
    if name is None:
        if outside is not None and jetpack_problem(root) is None:
            yield _unseen(what, outside)
        elif is_jetson:
            yield Finding("warn", what, "not installed", jetpack_advice(root))
        return
    found = Path(getattr(importlib.util.find_spec(name), "origin", "")).parent
    if is_jetson and outside is not None and found != outside:
        detail = f"{found} shadows JetPack's in {outside}, and may have no code for this GPU"
        yield Finding("warn", "TensorRT of JetPack", detail, "pip uninstall tensorrt and all packages tensorrt-cu*")
    tried = probe(_TENSORRT_CODE, LAYER_MODEL, limit_s=2 * PROBE_LIMIT_S)
    if tried.found is None:
        yield _failed(what, tried, "tensorrt", is_jetson)
    elif not tried.found["right"]:
        yield Finding(
            "bad", what, f"{tried.found['device']} computes wrong numbers", "run with --engine onnx, and report it"
        )
    else:
        graphs = f"; without CUDA graphs: {tried.found['graphs']}" if tried.found["graphs"] else ""
        yield Finding("ok", what, f"{tried.found['device']}, builds and runs a layer{graphs}")


def _unseen(what: str, outside: Path) -> Finding:
    """Explain why this environment does not see the system's TensorRT."""
    needed, ours = outside.parts[-3], f"python{sys.version_info[0]}.{sys.version_info[1]}"
    python = ours if needed in ("python3", ours) else needed
    made = "" if python == ours else f", and made for {needed} while this is {ours}"
    fix = f"recreate the environment with: {python} -m venv --system-site-packages .venv"
    return Finding("warn", what, f"is at {outside}, which this environment does not see{made}", fix)


def check_cuda() -> Iterator[Finding]:
    """Check that the driver supports the installed CUDA runtime, if an engine library uses one."""
    if tensorrt_name() is None and installed("onnxruntime-gpu") is None:
        return
    tried = probe(_CUDA_CODE)
    if tried.found is None and NO_DRIVER in tried.why and tensorrt_name() is not None:
        return  # TensorRT's finding says so
    if tried.found is None:
        yield _failed("CUDA runtime", tried, "the CUDA runtime", hardware.jetson_linux() is not None)
        return
    runtime, driver = tried.found["runtime"], tried.found["driver"]
    newer = ", an older release, which is enough" if numbers(runtime) > numbers(driver) else ""
    yield Finding("ok", "CUDA runtime", f"{runtime} in {tried.found['path']}; the driver supports {driver}{newer}")


_JETSON_FIXES = {
    "libnvdla_compiler": "sudo apt install nvidia-l4t-dla-compiler, in a container on the host; JetPack 7.2 has no "
    "such package, and its own TensorRT does not need it",
    "libnvinfer|libnvonnx": "sudo apt install --reinstall tensorrt python3-libnvinfer",
    "out of memory|NvMap|could not build an engine": GPU_MEMORY_ADVICE,
    "looking for a GPU|no CUDA-capable|no NVIDIA driver": "sudo usermod -aG video,render $USER, then log in again; in "
    "a container, use --runtime nvidia",
}
"""Fixes on a Jetson by pattern in an error."""


def _failed(what: str, tried: ProbeResult, package: str, is_jetson: bool) -> Finding:
    """Return the error of a probe, and its fix: a known one, the advice at its end, or to reinstall the package."""
    known = (fix for pattern, fix in _JETSON_FIXES.items() if is_jetson and re.search(pattern, tried.why))
    detail, _, advice = tried.why.rpartition("; ")
    fix = next(known, advice if detail else f"install {package} again as NVIDIA says for this device")
    return Finding("warn", what, detail or tried.why, _numpy_fix(tried) or fix)


def _numpy_fix(tried: ProbeResult) -> str | None:
    """Return a fix if a package was built for numpy 1 but numpy 2 is installed."""
    if "compiled using NumPy 1.x" in tried.errors or "_ARRAY_API not found" in tried.errors:
        return "pip install 'numpy<2', which this wheel was built for (part of the extra jetson6)"
    return None


def _reinstall(build: str) -> str:
    return install_line(build).replace("pip install", "pip install --force-reinstall", 1)


def check_onnxruntime(build: str) -> Iterator[Finding]:
    """Check each execution provider that a build of ONNX Runtime lists."""
    listed = probe(_ORT_CODE)
    if listed.found is None:
        fix = _numpy_fix(listed) or _reinstall(build)
        yield Finding("bad", "engine ONNX Runtime", f"does not load: {listed.why}", fix)
        return
    if _numpy_fix(listed) is not None:
        detail = f"was built for numpy 1, but numpy {installed('numpy')} is installed"
        yield Finding("bad", "engine ONNX Runtime", detail, _numpy_fix(listed))
    for provider in listed.found["all"]:
        what = f"engine {provider}"
        if provider in NOT_USED:
            continue
        tried = probe(_PROVIDER_CODE, PRODUCT_MODEL, provider)
        if tried.found is not None and tried.found["right"]:
            rounds = "" if tried.found["exact"] else ", but rounds float32: answers would differ from other devices'"
            detail = f"{build} {listed.found['version']}, loads and computes{rounds}"
            advice = "use it for fp16 bundles only" if rounds else None
            yield Finding("warn" if rounds else "ok", what, detail, advice)
            continue
        why = tried.why or "computes wrong numbers"
        if provider == "CPUExecutionProvider":
            yield Finding("bad", what, why, _reinstall(build))
        else:
            fix = "install the libraries that it names, or " if ".so" in why else ""
            fix += "ignore this: peers with 'engine: auto' skip it and log that"
            yield Finding("warn", what, f"is listed, but {why}", fix)
