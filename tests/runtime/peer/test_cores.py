"""Cores of their own for engines: real processes and threads, as the system reports them."""

import logging
import os
import re
import threading
from pathlib import Path

import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import ConfigError
from ls_edge.core.peers_file import load_peers
from ls_edge.core.text import format_ranges
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.peer.cores import EngineCores
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source

needs_two_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)


def last_core():
    """The last core that this process may use, and the others, as the system writes them."""
    own = frozenset(os.sched_getaffinity(0))
    return format_ranges(frozenset([max(own)])), format_ranges(own - {max(own)})


def threads_of(pid):
    """Each thread of a process: its number, its name, and the cores that it may use."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        cores = re.search(r"^Cpus_allowed_list:\s*(\S+)$", (task / "status").read_text(), re.M)
        found.append((int(task.name), (task / "comm").read_text().strip(), cores[1]))
    return found


@needs_two_cores
def test_a_peer_runs_its_engine_on_its_cores_and_all_else_on_the_others(tiny_bundle, tmp_path, images):
    engine, rest = last_core()
    each = {"cpus": engine, "threads": 2}
    with LocalCluster(tmp_path, tiny_bundle, {"a": range(6)}, each=each) as cluster:
        cluster.wait_warm(timeout=120)
        with Source.open(cluster.file, tiny_bundle) as source:
            assert source.wait_ready(30) == ()
            assert all(source.submit(image).result(30) for image in images(3))
            found = threads_of(cluster.processes["a"].pid)
    pid = cluster.processes["a"].pid
    engines = [cores for _, name, cores in found if name == "engine of a"]
    assert len(engines) >= 2  # the thread itself, and what ONNX Runtime started for two threads
    assert set(engines) == {engine}
    assert [cores for thread, _, cores in found if thread == pid] == [rest]
    of_libzmq = [(name, cores) for _, name, cores in found if name.startswith("ZMQ")]
    assert {name for name, _ in of_libzmq} >= {"ZMQbg/IO/0", "ZMQbg/Reaper"}
    assert {cores for _, cores in of_libzmq} == {rest}


@needs_two_cores
def test_a_source_does_so_with_its_own_threads_and_leaves_its_caller_alone(tiny_bundle, write_peers, serve, images):
    engine, rest = last_core()
    path = write_peers({"a": range(6)}, sources=["s"])
    document = yaml.safe_load(path.read_text())
    document["sources"][0] |= {"cpus": [int(engine)], "threads": 2}
    path.write_text(yaml.safe_dump(document))
    file = load_peers(path)
    serve(Peer(file, "a", Bundle.open(tiny_bundle)))
    mine, before = os.sched_getaffinity(0), {thread for thread, _, _ in threads_of(os.getpid())}
    with Source.open(file, tiny_bundle) as source:
        assert source.wait_ready(30) == ()
        assert source.submit(images(1)[0]).result(30)
        assert os.sched_getaffinity(0) == mine
        new = [one for one in threads_of(os.getpid()) if one[0] not in before]
        loops = {thread.native_id for thread in threading.enumerate() if thread.name == "source"}
    assert len(loops) == 1
    assert {cores for thread, name, cores in new if thread in loops or name.startswith("ZMQ")} == {rest}
    assert {cores for _, name, cores in new if name == "stem and head"} == {engine}
    assert os.sched_getaffinity(0) == mine


def peer_with(write_peers, tiny_bundle, cpus):
    return Peer(load_peers(write_peers({"a": range(6)}, cpus=cpus)), "a", Bundle.open(tiny_bundle))


@needs_two_cores
def test_cores_that_are_not_given_and_none_left_are_errors_of_one_line(write_peers, tiny_bundle):
    mine = frozenset(os.sched_getaffinity(0))
    every = format_ranges(mine)
    for cpus, words in (
        ([min(mine), 9998, 9999], f"does not give core 9998-9999 to this process, which may use {every}; list others"),
        ("9999", "does not give core 9999 to this process"),
        (every, f"cpus of 'a' are all cores that this process may use ({every}); leave one for its messages"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            peer_with(write_peers, tiny_bundle, cpus)
        assert re.match(r"\S+peers\.yaml:\d+:\d+: cpus of 'a'", str(caught.value))
        assert "\n" not in str(caught.value)
        assert os.sched_getaffinity(0) == mine


def test_where_threads_have_no_cores_of_their_own_the_key_is_logged(write_peers, monkeypatch, caplog):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    file = load_peers(write_peers({"a": range(6)}, cpus="0"))
    with caplog.at_level(logging.WARNING, logger="ls_edge.runtime"):
        cores = EngineCores.of(file, file.peer("a"))
    assert cores == EngineCores()
    assert [record.message for record in caplog.records] == ["cpus have no effect"]
    with cores.on_engine(), cores.others():
        pass
