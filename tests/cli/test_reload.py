"""SIGHUP: peers and sources read their files again; ``test_fleet_changes`` does it in a running fleet."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
import zmq

from ls_edge.cli.inputs import reload_source
from ls_edge.core.errors import ConfigError, LinkError, UsageError
from ls_edge.core.peers_file import parse_peers
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source
from ls_edge.runtime.transport.keys import new_keys
from tests.faults.engines import Faults, inject, write

ALL = tuple(range(6))
needs_curve = pytest.mark.skipif(not zmq.has("curve"), reason="libzmq was built without CURVE")


def edit(path, change):
    document = yaml.safe_load(Path(path).read_text())
    change({one["name"]: one for one in (*document["peers"], *document["sources"])}, document)
    Path(path).write_text(yaml.safe_dump(document, sort_keys=False))


def test_a_peer_whose_own_entry_changed_serves_it_in_the_same_process(tmp_path, tiny_bundle, wait_until):
    with LocalCluster(tmp_path, tiny_bundle, {"a": (0, 1, 2), "b": ALL}, sources=["laptop"]) as cluster:
        cluster.wait_warm()
        process = cluster.processes["a"].pid
        with Source.open(cluster.path, tiny_bundle, name="laptop") as source:
            assert source.wait_ready(10) == ()
            image = np.zeros((3, 16, 16), np.float32)
            port = free_ports(1)[0]

            def change(named, _document):
                named["a"].update(address=f"tcp://127.0.0.1:{port}", blocks=list(ALL))

            edit(cluster.path, change)
            for name in cluster.processes:
                cluster.signal(name, signal.SIGHUP)
            source.reload()
            wait_until(lambda: source.snapshot.peers["a"].warm and source.snapshot.peers["a"].blocks == ALL, timeout=60)
            cluster.terminate("b")
            answers = [source.submit(image).result(10) for _ in range(5)]
            assert not any(answer.degraded for answer in answers)
            assert {holder for answer in answers for holder in answer.record.holders} == {"a"}
        assert cluster.processes["a"].pid == process
        assert cluster.alive("a")


def test_an_unusable_file_does_not_change_the_peer(tmp_path, tiny_bundle, wait_until):
    with LocalCluster(tmp_path, tiny_bundle, {"a": ALL}) as cluster:
        cluster.wait_warm()
        good = cluster.path.read_text()
        with Source.open(cluster.file, tiny_bundle) as source:
            assert source.wait_ready(10) == ()
            for count, (change, why) in enumerate(
                (
                    ({"name": "z"}, "unknown peer"),
                    ({"blocks": [6]}, "lists block 6"),
                    ({"bind": "tcp://192.0.2.1:5555"}, "192.0.2.1"),
                    ({"provider": "NoneProvider"}, "NoneProvider"),
                )
            ):
                cluster.path.write_text(good)
                edit(cluster.path, lambda named, _, change=change: named["a"].update(change))
                cluster.signal("a", signal.SIGHUP)
                wait_until(lambda n=count: cluster.log_path("a").read_text().count("not reloaded") > n, timeout=60)
                assert why in cluster.log_path("a").read_text().rpartition("not reloaded")[2]
            assert source.submit(np.zeros((3, 16, 16), np.float32)).result(10).record.error is None


@needs_curve
def test_a_removed_key_ends_its_links_and_its_work(write_peers, tmp_path, tiny_bundle, serve, wait_until, caplog):
    pairs = {name: new_keys(name, tmp_path)[0] for name in ("a", "laptop", "guest")}
    path = write_peers({"a": ALL}, keys=pairs, sources=["laptop", "guest"])
    opened = Peer.open(path, "a", tiny_bundle, secret_key=tmp_path / "a.key_secret")
    peer = serve(inject(opened, tmp_path / "a.faults"))
    with (
        Source.open(path, tiny_bundle, secret_key=tmp_path / "laptop.key_secret") as source,
        Source.open(path, tiny_bundle, secret_key=tmp_path / "guest.key_secret") as guest,
    ):
        assert source.wait_ready(10) == guest.wait_ready(10) == ()
        write(tmp_path / "a.faults", Faults(least_ms=500))
        for one in (source, guest):
            one.submit(np.zeros((3, 16, 16), np.float32))
        wait_until(lambda: peer.snapshot.held == 2)
        edit(path, lambda named, document: document["sources"].remove(named["guest"]))
        peer.reload()
        wait_until(lambda: "removed from peers.yaml" in [getattr(record, "why", "") for record in caplog.records])
        assert [record.message for record in caplog.records if record.message == "dropped"] == ["dropped"]
        write(tmp_path / "a.faults", Faults())
        wait_until(lambda: not peer.snapshot.held and not peer.snapshot.stuck)
        wait_until(lambda: "it refused our key" in guest.snapshot.problems.get("a", ""))
        assert source.snapshot.problems == {}
        assert source.submit(np.zeros((3, 16, 16), np.float32)).result(10).record.error is None
        with pytest.raises(LinkError, match="is not in the file"):
            guest.reload()


def test_a_file_that_a_source_cannot_use_changes_nothing(write_peers, tiny_bundle, serve):
    path = write_peers({"a": ALL}, sources=["laptop"])
    serve(Peer.open(path, "a", tiny_bundle))
    with Source.open(path, tiny_bundle) as source:
        before = source.peers
        edit(path, lambda _, document: document.update(heartbeat={"timeout_ms": 300}))
        with pytest.raises(UsageError, match="changes the heartbeat"):
            source.reload()
        path.write_text("peers: 3\n")
        with pytest.raises(ConfigError):
            source.reload()
        assert source.peers is before
        assert source.wait_ready(10) == ()


def test_a_source_that_follows_an_applied_file_reads_its_own_again(write_peers, tiny_bundle):
    path, said = write_peers({"a": ALL}, sources=["laptop"]), []
    with Source.open(path, tiny_bundle) as source:
        source._use(parse_peers(path.read_bytes(), path))
        reload_source(source, said.append)
    assert said == [f"read {path} again: 1 peer"]


TERMINAL = """
import os, pty, signal, sys
process, terminal = pty.fork()
if not process:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores, and processes inherit that
    os.dup2(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 2)
    os.execv(sys.argv[2], sys.argv[2:])
print(process, flush=True)
sys.stdin.readline()
os.close(terminal)
print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
"""
"""A terminal with a command, which ends with a line of standard input; prints the command's id and exit code."""


def test_the_end_of_its_terminal_still_ends_a_peer(write_peers, tiny_bundle, tmp_path, wait_until):
    """SIGHUP is sent by hand, and by a terminal that is closed."""
    path = write_peers({"a": ALL}, sources=["laptop"])
    log = tmp_path / "log"
    words = ["peer", "--peers", str(path), "--name", "a", "--bundle", str(tiny_bundle)]
    # Only a process without other forks has the terminal's only descriptor.
    command = [sys.executable, "-c", TERMINAL, str(log), sys.executable, "-m", "ls_edge", *words]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as terminal,
        Source.open(path, tiny_bundle) as source,
    ):
        process = int(terminal.stdout.readline())
        assert source.wait_ready(30) == ()
        os.kill(process, signal.SIGHUP)
        wait_until(lambda: "reloaded" in log.read_text(), 30.0, "a reload")
        assert terminal.communicate("end\n", timeout=30)[0] == "0\n"
    assert "draining" in log.read_text()


@pytest.mark.parametrize("command", ["peer", "serve"])
def test_a_reload_that_is_asked_for_while_it_starts_does_not_end_it(
    command, write_peers, tiny_bundle, tmp_path, wait_until
):
    path = write_peers({"a": ALL}, sources=["laptop"])
    log, first = tmp_path / "log", {"peer": path, "serve": tmp_path / "tokens"}[command]
    words = {
        "peer": ["peer", "--name", "a"],
        "serve": ["serve", "--http", "127.0.0.1:0", "--token-file", str(first)],
    }[command]
    content = path.read_text() if command == "peer" else "t" * 16 + "\n"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    pipe.rename(first)
    words += ["--peers", str(path), "--bundle", str(tiny_bundle)]
    with log.open("w") as stderr, subprocess.Popen([sys.executable, "-m", "ls_edge", *words], stderr=stderr) as process:
        try:
            with first.open("w") as file:  # it reads the file now
                first.unlink()
                first.write_text(content)
                first.chmod(0o600)
                process.send_signal(signal.SIGHUP)
                file.write(content)
            wait_until(lambda: process.poll() is not None or "reloaded" in log.read_text(), 30.0, "a reload")
            assert process.poll() is None
        finally:
            process.terminate()
    assert {"peer": "draining", "serve": "stopping"}[command] in log.read_text()
