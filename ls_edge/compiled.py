"""Modules of which an install may have a compiled copy beside the Python one, and which of the two is in use.

``LS_EDGE_COMPILE=1 pip install .`` has mypyc translate these modules to C (``setup.py``). The compiled ones are then
imported and do the same; with ``LS_EDGE_PURE_PYTHON=1`` a process imports the Python ones even so. They are what
handles each message and each event: all else costs too little to be worth it, or (the structs of msgspec) is C already.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES, FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType

MODULES = (
    "ls_edge.core.bands",
    "ls_edge.runtime.source.deadlines",
    "ls_edge.runtime.routing.block_assignment",
    "ls_edge.runtime.routing.candidates",
    "ls_edge.runtime.routing.credits",
    "ls_edge.runtime.routing.custody",
    "ls_edge.runtime.routing.engine_queue",
    "ls_edge.runtime.routing.held_request",
    "ls_edge.runtime.routing.neighbours",
    "ls_edge.runtime.routing.peer_routing",
    "ls_edge.runtime.routing.policies.fastest",
    "ls_edge.runtime.routing.policies.nearest",
    "ls_edge.runtime.routing.policies.parallel",
    "ls_edge.runtime.routing.policies.policy",
    "ls_edge.runtime.routing.policies.quality",
    "ls_edge.runtime.routing.policies.random",
    "ls_edge.runtime.routing.policies.sequential",
    "ls_edge.runtime.routing.source_routing",
    "ls_edge.runtime.routing.tombstones",
    "ls_edge.runtime.routing.waiting_requests",
    "ls_edge.runtime.routing.wave_planner",
    "ls_edge.runtime.routing.waves",
    "ls_edge.runtime.transport.admission",
    "ls_edge.runtime.transport.linked_processes",
    "ls_edge.runtime.transport.links",
    "ls_edge.runtime.transport.node",
    "ls_edge.runtime.transport.outbox",
    "ls_edge.runtime.execution.worker",
)
"""All of them or none: they use one another's memory layouts."""
PURE_PYTHON = "LS_EDGE_PURE_PYTHON"
"""Environment variable: ``1`` imports the Python modules although compiled ones are there."""


class _PurePython:
    """Finds the Python file of each of :data:`MODULES`, ahead of the usual finder, which prefers compiled ones."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG004
        """As :meth:`importlib.abc.MetaPathFinder.find_spec`."""
        if name not in MODULES or path is None:
            return None
        loader = (SourceFileLoader, SOURCE_SUFFIXES)
        found = (FileFinder(folder, loader).find_spec(name) for folder in path)
        return next((spec for spec in found if spec is not None), None)


def is_pure_python() -> bool:
    """Whether the environment asks for the Python modules."""
    return os.environ.get(PURE_PYTHON, "") not in ("", "0")


def choose_modules() -> None:
    """Import the Python modules from now on where the environment asks for it."""
    if is_pure_python() and _PurePython not in sys.meta_path:
        sys.meta_path.insert(0, _PurePython)


def compiled_modules() -> tuple[str, ...]:
    """Those of :data:`MODULES` of which this install has a compiled copy for this Python."""
    folder = Path(__file__).parent
    files = {name: folder.joinpath(*name.split(".")[1:]) for name in MODULES}
    return tuple(
        name
        for name, file in files.items()
        if any(file.with_name(file.name + suffix).exists() for suffix in EXTENSION_SUFFIXES)
    )


def in_use() -> bool:
    """Whether this process imports compiled modules."""
    return bool(compiled_modules()) and not is_pure_python()
