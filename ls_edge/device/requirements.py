"""Commands in messages that tell users how to install missing packages.

They install packages from PyPI, never ls-edge itself, so they work for a clone and for a wheel on a board. The
requirements of an extra are read from the metadata of the installed package.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ls_edge.core.errors import UsageError, lacking
from ls_edge.device import hardware


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
    "export": ("torch", "timm", "onnx"),
    "metrics": ("prometheus_client",),
    "report": ("altair", "jinja2", "vl_convert"),
    "serve": ("prometheus_client", "aiohttp"),
}
"""Modules that :func:`require` checks, by extra."""


class Requirement(NamedTuple):
    """A required package with its lowest version and the first version that is too new, or empty strings for any."""

    name: str
    least: str
    below: str = ""

    def __str__(self) -> str:
        bounds = [sign + bound for sign, bound in ((">=", self.least), ("<", self.below)) if bound]
        return f"'{self.name}{','.join(bounds)}'" if bounds else self.name


def install_command(*extras: str) -> str:
    """Return ``pip install ...`` with the packages of ``extras`` that are missing or have an unsuitable version.

    ``cpu`` means the build of ONNX Runtime for this machine (:func:`engine_advice`).
    """
    known = requirements()
    wanted = list(dict.fromkeys(item for extra in extras if extra != "cpu" for item in known.get(extra, ())))
    absent = [item for item in wanted if not satisfied(item)] or wanted
    steps = [f"pip install {' '.join(map(str, absent))}"] if absent else []
    if "cpu" in extras and not any(installed(build) for build in ORT_BUILDS):
        steps.append(engine_advice())
    return ", and ".join(steps)


def require(what: str, *extras: str) -> None:
    """Raise :class:`UsageError` if a module of ``extras`` is missing, without importing the modules."""
    absent = [name for extra in extras for name in MODULES[extra] if importlib.util.find_spec(name) is None]
    if absent:
        names = ", ".join(extras)
        raise UsageError(f"{what} needs {', '.join(absent)} (extra {names}); to install: {install_command(*extras)}")


def require_import(what: str, modules: Sequence[str], *extras: str, instead: str = "") -> None:
    """Import modules that ``what`` needs; raise :class:`UsageError` with the reason and a command for ``extras``."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            need = f"{what} needs {lacking(error, module)} (extra {', '.join(extras)})"
            raise UsageError(f"{need}; to install: {install_command(*extras)}{instead}") from None


def engine_advice() -> str:
    """Return the command or advice to install the build of ONNX Runtime for this machine."""
    if not hardware.has_nvidia():
        return "pip install onnxruntime"
    if platform.machine() == "x86_64":
        return "pip install 'onnxruntime-gpu[cuda,cudnn]'"
    # PyPI's wheels for arm64 (CUDA 13, from Python 3.11 on) have no code for the GPUs of Jetsons
    return "install the onnxruntime-gpu wheel that NVIDIA provides for this board's JetPack (not the one on PyPI)"


def requirements() -> dict[str, list[Requirement]]:
    """Return the requirements of each extra, and of the core under an empty name; empty if ls-edge is not installed."""
    try:
        lines = importlib.metadata.requires("ls-edge") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    direct: dict[str, list[Requirement]] = {"": []}
    includes: dict[str, list[str]] = {}
    for line in lines:
        match = re.match(r"([A-Za-z0-9._-]+)(?:\[([\w,-]+)\])?([^;]*)(?:;.*extra\s*==\s*[\"']([\w-]+)[\"'])?", line)
        if match is None:
            continue
        extra = match[4] or ""
        bounds = dict(re.findall(r"(>=|<(?!=))\s*([0-9.]+)", match[3]))
        if match[1].lower() == "ls-edge":
            includes.setdefault(extra, []).extend((match[2] or "").split(","))
        else:
            direct.setdefault(extra, []).append(Requirement(match[1], bounds.get(">=", ""), bounds.get("<", "")))

    def whole(extra: str, above: tuple[str, ...] = ()) -> Iterator[Requirement]:
        for other in includes.get(extra, ()):
            if other not in above:
                yield from whole(other, (*above, extra))
        yield from direct.get(extra, ())

    return {extra: list(dict.fromkeys(whole(extra))) for extra in {**direct, **includes}}


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfied(item: Requirement) -> bool:
    """Return whether a distribution is installed in a version within the bounds."""
    version = installed(item.name)
    return version is not None and numbers(version) >= numbers(item.least) and not too_new(item, version)


def too_new(item: Requirement, version: str) -> bool:
    """Return whether a version is at or above the first one that is too new."""
    return bool(item.below) and numbers(version) >= numbers(item.below)


def numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, for comparison with a bound."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:3])
