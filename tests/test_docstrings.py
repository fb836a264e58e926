"""References in docstrings and comments lead to something that exists."""

import ast
import builtins
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":(?:class|func|meth|attr|data|mod|exc):`~?([\w.]+)`")
DOTTED = re.compile(r"``(ls_edge(?:\.\w+)+|[A-Z]\w*[a-z]\w*\.\w+)``")
FILE = re.compile(r"``([\w/]+\.(?:py|md|yaml))``")
FOLDERS = ("ls_edge", "runtime", "training", "export")
OTHERS = {"peers.yaml", "config.yaml", "extension_binary_data.md", "extension_classification.md", "inference_rest.md"}
"""Files that users write, and documents of others."""


def test_references_lead_to_something():
    texts = {path: path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names = {*dir(builtins), "ls_edge"}
    for path, text in texts.items():
        names |= {path.stem, path.parent.name}
        for node in ast.walk(ast.parse(text)):
            found = (getattr(node, key, None) for key in ("name", "asname", "attr", "id", "arg"))
            names |= {part for name in found if isinstance(name, str) for part in name.split(".")}
    files = [f"/{path.relative_to(ROOT)}" for top in (*FOLDERS, "tests", "docs") for path in (ROOT / top).rglob("*.*")]

    def exists(name):
        first, *others = name.strip(".").split(".")
        of_library = first != "ls_edge" and first.islower() and importlib.util.find_spec(first)
        return {first, *others} <= names or bool(of_library)

    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts.items()
        for name in {*ROLE.findall(text), *DOTTED.findall(text)}
        if not exists(name)
    ]
    for path, text in texts.items():
        named = {*FILE.findall(text)} - OTHERS
        dead += [f"{path}: {name}" for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert dead == []
