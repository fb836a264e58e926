"""Wheel and sdist contain every module, the types marker and the assets."""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("training", "export", "runtime")
"""Folders at the top that a link in ``ls_edge`` leads to."""


def expected():
    """Path in the wheel of every file that has to be there."""
    folders = {"ls_edge": ROOT / "ls_edge", **{f"ls_edge/{name}": ROOT / name for name in LINKED}}
    return {
        f"{inside}/{path.relative_to(folder).as_posix()}"
        for inside, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, and the sdist that it was made from."""
    if release := os.environ.get("RELEASE_FOLDER"):
        ((wheel,), (sdist,)) = (list(Path(release).glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
        return wheel, sdist
    source = tmp_path_factory.mktemp("source") / "clone"
    source.mkdir()
    for folder in ("ls_edge", *LINKED):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=ignored)
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


def test_the_wheel_contains_every_file(built):
    with zipfile.ZipFile(built[0]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected()
    assert built[0].name.endswith("-py3-none-any.whl")
    assert not any(word in name for name in names for word in ("faults", "chaos", "tests", "benchmark_"))
    assert {"ls_edge/py.typed", "ls_edge/data/assets/digits.npz", "ls_edge/data/assets/digits.md"} <= names


def test_the_sdist_contains_every_file(built):
    with tarfile.open(built[1]) as sdist:
        names = {name.split("/", 1)[1] for name in sdist.getnames() if "/" in name}
        assert not any(member.issym() or member.islnk() for member in sdist.getmembers())
    others = {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    assert expected() | others <= names


def test_the_metadata_is_complete(built):
    with zipfile.ZipFile(built[0]) as wheel:
        text = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "ls-edge = ls_edge.__main__:main" in text["entry_points.txt"]
    assert "Requires-Python: >=3.10" in text["METADATA"]
    for extra in ("cpu", "gpu-cu12", "gpu-cu13", "tensorrt", "train", "export", "dev"):
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


def needed_distributions(names):
    """The named distributions and everything that they need without an extra, as installed here."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        try:
            if name not in found:
                found[name] = importlib.metadata.distribution(name)
                lines = [line for line in found[name].requires or () if "extra ==" not in line]
                waiting += [re.match(r"[A-Za-z0-9._-]+", line)[0] for line in lines]
        except importlib.metadata.PackageNotFoundError:  # of another system, or of another Python
            continue
    return found


@pytest.fixture
def board(built, tmp_path):
    """A folder with the wheel and what a board installs with it; with ``python -S`` nothing else can be imported."""
    folder = tmp_path / "board"
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(folder)
        (metadata,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        lines = [
            line.removeprefix("Requires-Dist: ")
            for line in wheel.read(metadata).decode().splitlines()
            if line.startswith("Requires-Dist: ") and ("extra ==" not in line or re.search(r"extra == .cpu.", line))
        ]
    for distribution in needed_distributions(re.match(r"[A-Za-z0-9._-]+", line)[0] for line in lines).values():
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
    return folder


def test_a_board_without_packages_of_training_and_reports_serves_and_answers(board, tiny_bundle, write_peers, tmp_path):
    def python(*arguments):
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(board), "HOME": str(tmp_path)}
        return subprocess.Popen(
            [sys.executable, "-S", *map(str, arguments)], cwd=tmp_path, env=environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    heavy = ("torch", "torchvision", "timm", "onnx", "safetensors", "sklearn", "altair", "vl_convert", "jinja2")
    code = "import importlib.util, sys; print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    with python("-c", code, *heavy, "onnxruntime") as there:
        assert there.communicate(timeout=60)[0] == "['onnxruntime']\n"
    path = write_peers({"a": range(4), "b": range(2, 6)})
    common = ("--peers", path, "--bundle", tiny_bundle)
    peers = [python("-m", "ls_edge", "peer", *common, "--name", name) for name in ("a", "b")]
    try:
        with python(
            "-m", "ls_edge", "run", *common, "--data", "digits", "--limit", "20", "--wait", "60", "--json"
        ) as run:
            out, err = run.communicate(timeout=120)
    finally:
        for peer in peers:
            peer.terminate()
        ended = [peer.communicate(timeout=30) for peer in peers]
    assert run.returncode == 0, err + "".join(text for pair in ended for text in pair)
    document = json.loads(out)
    assert (document["answered"], document["degraded"], document["failed"]) == (20, 0, 0)
    assert all(document["peers"][name]["requests"] for name in ("a", "b"))
    assert [peer.returncode for peer in peers] == [0, 0], ended
