"""``ls-edge peer`` as a process on a terminal."""

import os
import pty
import signal
import subprocess
import sys
import termios

from ls_edge.core.peers_file import load_peers
from ls_edge.runtime.clients.session import Client


def test_a_peer_whose_terminal_is_stopped_serves_and_ends_in_order(write_peers, tiny_bundle):
    path = write_peers({"a": range(6)})
    command = [sys.executable, "-m", "ls_edge", "peer", "--peers", path, "--name", "a", "--bundle", tiny_bundle]
    shown, terminal = pty.openpty()
    termios.tcflow(terminal, termios.TCOOFF)  # Ctrl-S
    try:
        with (
            subprocess.Popen(command, stderr=terminal) as process,
            Client(load_peers(path), None, "x", "observer") as us,
        ):
            try:
                assert us.wait_until(lambda: us.sessions["a"].is_warm, 20)
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
            finally:
                process.kill()
    finally:
        os.close(shown)
        os.close(terminal)
