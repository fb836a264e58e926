"""Hardware of this machine from /proc, /sys, and the device tree: processor, cores, memory, board.

Linux only: on other systems, or if a file is missing, values are None or empty. No programs are started.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import resource
from pathlib import Path

_X86 = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_ARM = ("neon", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve")

ROOT = Path("/")
CGROUP = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")
MEMORY_SHARE = 0.8
"""Fraction of the free memory for engines; the rest is for tokens in flight and other processes."""
JETSON_MEMORY_SHARE = 0.6
"""The same on a Jetson, where CUDA may fail while memory is free. An assumption: no limit was published or measured."""


def cpu_name() -> str:
    """Return the model name of the processor, or its architecture if the name is unknown."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", _cpuinfo(), re.M)
    return found[1].strip() if found else platform.machine()


def cpu_features(cpuinfo: str | None = None) -> list[str]:
    """Return the processor's vector and matrix instructions that are relevant for engines.

    ``cpuinfo`` is the text of ``/proc/cpuinfo``, which is read by default.
    """
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", _cpuinfo() if cpuinfo is None else cpuinfo, re.M)
    flags = set(lines[0].split()) if lines else set()
    return [flag for flag in (*_X86, *_ARM) if flag in flags]


def multiplies_bfloat16(cpuinfo: str | None = None) -> bool:
    """Return whether the processor has bfloat16 products (AVX512-BF16, AMX, Arm's BF16)."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(cpu_features(cpuinfo))


def int8_products_saturate(cpuinfo: str | None = None) -> bool:
    """Return whether fast int8 products saturate, as on x86 with AVX2 and without VNNI or AMX."""
    features = set(cpu_features(cpuinfo))
    return "avx2" in features and not features & {"avx512_vnni", "avx_vnni", "amx_int8"}


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = CGROUP, own: Path = OWN_CGROUP) -> float | None:
    """Return the number of cores that the control groups of this process grant; None without a limit."""
    folders = _control_groups(root, own, "cpu")
    limits = [text_of(folder / "cpu.max").split() for folder in folders]
    limits += [[text_of(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period")] for folder in folders]  # v1
    known = [tuple(map(int, limit)) for limit in limits if len(limit) == 2 and all(map(str.isdigit, limit))]
    return min((granted / period for granted, period in known if period), default=None)


def memory_gib(root: Path = CGROUP, own: Path = OWN_CGROUP) -> tuple[float, float] | None:
    """Return total and free memory in GiB, within the limits of the control groups and of this process.

    Return None if unknown.
    """
    info = {name: int(kib) for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text_of("/proc/meminfo"), re.M)}
    if "MemTotal" not in info:
        return None
    total, free = info["MemTotal"] / 2**20, info.get("MemAvailable", info["MemTotal"]) / 2**20
    for folder in _control_groups(root, own, "memory"):
        for limit_file, used_file, prefix in _MEMORY_FILES:
            limit, used = text_of(folder / limit_file), text_of(folder / used_file)
            if limit.isdigit():
                # Cached files count as used until others need the memory.
                cached = re.findall(rf"^{prefix}(?:in)?active_file (\d+)$", text_of(folder / "memory.stat"), re.M)
                unused = int(limit) - (int(used) if used.isdigit() else 0) + sum(map(int, cached))
                total, free = min(total, int(limit) / 2**30), min(free, unused / 2**30)
    for kind, name in ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize")):
        own_limit = resource.getrlimit(kind)[0]
        if own_limit != resource.RLIM_INFINITY:
            taken = re.search(rf"^{name}:\s+(\d+) kB$", text_of("/proc/self/status"), re.M)
            total = min(total, own_limit / 2**30)
            free = min(free, own_limit / 2**30 - (int(taken[1]) / 2**20 if taken else 0))
    return total, max(0.0, free)


_MEMORY_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.high", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of the limit and the use of memory, and prefix of the counts, of control groups of version 2 and 1."""


def memory_for_engines(free: float, release: str | None) -> float:
    """Return the part of the free memory that engines may take; ``release`` is that of Jetson Linux, None elsewhere."""
    return free * (MEMORY_SHARE if release is None else JETSON_MEMORY_SHARE)


def shows_limits(root: Path = CGROUP, own: Path = OWN_CGROUP) -> bool:
    """Return whether limits of control groups can be read; a container may hide them."""
    groups = filter(None, (_control_groups(root, own, controller) for controller in ("cpu", "memory")))
    return not text_of(own) or all(any(any(folder.glob("*")) for folder in folders) for folders in groups)


def _control_groups(root: Path, own: Path, controller: str) -> list[Path]:
    """Return the folders of the control groups of this process, and those above them.

    Version 1 has a tree for each controller, or for several. A container sees its own group at the top of the tree,
    whatever its path.
    """
    lines = re.findall(r"^\d+:([^:]*):/(.*)$", text_of(own), re.M)
    paths, tree = [path for names, path in lines if controller in names.split(",")], root
    if paths:
        tree = next((one for one in root.glob("*") if controller in one.name.split(",")), root / controller)
    found = []
    for path in paths or [path for names, path in lines if not names]:
        level = tree if ".." in path else tree / path
        found += [folder for folder in (level, *level.parents) if folder.is_relative_to(tree)]
    return found


def model(root: Path = ROOT) -> str:
    """Return the board's name from the device tree; empty if there is none, as on a PC.

    Containers cannot see the device tree; ``/tmp/nv_jetson_model`` is where those for Jetsons have a copy of the file.
    """
    return text_of(root / "proc/device-tree/model") or text_of(root / "tmp/nv_jetson_model")


def board(root: Path = ROOT) -> str | None:
    """Return the board's name, with the release of Jetson Linux if there is one."""
    return ", Jetson Linux ".join(filter(None, (model(root), jetson_linux(root)))) or None


def jetson_linux(root: Path = ROOT) -> str | None:
    """Return the release of Jetson Linux (L4T), such as ``36.4.3``; None elsewhere."""
    found = re.search(r"R(\d+) \(release\), REVISION: ([\d.]+)", text_of(root / "etc/nv_tegra_release"))
    return f"{found[1]}.{found[2]}" if found else None


def jetpack(root: Path = ROOT) -> str | None:
    """Return the version of JetPack that belongs to the release of Jetson Linux; None elsewhere."""
    release = jetson_linux(root)
    if release is None:
        return None
    found = (_JETPACKS.get(".".join(release.split(".")[:count])) for count in (3, 2, 1))
    return next(filter(None, found), f"of Jetson Linux {release}")


def has_nvidia() -> bool:
    """Return whether this machine has a GPU of NVIDIA, on a card or in a Jetson."""
    return jetson_linux() is not None or any(map(os.path.exists, ("/dev/nvidia0", "/dev/nvhost-gpu", "/dev/nvgpu")))


def missing_gpu_nodes(root: Path = ROOT) -> list[str]:
    """Return the device nodes that a Jetson's GPU needs and that are missing; if some are, its driver did not start."""
    wanted: list[tuple[str, ...]] = [("/dev/nvmap",), ("/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu")]
    if "Thor" in model(root) or "tegra264" in text_of(root / "proc/device-tree/compatible"):
        wanted = [("/dev/nvidia0",)]
    return [names[0] for names in wanted if not any((root / name[1:]).exists() for name in names)]


_JETPACKS = {
    "32": "4",
    "34": "5",
    "35": "5",
    "36": "6",
    "36.3": "6.0",
    "36.4.0": "6.1",
    "36.4.2": "6.1",
    "36.4.3": "6.2",
    "36.4.4": "6.2.1",
    "36.4.7": "6.2.1",
    "36.5": "6.2.2",
    "36.5.2": "6.2.3",
    "38": "7",
    "38.2": "7.0",
    "38.4": "7.1",
    "39": "7",
    "39.2": "7.2",
}
"""Versions of JetPack by release of Jetson Linux, or by its first numbers."""


@functools.cache  # reading it takes milliseconds on a machine with many cores
def _cpuinfo() -> str:
    return text_of("/proc/cpuinfo")


def text_of(path: str | Path) -> str:
    """Return the text of a file, without surrounding whitespace and zero bytes; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""
