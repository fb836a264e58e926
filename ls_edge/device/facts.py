"""Facts about a board for its report: power mode, clocks, memory, versions, devices, sensors, and kernel messages.

Each fact is the unmodified output of a program, the content of files, or a line with the reason why it is missing.
Nothing on the board is changed.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from ls_edge.device.hardware import text_of

LIMIT_S = 20.0
"""Time limit of a program in seconds; all programs only print a status."""

PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "power mode": ("nvpmodel", "-q"),
    "service of the power mode": ("systemctl", "is-active", "nvpmodel"),
    "clocks": ("jetson_clocks", "--show"),
    "cards": ("nvidia-smi",),
    "groups": ("id", "-nG"),
    "packages": (
        "dpkg-query",
        "-W",
        "-f",
        "${db:Status-Abbrev} ${Package} ${Version}\n",
        "*nvinfer*",
        "*cudnn*",
        "cuda-cudart*",
        "nvidia-*",
    ),
}
"""Programs by subject."""
FILES: Mapping[str, tuple[str, ...]] = {
    "release": ("proc/device-tree/model", "proc/device-tree/compatible", "etc/nv_tegra_release", "etc/os-release"),
    "power modes": ("var/lib/nvpmodel/status", "etc/nvpmodel.conf"),
    "memory": ("proc/meminfo", "proc/swaps"),
    "clocks of cores, kHz": (
        "sys/devices/system/cpu/cpufreq/policy*/scaling_*_freq",
        "sys/devices/system/cpu/cpu[0-9]*/online",
    ),
    "clocks of the GPU, Hz": ("sys/class/devfreq/*/*_freq", "sys/class/devfreq/*/governor"),
    "switched-off parts of the GPU": ("sys/devices/**/tpc_pg_mask", "sys/devices/**/fbp_pg_mask"),
    "thermal trips": (
        "sys/class/thermal/thermal_zone*/type",
        "sys/class/thermal/thermal_zone*/temp",
        "sys/class/thermal/thermal_zone*/trip_point_*_t[ey][mp][pe]",
        "sys/class/thermal/thermal_zone*/cdev*_trip_point",
        "sys/class/thermal/thermal_zone*/cdev*/type",
        "sys/class/thermal/cooling_device*/type",
        "sys/class/thermal/cooling_device*/cur_state",
    ),
    "sensors": ("sys/class/hwmon/hwmon*/name", "sys/class/hwmon/hwmon*/*_label"),
}
"""Patterns of files below the root by subject."""
_DEVICES = ("dev/nvidia*", "dev/nvhost*", "dev/nvmap", "dev/nvgpu/*/*", "dev/dri/*")
_KEPT = re.compile(r"^(Mem|Swap|Cma|NvMap|Filename|/|PRETTY_NAME|# R|NVIDIA |nvidia,|pmode|< P)")
"""Relevant lines of files in ``proc`` and ``etc``; in ``sys``, all lines are relevant."""
_KERNEL = re.compile(r"out of memory|oom|nvmap|nvgpu|xid|firmware|throttl|over-?current", re.IGNORECASE)
_MOST_LINES = 60


def facts(root: Path = Path("/")) -> Iterator[tuple[str, str]]:
    """Yield the subject and the text of each fact."""
    for subject, command in PROGRAMS.items():
        yield subject, output_of(command)
    for subject, patterns in FILES.items():
        paths = [path for pattern in patterns for path in sorted(root.glob(pattern)) if path.is_file()]
        lines = [
            f"{path.relative_to(root)}: {line}"
            for path in paths
            for line in text_of(path).replace("\0", " ").splitlines()
            if path.relative_to(root).parts[0] == "sys" or _KEPT.match(line)
        ]
        yield subject, "\n".join(lines) or "no such file here"
    devices = [path for pattern in _DEVICES for path in sorted(root.glob(pattern))]
    yield (
        "devices",
        "\n".join(f"{path}{'' if os.access(path, os.W_OK) else ', not writable for this user'}" for path in devices)
        or "no such file here",
    )


def kernel_messages() -> str:
    """Return the kernel's latest messages about memory and the GPU."""
    found = output_of(("dmesg",))
    lines = [line for line in found.splitlines() if _KERNEL.search(line)]
    return "\n".join(lines[-_MOST_LINES:]) or (
        found if len(found.splitlines()) == 1 else "none about memory or the GPU"
    )


def output_of(command: tuple[str, ...]) -> str:
    """Return the output of a program, or one line with the reason why there is none."""
    try:
        done = subprocess.run(  # noqa: S603  commands of this module
            command, capture_output=True, text=True, errors="replace", timeout=LIMIT_S, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} did not answer: {error}"
    return (done.stdout + done.stderr).strip() or f"{command[0]} printed nothing"
