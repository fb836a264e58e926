"""``ls-edge run``: what it found out is never lost, and what keeps it from answering is said before the first image."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess

import msgspec
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle, bundle_id_of, write_manifest
from ls_edge.data.content import KnownImages, digests_of
from ls_edge.data.datasets import open_data
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.faults.engines import Faults
from tests.traces import read_trace

PLACEMENT = {"a": [0, 1, 2, 3], "b": [2, 3, 4, 5]}
SLOW = Faults(stall_ms=20.0, stall_part=1.0)


@pytest.fixture
def slow(peers):
    """Peers that take 40 ms for an image."""
    for name in PLACEMENT:
        peers.set_faults(name, SLOW)
    yield peers
    for name in PLACEMENT:
        peers.set_faults(name, Faults())


@pytest.fixture
def command(peers, tiny_bundle):
    return ["run", "--peers", peers.path, "--bundle", tiny_bundle, "--data", "digits"]


def lines_of(trace):
    return trace.read_bytes().splitlines() if trace.exists() else []


# Where the results go.


@pytest.mark.parametrize("flag", ["--trace", "--report", "--trace-events"])
def test_outputs_that_cannot_be_written_are_found_before_anything_is_sent(
    ls_edge, complaints, write_peers, tiny_bundle, tmp_path, flag
):
    nobody = write_peers({"a": range(6)})
    done = ls_edge.run(
        "run", "--peers", nobody, "--bundle", tiny_bundle, "--data", "digits", flag, tmp_path, "--wait", "0"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert complaints(done)[-1] == f"ls-edge: cannot write {tmp_path}: it is a folder; name a file"


def test_an_existing_trace_stays_until_the_first_answer_can_come(ls_edge, write_peers, tiny_bundle, tmp_path):
    trace = tmp_path / "t.jsonl"
    trace.write_text('{"id":0}\n')
    nobody = write_peers({"a": range(6)})
    done = ls_edge.run(
        "run", "--peers", nobody, "--bundle", tiny_bundle, "--data", "digits", "--trace", trace, "--wait", "0"
    )
    assert done.returncode == 1
    assert trace.read_text() == '{"id":0}\n'


def test_the_trace_of_a_run_that_is_killed_has_what_was_answered(ls_edge, slow, command, tmp_path, wait_until):
    trace = tmp_path / "t.jsonl"
    running = ls_edge.start(*command, "--limit", "5000", "--trace", trace)
    wait_until(lambda: len(lines_of(trace)) >= 5, 30.0, "lines in the trace")
    running.kill()
    running.wait()
    records = list(read_trace(trace))
    assert len(records) >= 5
    assert all(record.prediction is not None and record.error is None for record in records)


@pytest.mark.parametrize(
    ("number", "word"),
    [(signal.SIGINT, "interrupted"), pytest.param(signal.SIGTERM, "terminated", marks=pytest.mark.release)],
)
def test_a_run_that_is_stopped_prints_its_summary(
    ls_edge, complaints, slow, command, tmp_path, wait_until, number, word
):
    trace, report, events = tmp_path / "t.jsonl", tmp_path / "r.html", tmp_path / "e.json"
    outputs = ("--trace", trace, "--report", report, "--trace-events", events)
    running = ls_edge.start(*command, "--limit", "5000", *outputs, "--json")
    wait_until(lambda: len(lines_of(trace)) >= 5, 30.0, "lines in the trace")
    running.send_signal(number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    summary = json.loads(out)
    assert 5 <= summary["answered"] < 5000
    assert summary["requests"] == summary["answered"] == len(list(read_trace(trace)))
    assert "vegaEmbed(" in report.read_text()
    heads = [event for event in json.loads(events.read_text())["traceEvents"] if event["name"] == "head"]
    assert len(heads) == summary["answered"]
    *_, line = complaints(subprocess.CompletedProcess([], 0, out, err))
    assert f"{word} after {summary['requests']} of 5,000 requests" in line


def test_ctrl_c_ends_the_wait_for_peers(ls_edge, complaints, tiny_bundle, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes the connection and says nothing
        path = tmp_path / "peers.yaml"
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        path.write_text(f"peers: [{{name: a, address: '{address}', blocks: '0-5'}}]")
        waiting = ls_edge.start("run", "--peers", path, "--bundle", tiny_bundle, "--data", "digits", "--wait", "600")
        mute.settimeout(30)
        mute.accept()[0].close()
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=60)
    assert (waiting.returncode, out) == (130, "")
    assert complaints(subprocess.CompletedProcess([], 130, out, err)) == ["ls-edge: interrupted"]


def test_a_disk_that_becomes_full_costs_the_trace_and_nothing_else(ls_edge, complaints, command, tmp_path):
    trace = tmp_path / "t.jsonl"

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = ls_edge.run(*command, "--limit", "200", "--trace", trace, "--json", prepare=small_files)
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert (summary["requests"], summary["answered"]) == (200, 200)
    *_, line = complaints(done)
    assert f"the trace {trace} ends after " in line
    records = list(read_trace(trace))
    assert f"ends after {len(records)} requests" in line
    assert 0 < len(records) < 200


@pytest.mark.release
def test_a_report_that_fails_leaves_the_summary(ls_edge, complaints, command, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (6_000, 6_000))

    report = tmp_path / "r.html"
    done = ls_edge.run(*command, "--limit", "20", "--report", report, "--json", prepare=small_files)
    assert done.returncode == 1
    assert json.loads(done.stdout)["answered"] == 20
    assert any(f"cannot write {report}" in line for line in complaints(done))
    assert list(tmp_path.iterdir()) == [tmp_path / "peers.yaml"] or not report.exists()


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_output_that_cannot_be_written_is_an_error_and_the_files_are_complete(
    ls_edge, complaints, command, tmp_path, flags
):
    report, trace = tmp_path / "r.html", tmp_path / "t.jsonl"
    with open("/dev/full", "w") as full:
        done = ls_edge.run(*command, "--limit", "20", "--report", report, "--trace", trace, *flags, stdout=full)
    assert done.returncode == 1
    *_, line = complaints(done)
    assert "no space left on device" in line.lower()
    assert "Exception ignored" not in done.stderr
    if flags:  # the numbers have no other place, so nothing is sent
        assert not report.exists()
        return
    assert "vegaEmbed(" in report.read_text()
    assert len(list(read_trace(trace))) == 20


def test_a_soft_limit_of_file_descriptors_is_raised(ls_edge, command):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def few():
        resource.setrlimit(resource.RLIMIT_NOFILE, (20, hard))

    assert ls_edge.run(*command, "--limit", "3", prepare=few).returncode == 0


# What keeps it from answering.


@pytest.mark.release
def test_a_missing_block_ends_the_run_before_its_first_image(ls_edge, complaints, tiny_bundle, tmp_path):
    with LocalCluster(tmp_path, tiny_bundle, {"a": [0, 1, 2, 3], "b": [4, 5]}) as local:
        local.wait_warm()
        local.kill("b")
        command = ["run", "--peers", local.path, "--bundle", tiny_bundle, "--data", "digits", "--limit", "300"]
        trace = tmp_path / "t.jsonl"
        done = ls_edge.run(*command, "--wait", "0.3", "--trace", trace)
        assert (done.returncode, done.stdout) == (1, "")
        *_, line = complaints(done)
        assert "blocks 4-5 have no holder after 0.3 s (b" in line
        assert "the policy nearest may skip at most 1 of 6 blocks" in line
        assert "--max-skips 2" in line
        assert "--wait SECONDS" in line
        assert not trace.exists()

        done = ls_edge.run(*command, "--wait", "0.3", "--policy", "sequential", "--max-skips", "6")
        assert done.returncode == 1
        assert "sequential never skips a block" in complaints(done)[0]
        assert "--policy nearest --max-skips 2" in complaints(done)[0]

        done = ls_edge.run(*command, "--wait", "0.3", "--max-skips", "2", "--limit", "10", "--json")
        assert done.returncode == 3
        summary = json.loads(done.stdout)
        assert (summary["answered"], summary["degraded"]) == (10, 10)
        line, *_ = complaints(done)
        assert line.startswith("ls-edge: warning: blocks 4-5 have no holder after 0.3 s (b")
        assert "starting without" in line

        waiting = ls_edge.start(*command, "--wait", "60", "--limit", "10", "--json")
        local.start("b")
        out, err = waiting.communicate(timeout=60)
        assert waiting.returncode == 0, err
        assert json.loads(out)["answered"] == 10


def test_a_run_without_an_answer_has_failed(ls_edge, slow, command):
    done = ls_edge.run(*command, "--limit", "6", "--budget-ms", "30", "--max-skips", "0", "--json")
    assert done.returncode == 1
    summary = json.loads(done.stdout)
    assert (summary["requests"], summary["answered"], summary["failed"]) == (6, 0, 6)


def test_a_block_that_loses_its_last_holder_is_shown_during_the_run(ls_edge, tiny_bundle, tmp_path, wait_until):
    with LocalCluster(tmp_path, tiny_bundle, {"a": [0, 1, 2, 3], "b": [2, 3, 4, 5]}) as local:
        local.wait_warm()
        trace, said = tmp_path / "t.jsonl", tmp_path / "said"
        with said.open("w") as stream:
            running = ls_edge.start(
                "run", "--peers", local.path, "--bundle", tiny_bundle, "--data", "digits", "--limit", "100000",
                "--budget-ms", "60000", "--max-skips", "1", "--trace", trace, "--json", stderr=stream,
            )  # fmt: skip
            wait_until(lambda: lines_of(trace), 30.0, "the first answer")
            assert "lost the last holder" not in said.read_text()
            local.kill("b")
            wait_until(lambda: "lost the last holder" in said.read_text(), 30.0, "the display to say so")
            assert "blocks 4-5 lost the last holder" in said.read_text()
            running.send_signal(signal.SIGINT)
            out, _ = running.communicate(timeout=60)
        assert running.returncode == 130
        assert json.loads(out)["answered"] >= len(lines_of(trace)) > 0


def test_another_bundle_is_refused_if_the_same_is_demanded(ls_edge, complaints, peers, tiny_bundle, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle, copy)
    opened = Bundle.open(copy)
    parts = opened.manifest.parts
    changed = msgspec.structs.replace(parts.blocks[0], sha256="f" * 64)  # a source never opens it
    parts = msgspec.structs.replace(parts, blocks=(changed, *parts.blocks[1:]))
    another = bundle_id_of(opened.interface, opened.manifest.precision, parts)
    write_manifest(copy, msgspec.structs.replace(opened.manifest, parts=parts, bundle_id=another))
    command = ["run", "--peers", peers.path, "--bundle", copy, "--data", "digits", "--limit", "5", "--wait", "2"]
    done = ls_edge.run(*command, "--strict-bundle")
    assert (done.returncode, done.stdout) == (1, "")
    *_, line = complaints(done)
    assert "--strict-bundle" in line
    assert another[:12] in line
    assert opened.manifest.bundle_id[:12] in line
    assert ls_edge.run(*command).returncode == 0


# What the run was made with, and on what.


def test_json_holds_every_setting_in_force(ls_edge, peers, tiny_bundle):
    from ls_edge.cli.commands.run import command

    done = ls_edge.run(
        "run", "--peers", peers.path, "--bundle", tiny_bundle, "--data", "digits", "--limit", "3", "--json",
        "--audit", "0.5", "--wait", "9",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    settings = json.loads(done.stdout)["settings"]
    flags = {parameter.name for parameter in command.params} - {"as_json", "help", "help_all", "debug"}
    assert flags <= set(settings)
    assert (settings["audit"], settings["wait"], settings["data"], settings["limit"]) == (0.5, 9, "digits", 3)
    assert (settings["bundle"], settings["max_skips"], settings["max_inflight"]) == (str(tiny_bundle), 1, 4)


@pytest.mark.release
def test_a_run_warns_if_the_model_was_trained_on_the_images(ls_edge, complaints, peers, tiny_bundle, tmp_path):
    for label in ("0", "1"):
        (tmp_path / "data" / label).mkdir(parents=True)
        Image.new("L", (16, 16), 9 * int(label)).save(tmp_path / "data" / label / "a.png")
    bundle = tmp_path / "bundle"
    shutil.copytree(tiny_bundle, bundle)
    trained_on = KnownImages.of(digests_of(open_data(str(tmp_path / "data"), "train").images)).write()
    write_manifest(bundle, msgspec.structs.replace(Bundle.open(bundle).manifest, trained_on=trained_on))
    run = ["run", "--peers", peers.path, "--data", tmp_path / "data", "--limit", "5", "--bundle"]
    done = ls_edge.run(*run, bundle)
    assert done.returncode == 0, done.stderr
    line, *_ = complaints(done)
    assert f"the model was trained on 2 of the 2 different images of {tmp_path / 'data'}" in line
    assert not any("was trained on" in one for one in complaints(ls_edge.run(*run, tiny_bundle)))


def test_a_local_run_starts_and_ends_its_peers(ls_edge, complaints, tiny_bundle, tmp_path, peers):
    run = ["run", "--bundle", tiny_bundle, "--data", "digits", "--limit", "4"]
    env = {**os.environ, "LS_EDGE_PEERS": str(peers.path), "TMPDIR": str(tmp_path)}
    done = ls_edge.run(*run, "--local", "3", "--json", env=env)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    blocks = {name: peer["blocks"] for name, peer in found["peers"].items()}
    assert blocks == {"local-0": [0, 1, 4, 5], "local-1": [0, 1, 2, 3], "local-2": [2, 3, 4, 5]}
    assert (found["answered"], found["degraded"], found["settings"]["local"]) == (4, 0, 3)
    assert list(tmp_path.iterdir()) == []
    for more, what in (
        ((), "with --peers FILE, or start some on this machine with --local N; one of them"),
        (("--local", "2", "--peers", peers.path), "one of them"),
        (("--local", "60"), "this bundle needs 1 to 6, its number of blocks"),
    ):
        done = ls_edge.run(*run, *more)
        assert done.returncode == 2
        assert what in complaints(done)[0]
