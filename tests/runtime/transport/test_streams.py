"""Real peers and sources, with keys and without, under bytes that no program of ours would send: every ZMTP version,
cut off and closed at every place, from who dials them and from who listens where they dial. None of them ends."""

import json
import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
import zmq

from ls_edge.core.bundle import Bundle
from ls_edge.runtime.fleet.local_cluster import free_ports
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.messages import Hello
from ls_edge.runtime.transport.keys import new_keys
from tests.faults.streams import Attack

STREAMS = int(os.environ.get("LS_EDGE_HOSTILE_STREAMS", "150"))
"""Streams that each of the processes gets."""
ROGUES = 6
"""Addresses of the file where others listen: each is dialed a few times a second."""
ALL = list(range(6))

SOURCE = """
import json, sys, threading
import numpy as np
from ls_edge.runtime.source.source import Source

path, bundle, key = sys.argv[1:]
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
images = np.random.default_rng(0).standard_normal((4, 3, 16, 16)).astype(np.float32)
with Source.open(path, bundle, secret_key=key or None, name="laptop", budget_ms=30000) as source:
    assert source.wait_ready(30) == ()
    print("ready", flush=True)
    answered = degraded = 0
    while not over.is_set():
        answers = [future.result(40) for future in [source.submit(image) for image in images]]
        answered += len(answers)
        degraded += sum(answer.degraded for answer in answers)
    print(json.dumps({"answered": answered, "degraded": degraded}), flush=True)
"""


class Listener:
    """A port that everybody of the file dials, and whoever listens there."""

    def __init__(self, port):
        self.server = socket.create_server(("127.0.0.1", port), backlog=64)
        self.server.settimeout(0.05)

    def accept(self):
        try:
            return self.server.accept()[0]
        except OSError:
            return None


class Running:
    """Processes of a ``peers.yaml``: the peers ``a`` and ``b`` and the source ``laptop``; others listen as rogues."""

    def __init__(self, folder, bundle, keys):
        self.folder, self.bundle = folder, bundle
        self.rogues = [f"rogue-{number}" for number in range(ROGUES)]
        names = ("a", "b", *self.rogues)
        self.ports = dict(zip(names, free_ports(len(names)), strict=True))
        publics = {name: new_keys(name, folder)[0].public.decode() for name in (*self.ports, "laptop")} if keys else {}
        self.keys = bool(keys)
        peers = [
            {
                "name": name,
                "address": f"tcp://127.0.0.1:{port}",
                "blocks": ALL,
                "threads": 1,
                **self._key(publics, name),
            }
            for name, port in self.ports.items()
        ]
        self.path = folder / "peers.yaml"
        content = {"sources": [{"name": "laptop", **self._key(publics, "laptop")}], "peers": peers}
        self.path.write_text(yaml.safe_dump(content, sort_keys=False))
        self.processes = {}

    @staticmethod
    def _key(publics, name):
        return {"public_key": publics[name]} if publics else {}

    def start_peer(self, name):
        key = ["--secret-key", str(self.folder / f"{name}.key_secret")] if self.keys else []
        command = [
            "-m",
            "ls_edge",
            "peer",
            "--peers",
            str(self.path),
            "--name",
            name,
            "--bundle",
            str(self.bundle),
            *key,
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start_source(self):
        key = str(self.folder / "laptop.key_secret") if self.keys else ""
        with (self.folder / "laptop.log").open("ab") as log:
            self.processes["laptop"] = subprocess.Popen(
                [sys.executable, "-c", SOURCE, str(self.path), str(self.bundle), key],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
            )  # fmt: skip

    def says(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def assert_alive(self):
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended with {process.returncode}: {self.says(name)[-2000:]}"

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_mib(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.fixture
def running(tiny_bundle, tmp_path, wait_until, request):
    """Two warm peers, and a source that has them answer images one after the other."""
    one = Running(tmp_path, tiny_bundle, request.param)
    try:
        one.start_peer("a")
        one.start_peer("b")
        for name in ("a", "b"):
            wait_until(lambda n=name: " warm " in one.says(n), 60.0, f"{name} to be warm")
        one.start_source()
        assert one.processes["laptop"].stdout.readline() == b"ready\n", one.says("laptop")
        yield one
    finally:
        one.close()


CURVE = pytest.param(True, id="keys", marks=pytest.mark.skipif(not zmq.has("curve"), reason="libzmq without CURVE"))


@pytest.mark.release
@pytest.mark.parametrize("running", [pytest.param(False, id="plain"), CURVE], indirect=True)
def test_nobody_ends_and_all_is_answered_under_broken_streams(running, tiny_bundle, wait_until):
    manifest = Bundle.open(tiny_bundle).manifest
    hello = framing.encode(Hello("visitor", "source", 7, 0, manifest.model_id, manifest.bundle_id))
    pids = {name: process.pid for name, process in running.processes.items()}
    listeners = [Listener(running.ports[name]) for name in running.rogues]

    def dial(name):
        return lambda: socket.create_connection(("127.0.0.1", running.ports[name]), timeout=5)

    attacks = [Attack(dial(name), STREAMS, seed, hello) for seed, name in enumerate(("a", "b"))]
    # Three processes dial every rogue, and each of them is to get its share.
    attacks += [Attack(one.accept, 3 * STREAMS // ROGUES, 2 + seed, hello) for seed, one in enumerate(listeners)]
    before = {name: descriptors(pid) for name, pid in pids.items()}
    try:
        for attack in attacks:
            attack.start()
        early = {}
        while any(attack.is_alive() for attack in attacks):
            running.assert_alive()
            if not early and all(attack.sent > attack.count // 3 for attack in attacks):
                early = {name: resident_mib(pid) for name, pid in pids.items()}
            attacks[0].join(0.05)
    finally:
        for attack in attacks:
            attack.halt.set()
            attack.join()
        for listener in listeners:
            listener.server.close()
    running.assert_alive()
    assert all(attack.sent == attack.count for attack in attacks)
    for name, pid in pids.items():
        wait_until(lambda n=name, p=pid: descriptors(p) <= before[n], 15.0, f"the connections of {name} to be closed")
        assert resident_mib(pid) < early[name] + 16
    done, _ = running.processes["laptop"].communicate(timeout=60)
    said = json.loads(done)
    assert said["answered"] > 0
    assert said["degraded"] == 0
    assert running.processes["laptop"].returncode == 0, running.says("laptop")
    for name in ("a", "b"):
        running.processes[name].terminate()
        assert running.processes[name].wait(10) == 0, running.says(name)
        assert len(running.says(name)) < 200_000
