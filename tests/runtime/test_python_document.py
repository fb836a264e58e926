"""The programs of docs/python.md, run as they stand there, with real peers and a camera made of arrays."""

import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from tests.faults.engines import Faults, inject, write

DOCUMENT = Path(__file__).parents[2] / "docs" / "python.md"


def program(heading):
    """The first block of Python below a heading of the document."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", text, re.S)[1]


@pytest.fixture
def here(tiny_bundle, write_peers, serve, tmp_path, monkeypatch):
    """The folder in which the programs run: ``peers.yaml``, whose peer may be made to hang, and ``bundle``."""
    path = write_peers({"a": range(6)})
    faults = tmp_path / "a.faults"
    serve(inject(Peer(load_peers(path), "a", Bundle.open(tiny_bundle)), faults))
    (tmp_path / "bundle").symlink_to(tiny_bundle)
    monkeypatch.chdir(tmp_path)
    yield faults
    write(faults, Faults())


class Camera:
    """What ``cv2.VideoCapture`` is to the program; one frame comes while the peer's engine hangs."""

    def __init__(self, faults, frames, late):
        self.faults, self.frames, self.late = faults, frames, late
        self.read_frames = 0
        self.released = False

    def read(self):
        index, self.read_frames = self.read_frames, self.read_frames + 1
        if index >= self.frames:
            return False, None
        write(self.faults, Faults(hang=index == self.late))
        return True, np.random.default_rng(index).integers(0, 256, (24, 32, 3), dtype=np.uint8)

    def release(self):
        self.released = True


def test_the_camera_loop_survives_a_late_frame_and_ends_with_the_film(here, monkeypatch, capsys):
    camera = Camera(here, frames=6, late=2)
    monkeypatch.setitem(sys.modules, "cv2", types.SimpleNamespace(VideoCapture=lambda _number: camera))
    exec(compile(program("A camera loop"), str(DOCUMENT), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert camera.released
    assert len(lines) == 6
    answered = [bool(re.fullmatch(r"[0-9] \d+ ms (degraded)?", line)) for line in lines]
    assert all(there or line.startswith("no answer: request") for there, line in zip(answered, lines, strict=True))
    assert not answered[2]
    assert "within the budget" in lines[2]
    assert any(answered[3:])


def test_the_loop_over_files_prints_what_each_became(here, tmp_path, capsys):
    from PIL import Image

    (tmp_path / "images").mkdir()
    for index in range(3):
        pixels = np.random.default_rng(index).integers(0, 256, (20, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "images" / f"{index}.jpg")
    exec(compile(program("Many images"), str(DOCUMENT), "exec"), {})
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [re.match(r"images/(\d)\.jpg \d \[\d", line)[1] for line in lines] == ["0", "1", "2"]
    assert here.parent == tmp_path


def test_the_program_of_the_audits_prints_what_they_found(here, capsys):
    exec(compile(program("Audits"), str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out == "0 answers computed again, 0 differ\n"
    assert here.name == "a.faults"
