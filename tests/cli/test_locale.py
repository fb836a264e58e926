"""Names are UTF-8 in a real locale with another encoding."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from PIL import Image

DATA = "import sys; from ls_edge.data.datasets import open_data; print(ascii(open_data(sys.argv[1], 'eval').classes))"


@pytest.fixture(scope="module")
def latin1(tmp_path_factory):
    """Environment of a Raspberry Pi with LANG=en_US."""
    folder = tmp_path_factory.mktemp("locales")
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    made = subprocess.run(
        ["localedef", "-i", "en_US", "-f", "ISO-8859-1", folder / "en_US"], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("localedef lacks its sources: apt install locales")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "PYTHONUTF8", "PYTHONIO"))}
    return {**kept, "LOCPATH": str(folder), "LANG": "en_US"}


@pytest.fixture
def images(tmp_path):
    for name in ("Füchse", "Bären"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16)).save(tmp_path / "data" / name / "ä.png")
    return tmp_path / "data"


def test_classes_of_folders_and_tars_are_utf8(latin1, images, tmp_path):
    shutil.make_archive(str(tmp_path / "archive"), "tar", images)
    for data in (images, tmp_path / "archive.tar"):
        done = subprocess.run([sys.executable, "-c", DATA, data], env=latin1, capture_output=True, check=True)
        assert done.stdout.decode().strip() == ascii(("Bären", "Füchse"))


def test_commands_take_and_print_names_in_utf8(latin1, images, tiny_bundle):
    python = [sys.executable, "-E"]  # without the environment of Python
    command = [*python, "-m", "ls_edge", "predict", "--bundle", tiny_bundle, images, "--json", "--threads", "1"]
    done = subprocess.run(command, env=latin1, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [json.loads(line)["image"] for line in done.stdout.splitlines()] == [
        f"{images}/{name}/ä.png" for name in ("Bären", "Füchse")
    ]
    done = subprocess.run(
        [*command[:5], images / "fehlt-ü.png", *command[5:7], "--json"], env=latin1, capture_output=True
    )
    assert json.loads(done.stdout)["image"] == f"{images}/fehlt-ü.png"
