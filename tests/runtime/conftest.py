"""A peer whose store takes pushes of ``laptop``, but not of ``camera``."""

import pytest
import zmq

from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.transport.keys import KeyPair


@pytest.fixture
def keys():
    return {name: KeyPair(*zmq.curve_keypair()) for name in ("a", "laptop", "camera", "stranger")}


@pytest.fixture
def file(write_peers, keys):
    path = write_peers({"a": (1, 4)}, keys=keys, sources=["laptop", "camera"])
    path.write_text(path.read_text().replace("- name: laptop\n", "- name: laptop\n  may_push: true\n"))
    return load_peers(path)
