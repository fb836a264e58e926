"""Examples of the documents work as they are written: the first ten minutes, Python with real peers, peers.yaml."""

import re
import shlex
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.peer.peer import Peer

ROOT = Path(__file__).parents[2]
CLASSES = tuple(sorted(path.name for path in (ROOT / "examples" / "cifar10" / "images").iterdir()))


def blocks(document, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(encoding="utf-8"), re.S)


def with_free_ports(text):
    ports = iter(free_ports(text.count("tcp://127.0.0.1:")))
    return re.sub(r"tcp://127\.0\.0\.1:\d+", lambda _: f"tcp://127.0.0.1:{next(ports)}", text)


@pytest.fixture
def place(tmp_path, make_bundle, monkeypatch):
    """A folder with what the documents name: bundle, photo.jpg, examples/."""
    make_bundle(tmp_path / "bundle", blocks=8, classes=CLASSES)
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.jpg")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.release
def test_the_first_ten_minutes(place, ls_edge, monkeypatch):
    """Peers, status, predict and a run with its report; export and training have tests of their own."""
    (peers,) = [
        re.search(r"<<'END'\n(.*?)END", block, re.S)[1] for block in blocks("docs/start.md", "bash") if "END" in block
    ]
    Path("peers.yaml").write_text(with_free_ports(peers), encoding="utf-8")
    monkeypatch.setenv("LS_EDGE_PEERS", "peers.yaml")
    monkeypatch.setenv("LS_EDGE_BUNDLE", "bundle")
    lines = [line for block in blocks("docs/start.md", "bash") for line in block.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("ls-edge ")]
    serving = [words for words in commands if words[0] == "peer"]
    assert [words[-1] for words in serving] == ["a", "b", "c"]
    for words in serving:
        ls_edge.start(*words, stderr=None)
    run = next(words for words in commands if words[0] == "run")
    done = ls_edge.run(*run, timeout=90)  # it waits until the peers are warm
    assert done.returncode == 0, done.stderr
    assert Path("report.html").stat().st_size > 10_000
    for name in ("status", "predict"):
        done = ls_edge.run(
            *next(words for words in commands if words[0] == name and "--bundle" not in words), timeout=90
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("number", range(2))
def test_example_files_of_peers_are_valid(place, number):
    Path("peers.yaml").write_text(blocks("docs/peers.md", "yaml")[number], encoding="utf-8")
    assert load_peers("peers.yaml").peers


@pytest.fixture
def served(place):
    """One peer for all blocks."""
    text = f"peers:\n  - {{name: orin-0, address: 'tcp://127.0.0.1:{free_ports(1)[0]}', blocks: '0-7', threads: 1}}\n"
    Path("peers.yaml").write_text(text, encoding="utf-8")
    peer = Peer.open("peers.yaml", "orin-0", "bundle")
    thread = threading.Thread(target=peer.serve)
    thread.start()
    yield place
    peer.stop()
    peer.stop()
    thread.join(10)


@pytest.mark.processes
def test_the_python_of_the_documents_runs(served, capsys):
    with_peers, with_cluster = blocks("docs/run.md", "python")
    exec(compile(with_peers.replace("budget_ms=500", "budget_ms=20000"), "docs/run.md", "exec"), {})
    assert "False" in capsys.readouterr().out  # whether the answer is degraded
    exec(compile(with_cluster, "docs/run.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
