"""Phases of a peer: it leaves when it is stopped, and goes back to what worked."""

import logging

import pytest
import yaml

from ls_edge.core.errors import LsEdgeError
from ls_edge.runtime.peer.peer import TRANSITIONS, Outcome, Peer, Phase


def test_every_phase_can_end_and_every_outcome_is_used():
    reached = {Phase.LEFT}
    while more := {phase for (phase, _), after in TRANSITIONS.items() if after in reached} - reached:
        reached |= more
    assert reached == {*Phase}
    assert {outcome for _, outcome in TRANSITIONS} == {*Outcome}


def test_a_peer_that_is_stopped_before_it_serves_leaves(write_peers, tiny_bundle):
    peer = Peer.open(write_peers({"a": range(6)}), "a", tiny_bundle)
    peer.stop()
    peer.serve()
    assert not peer.machine.held


def test_engines_that_do_not_load_end_a_peer_with_one_bundle(write_peers, tiny_bundle):
    peer = Peer.open(write_peers({"a": range(6)}, provider="NoneProvider"), "a", tiny_bundle)
    with pytest.raises(LsEdgeError, match="NoneProvider"):
        peer.serve()


def test_a_reloaded_entry_whose_engines_do_not_load_is_undone(write_peers, tiny_bundle, serve, wait_until, caplog):
    path = write_peers({"a": range(6)})
    document = yaml.safe_load(path.read_text())
    wants = []
    peer = serve(Peer.open(path, "a", tiny_bundle), lambda: bool(wants and wants.pop()))
    wait_until(lambda: peer.snapshot.warm)
    document["peers"][0]["provider"] = "NoneProvider"
    path.write_text(yaml.safe_dump(document))
    with caplog.at_level(logging.WARNING):
        wants.append(True)
        wait_until(lambda: "not reloaded" in caplog.text)
    wait_until(lambda: peer.entry.provider is None and peer.snapshot.warm)
