"""``ls-edge build``, peers and sources on the doubles of CUDA and TensorRT, as processes and in this one."""

import contextlib
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.settings import Settings
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.keys import load_secret
from tests.engines.bundles import edited
from tests.engines.conftest import DOUBLES
from tests.faults.applying import give

WITHOUT = (
    "import sys, runpy\n"
    "class Gone:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        if name.split('.')[0] in ('torch', 'timm', 'onnx'): raise ImportError(name)\n"
    "sys.meta_path.insert(0, Gone())\n"
    "runpy.run_module('ls_edge', run_name='__main__')\n"
)


@pytest.fixture
def board(tmp_path):
    """Run ``ls-edge`` as on a board: TensorRT, CUDA and a cache, no torch, timm or onnx."""
    counts = tmp_path / "counts.json"
    env = {
        **os.environ, "PYTHONPATH": str(DOUBLES), "LS_EDGE_CACHE": str(tmp_path / "cache"),
        "CUDA_DOUBLE_REPORT": str(counts),
    }  # fmt: skip

    def run(*arguments, code=0):
        command = [sys.executable, "-c", WITHOUT, *map(str, arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        if counts.exists():
            left = json.loads(counts.read_text())
            assert left["left"] == left["misuse"] == []
        return done

    run.env, run.counts = env, counts
    return run


def keys(done):
    return {engine["part"]: engine["key"] for engine in json.loads(done.stdout)["engines"]}


def test_a_peer_loads_the_engines_that_build_made(board, tiny_bundle, write_peers, images, assert_replays, wait_until):
    peers = write_peers({"a": [0, 2, 3], "b": [1, 4, 5]}, engine="tensorrt", max_batch=4, gpu_mem_limit=1 << 28)
    done = board("build", tiny_bundle, "--blocks", "0,2-3", "--json")
    assert list(keys(done)) == ["block 0", "block 2", "block 3"]
    assert "block 2: building an engine for TensorRT " in done.stderr
    assert "block 2: ready after 0 s" in done.stderr
    by_name = board("build", tiny_bundle, "--peers", peers, "--name", "a", "--json")
    assert keys(by_name).keys() == keys(done).keys()
    assert "block 0: building an engine for TensorRT " in by_name.stderr
    # the peer that has its engines, and one that has not, as a service would run them: no terminal
    command = [sys.executable, "-c", WITHOUT, "peer", "--peers", peers, "--bundle", tiny_bundle]
    processes = [
        subprocess.Popen(
            [*command, "--name", name], env={**board.env, "CUDA_DOUBLE_REPORT": f"{board.counts}.{name}"},
            stderr=subprocess.PIPE, text=True,
        )
        for name in "ab"
    ]  # fmt: skip
    try:
        with Source(load_peers(peers), Bundle.open(tiny_bundle), Settings(provider="cpu")) as source:
            assert source.wait_ready(30) == ()
            answers = [source.submit(image).result() for image in images(4)]
            assert_replays(tiny_bundle, images(4), answers)
            # Ready is who is reached, through another peer too; an engine's name comes with the greeting.
            name = {"tensorrt TensorRT 10.3.0 on Double of a GPU"}
            wait_until(lambda: {view.engine for view in source.snapshot.peers.values()} == name, what="both greetings")
    finally:
        for process in processes:
            process.terminate()
        logs = [process.stderr.read() for process in processes]
        for process in processes:
            process.wait(30)
            process.stderr.close()
    assert "building an engine" not in logs[0]
    assert "building an engine for TensorRT " in logs[1]
    assert "engine chosen  engine=tensorrt" in logs[0]
    for name, log in zip("ab", logs, strict=True):
        counted = json.loads(Path(f"{board.counts}.{name}").read_text())
        assert counted["left"] == counted["misuse"] == [], log
        assert counted["counts"]["graph"] > 0


def test_build_makes_all_parts_and_largest_batches_are_rounded(board, tiny_bundle):
    done = board("build", tiny_bundle)
    assert done.stdout == (
        "8 engines for TensorRT 10.3.0 on Double of a GPU, up to 8 images: 8 built, 0 in the cache already\n"
    )
    assert board("build", tiny_bundle, "--max-batch", "8").stdout.endswith("0 built, 8 in the cache already\n")
    assert "up to 16 images: 1 built" in board("build", tiny_bundle, "--blocks", "0", "--max-batch", "9").stdout


def test_build_fills_a_store_and_builds_its_engines(board, tiny_bundle, write_peers, tmp_path):
    peers = write_peers({"a": [0, 2], "b": [1, 3, 4, 5]})
    here = ["--peers", peers, "--store", tmp_path / "store", "--name"]
    done = board("build", tiny_bundle, *here, "a")
    assert "2 engines for TensorRT 10.3.0 on Double of a GPU, up to 8 images: 2 built" in done.stdout
    with contextlib.closing(Store(tmp_path / "store", [0, 2])) as store:
        bundle = store.open_active()
        assert bundle.manifest.bundle_id == Bundle.open(tiny_bundle).manifest.bundle_id
        assert bundle.read("block 2") == Bundle.open(tiny_bundle).read("block 2")
    peers.write_text(peers.read_text().replace("threads: 1", "threads: 1\n  engine: onnx"))
    done = board("build", tiny_bundle, *here, "b")  # needs no engines; files of both peers stay apart by their digests
    assert done.stdout == f"{tmp_path / 'store'} has blocks 1, 3-5 of {tiny_bundle}\n"


def test_an_evaluation_names_the_engine_that_ran(board, tiny_bundle):
    done = board("eval", tiny_bundle, "--data", "digits", "--limit", "4", "--orders", "1", "--json")
    assert json.loads(done.stdout)["settings"]["engine"] == "TensorRT 10.3.0 on Double of a GPU"


@pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")
def test_a_push_builds_engines_while_the_previous_bundle_is_served(tmp_path, tiny_bundle, images, monkeypatch):
    go = tmp_path / "go"
    go.touch()
    for name, value in {
        "PYTHONPATH": DOUBLES,
        "LS_EDGE_CACHE": tmp_path / "cache",
        "TENSORRT_DOUBLE_WAITS": go,
    }.items():
        monkeypatch.setenv(name, str(value))
    cluster = LocalCluster(
        tmp_path / "fleet", tiny_bundle, {"a": range(6)}, sources=["laptop"], keys=True, stores=True,
        each={"engine": "tensorrt"},
    )  # fmt: skip
    seen = []

    def on_progress(_percent, _total, text):
        seen.append(text.removeprefix("a: "))
        if seen[-1].startswith("building, 0 of 6 engines, block 0") and go.is_fifo():
            answers.append(source.submit(images(1)[0]).result(30).record.degraded)
            with go.open("wb"):  # waits until the builder reads
                go.unlink()
                go.touch()

    def note(_, model):
        model.doc_string = "changed"

    def push(bundle):
        give(cluster.file, bundle, cluster.secret_key("laptop"), on_progress=on_progress)

    with cluster:
        push(Bundle.open(tiny_bundle))
        go.unlink()
        os.mkfifo(go)
        seen.clear()
        answers = []
        keys = load_secret(cluster.secret_key("laptop"))
        with Source(cluster.file, Bundle.open(tiny_bundle), Settings(provider="cpu"), keys=keys) as source:
            assert source.wait_ready(30) == ()
            push(
                edited(
                    Bundle.open(tiny_bundle),
                    tmp_path / "other",
                    lambda _, model: setattr(model, "doc_string", "changed"),
                )
            )
        log = cluster.log_path("a").read_text()
    assert answers == [False]
    states = dict.fromkeys(state.split(",")[0] for state in seen)
    assert [one for one in states if one not in ("idle", "receiving")] == ["building", "ready", "switching", "active"]
    *_, before, after = log.split("switching")
    assert before.count("building an engine") == 6
    assert "building an engine" not in after


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--store", "s"], "--store holds the blocks of one peer; give --peers FILE and --name NAME too"),
        (["--blocks", "0-6"], "--blocks '0-6': the bundle has blocks 0 to 5; leave block 6 out"),
        (["--blocks", "two"], "--blocks 'two': cannot read 'two'; write for example 0-2,7"),
        (["--name", "a"], "--peers and --name belong together; give both, or neither"),
        (["--blocks", "0", "--peers", "p", "--name", "a"], "--blocks and --peers both say which blocks"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(board, tiny_bundle, arguments, words):
    done = board("build", tiny_bundle, *arguments, code=2)
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(importlib.util.find_spec("tensorrt") is not None, reason="TensorRT is installed")
def test_without_a_gpu_only_tensorrt_for_rtx_builds(board, tiny_bundle):
    board.env["PYTHONPATH"] = ""
    if importlib.util.find_spec("tensorrt_rtx_bindings") is None:
        assert "tensorrt is not installed" in board("build", tiny_bundle, code=1).stderr
    else:
        said = board("build", tiny_bundle, "--blocks", "0-1").stdout
        assert re.match(r"2 engines for TensorRT RTX 1\.\S+ on any RTX GPU, up to 8 images: 2 built, 0 in", said)


def test_stem_and_head_have_an_engine_of_their_own(
    gpu, tiny_bundle, write_peers, serve, images, assert_replays, caplog
):
    path = write_peers({"a": range(6)}, sources=["laptop"], provider="cpu")
    path.write_text(path.read_text().replace("- name: laptop", "- name: laptop\n  engine: tensorrt"))
    bundle, file = Bundle.open(tiny_bundle), load_peers(path)
    serve(Peer(file, "a", bundle))
    with caplog.at_level(logging.INFO, "ls_edge.engines"), Source(file, bundle) as source:
        assert source.engines.engine == "tensorrt TensorRT 10.3.0 on Double of a GPU"
        assert source.wait_ready(30) == ()
        assert_replays(tiny_bundle, images(2), [source.submit(image).result() for image in images(2)])
    assert gpu.counts["execute"] + gpu.counts["graph"] > 0
    assert any(record.message == "engine chosen" and record.engine == "tensorrt" for record in caplog.records)
    for settings, words in (
        (Settings(provider="cpu", engine="onnx", threads=2), "onnx CPUExecutionProvider"),
        (Settings(engine="onnx"), "onnx CPUExecutionProvider (not CUDAExecutionProvider: not in this build of"),
    ):
        with Source(file, bundle, settings) as source:
            assert source.engines.engine.startswith(words)
            assert source.engines.threads == (settings.threads or 1)


def test_threads_of_the_file_apply_without_a_flag(tiny_bundle, write_peers):
    path = write_peers({"a": range(6)}, sources=["laptop", "other"])
    path.write_text(path.read_text().replace("- name: laptop", "- name: laptop\n  threads: 2"))
    bundle, file = Bundle.open(tiny_bundle), load_peers(path)
    for name, settings, threads in (
        ("laptop", Settings(), 2),
        ("other", Settings(), 1),
        ("laptop", Settings(threads=1), 1),
    ):
        with Source(file, bundle, settings, name=name) as source:
            assert source.engines.threads == threads
