"""Diagnose this machine: what ls-edge needs and is there, what is missing or conflicts, and what fixes it.

Whatever could crash or hang (engine libraries, execution providers, CUDA) is checked in a subprocess with a time limit,
by what it has to do later: a provider counts as loading when it multiplied two matrices. Requirements are read from the
installed package. Nothing on the machine is changed; peers are checked by ``ls-edge status``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ls_edge.device import hardware
from ls_edge.device.requirements import (
    ORT_BUILDS,
    Requirement,
    engine_advice,
    installed,
    numbers,
    requirements,
    too_new,
)
from ls_edge.report.formatting import counted

Status = Literal["ok", "warn", "bad"]

PROBE_LIMIT_S = 60.0
"""How long one probe may take; importing torch from a cold disk needs tens of seconds."""

_PURPOSE = {"train": "to train and eval", "export": "to export and verify"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Status
    """``bad`` where ls-edge cannot work, ``warn`` where something is not as good as it could be."""
    what: str
    detail: str
    fix: str | None = None
    """A command or a change that fixes it, or that adds what is missing; None where there is nothing to do."""


def examine() -> list[Finding]:
    """Check everything; takes from a second to a minute, by what is installed."""
    return [
        *check_python(), *check_packages(), *check_engines(), *check_zmq(), *check_torch(),
        *check_hardware(),
    ]  # fmt: skip


def worst(findings: list[Finding]) -> Status:
    """The worst status of all."""
    return max((finding.status for finding in findings), key=("ok", "warn", "bad").index, default="ok")


# --- Python and packages ----------------------------------------------------------------------------------------


def check_python() -> Iterator[Finding]:
    """Check the version of Python."""
    version = platform.python_version()
    detail = f"{platform.python_implementation()} {version}, {platform.machine()}, {platform.platform(terse=True)}"
    if numbers(version) >= (3, 10):
        yield Finding("ok", "Python", detail)
    else:
        yield Finding("bad", "Python", detail, "install Python 3.10 or newer and make the environment again with it")


def check_packages() -> Iterator[Finding]:
    """Check what is installed against the requirements of the package and its extras."""
    groups = requirements()
    if not groups:
        yield Finding("bad", "ls-edge", "is not installed, only found on the path", "pip install -e . in its clone")
        return
    for item in groups[""]:
        yield _package(item, needed=True)
    for extra in ("cpu", "gpu", "tensorrt", "train", "export"):
        inside = groups["train"] if extra == "export" else []
        yield from _extra(extra, [item for item in groups.get(extra, []) if item not in inside])
    builds = _onnxruntimes()
    if len(builds) > 1:
        keep = next((build for build in builds if hardware.has_nvidia() == (build == "onnxruntime-gpu")), builds[0])
        line = _build_line(keep)
        yield Finding(
            "bad", "ONNX Runtime", f"{' and '.join(builds)} are installed and overwrite each other's files",
            f"pip uninstall -y {' '.join(builds)}{' && ' if line.startswith('pip') else ', then '}{line}",
        )  # fmt: skip


def _onnxruntimes() -> list[str]:
    return [name for name in ORT_BUILDS if installed(name) is not None]


def _build_line(build: str) -> str:
    """How a build of ONNX Runtime is installed here; the index has no ``onnxruntime-gpu`` for boards."""
    return engine_advice() if build == "onnxruntime-gpu" and hardware.has_nvidia() else f"pip install {build}"


def _extra(extra: str, wanted: list[Requirement]) -> Iterator[Finding]:
    """The packages of an extra, which counts as wanted where its first package is installed."""
    absent = [item for item in wanted if installed(item.name) is None]
    is_wanted = wanted and wanted[0] not in absent
    if is_wanted:
        for item in wanted:
            if item not in absent:
                yield _package(item, needed=False)
    if absent and (is_wanted or extra in _PURPOSE):
        detail = f"{', '.join(item.name for item in absent)} not installed; needed {_PURPOSE.get(extra, 'with it')}"
        yield Finding("warn" if is_wanted else "ok", extra, detail, f"pip install {' '.join(map(str, absent))}")


def _package(item: Requirement, *, needed: bool) -> Finding:
    version = installed(item.name)
    if version is None:
        return Finding("bad", item.name, "not installed", f"pip install {item}")
    status: Status = "bad" if needed else "warn"
    if too_new(item, version):
        return Finding(status, item.name, f"{version}, and {item.below} is too new", f"pip install {item}")
    if numbers(version) < numbers(item.least):
        return Finding(status, item.name, f"{version}, older than {item.least}", f"pip install {item}")
    return Finding("ok", item.name, version)


# --- checks in a process of their own ---------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeResult:
    """What a subprocess found."""

    found: dict[str, Any] | None
    """The JSON object that it printed, None where it failed."""
    why: str = ""
    """Why it failed."""
    errors: str = ""
    """All that it wrote to standard error."""


def probe(code: str, *arguments: str, limit_s: float = PROBE_LIMIT_S) -> ProbeResult:
    """Run Python code that prints one JSON object as its last line; a crash, hang or error becomes a reason."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, code of this module
            [sys.executable, "-c", _NO_CWD + code, *arguments], capture_output=True, text=True, timeout=limit_s,
            stdin=subprocess.DEVNULL, errors="replace", env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ProbeResult(None, f"did not end within {limit_s:.0f} s")
    except OSError as error:
        return ProbeResult(None, f"could not be started: {error.strerror}")
    if done.returncode < 0:
        return ProbeResult(None, f"crashed with {signal.Signals(-done.returncode).name}", done.stderr)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        found = json.loads(last)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        reason = lines[-1].removeprefix("ls_edge.core.errors.EngineError: ")
        return ProbeResult(None, reason[:300], done.stderr)
    return ProbeResult(found, errors=done.stderr)


_NO_CWD = "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
"""Ahead of each probe: a folder called ``onnxruntime`` where doctor happens to run is not the package."""

_ORT_CODE = """
import json, onnxruntime
print(json.dumps({"version": onnxruntime.__version__, "all": onnxruntime.get_available_providers()}))
"""

_PROVIDER_CODE = """
import json, sys
import numpy
from ls_edge.engines.onnxruntime import open_session
session = open_session(bytes.fromhex(sys.argv[1]), "a product of matrices", provider=sys.argv[2], threads=1)
x = numpy.full((4, 4), 1 + 2.0 ** -12, numpy.float32)  # which TF32 and half precision round to 1
error = numpy.abs(session.run(None, {"x": x})[0] - x @ x).max()
print(json.dumps({"right": bool(error < 1e-3), "exact": bool(error < 1e-5)}))
"""

_TENSORRT_CODE = """
import json, sys
import numpy
from ls_edge.engines.cuda_memory import CudaWorkspace
from ls_edge.engines.engine import Signature, Tensor
from ls_edge.engines.tensorrt_build import EngineOptions, build, key_of, this_device
from ls_edge.engines.tensorrt_engine import TensorRTEngine
device = this_device()
signature = Signature((Tensor("x", "float32", (4,)),), Tensor("y", "float32", (4,)))
plan, _ = build(bytes.fromhex(sys.argv[1]), "a layer", key_of("", device, EngineOptions("fp32", 8)), b"")
engine = TensorRTEngine(plan, "a layer", signature, device, CudaWorkspace([signature], max_batch=8))
x = numpy.random.default_rng(0).standard_normal((3, 4), dtype=numpy.float32)
right = all(numpy.array_equal(engine.run({"x": x[:size]}), x[:size] + x[:size]) for size in (1, 1, 1, 3))
print(json.dumps({"device": str(device), "right": right, "graphs": engine.no_graphs}))
engine.close()
"""

_CUDA_CODE = """
import json
from ls_edge.engines.cuda_memory import cuda_module
error, driver = cuda_module().cudaDriverGetVersion()
print(json.dumps({"error": int(error), "driver": int(driver or 0)}))
"""

_ZMQ_CODE = "import json, zmq; print(json.dumps({'version': zmq.zmq_version(), 'curve': zmq.has('curve')}))"

_TORCH_CODE = """
import json, torch
there = torch.cuda.is_available()
count = torch.cuda.device_count() if there else 0
names = [torch.cuda.get_device_name(i) for i in range(count)]
if there:
    torch.ones(4, 4, device="cuda").matmul(torch.ones(4, 4, device="cuda")).sum().item()
print(json.dumps({"built": torch.version.cuda, "names": names}))
"""


def check_engines() -> Iterator[Finding]:
    """Check what can run engines, and say which of it 'engine: auto' takes and why not what comes before."""
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
    builds = _onnxruntimes()
    has_ort = importlib.util.find_spec("onnxruntime") is not None
    has_tensorrt = importlib.util.find_spec("tensorrt") is not None
    if not has_ort and not has_tensorrt:
        yield Finding(
            "warn", "engines", "neither ONNX Runtime nor TensorRT is installed, so nothing can be served or run",
            engine_advice(),
        )  # fmt: skip
    if has_ort:
        yield from check_onnxruntime(builds[0] if builds else "onnxruntime")
    yield from check_tensorrt()
    yield from check_cuda_bindings()


def check_tensorrt(system: Path = Path("/usr/lib")) -> Iterator[Finding]:
    """Check that TensorRT builds and runs a layer, or why it is not found though the system has it."""
    what = "engine TensorRT"
    if importlib.util.find_spec("tensorrt") is None:
        for outside in sorted(system.glob("python3*/dist-packages/tensorrt"))[:1]:
            needed = outside.parts[-3]
            ours = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            python = ours if needed in ("python3", ours) else needed
            detail = f"is at {outside}, which this environment does not see"
            if python != ours:
                detail += f", and made for {needed} while this is {ours}"
            fix = f"make the environment again with: {python} -m venv --system-site-packages .venv"
            yield Finding("warn", what, detail, fix)
        return
    tried = probe(_TENSORRT_CODE, layer_model().hex(), limit_s=2 * PROBE_LIMIT_S)
    if tried.found is None:
        yield Finding("warn", what, tried.why, _numpy_fix(tried) or _fix_of(tried.why, "tensorrt"))
    elif not tried.found["right"]:
        yield Finding(
            "bad", what, f"{tried.found['device']} computes wrong numbers", "use --engine onnx, and report it"
        )
    else:
        graphs = f"; without CUDA graphs: {tried.found['graphs']}" if tried.found["graphs"] else ""
        yield Finding("ok", what, f"{tried.found['device']}, builds and runs a layer{graphs}")


def check_cuda_bindings() -> Iterator[Finding]:
    """Check that ``cuda-bindings`` are of a CUDA release that the driver knows."""
    version = installed("cuda-bindings")
    has_tensorrt = importlib.util.find_spec("tensorrt") is not None
    if not has_tensorrt and installed("onnxruntime-gpu") is None:  # torch brings them too, and has its own check
        return
    if version is None:
        if has_tensorrt and importlib.util.find_spec("cuda") is None:
            fix = f"pip install '{_bindings_for(hardware.jetpack())}'"
            yield Finding("warn", "cuda-bindings", "not installed; TensorRT engines need it", fix)
        return
    tried = probe(_CUDA_CODE)
    if tried.found is None:
        yield Finding("warn", "cuda-bindings", f"{version}: {tried.why}", "pip install --force-reinstall cuda-bindings")
        return
    major, driver = numbers(version)[0], tried.found["driver"] // 1000
    known = f"{driver}.{tried.found['driver'] % 1000 // 10}"
    if driver == 0:
        yield Finding("warn", "cuda-bindings", f"{version}, and no driver of NVIDIA", "install the driver, or leave it")
    elif major > driver:
        yield Finding(
            "warn", "cuda-bindings", f"{version} are for CUDA {major}, the driver knows CUDA {known}",
            f"pip install 'cuda-bindings<{driver + 1}'",
        )  # fmt: skip
    else:
        yield Finding("ok", "cuda-bindings", f"{version}; the driver knows CUDA {known}")


def _bindings_for(jetpack: str | None) -> str:
    if jetpack is not None and jetpack.startswith("6"):
        return "cuda-bindings>=12.8,<13"
    return "cuda-bindings>=13,<14" if jetpack is not None else "cuda-bindings"


def _fix_of(why: str, package: str) -> str:
    """What an error of ours says to do, else to install the package again."""
    _, found, fix = why.rpartition("; ")
    return fix if found else f"install {package} again as NVIDIA says for this device"


def _numpy_fix(tried: ProbeResult) -> str | None:
    """What helps where a package was made for numpy 1 and numpy 2 is here."""
    if "compiled using NumPy 1.x" in tried.errors or "_ARRAY_API not found" in tried.errors:
        return "pip install 'numpy<2', which this wheel was made for (the extra jetson6 has it)"
    return None


def _reinstall(build: str) -> str:
    line = _build_line(build)
    return line.replace("pip install", "pip install --force-reinstall", 1)


def check_onnxruntime(build: str) -> Iterator[Finding]:
    """Check each execution provider that a build of ONNX Runtime lists."""
    listed = probe(_ORT_CODE)
    if listed.found is None:
        fix = _numpy_fix(listed) or _reinstall(build)
        yield Finding("bad", "engine ONNX Runtime", f"does not load: {listed.why}", fix)
        return
    if _numpy_fix(listed) is not None:
        detail = f"was made for numpy 1, and numpy {installed('numpy')} is here"
        yield Finding("bad", "engine ONNX Runtime", detail, _numpy_fix(listed))
    model = tiny_model().hex()
    for provider in listed.found["all"]:
        what = f"engine {provider}"
        if provider == "AzureExecutionProvider":  # sends tensors to a web service
            continue
        tried = probe(_PROVIDER_CODE, model, provider)
        if tried.found is not None and tried.found["right"]:
            rounds = "" if tried.found["exact"] else ", but rounds float32: answers would differ from other devices'"
            detail = f"{build} {listed.found['version']}, loads and computes{rounds}"
            advice = "serve fp16 bundles with it, or leave it" if rounds else None
            yield Finding("warn" if rounds else "ok", what, detail, advice)
            continue
        why = tried.why or "computes wrong numbers"
        if provider == "CPUExecutionProvider":
            yield Finding("bad", what, why, _reinstall(build))
        else:
            fix = "install the libraries that it names, or leave it: peers with 'engine: auto' pass over it and say so"
            yield Finding("warn", what, f"is listed, but {why}", fix)


def check_zmq() -> Iterator[Finding]:
    """Check that libzmq loads and has CURVE."""
    tried = probe(_ZMQ_CODE)
    if tried.found is None:
        yield Finding("bad", "libzmq", f"does not load: {tried.why}", "pip install --force-reinstall pyzmq")
    elif tried.found["curve"]:
        yield Finding("ok", "libzmq", f"{tried.found['version']} with CURVE")
    else:
        yield Finding(
            "warn", "libzmq", f"{tried.found['version']} without CURVE (libsodium), so links cannot be encrypted",
            "pip install --force-reinstall --only-binary pyzmq pyzmq",
        )  # fmt: skip


def check_torch() -> Iterator[Finding]:
    """Check that torch, where it is installed, computes on the GPUs that it finds."""
    if installed("torch") is None:
        return
    tried = probe(_TORCH_CODE, limit_s=2 * PROBE_LIMIT_S)
    if tried.found is None:
        yield Finding("warn", "torch", f"does not work: {tried.why}", "pip install --force-reinstall torch")
    elif tried.found["names"]:
        yield Finding("ok", "torch CUDA", f"CUDA {tried.found['built']} on {', '.join(tried.found['names'])}")
    elif hardware.has_nvidia():
        detail = f"there is a GPU, but torch (built for CUDA {tried.found['built']}) cannot use it"
        yield Finding("warn", "torch CUDA", detail, "install the torch build for this driver, see https://pytorch.org")
    else:
        yield Finding("ok", "torch CUDA", "no GPU; trains and exports on the CPU")


def tiny_model() -> bytes:
    """An ONNX model that multiplies its input ``x``, float32 ``[4, 4]``, by itself; written out without onnx."""
    return _model(b"MatMul", _number(1, 4))


def layer_model() -> bytes:
    """An ONNX model that adds its input ``x``, float32 ``[B, 4]``, to itself, for any number of rows."""
    return _model(b"Add", _nested(2, b"B"))


def _model(operator: bytes, rows: bytes) -> bytes:
    """One node that takes ``x`` twice; ``rows`` is the first side of its shape, the second is 4."""

    def tensor(field: int, name: bytes) -> bytes:
        shape = _nested(2, _nested(1, rows), _nested(1, _number(1, 4)))
        return _nested(field, _nested(1, name), _nested(2, _nested(1, _number(1, 1), shape)))

    node = _nested(1, _nested(1, b"x"), _nested(1, b"x"), _nested(2, b"y"), _nested(4, operator))
    graph = _nested(7, node, _nested(2, b"square"), tensor(11, b"x"), tensor(12, b"y"))
    return _number(1, 8) + graph + _nested(8, _number(2, 13))


def _varint(number: int) -> bytes:
    low = number & 0x7F
    return bytes((low,)) if number < 128 else bytes((low | 0x80,)) + _varint(number >> 7)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _nested(field: int, *content: bytes) -> bytes:
    body = b"".join(content)
    return _varint(field << 3 | 2) + _varint(len(body)) + body


# --- the hardware ------------------------------------------------------------------------------------------------


def check_hardware() -> Iterator[Finding]:
    """Check cores, memory and what else of the machine limits ls-edge."""
    board = hardware.board()
    if board is not None:
        yield Finding("ok", "board", board)
    jetpack = hardware.jetpack()
    if jetpack is not None:
        yield Finding("ok", "JetPack", jetpack)
    features = hardware.cpu_features()
    yield Finding("ok", "CPU", f"{hardware.cpu_name()}; {' '.join(features) or 'no vector instructions of note'}")
    cores, quota = hardware.cores(), hardware.cpu_quota()
    if quota is not None and quota < cores:
        yield Finding(
            "warn", "cores", f"{cores}, but the control group grants the time of {quota:g}",
            f"give peers no more than {counted(max(1, int(quota)), 'thread')} in all (--threads, or 'threads' in "
            "peers.yaml)",
        )  # fmt: skip
    else:
        yield Finding("ok", "cores", str(cores))
    memory = hardware.memory_gib()
    if memory is not None:
        scarce = memory[1] < 0.5
        fix = "end other programs: a peer needs room for its blocks and some 100 MiB" if scarce else None
        yield Finding("warn" if scarce else "ok", "memory", f"{memory[0]:.1f} GiB, {memory[1]:.1f} GiB free", fix)
    disk = shutil.disk_usage(".").free / 2**30
    fix = None if disk >= 1 else "make room: runs and bundles take up to some GiB"
    yield Finding("ok" if disk >= 1 else "warn", "disk", f"{disk:.1f} GiB free here", fix)
