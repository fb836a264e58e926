"""Peers have bounded memory and are shared fairly, whatever sources send."""

import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import wait
from pathlib import Path

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.routing.state.events import Arrived
from ls_edge.runtime.routing.state.held_request import Stage
from ls_edge.runtime.source.source import Settings, Source
from tests.faults.engines import Faults, inject, write

MIB = 2**20


def resident(pid):
    """Resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def outcomes(futures, seconds=20.0):
    """Number of answers and of each error; every request has ended."""
    assert not wait(futures, seconds).not_done
    return Counter(type(future.exception()).__name__ for future in futures)


class Ledger:
    """Maximum number of requests that a peer held, and of those with work left just after it accepted one."""

    def __init__(self, peer):
        self.held = self.work = 0
        handle = peer.machine.handle_all

        def watched(events, now):
            events = list(events)
            before = len(peer.machine.held)
            instructions = handle(events, now)
            items = peer.machine.held.values()
            self.held = max(self.held, len(items))
            # Copies whose next holder failed are work again, so they alone may exceed the credits.
            if len(items) > before and all(isinstance(e, Arrived) and not e.run.returning for e in events):
                copies = (Stage.CUSTODY, Stage.OFFERED)
                self.work = max(self.work, sum(item.stage not in copies for item in items))
            return instructions

        peer.machine.handle_all = watched


def test_peers_hold_no_more_than_their_credits_and_the_rest_is_overloaded(
    tiny_bundle, write_peers, serve, images, tmp_path, assert_replays
):
    file, bundle = load_peers(write_peers({"a": [0, 1, 2], "b": [3, 4, 5]}, credits=4)), Bundle.open(tiny_bundle)
    faults = tmp_path / "slow.faults"
    write(faults, Faults(stall_ms=10.0, stall_part=1.0))
    peers = [serve(inject(Peer(file, name, bundle), faults)) for name in ("a", "b")]
    ledgers = [Ledger(peer) for peer in peers]
    pictures = images(200)
    with Source(file, bundle, Settings(max_skips=0)) as source:
        assert source.wait_ready(30) == ()
        futures = [source.submit(image, budget_ms=1500) for image in pictures]
        ended = outcomes(futures)
        assert set(ended) <= {"NoneType", "Overloaded", "BudgetExceeded"}
        assert ended["Overloaded"] > 20
        assert ended["Overloaded"] + ended["BudgetExceeded"] > 100
        answered = [(image, f.result()) for image, f in zip(pictures, futures, strict=True) if f.exception() is None]
        assert len(answered) >= 10
        assert not any(answer.degraded for _, answer in answered)
        assert {future.exception().record.id for future in futures if future.exception()} == set(range(200)) - {
            answer.request for _, answer in answered
        }
        later = source.submit(pictures[0], budget_ms=5000).result(6)
    for ledger in ledgers:
        assert 0 < ledger.work <= 2 * 4  # the credits, and what a source is guaranteed beyond them
        assert ledger.held <= 2 * 4 + 16
    some = answered[::5]
    assert_replays(tiny_bundle, [image for image, _ in some], [answer for _, answer in some])
    assert_replays(tiny_bundle, pictures[:1], [later])


def test_the_memory_of_peers_does_not_grow_with_the_number_of_requests(start_peers, tiny_bundle, images):
    everything = range(Bundle.open(tiny_bundle).num_blocks)
    peers = start_peers({"a": everything, "b": everything}, each={"credits": 4})
    with Source.open(peers.path, tiny_bundle, max_inflight=1000, max_skips=0) as source:
        assert source.wait_ready(30) == ()
        pictures = images(100)
        assert outcomes([source.submit(image) for image in pictures]) == {"NoneType": 100}
        before = {name: resident(process.pid) for name, process in peers.processes.items()}
        for name in peers.bundles:
            peers.set_faults(name, Faults(stall_ms=5.0, stall_part=1.0))
        futures = [source.submit(pictures[i % 100], budget_ms=2500) for i in range(4000)]
        ended = outcomes(futures)
        grown = {name: resident(process.pid) - before[name] for name, process in peers.processes.items()}
        for name in peers.bundles:
            peers.set_faults(name, Faults())
        assert outcomes([source.submit(image) for image in pictures]) == {"NoneType": 100}
    # Tokens and header of a request are 3 KB, so 4000 of them would be 12 MB.
    assert max(grown.values()) < 3 * MIB, grown
    assert set(ended) <= {"NoneType", "Overloaded", "BudgetExceeded"}
    assert ended["Overloaded"] > ended["NoneType"] > 20


def credits_seen(source, name):
    """Credits that a peer last announced to a source."""
    return source.snapshot.peers[name].credits


def test_work_of_a_killed_source_is_dropped_and_another_source_is_served(
    start_peers, tmp_path, tiny_bundle, images, wait_until, assert_replays
):
    everything, most = range(Bundle.open(tiny_bundle).num_blocks), 8
    peers = start_peers({"a": everything, "b": everything}, each={"credits": most})
    with Source.open(peers.path, tiny_bundle, max_skips=0) as source:
        assert source.wait_ready(30) == ()
        for name in peers.bundles:
            # The accepted requests of the other source would take the peers seven seconds.
            peers.set_faults(name, Faults(stall_ms=150.0, stall_part=1.0))
        with (tmp_path / "killed.log").open("wb") as log:
            killed = subprocess.Popen(
                [sys.executable, "-m", "ls_edge", "run", "--peers", str(peers.path), "--bundle", str(tiny_bundle),
                 "--data", "digits", "--limit", "500", "--concurrency", "60", "--budget-ms", "60000"],
                stdout=log, stderr=log,
            )  # fmt: skip
        try:
            wait_until(lambda: all(credits_seen(source, name) == 0 for name in "ab"), 60.0, "full peers")
        finally:
            killed.send_signal(signal.SIGKILL)
            killed.wait()
        wait_until(lambda: all(credits_seen(source, name) == most - most // 2 for name in "ab"), 15.0, "no load")
        for name in peers.bundles:
            peers.set_faults(name, Faults())
        answers = [future.result(10) for future in [source.submit(image) for image in images(20)]]
    for name in peers.bundles:
        assert "no way home" in peers.log_path(name).read_text()
    assert_replays(tiny_bundle, images(20), answers)
