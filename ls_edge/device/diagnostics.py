"""Checks of this machine: Python, packages, libzmq, torch, and hardware.

Libraries that could crash or hang are checked in a subprocess with a time limit. Requirements are read from the
metadata of the installed package. Nothing on the machine is changed. ``ls_edge.engines.diagnostics`` checks engines.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from ls_edge.device import hardware
from ls_edge.device.child import NO_CWD
from ls_edge.device.requirements import (
    GPU_MEMORY_ADVICE,
    ORT_BUILDS,
    compiler_problem,
    engine_advice,
    installed,
    jetpack_advice,
    jetpack_problem,
    numbers,
    requirements,
    satisfied,
)

Status = Literal["ok", "warn", "bad"]

PEER_MIB = 90
"""Memory of a peer in addition to its blocks, in MiB: 80 with six blocks of a ViT-B."""
PROBE_LIMIT_S = 60.0
"""Time limit of a probe in seconds; importing torch from a cold disk can take tens of seconds."""

_PURPOSE = {"train": "to train and eval", "export": "to export and verify"}


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    status: Status
    """``bad`` if ls-edge cannot work, ``warn`` if something could be better."""
    what: str
    detail: str
    fix: str | None = None


Check = Callable[[], Iterable[Finding]]


def examine(check_engines: Check) -> list[Finding]:
    """Run all checks, which takes from a second to a minute; ``check_engines`` checks the engine libraries."""
    checks: tuple[Check, ...] = (
        check_python,
        check_packages,
        check_engines,
        check_zmq,
        check_torch,
        check_hardware,
    )
    return [finding for check in checks for finding in check()]


def worst(findings: list[Finding]) -> Status:
    """Return the worst status."""
    return max((finding.status for finding in findings), key=("ok", "warn", "bad").index, default="ok")


def judged(what: str, detail: str, fix: str | None) -> Finding:
    """Return a finding with the status ``ok`` if there is no fix, otherwise ``warn``."""
    return Finding("ok" if fix is None else "warn", what, detail, fix)


def check_python() -> Iterator[Finding]:
    """Name the version of Python."""
    known = (platform.python_version(), platform.machine(), platform.platform(terse=True))
    yield Finding("ok", "Python", f"{platform.python_implementation()} {', '.join(known)}")


def check_packages() -> Iterator[Finding]:
    """Check the installed packages against the requirements of ls-edge and its extras."""
    groups = requirements()
    if not groups:
        yield Finding("bad", "ls-edge", "is on the path but not installed", "pip install -e . in its clone")
        return
    for item in groups[""]:
        yield _package(item, needed=True)
    build = installed("onnxruntime-gpu")
    gpu = "gpu-cu12" if build is not None and numbers(build) < (1, 27) else "gpu-cu13"
    for extra in ("cpu", gpu, "tensorrt", "train", "export"):
        inside = groups["train"] if extra == "export" else []
        yield from _extra(extra, [item for item in groups.get(extra, []) if item not in inside])
    builds = onnxruntime_builds()
    if len(builds) > 1:
        keep = next((build for build in builds if hardware.has_nvidia() == (build == "onnxruntime-gpu")), builds[0])
        line = install_line(keep)
        yield Finding(
            "bad",
            "ONNX Runtime",
            f"{' and '.join(builds)} are installed and overwrite each other's files",
            f"pip uninstall -y {' '.join(builds)}{' && ' if line.startswith('pip') else ', then '}{line}",
        )


def _extra(extra: str, wanted: list[Requirement]) -> Iterator[Finding]:
    """Check the packages of an extra, which counts as wanted if its first package is installed."""
    absent = [item for item in wanted if installed(item.name) is None]
    is_wanted = wanted and wanted[0] not in absent
    if is_wanted:
        for item in wanted:
            if item not in absent:
                yield _package(item, needed=False)
    if absent and (is_wanted or extra in _PURPOSE):
        detail = f"{', '.join(item.name for item in absent)} not installed; needed {_PURPOSE.get(extra, 'with it')}"
        yield Finding("warn" if is_wanted else "ok", extra, detail, f"pip install {shlex.join(map(str, absent))}")


def _package(item: Requirement, *, needed: bool) -> Finding:
    version, command = installed(item.name), f"pip install {shlex.quote(str(item))}"
    if version is None:
        return Finding("bad", item.name, "not installed", command)
    if satisfied(item):
        return Finding("ok", item.name, version)
    return Finding("bad" if needed else "warn", item.name, f"{version}; {item.specifier} is required", command)


@dataclass(frozen=True)
class ProbeResult:
    """Result of a subprocess."""

    found: dict[str, Any] | None
    why: str = ""
    errors: str = ""


def probe(code: str, *arguments: str, limit_s: float = PROBE_LIMIT_S) -> ProbeResult:
    """Run Python code whose last output line is a JSON object; turn a crash, hang, or error into a reason."""
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, code of this module
            [sys.executable, "-c", NO_CWD + code, *arguments],
            capture_output=True,
            text=True,
            timeout=limit_s,
            stdin=subprocess.DEVNULL,
            errors="replace",
            env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"},
        )
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
        reason = lines[-1].removeprefix("ls_edge.core.errors.EngineError: ").replace("see 'ls-edge doctor', or ", "")
        return ProbeResult(None, reason[:300], done.stderr)
    return ProbeResult(found, errors=done.stderr)


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


def onnxruntime_builds() -> list[str]:
    """Return the installed distributions of ONNX Runtime."""
    return [name for name in ORT_BUILDS if installed(name) is not None]


def install_line(build: str) -> str:
    """Return the command or advice to install a build of ONNX Runtime; PyPI has no ``onnxruntime-gpu`` for boards."""
    return engine_advice() if build == "onnxruntime-gpu" and hardware.has_nvidia() else f"pip install {build}"


def check_zmq() -> Iterator[Finding]:
    """Check that libzmq loads and has CURVE."""
    tried = probe(_ZMQ_CODE)
    if tried.found is None:
        yield Finding("bad", "libzmq", f"does not load: {tried.why}", "pip install --force-reinstall pyzmq")
    else:
        with_curve = tried.found["curve"]
        features = "with CURVE" if with_curve else "without CURVE (libsodium), so links cannot be encrypted"
        fix = None if with_curve else "pip install --force-reinstall --only-binary pyzmq pyzmq"
        yield judged("libzmq", f"{tried.found['version']} {features}", fix)


def check_torch() -> Iterator[Finding]:
    """Check that torch, if it is installed, computes on the GPUs that it finds."""
    if installed("torch") is None or not _has_temporary_folder():  # without one, torch does not load
        return
    tried = probe(_TORCH_CODE, limit_s=2 * PROBE_LIMIT_S)
    if tried.found is None:
        yield Finding("warn", "torch", f"does not work: {tried.why}", "pip install --force-reinstall torch")
    elif tried.found["names"]:
        detail, problem = f"CUDA {tried.found['built']} on {', '.join(tried.found['names'])}", compiler_problem()
        fix = "install it; 'train' does not compile blocks without it, which is slower" if problem else None
        yield judged("torch CUDA", f"{detail}; {problem}" if problem else detail, fix)
    elif hardware.has_nvidia():
        detail = f"there is a GPU, but torch (built for CUDA {tried.found['built']}) cannot use it"
        build = "the torch build for this driver, see https://pytorch.org"
        if hardware.jetson_linux():  # for which pytorch.org has no wheels
            build = "NVIDIA's torch wheel for this board's JetPack, or uninstall torch: a peer needs none"
        yield Finding("warn", "torch CUDA", detail, f"install {build}")
    else:
        yield Finding("ok", "torch CUDA", "no GPU; trains and exports on the CPU")


def check_jetson(root: Path = hardware.ROOT) -> Iterator[Finding]:
    """Check the release and the GPU of a Jetson."""
    version, problem, missing = hardware.jetpack(root), jetpack_problem(root), hardware.missing_gpu_nodes(root)
    if version is None:
        return
    yield judged("JetPack", problem or version, jetpack_advice(root) if problem else None)
    if missing:
        detail = f"{' and '.join(missing)} missing, so the driver did not start the GPU"
        fix = (
            "read 'sudo dmesg | grep -i -e nvgpu -e firmware': most often the firmware of the GPU is not where the "
            "kernel looks (JetPack 7.2: /etc/firmware); in a container, start it with --runtime nvidia"
        )
        yield Finding("warn", "GPU", detail, fix)


def _has_temporary_folder() -> bool:
    try:
        return bool(tempfile.gettempdir())
    except FileNotFoundError:
        return False


def check_hardware() -> Iterator[Finding]:
    """Check the board, the processor, memory, and disk."""
    yield from check_jetson()
    features = " ".join(hardware.cpu_features()) or "no relevant vector instructions"
    cores, quota, memory = hardware.cores(), hardware.cpu_quota(), hardware.memory_gib()
    free_disk = shutil.disk_usage(".").free / 2**30
    limited, limit = "", None
    unknown = "" if hardware.shows_limits() else "; the limits of its control group are unknown"
    if quota is not None and quota < cores:
        limited = f", but the control group grants the time of {quota:g}"
        threads = f"{max(1, int(quota))} (--threads, or 'threads' in peers.yaml)"
        limit = f"limit the threads of all peers together to {threads}"
    rows = [
        ("board", hardware.board(), None),
        ("CPU", f"{hardware.cpu_name()}; {features}", None),
        ("cores", f"{cores}{limited}", limit),
        (
            "memory",
            memory
            and f"{memory[0]:.1f} GiB, {memory[1]:.1f} GiB free, room for blocks of "
            f"{hardware.memory_for_engines(max(0.0, memory[1] * 1024 - PEER_MIB), hardware.jetson_linux()):,.0f} "
            f"MiB{unknown}",
            (GPU_MEMORY_ADVICE if hardware.jetson_linux() else "end other programs")
            + f"; a peer needs {PEER_MIB} MiB in addition to its blocks"
            if memory and memory[1] < 0.5
            else None,
        ),
        (
            "disk",
            f"{free_disk:.1f} GiB free here",
            "free some space: runs and bundles take up to a few GiB" if free_disk < 1 else None,
        ),
    ]
    yield from (judged(what, detail, fix) for what, detail, fix in rows if detail)
    if not _has_temporary_folder():
        fix = "mount a folder for them, such as docker --tmpfs /tmp, or set TMPDIR"
        yield Finding("warn", "temporary files", "there is no folder that can be written", fix)
