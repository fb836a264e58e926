"""Phases of a peer: it leaves when it is stopped, and goes back to what worked."""

import logging
import subprocess
import threading
from concurrent.futures import Future
from typing import get_args

import pytest
import yaml

from ls_edge.core.errors import EngineError, LsEdgeError
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.status import Observer
from ls_edge.runtime.peer.peer import TRANSITIONS, Outcome, Peer, Phase
from ls_edge.runtime.protocol.messages import FindingRow
from ls_edge.runtime.source.source import Source
from tests.faults.own_network import in_own_network, needs_own_network


def test_every_phase_can_end_and_every_outcome_is_used():
    reached = {"left"}
    while more := {phase for (phase, _), after in TRANSITIONS.items() if after in reached} - reached:
        reached |= more
    assert reached == {*get_args(Phase)}
    assert {outcome for _, outcome in TRANSITIONS} == {*get_args(Outcome)}


def test_a_peer_that_is_stopped_before_it_serves_leaves(write_peers, tiny_bundle):
    peer = Peer.open(write_peers({"a": range(6)}), "a", tiny_bundle)
    peer.stop()
    peer.serve()
    assert not peer.machine.held


def test_a_peer_is_checked_where_no_more_threads_can_be_started(
    write_peers, tiny_bundle, serve, wait_until, monkeypatch
):
    path, rows = write_peers({"a": range(6)}), (FindingRow("warn", "threads", "none left"),)
    peer = serve(Peer.open(path, "a", tiny_bundle, examine=lambda: rows))
    wait_until(lambda: peer.snapshot.warm)
    monkeypatch.setattr(threading.Thread, "start", None)
    with Observer(load_peers(path)) as observer:
        assert observer.inspect(20.0) == {"a": rows}


@needs_own_network
@in_own_network
def test_a_peer_waits_for_an_address_that_comes_later(write_peers, tiny_bundle, serve, wait_until, caplog):
    path = write_peers({"a": range(6)}, address="tcp://10.97.0.1:5555", top={"insecure": True})
    with caplog.at_level(logging.WARNING, "ls_edge"):
        peer = serve(Peer.open(path, "a", tiny_bundle))
        wait_until(lambda: "waiting for an address" in caplog.text)
    assert "must be an address of this machine" in caplog.records[-1].why
    subprocess.run(["ip", "addr", "add", "10.97.0.1/24", "dev", "lo"], check=True, timeout=20)
    wait_until(lambda: peer.snapshot.warm)


def test_engines_that_do_not_load_end_a_peer_with_one_bundle(write_peers, tiny_bundle):
    peer = Peer.open(write_peers({"a": range(6)}, provider="NoneProvider"), "a", tiny_bundle)
    with pytest.raises(LsEdgeError, match="NoneProvider"):
        peer.serve()


def served(peer, error):
    """Start a peer whose engines raise ``error`` as soon as it is warm; return the future of its end."""
    ended, open_really = Future(), peer.open_engines

    def serve():
        try:
            ended.set_result(peer.serve())
        except LsEdgeError as reason:
            ended.set_exception(reason)

    class Failing:
        def __init__(self, engine):
            self._engine = engine

        def __getattr__(self, name):
            return getattr(self._engine, name)

        def run(self, inputs):
            if peer.snapshot.warm:
                raise error
            return self._engine.run(inputs)

    peer.open_engines = lambda *words: {block: Failing(engine) for block, engine in open_really(*words).items()}
    threading.Thread(target=serve).start()
    return ended


def test_a_peer_whose_blocks_all_keep_failing_ends_with_the_reason(write_peers, tiny_bundle, images):
    """It would hold nothing for good; its supervisor starts it again, and it may have memory then."""
    path = write_peers({"a": range(6)})
    peer = Peer.open(path, "a", tiny_bundle)
    ended = served(peer, EngineError("out of memory"))
    try:
        with Source.open(path, tiny_bundle, budget_ms=1000) as source:
            assert source.wait_ready(30) == ()
            for _ in range(60):  # a request tries a few blocks
                if not ended.done():
                    source.submit(images(1)[0]).exception(30)
            with pytest.raises(EngineError, match=r"^all blocks of a keep failing, the last one: out of memory$"):
                ended.result(30)
    finally:
        peer.stop()


class Reload:
    """Requests to read ``peers.yaml`` again, with a provider that does not exist."""

    def __init__(self, path):
        self.path, self.wanted, self.looks = path, False, 0

    def __call__(self):
        self.looks += 1
        wanted, self.wanted = self.wanted, False
        return wanted

    def request(self, provider="NoneProvider"):
        document = yaml.safe_load(self.path.read_text())
        document["peers"][0]["provider"] = provider
        self.path.write_text(yaml.safe_dump(document))
        self.wanted = True


def test_a_reloaded_entry_whose_engines_do_not_load_is_undone(write_peers, tiny_bundle, serve, wait_until, caplog):
    path = write_peers({"a": range(6)})
    reload = Reload(path)
    peer = serve(Peer.open(path, "a", tiny_bundle), reload)
    wait_until(lambda: peer.snapshot.warm)
    with caplog.at_level(logging.WARNING):
        reload.request()
        wait_until(lambda: "not reloaded" in caplog.text)
    wait_until(lambda: peer.entry.provider is None and peer.snapshot.warm)
