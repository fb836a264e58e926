"""Real peer processes that are really killed, stopped and started again while real requests are on their way."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded, ModelMismatch
from ls_edge.data.datasets import open_data
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.run_summary import summarize
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.protocol.codecs import REPLAY_TOLERANCE
from ls_edge.runtime.source.run_dataset import run_dataset
from ls_edge.runtime.source.source import Source


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def thirds(blocks):
    """Three peers; each block is held by two."""
    third = blocks // 3
    parts = [list(range(i * third, blocks if i == 2 else (i + 1) * third)) for i in range(3)]
    return {"a": sorted(parts[0] + parts[1]), "b": sorted(parts[1] + parts[2]), "c": sorted(parts[2] + parts[0])}


class Run:
    """A run in a thread of its own, so that the test can do harm to it."""

    def __init__(self, source, count, concurrency=4):
        self.source = source
        self.asked, self.done = count, 0
        self.result = None
        images = open_data("digits", "eval").take(count)

        def go():
            self.result = run_dataset(source, images, concurrency=concurrency, on_record=self.count)

        self.thread = threading.Thread(target=go)
        self.thread.start()

    def count(self, record):
        self.done += 1

    def after(self, answers):
        """Wait for so many answers, or for all of them where the rest came before we looked."""
        until(lambda: self.done >= min(answers, self.asked))

    def finish(self):
        self.thread.join(60)
        assert not self.thread.is_alive()
        assert self.result is not None
        records = self.result.records
        assert len({r.id for r in records}) == len(records)
        return records, summarize(records, self.result.events, self.result.context)


def assert_replays(bundle, records, codec="raw"):
    """Each answer's logits are those of its own order, run block by block in one process (guarantee R2)."""
    opened = Bundle.open(bundle)
    images = {image.name: image for image in open_data("digits", "eval").images}
    from ls_edge.data.preprocess import Preprocessor

    preprocess = Preprocessor(opened.manifest.image)
    with Pipeline.open(opened, threads=1) as chain:
        for record in records:
            array = preprocess(images[record.image].read(), record.image)
            logits = chain.forward(array[np.newaxis], record.arrangement)[0]
            error = np.abs(logits - np.array(record.logits)).max() / np.abs(logits).max()
            assert error <= REPLAY_TOLERANCE[codec]
            ran = [block for block, _ in record.steps]
            assert sorted([*ran, *record.skipped]) == list(range(opened.num_blocks))


@pytest.fixture
def peers(tmp_path, tiny_bundle):
    blocks = Bundle.open(tiny_bundle).num_blocks
    with LocalCluster(tmp_path / "peers", tiny_bundle, thirds(blocks)) as local:
        local.wait_warm()
        yield local


@pytest.fixture
def source(peers, tiny_bundle):
    with Source.open(peers.path, tiny_bundle, budget_ms=8000) as opened:
        assert opened.wait_ready() == ()
        yield opened


def test_one_of_two_holders_is_killed_and_comes_back(peers, source, tiny_bundle):
    run = Run(source, 400)
    run.after(60)
    peers.kill("b")
    run.after(run.done + 60)
    peers.start("b")
    peers.wait_warm("b")
    until(lambda: source.snapshot.peers["b"].state == "alive")
    records, summary = run.finish()
    assert (summary.answered, summary.failed, summary.degraded) == (400, 0, 0)
    assert [e.state for e in run.result.events if e.peer == "b"][:2] == ["alive", "lost"]
    assert_replays(tiny_bundle, records[::7])
    again, summary = Run(source, 60).finish()
    assert summary.failed == 0
    assert "b" in {holder for record in again for _, holder in record.steps}


def test_a_stopped_peer_is_found_by_heartbeats_and_used_again(peers, source, tiny_bundle):
    run = Run(source, 300)
    run.after(50)
    peers.signal("c", signal.SIGSTOP)
    until(lambda: source.snapshot.peers["c"].state == "lost")
    run.after(run.done + 20)
    peers.signal("c", signal.SIGCONT)
    until(lambda: source.snapshot.peers["c"].state == "alive")
    records, summary = run.finish()
    assert (summary.answered, summary.failed, summary.degraded) == (300, 0, 0)
    assert_replays(tiny_bundle, records[::11])


def test_sigterm_drains_and_leaves_with_zero(peers, source):
    run = Run(source, 200)
    run.after(40)
    assert peers.terminate("a") == 0
    _, summary = run.finish()
    assert (summary.answered, summary.failed, summary.degraded) == (200, 0, 0)
    assert "leaving" in peers.last_log_line("a")
    assert "held=0" in peers.last_log_line("a")


def test_all_peers_gone_and_back(peers, source):
    run = Run(source, 100)
    run.after(20)
    for name in ("a", "b", "c"):
        peers.kill(name)
    peers.start("a", "b", "c")
    peers.wait_warm("a", "b", "c")
    _, summary = run.finish()
    assert (summary.answered, summary.failed) == (100, 0)


def test_the_only_holder_of_a_block_is_killed(tmp_path, tiny_bundle):
    blocks = Bundle.open(tiny_bundle).num_blocks
    placement = {"a": list(range(blocks - 1)), "b": list(range(blocks - 1)), "c": [blocks - 1]}
    with LocalCluster(tmp_path / "peers", tiny_bundle, placement) as local:
        local.wait_warm()
        with Source.open(local.path, tiny_bundle) as source:
            assert source.wait_ready() == ()
            run = Run(source, 120)
            run.after(30)
            local.kill("c")
            records, summary = run.finish()
        assert (summary.answered, summary.failed) == (120, 0)
        assert 0 < summary.degraded < 120
        assert {r.skipped for r in records if r.degraded} == {(blocks - 1,)}
        assert_replays(tiny_bundle, records[::9])
        with Source.open(local.path, tiny_bundle, max_skips=0, budget_ms=600) as strict:
            strict.wait_ready(0.5)
            image = open_data("digits", "eval").images[0]
            with pytest.raises(BudgetExceeded, match=f"block {blocks - 1} had no reachable holder"):
                strict.submit(image.read()).result(5)


def test_the_command_answers_writes_its_trace_and_says_that_it_was_degraded(tmp_path, tiny_bundle):
    blocks = Bundle.open(tiny_bundle).num_blocks
    with LocalCluster(tmp_path / "peers", tiny_bundle, {"a": list(range(blocks - 1)), "b": [blocks - 1]}) as local:
        local.wait_warm()
        trace, report = tmp_path / "t.jsonl", tmp_path / "r.html"
        command = [
            sys.executable, "-m", "ls_edge", "run", "--peers", str(local.path), "--bundle", str(tiny_bundle), "--data",
            "digits", "--limit", "60", "--policy", "random", "--seed", "3", "--json", "--trace", str(trace),
        ]  # fmt: skip
        reported = [*command, "--report", str(report)]
        done = subprocess.run(reported, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["requests"], summary["answered"], summary["failed"], summary["degraded"]) == (60, 60, 0, 0)
        assert summary["policy"] == "random"
        lines = [json.loads(line) for line in trace.read_text().splitlines()]
        assert len(lines) == 60
        orders = {tuple(block for block, _ in line["order"]) for line in lines}
        assert len(orders) > 20
        _replay_with_plain_onnxruntime(tiny_bundle, lines)
        assert "<svg" in report.read_text()
        local.kill("b")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["answered"], summary["degraded"]) == (60, 60)


def _replay_with_plain_onnxruntime(bundle, lines):
    """Without this package's engines: the bundle's files, in the order of the trace."""
    import onnxruntime

    from ls_edge.data.preprocess import Preprocessor

    manifest = json.loads((bundle / "manifest.json").read_text())

    def session(file):
        return onnxruntime.InferenceSession(str(bundle / file), providers=["CPUExecutionProvider"])

    stem, head = session(manifest["parts"]["stem"]["file"]), session(manifest["parts"]["head"]["file"])
    blocks = [session(part["file"]) for part in manifest["parts"]["blocks"]]
    preprocess = Preprocessor(Bundle.open(bundle).manifest.image)
    images = {image.name: image for image in open_data("digits", "eval").images}
    for line in lines:
        array = preprocess(images[line["image"]].read(), line["image"])[np.newaxis]
        tokens = stem.run(["tokens"], {"images": array})[0]
        for block, _ in line["order"]:
            tokens = blocks[block].run(["tokens_out"], {"tokens": tokens})[0]
        logits = head.run(["logits"], {"tokens": tokens})[0][0]
        assert np.abs(logits - line["logits"]).max() <= 1e-4 * np.abs(logits).max()
        assert line["prediction"] == int(np.argmax(line["logits"]))


def test_peers_of_another_model_are_refused_with_both_ids(tmp_path, tiny_bundle, other_bundle):
    ours, theirs = (Bundle.open(b).manifest.model_id[:12] for b in (tiny_bundle, other_bundle))
    blocks = Bundle.open(tiny_bundle).num_blocks
    with LocalCluster(tmp_path / "peers", other_bundle, {"a": list(range(blocks))}) as local:
        local.wait_warm()
        with Source.open(local.path, tiny_bundle) as source:
            assert len(source.wait_ready(0.5)) == blocks
            assert ours in source.snapshot.mismatched["a"]
            assert theirs in source.snapshot.mismatched["a"]
        done = subprocess.run(
            [sys.executable, "-m", "ls_edge", "run", "--peers", str(local.path), "--bundle", str(tiny_bundle), "--data",
             "digits", "--limit", "3", "--wait", "1"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == ModelMismatch.exit_code
        assert ours in done.stderr
        assert theirs in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_every_hop_through_the_source(peers, tiny_bundle):
    with Source.open(peers.path, tiny_bundle, via_source=True) as source:
        assert source.wait_ready() == ()
        records, summary = Run(source, 40).finish()
    assert (summary.answered, summary.failed, summary.degraded) == (40, 0, 0)
    assert_replays(tiny_bundle, records[::5])


def test_cancelled_futures_and_closing(peers, tiny_bundle):
    source = Source.open(peers.path, tiny_bundle)
    assert source.wait_ready() == ()
    image = source.preprocess(open_data("digits", "eval").images[0].read())
    futures = [source.submit(image) for _ in range(50)]
    for future in futures[::2]:
        future.cancel()
    for future in futures[1::2]:
        assert future.result(10).logits.shape == (10,)
    source.close()
    source.close()


@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_codecs_through_real_peers(tmp_path, tiny_bundle, codec):
    blocks = Bundle.open(tiny_bundle).num_blocks
    with LocalCluster(tmp_path / "peers", tiny_bundle, thirds(blocks), each={"codec": codec}) as local:
        local.wait_warm()
        with Source.open(local.path, tiny_bundle, policy="random") as source:
            assert source.wait_ready() == ()
            records, summary = Run(source, 30).finish()
    assert summary.failed == 0
    assert_replays(tiny_bundle, records, codec)


def test_a_port_in_use_is_one_line(peers, tiny_bundle):
    command = [sys.executable, "-m", "ls_edge", "peer", "--peers", str(peers.path), "--name", "a"]
    done = subprocess.run(
        [*command, "--bundle", str(tiny_bundle)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert "in use" in done.stderr


def test_peers_do_not_outlive_who_started_them(tmp_path, tiny_bundle):
    program = (
        "import os, signal, sys\n"
        "from ls_edge.runtime.fleet.local_cluster import LocalCluster\n"
        "with LocalCluster(sys.argv[1], sys.argv[2], {'a': [0, 1], 'b': [2, 3]}) as peers:\n"
        "    peers.wait_warm()\n"
        "    print(*(process.pid for process in peers.processes.values()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), str(tiny_bundle)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    until(lambda: not any(runs(pid) for pid in pids), 6.0)


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
