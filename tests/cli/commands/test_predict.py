"""``ls-edge predict``: class names for files, folders, standard input and a camera."""

import json
import os
import re
import signal

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle
from ls_edge.data.datasets import open_data
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.data.cameras import Camera, Rtsp

PLACEMENT = {"a": [0, 1, 2, 3], "b": [2, 3, 4, 5]}


@pytest.fixture
def command(peers, tiny_bundle):
    return ["predict", "--peers", peers.path, "--bundle", tiny_bundle]


@pytest.fixture
def photos(tmp_path):
    """A folder of twelve images, two of them a folder below, and what is no image."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number, image in enumerate(open_data("digits", "eval").images[:120:10]):
        below = folder / "more" if number > 9 else folder
        Image.fromarray(image.read()).save(below / f"{number:02d}.png")
    (folder / "notes.txt").write_text("not an image, not by name either")
    return folder


def in_one_process(bundle, path):
    """Class names and probabilities of an image, the likeliest first."""
    opened = Bundle.open(bundle)
    from ls_edge.data.preprocess import Preprocessor

    array = Preprocessor(opened.manifest.image)(path.read_bytes())
    with Pipeline.open(opened, threads=1) as chain:
        logits = chain.forward(array[np.newaxis])[0].astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    order = np.argsort(-probabilities)
    return [(opened.manifest.classes[i], probabilities[i]) for i in order]


def test_every_image_of_a_folder_has_a_line_of_json(ls_edge, complaints, command, photos, tiny_bundle):
    done = ls_edge.run(*command, photos, "--json", "--top", "2", "--policy", "sequential")
    assert done.returncode == 0
    assert complaints(done) == [f"ls-edge: {photos}: 12 images; 1 file ignored: .txt 1"]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["image"] for line in lines] == [str(path) for path in sorted(photos.rglob("*.png"), key=str)]
    for line in lines:
        assert set(line) == {"image", "top", "degraded", "latency_ms", "error", "why_skipped", "skipped", "time"}
        assert (line["degraded"], line["error"]) == (False, None)
        assert line["latency_ms"] > 0
    for line in lines[::5]:
        expected = in_one_process(tiny_bundle, photos.parent / line["image"])[:2]
        assert [top["label"] for top in line["top"]] == [label for label, _ in expected]
        assert [top["probability"] for top in line["top"]] == pytest.approx([p for _, p in expected], abs=1e-4)


def test_the_text_names_the_most_likely_classes(ls_edge, command, photos):
    done = ls_edge.run(*command, photos / "03.png", "--top", "2")
    assert done.returncode == 0
    (line,) = done.stdout.splitlines()
    name, _, rest = line.partition(".png: ")
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {re.escape(str(photos / '03'))}", name)
    assert rest.count("%, ") == 1
    assert rest.endswith(" ms)")


def test_standard_input_is_an_encoded_image(ls_edge, command, photos):
    with (photos / "03.png").open("rb") as stream:
        done = ls_edge.run(*command, "-", "--json", stdin=stream)
    assert done.returncode == 0
    file = ls_edge.run(*command, photos / "03.png", "--json")
    piped, named = json.loads(done.stdout), json.loads(file.stdout)
    assert piped["image"] == "-"
    assert piped["top"] == named["top"]


def test_an_image_that_cannot_be_read_is_a_line_with_an_error(ls_edge, complaints, command, photos):
    (photos / "bad.png").write_bytes(b"no image")
    done = ls_edge.run(*command, photos / "03.png", photos / "bad.png", "nowhere", photos / "05.png", "--json")
    assert done.returncode == 3
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [bool(line["error"]) for line in lines] == [False, True, True, False]
    assert "cannot decode" in lines[1]["error"]
    assert "no such file or folder" in lines[2]["error"]
    assert (lines[1]["top"], lines[1]["latency_ms"]) == ([], None)
    done = ls_edge.run(*command, photos / "bad.png", photos / "05.png")
    assert done.returncode == 3
    assert len(complaints(done)) == len(done.stdout.splitlines()) == 1


def test_without_a_readable_image_no_peer_is_needed(ls_edge, complaints, write_peers, tiny_bundle, tmp_path):
    (tmp_path / "empty").mkdir()
    nobody = write_peers({"a": range(6)})
    done = ls_edge.run("predict", "--peers", nobody, "--bundle", tiny_bundle, "nowhere", tmp_path / "empty")
    assert (done.returncode, done.stdout) == (1, "")
    assert complaints(done) == [
        "ls-edge: nowhere: no such file or folder; check the path",
        f"ls-edge: {tmp_path / 'empty'}: the folder has no images; their names must end in .bmp, .gif, .jfi, .jfif, "
        ".jif, .jpe, .jpeg, .jpg, .mpo, .pbm, .pgm, .png, .pnm, .ppm, .tif, .tiff, .webp",
    ]


def test_a_missing_block_is_named_or_skipped(ls_edge, complaints, tiny_bundle, photos, tmp_path):
    with LocalCluster(tmp_path / "peers", tiny_bundle, {"a": [0, 1, 2, 3, 4], "b": [5]}) as local:
        local.wait_warm("a")
        local.kill("b")
        command = ["predict", "--peers", local.path, "--bundle", tiny_bundle, photos / "03.png", "--wait", "1.5"]
        done = ls_edge.run(*command, "--json")
        assert done.returncode == 3
        line = json.loads(done.stdout)
        assert (line["degraded"], line["skipped"]) == (True, [5])  # blocks, as in the answers of 'serve' and in traces
        assert "block 5 has no holder" in complaints(done)[0]
        done = ls_edge.run(*command, "--max-skips", "0")
        assert (done.returncode, done.stdout) == (1, "")
        assert "block 5 has no holder" in complaints(done)[0]


CV2 = """
import numpy, types
from PIL import Image
CAP_PROP_BUFFERSIZE = 38
utils = types.SimpleNamespace(logging=types.SimpleNamespace(
    LOG_LEVEL_SILENT=0, getLogLevel=lambda: 3, setLogLevel=lambda level: None))

class VideoCapture:
    def __init__(self, index):
        self.index, self.left = index, {frames}
    def isOpened(self):
        return self.index == 1
    def set(self, what, value):
        return True
    def read(self):
        self.left -= 1
        if self.left < 0:
            return False, None
        return True, numpy.asarray(Image.open({path!r}).convert("RGB"))[:, :, ::-1]
"""


def test_frames_of_a_camera_are_answered(ls_edge, complaints, command, photos, tmp_path):
    picture = Image.open(photos / "03.png").convert("RGB")
    red, green, blue = picture.split()
    Image.merge("RGB", (red.point(lambda v: v // 2), green, blue.point(lambda v: 255 - v))).save(photos / "color.png")
    (tmp_path / "modules").mkdir()
    double, path = tmp_path / "modules" / "cv2.py", str(photos / "color.png")
    double.write_text(CV2.format(frames=1000, path=path))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "modules")}
    file = json.loads(ls_edge.run(*command, photos / "color.png", "--json").stdout)

    done = ls_edge.run(*command, "camera:1", "--limit", "2", "--json", env=environment)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert [json.loads(line)["image"] for line in lines] == ["camera:1#0", "camera:1#1"]
    assert all(json.loads(line)["top"] == file["top"] for line in lines)

    double.write_text(CV2.format(frames=3, path=path))
    done = ls_edge.run(*command, "camera:1", env=environment)
    assert done.returncode == 3
    assert 1 <= len(done.stdout.splitlines()) <= 3  # frames that came during an answer are dropped
    assert complaints(done) == ["ls-edge: camera:1: camera 1 stopped after 3 frames; check its cable or network"]

    done = ls_edge.run(*command, "camera", env=environment)
    assert done.returncode == 1
    assert "cannot open camera 0" in complaints(done)[0]


def test_a_camera_without_opencv_is_one_line(ls_edge, complaints, command, tmp_path):
    (tmp_path / "cv2.py").write_text("raise ImportError('not here')")
    done = ls_edge.run(*command, "camera", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = complaints(done)
    assert "pip install 'opencv-python-headless>=" in line


def test_without_peers_this_process_answers(ls_edge, complaints, photos, tiny_bundle):
    path, broken = photos / "00.png", photos / "broken.jpg"
    broken.write_bytes(b"no image")
    done = ls_edge.run("predict", "--bundle", tiny_bundle, path, broken, "--json", "--top", 2, "--threads", 1)
    assert done.returncode == 3, done.stderr
    answered, failed = map(json.loads, done.stdout.splitlines())
    expected = in_one_process(tiny_bundle, path)[:2]
    assert [(top["label"], pytest.approx(top["probability"])) for top in answered["top"]] == expected
    assert (answered["degraded"], answered["error"]) == (False, None)
    assert answered["latency_ms"] > 0
    assert "broken.jpg" in failed["error"]
    done = ls_edge.run("predict", "--bundle", tiny_bundle, photos, "--limit", 3, "--top", 1)
    assert len(done.stdout.splitlines()) == 3
    assert complaints(done) == [f"ls-edge: {photos}: 13 images; 1 file ignored: .txt 1"]


@pytest.fixture
def clip(photos, tmp_path):
    """A video of twelve frames, the images of the folder."""
    cv2 = pytest.importorskip("cv2")
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 10, (64, 64))
    for photo in sorted(photos.rglob("*.png")):
        writer.write(np.asarray(Image.open(photo).convert("L").resize((64, 64)).convert("RGB")))
    writer.release()
    return path


def test_each_frame_of_a_video_is_answered_here_and_by_peers(ls_edge, complaints, command, tiny_bundle, clip):
    for asked in (["predict", "--bundle", tiny_bundle], command):
        done = ls_edge.run(*asked, clip, "--json", "--top", 1)
        assert done.returncode == 0
        assert complaints(done) == []
        assert [json.loads(line)["image"] for line in done.stdout.splitlines()] == [f"{clip}#{i}" for i in range(12)]


def test_a_camera_or_video_that_cannot_be_opened_is_one_line(ls_edge, complaints, tiny_bundle, tmp_path):
    pytest.importorskip("cv2")
    (tmp_path / "clip.mp4").write_bytes(b"no video")
    streams = {tmp_path / "clip.mp4": "cannot be decoded as a video", "rtsp://127.0.0.1:9/x": "check the address"}
    done = ls_edge.run("predict", "--bundle", tiny_bundle, *streams)
    assert (done.returncode, done.stdout) == (1, "")
    lines = complaints(done)
    assert len(lines) == 2
    assert all(why in line for line, why in zip(lines, streams.values(), strict=True))
    done = ls_edge.run("run", "--local", 1, "--bundle", tiny_bundle, "--data", "camera:9", "--limit", 1)
    assert (done.returncode, complaints(done)) == (
        1,
        ["ls-edge: cannot open camera 9; check that it is connected and that no other program uses it"],
    )


def secret(camera):
    """The address of a camera that needs a password in its user part and in its query."""
    return camera.url.replace("://", "://admin:SECRET@") + "?user=admin&pwd=SECRET"


def test_no_output_of_a_run_has_the_password_of_its_camera(ls_edge, complaints, tiny_bundle, tmp_path):
    run = ["run", "--local", 1, "--bundle", tiny_bundle, "--limit", 100, "--json", "--trace", tmp_path / "t.jsonl"]
    run += ["--trace-events", tmp_path / "e.json", "--report", tmp_path / "r.html"]
    with Camera(16, 0.05) as camera:
        done = ls_edge.run(*run, "--data", secret(camera))
    document = json.loads(done.stdout)
    assert (done.returncode, document["failed"]) == (3, 0)  # 16 of 100 images came
    assert document["account"]["images"] == document["answered"] == document["requests"] <= 16
    (line,) = complaints(done)
    assert f"{camera.url}?user=…&pwd=… stopped after 16 frames" in line
    written = "".join(path.read_text() for path in tmp_path.glob("*.*"))
    assert f"{camera.url}?user=…&pwd=…#0" in written
    assert "SECRET" not in done.stdout + done.stderr + written


@pytest.mark.parametrize(("pause", "number", "code"), [(0.05, None, 3), (1.5, "SIGTERM", 143)])
def test_predict_ends_with_its_camera_or_a_signal(ls_edge, tiny_bundle, pause, number, code):
    with Camera(30 if number else 5, pause) as camera:
        process = ls_edge.start("predict", "--bundle", tiny_bundle, secret(camera), "--json", "--threads", 1)
        first = process.stdout.readline()
        if number:
            process.send_signal(getattr(signal, number))
        out, err = process.communicate(timeout=60)
    assert (process.returncode, "SECRET" in first + out + err) == (code, False), err


def test_cameras_and_photos_are_read_in_turns(ls_edge, tiny_bundle, photos):
    with Camera(99, 0.1) as one, Rtsp(99, 0.1) as two:
        words = [one.url, photos / "00.png", two.url, "--limit", 5, "--threads", 1, "--json"]
        done = ls_edge.run("predict", "--bundle", tiny_bundle, *words)
    found = [json.loads(line)["image"] for line in done.stdout.splitlines()]
    assert found == [str(photos / "00.png"), f"{one.url}#0", f"{two.url}#0", f"{one.url}#1", f"{two.url}#1"]
    assert done.returncode == 0
