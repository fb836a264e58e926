"""Pauses of processes, and work of sources that die out of sight, have no lasting effect."""

import signal
import subprocess
import sys
from concurrent.futures import FIRST_COMPLETED, wait

import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded
from ls_edge.core.peers_file import load_peers
from ls_edge.core.records import PeerState
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.peer.peer import Peer
from tests.faults.engines import Faults, inject, write

BUDGET_MS = 300.0
"""Much less than the pause: requests that come after it must not be measured by it."""


def test_a_peer_that_was_stopped_in_an_engine_call_runs_blocks_again(start_peers, open_source, images, wait_until):
    """Every request outlives the pause, and the peer serves short budgets soon afterwards.

    This does not show that a long call counts little in the usual time of one: the calls after it, and that most of a
    budget is always tried, would do as well; the test of a "black hole" in ``test_machine.py`` shows that.
    """
    peers = start_peers({"a": range(6)})
    peers.set_faults("a", Faults(least_ms=20.0))
    source, (picture,) = open_source(peers.path, max_skips=0, budget_ms=30_000), images(1)
    futures = [source.submit(picture) for _ in range(8)]
    wait(futures, 30, FIRST_COMPLETED)
    peers.signal("a", signal.SIGSTOP)  # in one of its calls of 20 ms
    wait_until(lambda: source.snapshot.peers["a"].state is PeerState.LOST, 30.0, "the heartbeats to end")
    stopped = [source.submit(picture, budget_ms=2_000) for _ in range(2)]
    assert {type(future.exception(30)) for future in stopped} == {BudgetExceeded}  # the pause outlasts two seconds
    peers.signal("a", signal.SIGCONT)
    assert not wait(futures, 30).not_done
    assert {future.exception() for future in futures} == {None}
    peers.set_faults("a", Faults())
    wait_until(lambda: all(answers(source, picture)), 30.0, "five answers in a row within the budget")


def answers(source, picture):
    """Yield whether each of five requests, one after the other, is answered within a short budget."""
    for _ in range(5):
        yield source.submit(picture, budget_ms=BUDGET_MS).exception(10) is None


SOURCE = """
import sys
from ls_edge.runtime.source.source import Source
import numpy as np
source = Source.open(sys.argv[1], sys.argv[2], name="hidden", max_skips=0, budget_ms=300_000)
assert 0 not in source.wait_ready(20, may_miss=5)  # no holder of the other blocks is in sight
shape = (3, *source.bundle.manifest.image.size)
for _ in range(6):
    source.submit(np.zeros(shape, np.float32))
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.mark.release
def test_work_of_a_source_that_dies_behind_a_relay_is_forgotten(tiny_bundle, write_peers, serve, tmp_path, wait_until):
    """``far`` has no link to the source; its engine is slow, so that it has work when the source dies."""
    blocks = Bundle.open(tiny_bundle).num_blocks
    path = write_peers({"relay": [0], "far": range(1, blocks - 1), "nobody": [blocks - 1]})
    write(tmp_path / "slow", Faults(least_ms=300.0))
    far = serve(inject(Peer(load_peers(path), "far", Bundle.open(tiny_bundle)), tmp_path / "slow"))
    relay = serve(Peer(load_peers(path), "relay", Bundle.open(tiny_bundle)))
    wait_until(
        lambda: far.machine.rules.warm and relay.machine.rules.warm and "far" in relay.machine.neighbors.by_name,
        what="peers",
    )
    seen = yaml.safe_load(path.read_text())
    seen["peers"] = [p for p in seen["peers"] if p["name"] != "nobody"]
    seen["peers"][0]["blocks"] = [0, blocks - 1]  # for the source, which would not start otherwise
    seen["peers"][1]["address"] = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    source_path = tmp_path / "seen.yaml"
    source_path.write_text(yaml.safe_dump(seen))
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE, str(source_path), str(tiny_bundle)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"sent\n"
        wait_until(lambda: len(far.machine.held) >= 3, what="work at the far peer")
        assert "hidden" not in "".join(far.machine.neighbors.by_name)
    finally:
        process.kill()
        process.wait(20)
        process.stdin.close()
        process.stdout.close()
    wait_until(lambda: not far.machine.held and not relay.machine.held, timeout=15, what="all to be forgotten")
    assert far.machine.rules.credits == far.machine.limits.credits
