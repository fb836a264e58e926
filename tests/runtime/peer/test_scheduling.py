"""Scheduling policy of real threads, as the system reports it."""

import contextlib
import os
import threading
from pathlib import Path

import pytest

from ls_edge.runtime.source.source import Source

needs_default_policy = pytest.mark.skipif(
    os.sched_getscheduler(0) != os.SCHED_OTHER, reason="needs the usual scheduling policy"
)


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
