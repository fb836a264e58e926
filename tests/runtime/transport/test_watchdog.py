import os
import signal
import socket

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.transport.node import Watchdog

SIGN = b"READY=1\nWATCHDOG=1"


@pytest.fixture
def systemd(tmp_path, monkeypatch):
    """A socket that takes signs of life of a unit with WatchdogSec=1."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as taker:
        taker.bind(str(tmp_path / "notify"))
        taker.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        yield taker


def test_signs_of_life_are_sent_within_the_limit_only(systemd, monkeypatch):
    watchdog = Watchdog()
    for _ in range(1000):
        watchdog.beat()
    assert systemd.recv(99) == SIGN
    systemd.settimeout(0)
    with pytest.raises(BlockingIOError):
        systemd.recv(99)
    monkeypatch.delenv("WATCHDOG_USEC")
    unlimited = Watchdog()
    unlimited.beat()
    unlimited.beat()
    assert systemd.recv(99) == SIGN
    with pytest.raises(BlockingIOError):
        systemd.recv(99)


def test_a_peer_that_hangs_sends_none(systemd, tiny_bundle, tmp_path):
    with LocalCluster(tmp_path / "peers", tiny_bundle, {"a": "all"}) as peers:
        peers.wait_warm()
        assert [systemd.recv(99) for _ in range(3)] == [SIGN] * 3
        process = peers.processes["a"]
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        systemd.settimeout(0)
        while True:
            try:
                systemd.recv(99)
            except BlockingIOError:
                break
        systemd.settimeout(2)
        with pytest.raises(TimeoutError):
            systemd.recv(99)
