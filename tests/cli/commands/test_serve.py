"""``ls-edge serve`` as a process that starts before its peers."""

import subprocess
import sys

from ls_edge.core.bundle import Bundle
from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.peer.peer import Peer


def test_a_server_without_a_bundle_waits_for_its_peers_and_says_so(write_peers, serve, tiny_bundle):
    path = write_peers({"a": "all"})
    command = [sys.executable, "-m", "ls_edge", "serve", "--peers", path, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert "waiting for a model  why='a: nobody answers at" in process.stderr.readline()
            serve(Peer(load_peers(path), "a", Bundle.open(tiny_bundle)))
            assert any("serving" in line for line in process.stderr)
        finally:
            process.terminate()
            process.stderr.read()
    assert process.returncode == 0
