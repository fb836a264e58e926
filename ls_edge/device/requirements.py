"""Commands in messages that tell users how to install missing packages.

They install packages from PyPI, never ls-edge itself, so they work for a clone and for a wheel on a board. The
requirements of an extra are read from the metadata of the installed package.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import platform
import re
import shlex
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ls_edge.core.errors import UsageError, lacking
from ls_edge.device import hardware

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def compiler_problem() -> str:
    """Return the reason why torch models cannot be compiled for a GPU, or an empty string.

    Triton, which torch uses for compilation, compiles a C module on first use.
    """
    if not any(map(shutil.which, (os.environ.get("CC", "gcc"), "gcc", "clang"))):
        return "there is no C compiler (apt install gcc)"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.exists() else f"there is no {header} (apt install python3-dev)"


ORT_BUILDS = (
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-openvino",
    "onnxruntime-directml",
    "onnxruntime-rocm",
    "onnxruntime-qnn",
    "onnxruntime-training",
)
"""Distributions that all provide the module ``onnxruntime`` and overwrite each other's files."""


MODULES = {
    "cpu": ("onnxruntime",),
    "camera": ("cv2",),
    "export": ("torch", "timm", "onnx"),
    "metrics": ("prometheus_client",),
    "report": ("altair", "jinja2", "vl_convert"),
    "serve": ("prometheus_client", "aiohttp"),
}
"""Modules that :func:`require` checks, by extra."""


def install_command(*extras: str) -> str:
    """Return ``pip install ...`` with the packages of ``extras`` that are missing or have an unsuitable version.

    ``cpu`` means the build of ONNX Runtime for this machine (:func:`engine_advice`).
    """
    known = requirements()
    wanted = list(dict.fromkeys(item for extra in extras if extra != "cpu" for item in known.get(extra, ())))
    absent = [item for item in wanted if not satisfied(item)] or wanted
    steps = [f"pip install {shlex.join(map(str, absent))}"] if absent else []
    if "cpu" in extras and not any(installed(build) for build in ORT_BUILDS):
        steps.append(engine_advice())
    return ", and ".join(steps)


def require(what: str, *extras: str) -> None:
    """Raise :class:`UsageError` if a module of ``extras`` is missing, without importing the modules."""
    absent = [name for extra in extras for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if absent:
        raise UsageError(need(what, ", ".join(absent), *extras))


def require_import(what: str, modules: Sequence[str], *extras: str, instead: str = "") -> None:
    """Import modules that ``what`` needs; raise :class:`UsageError` with the reason and a command for ``extras``."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(f"{need(what, lacking(error, module), *extras)}{instead}") from None


def need(what: str, module: str, *extras: str) -> str:
    """Return the message that ``what`` needs a module of ``extras``, with the command that installs it."""
    return f"{what} needs {module} (extra {', '.join(extras)}); to install: {install_command(*extras)}"


GPU_MEMORY_ADVICE = (
    "free memory for the GPU (swap does not help it): no desktop, no zram, fewer peers, a gpu_mem_limit, then drop the "
    "page cache (echo 3 | sudo tee /proc/sys/vm/drop_caches) or reboot"
)
"""Advice for a Jetson, where CUDA may fail with NvMap error 12 although memory is free."""
_PYTHONS = {"4": "3.6", "5": "3.8"}
"""Python of the versions of JetPack that have one that ls-edge does not support."""


def jetpack_problem(root: Path = hardware.ROOT) -> str | None:
    """Return the reason why ls-edge does not support the JetPack of this board; None if it does, and elsewhere."""
    version, release = hardware.jetpack(root), hardware.jetson_linux(root)
    if version is None or release is None or numbers(release) >= (36, 4):
        return None
    python = f"its Python is {_PYTHONS[version]}, ls-edge needs 3.10, and " if version in _PYTHONS else ""
    return f"JetPack {version} is not supported: {python}its TensorRT is older than 10.3"


def jetpack_advice(root: Path = hardware.ROOT) -> str:
    """Return how to get a TensorRT that ls-edge supports on this Jetson."""
    if jetpack_problem(root) is None:
        return "sudo apt install nvidia-jetpack"
    return (
        "install JetPack 6.1 or newer (Orin and Thor only); older boards serve on their CPU, with a Python "
        "3.10 besides JetPack's and 'pip install onnxruntime'"
    )


def engine_advice() -> str:
    """Return the command or advice to install the build of ONNX Runtime for this machine."""
    if not hardware.has_nvidia() or jetpack_problem() is not None:
        return "pip install onnxruntime"
    if platform.machine() == "x86_64":
        return "pip install 'onnxruntime-gpu[cuda,cudnn]'"
    # PyPI's wheels for arm64 (CUDA 13, from Python 3.11 on) have no code for the GPUs of Jetsons
    return "install the onnxruntime-gpu wheel that NVIDIA provides for this board's JetPack (not the one on PyPI)"


def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of each extra, and of the core under an empty name; empty if ls-edge is not installed."""
    import importlib.metadata  # both take a peer 3 MiB that it does not need

    from packaging.requirements import Requirement

    try:
        about = importlib.metadata.metadata("ls-edge")
    except importlib.metadata.PackageNotFoundError:
        return {}
    every = [Requirement(line) for line in about.get_all("Requires-Dist", [])]

    def of(extra: str) -> Iterator[Requirement]:
        for item in every:
            if item.marker is None or not item.marker.evaluate({"extra": extra}):
                continue
            if item.name == "ls-edge":
                yield from itertools.chain.from_iterable(map(of, sorted(item.extras)))
            else:
                yield Requirement(f"{item.name}{item.specifier}")

    return {
        "": [item for item in every if item.marker is None],
        **{extra: list(dict.fromkeys(of(extra))) for extra in about.get_all("Provides-Extra", [])},
    }


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfied(item: Requirement) -> bool:
    """Return whether a distribution is installed in a version within the bounds, of which any build counts."""
    version = installed(item.name)
    return version is not None and item.specifier.contains(".".join(map(str, numbers(version))))


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, for comparison with another one."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
