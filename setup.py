"""What ``pyproject.toml`` cannot say: with ``LS_EDGE_COMPILE=1`` a wheel gets compiled modules beside the Python ones.

mypyc, a part of mypy, translates the modules of ``ls_edge/compiled.py`` to C. It is shown the package as it is when
installed, since the names of modules go by their places. An editable install stays pure Python.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
STAGE = ROOT / "build" / "compiled"
FOLDERS = {
    "ls_edge": "ls_edge",
    "training": "ls_edge/training",
    "export": "ls_edge/export",
    "runtime": "ls_edge/runtime",
}
OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--explicit-package-bases")
"""Only what is compiled is checked here; ``make types`` checks all, with the pinned versions of other packages."""


def wanted() -> bool:
    """Whether this run builds a wheel that is to have compiled modules."""
    asked = os.environ.get("LS_EDGE_COMPILE", "")
    if asked not in ("", "0", "1"):
        raise SystemExit(f"LS_EDGE_COMPILE is {asked!r}; set it to 1 for compiled modules, or leave it out")
    return asked == "1" and "bdist_wheel" in sys.argv


def compiled() -> list[Extension]:
    """The extension modules that mypyc makes."""
    try:
        from mypyc.build import mypycify
    except ImportError:
        raise SystemExit("LS_EDGE_COMPILE=1 needs mypyc: pip install mypy, or build with build isolation") from None
    shutil.rmtree(STAGE, ignore_errors=True)
    for folder, inside in FOLDERS.items():
        shutil.copytree(ROOT / folder, STAGE / inside, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    modules = runpy.run_path(str(ROOT / "ls_edge" / "compiled.py"))["MODULES"]
    files = [name.replace(".", "/") + ".py" for name in modules]
    os.chdir(STAGE)
    try:
        extensions = mypycify(
            [*OPTIONS, "--cache-dir", str(STAGE / "cache"), *files],
            opt_level=os.environ.get("MYPYC_OPT_LEVEL", "2"),
            debug_level="0",
            target_dir=str(STAGE / "c"),
            group_name="ls_edge",
        )
    finally:
        os.chdir(ROOT)
    for extension in extensions:  # warnings of a compiler that mypyc does not know are no errors
        extension.extra_compile_args = [flag for flag in extension.extra_compile_args if flag != "-Werror"]
    return extensions


setup(ext_modules=compiled() if wanted() else [])
