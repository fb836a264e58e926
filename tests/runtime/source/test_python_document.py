"""The programs of docs/python.md run unchanged, with real peers and a camera that returns arrays."""

import asyncio
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.errors import DataError, UsageError
from ls_edge.runtime.source.source import Source
from tests.faults.engines import Faults, write

DOCUMENT = Path(__file__).parents[3] / "docs" / "python.md"


def program(heading):
    """The first block of Python below a heading of the document."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", text, re.S)[1]


@pytest.fixture
def here(tiny_bundle, serve_peers, tmp_path, monkeypatch):
    """Folder of the programs, with ``peers.yaml``, whose peer may be made to hang, and ``bundle``; its faults."""
    serve_peers({"a": range(6)}, faulty=True)
    (tmp_path / "bundle").symlink_to(tiny_bundle)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "a.faults"
    write(tmp_path / "a.faults", Faults())


class Camera:
    """A ``cv2.VideoCapture``; one of its frames comes while the peer's engine hangs."""

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


def test_the_camera_loop_survives_a_late_frame_and_ends_with_the_video(here, monkeypatch, capsys):
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


@pytest.fixture
def photos(tmp_path):
    """Three files in the folder ``images``."""
    (tmp_path / "images").mkdir()
    paths = [tmp_path / "images" / f"{index}.jpg" for index in range(3)]
    for index, path in enumerate(paths):
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(path)
    return paths


def test_a_cluster_survives_a_killed_peer(here, photos, tmp_path, capsys):
    photos[0].rename(tmp_path / "photo.jpg")
    exec(compile(program("Peers on this machine"), str(DOCUMENT), "exec"), {})
    first, second = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"[0-9] \d+\.\d %(, [0-9] \d+\.\d %){2}  \(\d+\.\d ms\)", first)
    assert second.partition("  (")[0] == first.partition("  (")[0]


def test_the_loop_over_files_prints_a_line_per_file(here, tmp_path, photos, capsys):
    exec(compile(program("Many images"), str(DOCUMENT), "exec"), {})
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [re.match(r"images/(\d)\.jpg \d \[\d", line)[1] for line in lines] == ["0", "1", "2"]
    assert here.parent == tmp_path


def test_the_audit_program_prints_its_results(here, capsys):
    exec(compile(program("Audits"), str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out == "0 answers recomputed, 0 differ\n"
    assert here.name == "a.faults"


def test_the_asyncio_program_prints_the_top_classes_of_each_file(here, photos, capsys):
    exec(compile(program("asyncio"), str(DOCUMENT), "exec"), {})
    lines = sorted(capsys.readouterr().out.splitlines())
    assert [
        bool(re.fullmatch(rf"images/{index}\.jpg( [0-9] \d+%){{3}}", line)) for index, line in enumerate(lines)
    ] == [
        True,
        True,
        True,
    ]


def test_an_asyncio_timeout_stops_the_work_on_the_image(here, photos, wait_until):
    async def wait_briefly(source):
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(source.classify(photos[0]), timeout=0.2)

    with Source.open("peers.yaml", "bundle") as source:
        assert source.wait_ready() == ()
        write(here, Faults(hang=True))
        asyncio.run(wait_briefly(source))
        wait_until(lambda: source.counts.canceled == 1, what="the end of the request")
        assert source.counts.in_flight == 0
        write(here, Faults())


def test_an_image_can_be_a_path_bytes_pixels_or_a_pillow_image(here, photos, tmp_path):
    with Source.open("peers.yaml", "bundle") as source:
        assert source.wait_ready() == ()
        with Image.open(photos[1]) as opened:
            kinds = [photos[1], str(photos[1]), photos[1].read_bytes(), opened.copy(), np.asarray(opened)]
        first, *others = [source.submit(kind).result(20) for kind in kinds]
        for other in others:
            np.testing.assert_allclose(other.logits, first.logits, rtol=1e-4, atol=1e-4)
        assert first.record.image == "1.jpg"
        assert source.submit(photos[1], name="door").result(20).record.image == "door"
        with pytest.raises(DataError, match=r"cannot read .*gone\.jpg"):
            source.submit(tmp_path / "gone.jpg")
        with pytest.raises(UsageError, match="path of a file"):
            source.submit(3.0)


def test_an_answer_has_the_top_classes_with_their_probabilities(here, photos):
    with Source.open("peers.yaml", "bundle") as source:
        assert source.wait_ready() == ()
        answer = source.submit(photos[0], label=3).result(20)
    shares = np.exp(answer.logits.astype(np.float64)) / np.exp(answer.logits.astype(np.float64)).sum()
    np.testing.assert_allclose(answer.probabilities, shares)
    assert answer.top(3) == [(str(index), answer.probabilities[index]) for index in np.argsort(-shares)[:3]]
    assert answer.class_name == answer.top(1)[0][0] == str(answer.prediction)
    assert answer.record.label == 3
