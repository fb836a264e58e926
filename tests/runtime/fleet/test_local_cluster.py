"""Peers as processes on this machine: they start, serve, are killed, return, and never outlive the cluster."""

import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from ls_edge.runtime.source.source import Source

PLACEMENT = {"a": [0, 1, 2], "b": [3, 4, 5]}


def exists(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_free_ports_are_distinct_and_not_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = free_ports(20)
        assert len({*ports, taken.getsockname()[1]}) == 21


def test_the_file_has_the_given_peers_and_keys(tmp_path, tiny_bundle):
    local = LocalCluster(tmp_path / "new" / "folder", tiny_bundle, PLACEMENT, each={"codec": "fp16", "credits": 3})
    assert [(p.name, p.blocks, p.codec, p.credits, p.threads) for p in local.file.peers] == [
        ("a", (0, 1, 2), "fp16", 3, 1),
        ("b", (3, 4, 5), "fp16", 3, 1),
    ]
    assert not local.alive("a")
    local.close()


def test_nobody_else_takes_the_port_of_a_peer_that_does_not_run(tmp_path, tiny_bundle):
    local = LocalCluster(tmp_path, tiny_bundle, PLACEMENT)
    ports = [int(peer.address.rpartition(":")[2]) for peer in local.file.peers]
    for port in ports:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as caller, pytest.raises(ConnectionRefusedError):
            caller.connect(("127.0.0.1", port))
    del local
    gc.collect()
    for port in ports:
        with socket.socket() as other:
            other.bind(("127.0.0.1", port))


def test_peers_serve_are_killed_and_serve_again(tmp_path, tiny_bundle, images, assert_replays):
    with LocalCluster(tmp_path, tiny_bundle, PLACEMENT) as local:
        local.wait_warm()
        assert local.alive("a")
        assert local.alive("b")
        with pytest.raises(UsageError, match="peer 'a' is already running"):
            local.start("a")
        with Source(local.file, Bundle.open(tiny_bundle)) as source:
            assert source.wait_ready(30) == ()
            batch = images(3)
            assert_replays(tiny_bundle, batch, [source.submit(image).result(10) for image in batch])

            local.kill("a")
            assert not local.alive("a")
            before = local.log_path("a").stat().st_size
            local.start("a")
            local.wait_warm("a")
            assert local.log_path("a").stat().st_size > before
            assert source.wait_ready(30) == ()
            assert_replays(tiny_bundle, batch, [source.submit(image).result(10) for image in batch])

        assert local.terminate("a") == 0
        assert not local.alive("a")
        assert b"leaving" in local.log_path("a").read_bytes()
        local.signal("a", signal.SIGTERM)  # not running: nothing happens
        pids = [process.pid for process in local.processes.values()]
    assert not any(exists(pid) for pid in pids)


def test_an_error_leaves_no_process_behind_not_even_a_stopped_one(tmp_path, tiny_bundle):
    pids = []

    def use():
        with LocalCluster(tmp_path, tiny_bundle, PLACEMENT) as local:
            pids.extend(process.pid for process in local.processes.values())
            local.signal("b", signal.SIGSTOP)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        use()
    assert len(pids) == 2
    assert not any(exists(pid) for pid in pids)


def test_the_error_has_the_log_of_a_peer_that_does_not_become_warm(tmp_path, tiny_bundle):
    broken = tmp_path / "broken"
    shutil.copytree(tiny_bundle, broken)
    (broken / "blocks" / "04.onnx").write_bytes(b"not what it was")
    local = LocalCluster(tmp_path, tiny_bundle, PLACEMENT)
    local.bundles["b"] = broken
    port = int(local.file.peer("a").bind.rpartition(":")[2])
    try:
        with socket.create_server(("127.0.0.1", port)):
            local.start("a", "b")
            with pytest.raises(LinkError, match=f"peer a did not become warm: .*tcp://127.0.0.1:{port} is in use"):
                local.wait_warm("a")
        with pytest.raises(LinkError, match=r"peer b did not become warm: .*04\.onnx .*is not the file of this bundle"):
            local.wait_warm("b")
        assert local.processes["a"].wait(5) == 1
        assert local.processes["b"].wait(5) == 1
    finally:
        local.close()


def test_the_error_has_the_time_that_a_running_peer_had_to_become_warm(tmp_path, tiny_bundle):
    with (
        LocalCluster(tmp_path, tiny_bundle, PLACEMENT) as local,
        pytest.raises(LinkError, match=r"peer a did not become warm in 0 s \(is this machine busy\?\): "),
    ):
        local.wait_warm("a", timeout=0)


def test_waiting_for_a_peer_that_was_never_started_is_an_error(tmp_path, tiny_bundle):
    local = LocalCluster(tmp_path, tiny_bundle, PLACEMENT)
    with pytest.raises(LinkError, match="peer a did not become warm: its log is empty"):
        local.wait_warm("a")


def test_peers_do_not_outlive_the_process_that_started_them(tmp_path, tiny_bundle, wait_until):
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
    wait_until(lambda: not any(runs(pid) for pid in pids))


def runs(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
