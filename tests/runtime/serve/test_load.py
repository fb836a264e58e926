"""``ls-edge serve`` under more load than it takes, from wrk, while peers are killed and other clients are slow."""

import contextlib
import re
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path

import pytest

from ls_edge.runtime.fleet.local_cluster import LocalCluster
from tests.runtime.serve.serving import PLACEMENT, Server, picture, samples

pytestmark = pytest.mark.release
SECONDS = 60
CONCURRENCY = 4
SCRIPT = """
local file = assert(io.open(os.getenv("IMAGE"), "rb"))
wrk.method, wrk.path, wrk.body = "POST", "/predict", file:read("*all")
wrk.headers["Content-Type"] = "image/png"
function delay() return 5 end
"""
"""Each connection waits 5 ms between its requests, so that refusals do not take the cores of the peers."""


def resident_mb(process):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())[1]) / 1024


def statuses(server):
    return {
        key[2]: value
        for key, value in samples(server).items()
        if key[0] == "ls_edge_http_responses_total" and key[1] == "/predict"
    }


@contextlib.contextmanager
def slow_clients(address):
    """Clients that send a byte a second, that close one direction, and that never read."""
    over = threading.Event()
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(address, timeout=10)) for _ in range(30)]
        for connection in slow[10:20]:
            connection.sendall(b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nx")
            connection.shutdown(socket.SHUT_WR)
        for connection in slow[20:]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)

        def drip():
            for byte in b"POST /predict HTTP/1.1\r\nHost: localhost\r\nX: " + SECONDS * b"x":
                for connection in slow[:10]:
                    with contextlib.suppress(OSError):
                        connection.sendall(bytes([byte]))
                if over.wait(1.0):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@pytest.mark.timeout(SECONDS + 120)
def test_twice_the_capacity_while_peers_are_killed(tmp_path, bundle, ls_edge, wait_until):
    wrk = shutil.which("wrk")
    if wrk is None:
        pytest.skip("wrk is not installed; Debian has it in the package wrk")
    script, image = tmp_path / "predict.lua", tmp_path / "image.png"
    script.write_text(SCRIPT)
    image.write_bytes(picture())
    with LocalCluster(tmp_path / "peers", bundle, PLACEMENT) as local:
        local.wait_warm()
        server = Server(ls_edge, local.path, bundle, "--concurrency", CONCURRENCY, "--queue", 2, "--budget-ms", 4000)
        wait_until(lambda: server.get("/health/ready")[0] == 200)
        url = "http://{}:{}".format(*server.address)
        words = [
            wrk,
            "--threads",
            "1",
            "--connections",
            str(2 * CONCURRENCY),
            "--duration",
            f"{SECONDS}s",
            "--timeout",
            "10s",
            "--script",
            script,
            url,
        ]
        with (
            slow_clients(server.address),
            subprocess.Popen(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={"IMAGE": str(image)}
            ) as load,
        ):
            began, memory = time.monotonic(), []
            while load.poll() is None:
                for name in PLACEMENT:
                    local.kill(name)
                    local.start(name)
                    local.wait_warm(name)
                    memory.append((time.monotonic() - began, resident_mb(server.process)))
            printed = load.stdout.read()
        assert load.returncode == 0, printed
        assert "Socket errors" not in printed, printed
        counts = statuses(server)
        assert counts.keys() <= {"200", "503", "504", "499"}, counts  # 499: what wrk left open at its end
        assert counts.get("499", 0) <= 2 * CONCURRENCY + 10
        assert counts["200"] > 1000, counts
        assert counts["503"] > 100, counts
        first = max(mb for at, mb in memory if at < SECONDS / 3)
        last = max(mb for at, mb in memory if at > 2 * SECONDS / 3)
        assert last <= 1.05 * first + 2, memory
        assert server.predict(picture())[0] == 200
        assert server.stop() == 0
