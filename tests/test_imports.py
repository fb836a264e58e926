"""Imports of every module follow the lines of ``docs/develop.md``."""

import ast
import functools
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("training", "export", "runtime")
"""Folders at the top that a link in ``ls_edge`` leads to; their own names are not importable from a wheel."""

LINES = (
    ("public",),  # ls_edge/__init__.py, __main__.py: the public names and the entry point
    ("cli", "benchmarks"),
    ("api",),
    ("analysis",),
    ("export",),
    ("training", "fleet"),
    ("serve",),
    ("source",),
    ("peer",),
    ("clients",),
    ("store",),
    ("transport", "simulator"),
    ("routing", "change"),
    ("protocol",),
    ("report",),
    ("evaluation", "engines", "data"),
    ("device",),
    ("core",),  # and ls_edge/version.py
)
"""A package imports packages of lower lines only."""
FLOORS = {
    "ls_edge.runtime.fleet": (("simulation",), ("planning", "local_cluster", "local_peer")),
    "ls_edge.runtime.routing": (
        ("peer", "source"),
        ("machine",),
        ("recovery", "recent_events"),
        ("decisions",),
        ("reach",),
        ("policies",),
        ("state",),
    ),
}
"""Folders and modules of a package; each imports those of lower floors only."""
ALSO = {("engines", "data")}
RUNTIME = {path.parent.name for path in (ROOT / "runtime").glob("*/__init__.py")}
"""Packages that `export` and `training` never import."""
PURE = {"change", "transport", "simulator", "routing", "protocol"}
LIBRARIES = {"report", "evaluation", "engines", "data"}
"""Packages that the pure ones never import, although these stand on lower lines."""


def modules():
    found = {}
    for folder in ("ls_edge", *LINKED, "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = ("ls_edge",) if folder in LINKED else ()
            found[".".join((*package, *(part for part in parts if part != "__init__")))] = path
    return found


MODULES = modules()


def imports_of(source):
    """Modules of this repository that a module imports, anywhere in it: in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


@functools.cache  # only the process that runs these tests reads all modules
def graph():
    return {name: imports_of(path.read_text(encoding="utf-8")) - {name} for name, path in MODULES.items()}


def package_of(module):
    first, *rest = module.split(".")
    if first != "ls_edge":
        return first
    if rest in ([], ["__main__"]):
        return "public"
    if rest in (["version"], ["runtime"]):
        return "core"
    return rest[1] if rest[0] == "runtime" and len(rest) > 1 else rest[0]


def forbidden(importer, imported):
    here, there = package_of(importer), package_of(imported)
    line = {package: number for number, packages in enumerate(LINES) for package in packages}
    if here == there or (here, there) in ALSO:
        return False
    if (here in ("export", "training") and there in RUNTIME) or (here in PURE and there in LIBRARIES):
        return True
    return line[there] <= line[here]


def test_imports_follow_the_lines():
    wrong = [f"{name} imports {other}" for name in sorted(graph()) for other in graph()[name] if forbidden(name, other)]
    assert wrong == []


def floors_of(package):
    """Return the room (folder or module) inside a package, and the number of its floor, by module."""
    rooms = {name: name[len(package) + 1 :].partition(".")[0] for name in MODULES if name.startswith(f"{package}.")}
    floors = {room: number for number, names in enumerate(FLOORS[package]) for room in names}
    assert set(rooms.values()) == floors.keys()
    return {name: (room, floors[room]) for name, room in rooms.items()}


@pytest.mark.parametrize("package", FLOORS)
def test_imports_inside_a_package_lead_to_lower_floors(package):
    at = floors_of(package)
    inside = [(name, other) for name in at for other in graph()[name] & at.keys() if at[name][0] != at[other][0]]
    assert [f"{name} imports {other}" for name, other in inside if at[other][1] <= at[name][1]] == []


def test_no_folder_is_both_above_and_below_a_neighbor():
    """Within a folder, modules and folders as a whole import one another in one direction only."""
    floors = defaultdict(lambda: defaultdict(set))
    for name, others in graph().items():
        for other in others:
            above, below = name.split("."), other.split(".")
            level = next((n for n, parts in enumerate(zip(above, below, strict=False)) if len(set(parts)) > 1), None)
            if level is not None:
                floors[".".join(above[:level])][above[level]].add(below[level])
    for folder in floors:
        try:
            TopologicalSorter(floors[folder]).prepare()
        except CycleError as error:
            pytest.fail(f"{folder}: {' imports '.join(reversed(error.args[1]))}")


def test_clients_load_nothing_of_routing():
    reached, new = set(), {name for name in MODULES if package_of(name) == "clients"}
    while new:
        reached |= new
        new = {other for name in new for other in graph()[name]} - reached
    assert [name for name in sorted(reached) if package_of(name) == "routing"] == []


def test_the_lines_are_checked():
    assert {package_of(name) for name in MODULES} == {package for line in LINES for package in line}
    for wrong in (("core.bundle", "cli.commands.run"), ("data.datasets", "engines.engine"),
                  ("export.writer", "runtime.source.source")):  # fmt: skip
        assert forbidden(*(f"ls_edge.{name}" for name in wrong))
    assert not forbidden("ls_edge.engines.pipeline", "ls_edge.data.datasets")


def test_shipped_code_imports_neither_tests_nor_benchmarks():
    for name in MODULES:
        if package_of(name) != "benchmarks":
            text = MODULES[name].read_text(encoding="utf-8")
            assert re.search(r"(?m)^\s*(from|import) (tests|benchmarks)\b", text) is None, name


def test_every_module_is_imported_as_part_of_the_package():
    bare = re.compile(rf"(?m)^\s*(from|import) ({'|'.join(LINKED)})\b")
    paths = [path for folder in ("tests", "examples", "docs") for path in (ROOT / folder).rglob("*.py")]
    assert [str(path) for path in (*MODULES.values(), *paths) if bare.search(path.read_text(encoding="utf-8"))] == []
