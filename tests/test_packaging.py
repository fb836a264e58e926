"""What is built holds everything: every module of the four folders, types marker and assets, in wheel and sdist."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"ls_edge": "ls_edge", "training": "ls_edge/training", "export": "ls_edge/export", "runtime": "ls_edge/runtime"}


def expected():
    """Path in the wheel of every file that has to be there, by its path in the repository."""
    found = {}
    for room, inside in ROOMS.items():
        for path in (ROOT / room).rglob("*"):
            below = path.relative_to(ROOT / room)
            if path.is_file() and "__pycache__" not in below.parts:
                found[f"{room}/{below.as_posix()}"] = f"{inside}/{below.as_posix()}"
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The sdist, and the wheel made from it."""
    source = tmp_path_factory.mktemp("source") / "clone"
    source.mkdir()
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(source / "dist"), str(source)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (wheel,) = (source / "dist").glob("*.whl")
    (sdist,) = (source / "dist").glob("*.tar.gz")
    return wheel, sdist


def test_the_wheel_holds_every_file(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == set(expected().values())
    assert {"ls_edge/py.typed", "ls_edge/data/assets/digits.npz", "ls_edge/data/assets/digits.md"} <= names


def test_the_sdist_holds_every_file(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
    assert set(expected()) | {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= names


def test_the_metadata(built):
    with zipfile.ZipFile(built[0]) as wheel:
        text = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "ls-edge = ls_edge.__main__:main" in text["entry_points.txt"]
    assert "Requires-Python: >=3.10" in text["METADATA"]
    for extra in ("cpu", "gpu", "tensorrt", "train", "export", "dev"):
        assert f"Provides-Extra: {extra}" in text["METADATA"]
    needed = [
        line for line in text["METADATA"].splitlines() if line.startswith("Requires-Dist:") and "extra" not in line
    ]
    assert not any(heavy in line for line in needed for heavy in ("torch", "timm", "onnx", "tensorrt"))
    assert "Apache License" in text["LICENSE"]


def test_the_wheel_works_without_the_clone(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import ls_edge, ls_edge.data.preprocess as p\n"
        "from ls_edge.data.datasets import open_data\n"
        "print(ls_edge.__file__, p.__file__, len(open_data('digits', 'eval')), sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        str(tmp_path / "ls_edge" / "__init__.py"), str(tmp_path / "ls_edge" / "data" / "preprocess.py"), "359",
    ]  # fmt: skip
