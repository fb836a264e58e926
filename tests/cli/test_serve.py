"""``ls-edge serve`` as a command: addresses, signals, and what has to be installed."""

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys

import pytest

from tests.faults.engines import Faults
from tests.runtime.serve.serving import Server, picture, together


def test_addresses_off_the_loopback_need_tls_and_tokens(swarm, bundle, ls_edge, command):
    given = ["serve", "--peers", swarm.path, "--bundle", bundle]
    for address in ("0.0.0.0:0", "[::]:0", "192.0.2.1:0", "some-name:0"):
        code, _, error = command(*given, "--http", address)
        assert code == 2
        assert error == (
            f"ls-edge: --http {address} is not on the loopback, so it needs --tls-cert, --tls-key and --token-file; "
            "or listen on 127.0.0.1 behind a reverse proxy, or allow it with --insecure-http\n"
        )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, _, error = command(*given, "--http", f"127.0.0.1:{taken.getsockname()[1]}")
        assert code == 1
        assert "cannot listen (Address already in use); free the port, or give another" in error

    def ignore():  # as a shell does for what a script starts in the background
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    process = ls_edge.start(*given, "--http", "0.0.0.0:0", "--insecure-http", prepare=ignore)
    assert any("serving  url=http://0.0.0.0:" in line for line in process.stderr)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def test_one_line_names_the_missing_extra(swarm, bundle):
    code = "import sys; sys.modules['aiohttp'] = None; from ls_edge.__main__ import main; main()"
    words = [sys.executable, "-c", code, "serve", "--peers", swarm.path, "--bundle", bundle]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    start = r"ls-edge: ls-edge serve needs aiohttp \(extra serve\); to install: pip install .*aiohttp.*\n"
    assert re.fullmatch(start, done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_answers_be_finished(slow, bundle, ls_edge, wait_until, number):
    server = Server(ls_edge, slow.path, bundle)

    def stop():
        wait_until(lambda: server.get("/status")[1]["in_flight"] == 1)
        server.process.send_signal(number)
        wait_until(lambda: "stopping" in server.process.stderr.readline())
        wait_until(refused, what="the port to be closed")

    def refused():
        try:
            server.get("/health/live")
        except ConnectionError:
            return True
        return False

    (status, answer), _ = together(lambda: server.predict(picture()), stop)
    assert (status, answer["degraded"]) == (200, False)
    assert server.process.wait(20) == 0
    assert server.process.stderr.read() == ""


def test_second_signal_ends_immediately(slow, bundle, ls_edge, wait_until):
    server = Server(ls_edge, slow.path, bundle)

    def stop():
        wait_until(lambda: server.get("/status")[1]["in_flight"] == 1)
        slow.set_faults("a", Faults(hang=True))
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "stopping" in server.process.stderr.readline())
        server.process.send_signal(signal.SIGTERM)
        return server.process.wait(5)

    def ask():
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.predict(picture())

    assert together(ask, stop)[1] == 128 + signal.SIGTERM
    assert server.process.stderr.read() == "ls-edge: terminated\n"
