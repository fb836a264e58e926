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

from ls_edge import hardware
from ls_edge.report.formatting import counted
from ls_edge.requirements import ORT_BUILDS, Requirement, engine_advice, installed, numbers, requirements

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
    return [*check_python(), *check_packages(), *check_engines(), *check_zmq(), *check_torch(), *check_hardware()]


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
    if numbers(version) < numbers(item.least):
        status: Status = "bad" if needed else "warn"
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
        return ProbeResult(None, f"crashed with {signal.Signals(-done.returncode).name}")
    last = (done.stdout.strip().splitlines() or [""])[-1]
    try:
        found = json.loads(last)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"ended with {done.returncode}"]
        return ProbeResult(None, lines[-1][:300])
    return ProbeResult(found)


_NO_CWD = "import sys; sys.path[:] = [entry for entry in sys.path if entry]\n"
"""Ahead of each probe: a folder called ``onnxruntime`` where doctor happens to run is not the package."""

_ORT_CODE = """
import json, onnxruntime
print(json.dumps({"version": onnxruntime.__version__, "all": onnxruntime.get_available_providers()}))
"""

_PROVIDER_CODE = """
import json, sys
import numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(bytes.fromhex(sys.argv[1]), options, providers=[sys.argv[2]])
if sys.argv[2] not in session.get_providers():
    sys.exit("its libraries do not load")
x = numpy.eye(4, dtype=numpy.float32) * 3
print(json.dumps({"right": bool(numpy.allclose(session.run(None, {"x": x})[0], x @ x))}))
"""

_TENSORRT_CODE = "import json, tensorrt; print(json.dumps({'version': tensorrt.__version__}))"

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
    outside = sorted(Path("/usr/lib").glob("python3*/dist-packages/tensorrt"))
    if not has_tensorrt and outside:
        fix = "make the environment again with: python3 -m venv --system-site-packages .venv"
        yield Finding("warn", "engine TensorRT", f"is at {outside[0]}, which this environment does not see", fix)
    if has_tensorrt:
        tried = probe(_TENSORRT_CODE)
        if tried.found is not None:
            yield Finding("ok", "engine TensorRT", str(tried.found["version"]))
        else:
            yield Finding(
                "warn", "engine TensorRT", f"does not load: {tried.why}", "pip install --force-reinstall tensorrt"
            )


def _reinstall(build: str) -> str:
    line = _build_line(build)
    return line.replace("pip install", "pip install --force-reinstall", 1)


def check_onnxruntime(build: str) -> Iterator[Finding]:
    """Check each execution provider that a build of ONNX Runtime lists."""
    listed = probe(_ORT_CODE)
    if listed.found is None:
        yield Finding("bad", "engine ONNX Runtime", f"does not load: {listed.why}", _reinstall(build))
        return
    model = tiny_model().hex()
    for provider in listed.found["all"]:
        what = f"engine {provider}"
        if provider == "AzureExecutionProvider":  # sends tensors to a web service
            continue
        tried = probe(_PROVIDER_CODE, model, provider)
        if tried.found is not None and tried.found["right"]:
            yield Finding("ok", what, f"{build} {listed.found['version']}, loads and computes")
            continue
        why = tried.why or "computes wrong numbers"
        if provider == "CPUExecutionProvider":
            yield Finding("bad", what, why, _reinstall(build))
        else:
            fix = "install the libraries that it needs, or leave it: peers with 'engine: auto' pass over it"
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

    def varint(number: int) -> bytes:
        low = number & 0x7F
        return bytes((low,)) if number < 128 else bytes((low | 0x80,)) + varint(number >> 7)

    def number(field: int, value: int) -> bytes:
        return varint(field << 3) + varint(value)

    def nested(field: int, *content: bytes) -> bytes:
        body = b"".join(content)
        return varint(field << 3 | 2) + varint(len(body)) + body

    def tensor(field: int, name: bytes) -> bytes:
        side = nested(1, number(1, 4))
        return nested(field, nested(1, name), nested(2, nested(1, number(1, 1), nested(2, side, side))))

    node = nested(1, nested(1, b"x"), nested(1, b"x"), nested(2, b"y"), nested(4, b"MatMul"))
    graph = nested(7, node, nested(2, b"square"), tensor(11, b"x"), tensor(12, b"y"))
    return number(1, 8) + graph + nested(8, number(2, 13))


# --- the hardware ------------------------------------------------------------------------------------------------


def check_hardware() -> Iterator[Finding]:
    """Check cores, memory and what else of the machine limits ls-edge."""
    board = hardware.board()
    if board is not None:
        yield Finding("ok", "board", board)
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
