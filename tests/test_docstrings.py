"""References in docstrings and comments lead to something that exists."""

import ast
import builtins
import functools
import importlib.util
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`~?([\w.]+)`")
DOTTED = re.compile(r"``(ls_edge(?:\.\w+)+|[A-Z]\w*[a-z]\w*\.\w+)``")
SEE = re.compile(r"\b[Ss]ee (?:``)?([a-z]+(?:_[a-z]+)+|[A-Z]\w*[a-z]\w*\.\w+)\b(?!\.py)")
FILE = re.compile(r"``([\w/]+\.(?:py|md|yaml))``")


def sources():
    """Text by the name of each module."""
    found = {}
    for folder in ("ls_edge", "runtime", "training", "export"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            package = () if folder == "ls_edge" else ("ls_edge",)
            name = ".".join((*package, *(part for part in parts if part != "__init__")))
            found[name] = path.read_text(encoding="utf-8")
    return found


SOURCES = sources()


class Names:
    """What the modules define; only the process that runs these tests reads all of them."""

    def __init__(self):
        self.names = set(dir(builtins))
        """Classes, functions, constants and imported names of all modules."""
        self.parameters = set()
        self.members = defaultdict(set)
        """Methods, fields and attributes of ``self`` by class; bases count as members."""
        for text in SOURCES.values():
            self.read(ast.parse(text))

    def read(self, tree):
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.names.update(alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.arg):
                self.parameters.add(node.arg)
        for node in tree.body:
            self.names.update(
                {node.name} if hasattr(node, "name") else {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            )
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(owner):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    self.members[owner.name].add(node.name)
                elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                    self.members[owner.name].add(node.attr)
                elif isinstance(node, ast.Name) and (isinstance(node.ctx, ast.Store) or node in owner.bases):
                    self.members[owner.name].add(node.id)


@functools.cache
def known():
    return Names()


TRACKED = {
    path.relative_to(ROOT).as_posix()
    for folder in ("ls_edge", "runtime", "training", "export", "tests", "docs")
    for path in (ROOT / folder).rglob("*.*")
}
"""Files of the repository."""
OTHERS = {"peers.yaml", "config.yaml", "extension_binary_data.md", "extension_classification.md", "inference_rest.md"}
"""Files that users write, and documents of others."""


def is_file(name):
    """Whether a path, or the last parts of one, is a file of the repository or of others."""
    return name in OTHERS or any(path == name or path.endswith(f"/{name}") for path in TRACKED)


def has_member(owner, name, seen=()):
    members = known().members
    own = members.get(owner, set())
    return name in own or any(has_member(base, name, (*seen, owner)) for base in own & members.keys() - {*seen})


def exists(name, classes):
    """Whether a dotted name is a module, or leads to a name, or to a member of a class; ``classes`` are those here."""
    if name in SOURCES or any(has_member(owner, name) for owner in classes):
        return True
    *before, last = name.split(".")
    if before and before[0] != "ls_edge" and importlib.util.find_spec(before[0]) is not None:
        return True  # of a library
    return last in known().names if not before or ".".join(before) in SOURCES else has_member(before[-1], last)


@pytest.mark.parametrize("module", SOURCES)
def test_references_lead_to_something(module):
    text = SOURCES[module]
    classes = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    names = {*ROLE.findall(text), *DOTTED.findall(text), *(set(SEE.findall(text)) - known().parameters)}
    assert [name for name in sorted(names) if not exists(name, classes)] == []
    assert [name for name in sorted({*FILE.findall(text)}) if not is_file(name)] == []


def test_references_to_nothing_are_found():
    assert exists("Bands.from_json", [])
    assert exists("from_json", ["Bands"])
    assert exists("ls_edge.core.bands.Bands", [])
    assert exists("FolderInUse.exit_code", [])  # of a base
    for dead in ("Bands.from_yaml", "from_json", "ls_edge.core.bends", "ls_edge.core.bands.Bends", "BendsError"):
        assert not exists(dead, []), dead
    assert SEE.findall("see execution_order, see ``Machine.validate``, see page 3") == [
        "execution_order", "Machine.validate",
    ]  # fmt: skip
    assert is_file("state/custody.py")
    assert not is_file("parts/engine.py")
