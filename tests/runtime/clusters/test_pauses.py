"""Real processes that pause, and sources that die out of sight: both are forgotten as soon as they are over."""

import signal
import subprocess
import sys
import time
from concurrent.futures import wait

import pytest
import yaml

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.engines import Faults, inject, write

PAUSE_S = 4.0
BUDGET_MS = 300.0
"""Much less than the pause: requests that come after it must not be measured by it."""


def test_a_peer_that_was_stopped_in_an_engine_call_runs_blocks_again(tiny_bundle, tmp_path, images):
    """Every request outlives the pause, and the peer serves short budgets soon afterwards.

    This does not show that a long call counts little in the usual time of one: the calls after it, and that most of a
    budget is always tried, would do as well; the test of a "black hole" in ``test_claims.py`` shows that.
    """
    everything = range(Bundle.open(tiny_bundle).num_blocks)
    with FaultyCluster(tmp_path, tiny_bundle, {"a": everything}) as peers:
        peers.set_faults("a", Faults(least_ms=20.0))
        peers.wait_warm()
        with Source.open(peers.path, tiny_bundle, max_skips=0, budget_ms=30_000) as source:
            assert source.wait_ready() == ()
            picture = images(1)[0]
            futures = [source.submit(picture) for _ in range(8)]
            time.sleep(0.1)
            peers.signal("a", signal.SIGSTOP)  # of its calls of 20 ms one is going on
            time.sleep(PAUSE_S)
            peers.signal("a", signal.SIGCONT)
            assert not wait(futures, 30).not_done
            peers.set_faults("a", Faults())
            end = time.monotonic() + 20
            answered = 0
            while answered < 5 and time.monotonic() < end:
                error = source.submit(picture, budget_ms=BUDGET_MS).exception(10)
                answered = 0 if error is not None else answered + 1
            assert answered == 5


SOURCE = """
import sys, time
from ls_edge.runtime.source.source import Source
import numpy as np
source = Source.open(sys.argv[1], sys.argv[2], name="hidden", max_skips=0, budget_ms=300_000)
end = time.monotonic() + 20
while 0 in source.snapshot.missing_blocks:  # of the others none is in sight
    assert time.monotonic() < end
    time.sleep(0.02)
shape = (3, *source.bundle.manifest.image.size)
for _ in range(6):
    source.submit(np.zeros(shape, np.float32))
print("sent", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_work_of_a_source_that_dies_behind_a_relay_is_forgotten(
    tiny_bundle, write_peers, serve, tmp_path, wait_until, how
):
    """``far`` has no link to the source; its engine is slow, so that work is there when the source dies."""
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
    seen["peers"][0]["blocks"] = [0, blocks - 1]  # what the source believes; else it would not start
    seen["peers"][1]["address"] = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    source_path = tmp_path / "seen.yaml"
    source_path.write_text(yaml.safe_dump(seen))
    process = subprocess.Popen(
        [sys.executable, "-c", SOURCE, str(source_path), str(tiny_bundle)],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"sent\n"
        wait_until(lambda: len(far.machine.held) >= 3, what="work at the far peer")
        assert "hidden" not in "".join(far.machine.neighbors.by_name)
    finally:
        process.send_signal(how)
        process.wait(20)
        process.stdout.close()
    wait_until(lambda: not far.machine.held and not relay.machine.held, timeout=15, what="all to be forgotten")
    assert far.machine.rules.credits == far.machine.limits.credits
