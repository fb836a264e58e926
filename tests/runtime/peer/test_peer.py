"""Phases of a peer: it leaves when it is stopped, and goes back to what worked."""

import logging
import subprocess
import threading
from concurrent.futures import Future
from typing import get_args

import pytest
import yaml

from ls_edge.core.errors import DeviceLost, EngineError, LsEdgeError
from ls_edge.runtime.peer.peer import TRANSITIONS, Outcome, Peer, Phase
from ls_edge.runtime.source.source import Source
from tests.faults.engines import Faults, inject, write
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


@needs_own_network
@in_own_network
def test_a_peer_that_waits_for_an_address_leaves_when_it_is_stopped(
    write_peers, tiny_bundle, serve, wait_until, caplog
):
    path = write_peers({"a": range(6)}, address="tcp://10.97.0.1:5555", top={"insecure": True})
    peer = serve(Peer.open(path, "a", tiny_bundle))
    wait_until(lambda: "waiting for an address" in caplog.text)
    peer.stop()  # the fixture asserts that it leaves


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


def test_a_lost_gpu_ends_a_peer_although_its_setup_was_just_reloaded(write_peers, tiny_bundle, images):
    """Only a new process can use the GPU again, so the peer does not go back to another setup or bundle."""
    path = write_peers({"a": range(6)})
    peer = Peer.open(path, "a", tiny_bundle)
    ended = served(peer, DeviceLost("error 719"))
    with Source.open(path, tiny_bundle, budget_ms=1000) as source:
        assert source.wait_ready(30) == ()
        peer._fallback = peer._setup
        source.submit(images(1)[0]).exception(30)
        with pytest.raises(DeviceLost):
            ended.result(30)


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


@pytest.mark.parametrize("providers", [["NoneProvider"], ["NoneProvider", "NoProvider"]], ids=["one", "two"])
def test_reloads_are_undone_after_a_long_drain(
    providers, write_peers, tiny_bundle, serve, images, wait_until, caplog, tmp_path
):
    """The peer that drains is warm, but not with the reloaded entry."""
    path, faults = write_peers({"a": range(6)}), tmp_path / "a.faults"
    reload = Reload(path)
    peer = serve(inject(Peer.open(path, "a", tiny_bundle), faults), reload)
    with Source.open(path, tiny_bundle) as source, caplog.at_level(logging.INFO):
        assert source.wait_ready() == ()
        write(faults, Faults(hang=True))
        held = source.submit(images(1)[0], budget_ms=60_000)
        wait_until(lambda: peer.snapshot.held, what="a held request")
        before = peer.node
        for provider in providers:
            reload.request(provider)
            wait_until(lambda one=provider: peer.entry.provider == one and peer.machine.rules.draining, what="a drain")
            looks = reload.looks
            wait_until(lambda looks=looks: reload.looks > looks + 1, what="two looks during the drain")
        write(faults, Faults())
        assert not held.result(30).degraded
        wait_until(lambda: "not reloaded" in caplog.text)
        wait_until(lambda: peer.node is not before and peer.entry.provider is None and peer.snapshot.warm)
    left = [record.held for record in caplog.records if record.message == "leaving"]
    assert left[0] == 0  # it has handed its requests on
