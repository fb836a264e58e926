"""Every cell of examples/notebooks/, run in its order as a notebook does, with what its last expression draws."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


def cells(path):
    return ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]


def run_cell(code, names):
    """Run a cell; return what a notebook would show of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if last is None:
        return None
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["any_order", "lose_a_device", "plan_a_fleet"]
    for path in NOTEBOOKS:
        assert all(not c.get("outputs") for c in json.loads(path.read_text())["cells"])


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_of_a_notebook_shows_nothing_red(path, tmp_path):
    """A notebook shows standard error in red: warnings and logs."""
    code = re.sub(r"epochs ?= ?\d+", "epochs=1", cells(path)[0])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=500, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.release
@pytest.mark.timeout(600)
@pytest.mark.leaks_ok  # what draws keeps threads for the process
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:the best checkpoint:UserWarning")  # after so short a training
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_of_a_notebook_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    shown = [run_cell(code.replace("epochs = 12", "epochs = 3"), names) for code in cells(path)]
    text = "\n".join(filter(None, shown)) + capsys.readouterr().out
    expected = {
        "any_order": ("<svg", "any-order: vit_digits", "random order"),
        "lose_a_device": ("100 answers, 0 of them", "'alive'"),
        "plan_a_fleet": ("images", "latency_ms"),
    }
    for words in expected[path.stem]:
        assert words in text, text[:2000]
