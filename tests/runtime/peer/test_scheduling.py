"""The scheduling policy of the threads of peers and sources: real threads, as the system reports them."""

import contextlib
import os
import sys
import threading
from pathlib import Path

import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.cores import batch_scheduling
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER,
    reason="needs Linux and its usual scheduling policy",
)


def policies_of(pid):
    """Each thread of a process, by number: its name and its policy."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found[int(path.name)] = (path / "comm").read_text().strip(), os.sched_getscheduler(int(path.name))
    return found


def test_no_thread_of_a_peer_that_handles_messages_or_blocks_interrupts_another(tiny_bundle, tmp_path, images):
    with LocalCluster(tmp_path, tiny_bundle, {"a": range(6)}, each={"threads": 2}) as cluster:
        cluster.wait_warm(timeout=120)
        with Source.open(cluster.file, tiny_bundle) as source:
            assert source.wait_ready(30) == ()
            assert source.submit(images(1)[0]).result(30)
            pid = cluster.processes["a"].pid
            found = policies_of(pid)
    assert found[pid][1] == os.SCHED_BATCH
    assert {name for name, _ in found.values()} >= {"engine of a", "ZMQbg/IO/0"}
    threads = [policy for name, policy in found.values() if name in ("engine of a", "ZMQbg/IO/0")]
    assert len(threads) >= 3  # ONNX Runtime has started one too
    assert set(threads) == {os.SCHED_BATCH}


def test_a_source_changes_only_the_threads_that_it_starts(tiny_bundle, write_peers, serve, images):
    file = load_peers(write_peers({"a": range(6)}))
    serve(Peer(file, "a", Bundle.open(tiny_bundle)))
    before = set(policies_of(os.getpid()))
    with Source.open(file, tiny_bundle) as source:
        assert source.wait_ready(30) == ()
        assert source.submit(images(1)[0]).result(30)
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
        found = policies_of(os.getpid())
        loops = {thread.native_id for thread in threading.enumerate() if thread.name == "source"}
    ours = {name for task, (name, policy) in found.items() if task not in before and policy == os.SCHED_BATCH}
    assert ours >= {"stem and head", "ZMQbg/IO/0"}
    assert [found[loop][1] for loop in loops] == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def on_a_thread(call):
    """What a call returns on a thread of its own, whose policy ends with it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join(10.0)
    return found[0]


def test_another_policy_is_kept():
    def seen():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with batch_scheduling():
            within = os.sched_getscheduler(0)
        return within, os.sched_getscheduler(0)

    assert on_a_thread(seen) == (os.SCHED_IDLE, os.SCHED_IDLE)


def test_the_usual_policy_is_back_after_an_error_and_where_it_is_used_twice():
    found = []

    def fail():
        with batch_scheduling():
            with batch_scheduling():
                found.append(os.sched_getscheduler(0))
            found.append(os.sched_getscheduler(0))
            raise ValueError("within")

    def seen():
        with pytest.raises(ValueError, match="within"):
            fail()
        return os.sched_getscheduler(0)

    assert on_a_thread(seen) == os.SCHED_OTHER
    assert found == [os.SCHED_BATCH, os.SCHED_BATCH]


def test_a_system_that_forbids_it_changes_nothing(monkeypatch):
    def forbidden(*_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    with batch_scheduling():
        assert os.sched_getscheduler(0) == os.SCHED_OTHER
