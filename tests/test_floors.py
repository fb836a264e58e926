"""Lowest versions: ``make test-floors`` installs those of ``pyproject.toml``."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_floors_are_the_lower_bounds_of_the_project():
    pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "floors.py"], capture_output=True, text=True, check=True, timeout=60
    )
    pins = dict(line.split("==") for line in done.stdout.splitlines())
    assert {"click", "msgspec", "numpy", "pillow", "pyyaml", "pyzmq", "rich", "onnx", "onnxruntime"} <= pins.keys()
    assert {"aiohttp", "prometheus-client", "altair", "jinja2", "scikit-learn", "umap-learn"} <= pins.keys()
    assert {"huggingface_hub", "opencv-python-headless"} <= pins.keys()
    assert (pins["timm"], pins["onnxscript"]) == ("1.0.17", "0.6")
    assert not {"torch", "torchvision", "ls-edge", "pytest", "tensorrt"} & pins.keys()
    project = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{name}>={version}"' in project for name, version in pins.items())


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_target_installs_them_in_front_of_the_environment():
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", "test-floors"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "tests/floors.py > .venv-floors/requirements.txt" in done.stdout
    tests = next(line for line in done.stdout.splitlines() if " -m pytest " in line)
    named = [part for part in tests.split() if part.startswith("tests/")]
    assert {"tests/core", "tests/training", "tests/export", "tests/runtime/serve"} <= set(named)
    assert all((ROOT / part).exists() for part in named)
