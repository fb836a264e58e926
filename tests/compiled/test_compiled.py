"""Compiled modules do what the Python ones do. ``make test-compiled`` runs this file: the compiler takes minutes.

The wheel is built with ``LS_EDGE_COMPILE=1`` and unpacked into an empty folder, which stands first on the path of
processes of their own. The same folder without the compiled modules (``LS_EDGE_PURE_PYTHON=1``) is what they are
compared with.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import numpy as np
import pytest

from ls_edge.compiled import MODULES, PURE_PYTHON, compiled_modules, in_use

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ASKED = os.environ.get("LS_EDGE_TEST_COMPILED") == "1"
COMPILER = sysconfig.get_config_var("CC") or "cc"
NEEDED = ("ls_edge", "training", "export", "runtime", "packaging")

pytestmark = pytest.mark.timeout(1800)
ROUTING = (
    "test_bands", "test_block_assignment", "test_credit_waits", "test_custody_transfers", "test_custody_waiting",
    "test_greeting", "test_links", "test_not_finite", "test_pauses", "test_policy", "test_quality",
    "test_routing_stateful", "test_simulation", "test_source_budgets", "test_source_routing", "test_sparse_links",
    "test_transitions", "test_wave_planner", "test_waves",
)  # fmt: skip
"""Tests of what is compiled; left out are those that replace methods of its classes, or make subclasses of them."""
SUBCLASSES = "liar or while_the_source_fails"
"""Parts of the names of tests in these files that do."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder with the wheel and its compiled modules."""
    if not ASKED:
        pytest.skip("takes minutes: 'make test-compiled' runs it")
    if shutil.which(COMPILER.split()[0]) is None:
        pytest.skip(f"there is no C compiler ({COMPILER})")
    clone, made = tmp_path_factory.mktemp("source") / "clone", tmp_path_factory.mktemp("installed")
    for name in NEEDED:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(clone / "dist"), str(clone)],
        capture_output=True, text=True, timeout=1500, check=False,
        env={"MYPYC_OPT_LEVEL": "0", **os.environ, "LS_EDGE_COMPILE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (clone / "dist").glob("*.whl")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(made)
    return made


def python(folder, *arguments, pure=False, cwd=None, timeout=300.0):
    """Run Python with the compiled modules, or beside them; returns standard output and standard error."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONHASHSEED": "0", PURE_PYTHON: "1" if pure else ""}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd or folder, env=environment, capture_output=True, text=True,
        timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout, done.stderr


def test_this_editable_install_is_pure_python():
    assert compiled_modules() == ()
    assert not in_use()


def test_the_list_names_modules_that_there_are():
    places = {"runtime": ROOT, "training": ROOT, "export": ROOT}
    for name in MODULES:
        inside = name.split(".")[1:]
        assert places.get(inside[0], ROOT / "ls_edge").joinpath(*inside).with_suffix(".py").is_file(), name


def test_a_wrong_value_of_the_switch_is_named(tmp_path):
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60,
        env={**os.environ, "LS_EDGE_COMPILE": "yes"}, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "LS_EDGE_COMPILE is 'yes'; set it to 1 for compiled modules, or leave it out"
    )


def test_all_modules_are_there_and_doctor_says_so(folder):
    code = (
        "import importlib, json, sys\n"
        "from ls_edge.compiled import MODULES\n"
        "from ls_edge.cli.diagnostics import check_compiled\n"
        "files = [importlib.import_module(name).__file__ for name in MODULES]\n"
        "print(json.dumps([files, [one.detail for one in check_compiled()]]))"
    )
    files, detail = json.loads(python(folder, "-c", code)[0])
    assert len(files) == len(MODULES)
    assert all(file.startswith(str(folder)) and file.endswith((".so", ".pyd")) for file in files)
    assert detail == [f"{len(MODULES)}, in use"]
    files, detail = json.loads(python(folder, "-c", code, pure=True)[0])
    assert all(file.startswith(str(folder)) and file.endswith(".py") for file in files)
    assert detail == [f"{len(MODULES)}, not in use: {PURE_PYTHON} is set"]


@pytest.mark.parametrize("seed", range(8))
def test_the_machines_say_the_same(folder, seed):
    fast, file = python(folder, HERE / "trace.py", seed)
    plain, plain_file = python(folder, HERE / "trace.py", seed, pure=True)
    assert not file.strip().endswith(".py")
    assert plain_file.strip().endswith(".py")
    assert "Forward(" in plain
    assert fast.splitlines() == plain.splitlines()


def test_the_tests_of_routing_and_links_pass(folder):
    files = [ROOT / "tests" / "runtime" / f"{name}.py" for name in ROUTING]
    out, _ = python(
        folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--rootdir", ROOT, "-c",
        ROOT / "pyproject.toml", "-k", f"not {SUBCLASSES}", *files, timeout=1500,
    )  # fmt: skip
    assert " passed" in out


def test_real_peers_give_the_same_logits(folder, tiny_bundle, tmp_path):
    found = {}
    for pure in (False, True):
        out = tmp_path / f"{pure}.npy"
        text, _ = python(folder, HERE / "answers.py", tiny_bundle, tmp_path / str(pure), out, pure=pure)
        found[pure] = (json.loads(text), np.load(out))
    fast, plain = found[False], found[True]
    assert [fast[0]["source"], *fast[0]["peers"]] == [True] * 4
    assert [plain[0]["source"], *plain[0]["peers"]] == [False] * 4
    assert fast[0]["degraded"] == plain[0]["degraded"] == [False] * 6
    assert fast[0]["orders"] == plain[0]["orders"]
    np.testing.assert_allclose(fast[1], plain[1], rtol=0, atol=1e-4 * np.abs(plain[1]).max())
