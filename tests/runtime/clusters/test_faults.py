"""Real peers are killed, stopped and restarted while requests are in flight."""

import json
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded, ModelMismatch
from ls_edge.core.peers_file import load_peers
from ls_edge.data.datasets import open_data
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.run_summary import summarize
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.source.run_dataset import run_dataset
from ls_edge.runtime.source.source import Source
from tests.traces import replay

THIRDS = {"a": [0, 1, 2, 3], "b": [2, 3, 4, 5], "c": [0, 1, 4, 5]}
"""Every block has two holders."""


class Run:
    """A run on another thread, so that the test can harm its peers."""

    def __init__(self, source, count, concurrency=4):
        self.source = source
        self.asked, self.done = count, 0
        self.changed = threading.Condition()
        self.result = None
        images = open_data("digits", "eval").take(count)

        def go():
            self.result = run_dataset(source, images, concurrency=concurrency, on_record=self.count)

        self.thread = threading.Thread(target=go)
        self.thread.start()

    def count(self, record):
        with self.changed:
            self.done += 1
            self.changed.notify_all()

    def after(self, answers):
        """Wait for this number of answers, or for all of them."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.done >= min(answers, self.asked), 60)

    def finish(self):
        self.thread.join(120)
        assert not self.thread.is_alive()
        assert self.result is not None
        records = self.result.records
        assert len({r.id for r in records}) == len(records)
        return records, summarize(records, self.result.events, self.result.context)


def assert_replays(bundle, records, codec="raw"):
    """Check that the logits of each answer are those of its order, computed in this process."""
    opened = Bundle.open(bundle)
    images = {image.name: image for image in open_data("digits", "eval").images}
    preprocess = Preprocessor(opened.manifest.image)
    arrays = {record.image: preprocess(images[record.image].read(), record.image) for record in records}
    with Pipeline.open(opened, threads=1) as pipeline:
        for replayed in replay(pipeline, records, lambda record: arrays[record.image]):
            assert replayed.error <= codec_of(codec).replay_tolerance
    for record in records:
        assert sorted([*(block for block, _ in record.steps), *record.skipped]) == list(range(opened.num_blocks))


@pytest.fixture
def thirds(start_peers):
    return start_peers(THIRDS)


@pytest.fixture
def source(thirds, open_source):
    return open_source(thirds.path, budget_ms=8000)


def test_a_killed_holder_costs_no_answer_and_is_used_again(thirds, source, tiny_bundle, wait_until):
    run = Run(source, 400)
    run.after(60)
    thirds.kill("b")
    run.after(run.done + 60)
    thirds.start("b")
    thirds.wait_warm("b")
    wait_until(lambda: source.snapshot.peers["b"].state == "alive")
    records, summary = run.finish()
    assert (summary.answered, summary.failed, summary.degraded) == (400, 0, 0)
    assert [e.state for e in run.result.events if e.peer == "b"][:2] == ["alive", "lost"]
    assert_replays(tiny_bundle, records[::7])
    again, summary = Run(source, 60).finish()
    assert summary.failed == 0
    assert "b" in {holder for record in again for _, holder in record.steps}


def test_a_stopped_peer_is_detected_by_heartbeats_and_used_again(thirds, source, tiny_bundle, wait_until):
    run = Run(source, 300)
    run.after(50)
    thirds.signal("c", signal.SIGSTOP)
    wait_until(lambda: source.snapshot.peers["c"].state == "lost")
    run.after(run.done + 20)
    thirds.signal("c", signal.SIGCONT)
    wait_until(lambda: source.snapshot.peers["c"].state == "alive")
    records, summary = run.finish()
    assert (summary.answered, summary.failed, summary.degraded) == (300, 0, 0)
    assert_replays(tiny_bundle, records[::11])


def test_sigterm_drains_and_exits_with_zero(thirds, source):
    run = Run(source, 200)
    run.after(40)
    assert thirds.terminate("a") == 0
    _, summary = run.finish()
    assert (summary.answered, summary.failed, summary.degraded) == (200, 0, 0)
    assert "leaving" in thirds.last_log_line("a")
    assert "held=0" in thirds.last_log_line("a")


def test_requests_survive_a_restart_of_all_peers(thirds, open_source):
    run = Run(open_source(thirds.path, budget_ms=30_000), 100)  # peers need seconds to start on a loaded machine
    run.after(20)
    for name in ("a", "b", "c"):
        thirds.kill(name)
    thirds.start("a", "b", "c")
    thirds.wait_warm("a", "b", "c")
    _, summary = run.finish()
    assert (summary.answered, summary.failed) == (100, 0)


def test_without_the_only_holder_of_a_block_it_is_skipped_or_missed(start_peers, open_source, tiny_bundle, wait_until):
    peers = start_peers({"a": range(5), "b": range(5), "c": [5]})
    run = Run(open_source(peers.path), 120)
    run.after(30)
    peers.kill("c")
    records, summary = run.finish()
    assert (summary.answered, summary.failed) == (120, 0)
    assert 0 < summary.degraded < 120
    assert {r.skipped for r in records if r.degraded} == {(5,)}
    assert_replays(tiny_bundle, records[::9])
    with Source.open(peers.path, tiny_bundle, max_skips=0, budget_ms=600) as strict:
        wait_until(lambda: strict.wait_ready(0.1) == (5,), what="the other blocks")
        image = open_data("digits", "eval").images[0]
        with pytest.raises(BudgetExceeded, match="block 5 had no reachable holder"):
            strict.submit(image.read()).result(5)


@pytest.mark.release
def test_the_command_writes_a_trace_and_exits_with_3_if_degraded(start_peers, tmp_path, tiny_bundle):
    peers = start_peers({"a": range(5), "b": [5]})
    trace, report = tmp_path / "t.jsonl", tmp_path / "r.html"
    command = [
        sys.executable, "-m", "ls_edge", "run", "--peers", str(peers.path), "--bundle", str(tiny_bundle), "--data",
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
    peers.kill("b")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["answered"], summary["degraded"]) == (60, 60)


def _replay_with_plain_onnxruntime(bundle, lines):
    """Run the files of the bundle in the order of the trace, without this package's engines."""
    import onnxruntime

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


def test_peers_of_another_model_are_refused_with_both_ids(start_peers, tiny_bundle, other_bundle, wait_until):
    ours, theirs = (Bundle.open(b).manifest.model_id[:12] for b in (tiny_bundle, other_bundle))
    peers = start_peers({"a": range(6)}, other_bundle)
    with Source.open(peers.path, tiny_bundle) as source:
        wait_until(lambda: len(source.wait_ready(0.1)) == 6 and "a" in source.snapshot.mismatched)
        assert ours in source.snapshot.mismatched["a"]
        assert theirs in source.snapshot.mismatched["a"]
    done = subprocess.run(
        [sys.executable, "-m", "ls_edge", "run", "--peers", str(peers.path), "--bundle", str(tiny_bundle), "--data",
         "digits", "--limit", "3", "--wait", "3"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == ModelMismatch.exit_code
    assert ours in done.stderr
    assert theirs in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_processes_with_an_older_file_take_part(serve, write_peers, tiny_bundle, images, tmp_path):
    """It dropped all tokens whose block had run on a holder that is not listed in its own file."""
    new = write_peers({"a": [0, 1, 2, 3], "b": [3], "c": [4, 5]})
    document = yaml.safe_load(new.read_text())
    document["peers"][0]["blocks"].remove(3)
    older = tmp_path / "older.yaml"
    older.write_text(yaml.safe_dump(document))
    for name in "abc":
        serve(Peer(load_peers(older if name == "c" else new), name, Bundle.open(tiny_bundle)))
    with Source.open(older, tiny_bundle, max_skips=0, policy="sequential") as source:
        assert source.wait_ready(30) == ()
        for image in images(5):
            assert source.submit(image, budget_ms=60_000).result(30).record.skipped == ()
