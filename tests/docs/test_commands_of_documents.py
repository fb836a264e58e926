"""Examples of README.md and docs/ work as they are written: commands with real peers, Python, files of settings."""

import re
import shlex
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source

ROOT = Path(__file__).parents[2]
KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.S)


def with_free_ports(text):
    ports = iter(free_ports(text.count("tcp://127.0.0.1:")))
    return re.sub(r"tcp://127\.0\.0\.1:\d+", lambda _: f"tcp://127.0.0.1:{next(ports)}", text)


@pytest.fixture
def place(tmp_path, make_bundle, monkeypatch):
    """A folder with what the documents name: bundle, photo.jpg, images/."""
    make_bundle(tmp_path / "bundle", blocks=8)
    pixels = np.random.default_rng(0).integers(0, 255, (3, 40, 60, 3), dtype=np.uint8)
    (tmp_path / "images").mkdir()
    for path, image in zip(("photo.jpg", "images/a.jpg", "images/b.jpg"), pixels, strict=True):
        Image.fromarray(image).save(tmp_path / path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_of_the_readme_work(place, ls_edge):
    peers = with_free_ports(blocks("README.md", "yaml")[0])
    Path("peers.yaml").write_text(peers, encoding="utf-8")
    text = "".join([blocks("README.md", "bash")[1], *blocks("docs/run.md", "bash")])
    lines = [shlex.split(line, comments=True)[1:] for line in text.splitlines() if line.startswith("ls-edge ")]
    by_name = {words[0]: words for words in lines}
    by_name["run"] = next(words for words in lines if "--trace" in words)
    by_name["predict"] = next(words for words in lines if words[0] == "predict")
    assert {"bench", "peer", "status", "run", "predict"} <= set(by_name)
    serving = by_name.pop("peer")
    assert "orin-0" in serving
    for entry in yaml.safe_load(peers)["peers"]:
        ls_edge.start(*[entry["name"] if word == "orin-0" else word for word in serving], stderr=None)
    for name in ("run", "status", "predict"):  # run waits until the peers are warm
        done = ls_edge.run(*by_name[name], timeout=90)
        assert done.returncode == 0, done.stderr
    done = ls_edge.run(*next(words for words in lines if "--local" in words), timeout=90)
    assert done.returncode == 0, done.stderr
    done = ls_edge.run(*by_name["bench"], "--duration", "0.1")
    assert done.returncode == 0, done.stderr
    assert Path("report.html").stat().st_size > 10_000
    assert len(Path("t.jsonl").read_text().splitlines()) == 359


def test_the_keys_and_peers_of_boards_work(place, command):
    (line,) = [block for block in blocks("docs/fleet.md", "bash") if block.startswith("ls-edge keys new")]
    text = blocks("docs/fleet.md", "yaml")[0]
    for name in ("laptop", "orin-0", "orin-1"):
        code, out, _ = command(*shlex.split(line.replace("orin-0", name))[1:])
        assert code == 0
        text = text.replace('"..."', f'"{yaml.safe_load(out.splitlines()[0])["public_key"]}"', 1)
    Path("peers.yaml").write_text(text, encoding="utf-8")
    assert load_peers("peers.yaml").uses_keys


@pytest.mark.parametrize("number", range(2))
def test_example_files_of_peers_are_valid(place, number):
    Path("peers.yaml").write_text(blocks("docs/peers.md", "yaml")[number], encoding="utf-8")
    assert load_peers("peers.yaml").peers


def test_example_settings_of_training_are_valid(place):
    from ls_edge.training.config import read_config

    Path("ablation.yaml").write_text(blocks("docs/train.md", "yaml")[0], encoding="utf-8")
    config, _ = read_config(Path("ablation.yaml"), {})
    assert config.method == "anyorder"


class Camera:
    """OpenCV's, of a film of three frames."""

    def __init__(self, number):
        self.frames = [np.full((48, 64, 3), shade, np.uint8) for shade in (0, 100, 255)]
        self.released = False

    def read(self):
        return (True, self.frames.pop()) if self.frames else (False, None)

    def release(self):
        self.released = True


@pytest.fixture
def served(place):
    """One peer for all blocks, called orin-0 as in the documents."""
    text = f"peers:\n  - {{name: orin-0, address: 'tcp://127.0.0.1:{free_ports(1)[0]}', blocks: '0-7', threads: 1}}\n"
    Path("peers.yaml").write_text(text, encoding="utf-8")
    peer = Peer.open("peers.yaml", "orin-0", "bundle")
    thread = threading.Thread(target=peer.serve)
    thread.start()
    yield place
    peer.stop()
    peer.stop()
    thread.join(10)


def test_the_python_of_the_documents_runs(served, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", types.SimpleNamespace(VideoCapture=Camera))
    with Source.open("peers.yaml", "bundle") as source:
        source.wait_ready()
        image = source.preprocess(Path("photo.jpg").read_bytes())
        answer = source.submit(image).result()
    programs = blocks("docs/python.md", "python")
    *tried, serving = [code for code in programs if "ls_edge." not in code]  # those of functions have their own tests
    assert len(tried) >= 4
    assert "peer.serve()" in serving  # as the fixture does
    for code in tried:
        names = {"image": image, "answer": answer}
        exec(compile(code, "docs/python.md", "exec"), names)
        if "camera" in names:
            assert names["camera"].released
            assert capsys.readouterr().out.count(" ms ") == 3
        if "futures" in names:
            assert capsys.readouterr().out.count("images/") == 2
        if "logits" in names:
            assert np.abs(names["logits"] - answer.logits).max() < 1e-4
