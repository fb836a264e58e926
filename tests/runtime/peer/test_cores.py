"""Cores and scheduling policy of real threads, as the system reports them."""

import contextlib
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
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source

needs_two_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")

needs_default_policy = pytest.mark.skipif(
    os.sched_getscheduler(0) != os.SCHED_OTHER, reason="needs the usual scheduling policy"
)


def last_core():
    """The last core that this process may use, and the other cores, as the system writes them."""
    own = frozenset(os.sched_getaffinity(0))
    return format_ranges(frozenset([max(own)])), format_ranges(own - {max(own)})


def threads_of(pid):
    """Number, name and allowed cores of each thread of a process."""
    found = []
    for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
        cores = re.search(r"^Cpus_allowed_list:\s*(\S+)$", (task / "status").read_text(), re.M)
        found.append((int(task.name), (task / "comm").read_text().strip(), cores[1]))
    return found


@needs_two_cores
def test_a_peer_runs_its_engine_on_cpus_and_all_other_threads_elsewhere(start_peers, open_source, images):
    engine, rest = last_core()
    peers = start_peers({"a": range(6)}, each={"cpus": engine, "threads": 2})
    source, pid = open_source(peers.file), peers.processes["a"].pid
    assert all(source.submit(image).result(30) for image in images(3))
    found = threads_of(pid)
    engines = [cores for _, name, cores in found if name == "engine of a"]
    assert len(engines) >= 2  # the thread itself, and the one that ONNX Runtime started
    assert set(engines) == {engine}
    assert [cores for thread, _, cores in found if thread == pid] == [rest]
    of_libzmq = [(name, cores) for _, name, cores in found if name.startswith("ZMQ")]
    assert {name for name, _ in of_libzmq} >= {"ZMQbg/IO/0", "ZMQbg/Reaper"}
    assert {cores for _, cores in of_libzmq} == {rest}


@needs_two_cores
def test_a_source_moves_its_own_threads_but_not_its_caller(tiny_bundle, write_peers, serve, images):
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
def test_unavailable_cores_and_a_reservation_of_all_cores_are_errors_of_one_line(write_peers, tiny_bundle):
    mine = frozenset(os.sched_getaffinity(0))
    every = format_ranges(mine)
    for cpus, words in (
        ([min(mine), 998, 999], f"does not give core 998-999 to this process, which may use {every}; list others"),
        ("999", "does not give core 999 to this process"),
        (every, f"cpus of 'a' are all cores that this process may use ({every}); leave one for its messages"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)) as caught:
            peer_with(write_peers, tiny_bundle, cpus)
        assert re.match(r"\S+peers\.yaml:\d+:\d+: cpus of 'a'", str(caught.value))
        assert "\n" not in str(caught.value)
        assert os.sched_getaffinity(0) == mine


def policies_of(pid):
    """Name and policy of each thread of a process, by number."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            found[int(path.name)] = (path / "comm").read_text().strip(), os.sched_getscheduler(int(path.name))
    return found


@needs_default_policy
def test_a_source_changes_the_policy_of_only_its_own_threads(tiny_bundle, serve_peers, images):
    file = serve_peers({"a": range(6)})
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
