"""A client judges a peer by its last messages."""

import pytest

from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.session import Session
from ls_edge.runtime.protocol.messages import State, Welcome


@pytest.mark.parametrize(
    ("changes", "state", "why"),
    [
        ({}, "alive", None),
        ({"warm": False}, "cold", "it is loading its engines"),
        ({"stuck": True}, "stuck", "its engine has not answered for longer than it should"),
        ({"draining": True}, "draining", "it is leaving and accepts no new requests"),
    ],
    ids=["alive", "cold", "stuck", "draining"],
)
def test_a_peer_is_judged_by_its_last_state(changes, state, why, write_peers):
    session = Session(load_peers(write_peers({"a": [0, 1]})).peers[0], up=True)
    assert session.judge()[0] == "silent"
    session.receive(Welcome("a", "peer", 1, 0, "model", "bundle", (0, 1)))
    session.receive(
        State(**{"warm": True, "draining": False, "stuck": False} | changes, credits=1, queue=0, calls=0, block_us=1)
    )
    assert session.judge() == (state, why)
