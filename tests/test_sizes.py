"""Limits of size: files, classes and functions that one reading explains, and folders that one look does."""

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8"))
    for top in ("ls_edge", "runtime", "training", "export")
    for path in (ROOT / top).rglob("*.py")
}
COMMANDS = Path("ls_edge/cli/commands")


def lines_of(node):
    return node.end_lineno - node.lineno + 1


def is_large(node, path):
    if isinstance(node, ast.ClassDef):
        stored = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
        attributes = {one.attr for one in stored if ast.unparse(one.value) == "self"}
        methods = sum(isinstance(one, ast.FunctionDef) for one in node.body)
        return lines_of(node) > 300 or methods > 30 or len(attributes) > 16
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and path.parent != COMMANDS:
        names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        return lines_of(node) > 60 or len(names) - (names[:1] in (["self"], ["cls"])) > 8
    return False


def test_files_classes_and_functions_are_small():
    large = [f"{path}:{node.lineno}" for path, tree in TREES.items() for node in ast.walk(tree) if is_large(node, path)]
    assert large == []
    assert [path for path in TREES if (ROOT / path).read_text(encoding="utf-8").count("\n") > 500] == []


def test_folders_are_small():
    modules = Counter(path.parent for path in TREES if path.stem != "__init__" and path.parent != COMMANDS)
    assert {folder: count for folder, count in modules.items() if count > 14} == {}
