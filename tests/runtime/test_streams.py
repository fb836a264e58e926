"""Real peers and sources, with keys and without, under bytes that no program of ours would send: every ZMTP version,
cut off and closed at every place, from who dials them and from who listens where they dial. None of them ends."""

import itertools
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
import zmq

from ls_edge.bundle import Bundle
from ls_edge.runtime import wire
from ls_edge.runtime.keys import new_keys
from ls_edge.runtime.local import free_ports
from ls_edge.runtime.wire import Hello

STREAMS = int(os.environ.get("LS_EDGE_HOSTILE_STREAMS", "150"))
"""Streams that each of the processes gets."""
ROGUES = 6
"""Addresses of the file where others listen: each is dialled a few times a second."""
HALF_OPEN = 24
"""Connections that are left open at once, silent in the middle of a stream."""
ALL = list(range(6))
PARTS = ("NULL", "PLAIN", "CURVE", "GSSAPI", "ls-edge", "")

SOURCE = """
import json, sys, threading
import numpy as np
from ls_edge.runtime.source import Source

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
        source.events.clear()
    print(json.dumps({"answered": answered, "degraded": degraded}), flush=True)
"""


class Streams:
    """Seeded streams of bytes: a greeting of some version, what follows it there, and where it goes wrong."""

    def __init__(self, seed, hello):
        self.rng = random.Random(seed)
        self.hello = hello
        self.sort = itertools.cycle(range(10))

    def next(self):
        """A stream in pieces, as they are written one after the other; before None the other side is listened to."""
        rng, sort = self.rng, next(self.sort)
        if sort > 7:
            return self._after_handshake()
        if sort == 0:
            data = rng.randbytes(rng.randrange(1, 400))
        elif sort == 1:
            data = (
                b"\xff" + rng.randbytes(8) + bytes([rng.choice((0x7F, 0x01, 0xFF))]) + rng.randbytes(rng.randrange(90))
            )
        else:
            data = self._versioned(sort)
        kind = rng.randrange(6)
        if kind == 0:
            data = data[: rng.randrange(len(data)) + 1]
        elif kind == 1:
            changed = bytearray(data)
            for _ in range(rng.randrange(1, 5)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            data = bytes(changed)
        if rng.randrange(3):
            return [data]
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(1, 4)))
        return [data[i:j] for i, j in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    def _after_handshake(self):
        """What nobody expects of one whose handshake was in order; sometimes much of it."""
        rng = self.rng
        greeting = (
            b"\xff" + bytes(7) + b"\x01\x7f" + bytes([3, rng.randrange(2)]) + b"NULL".ljust(20, b"\0") + bytes(32)
        )
        kind = rng.choice(("DEALER", "ROUTER"))
        many = self._frames() * rng.choice((1, 1, 1, 200, 3000))
        cut = rng.randrange(len(many) + 1)
        return [greeting + self._command(b"\x05READY" + self._property("Socket-Type", kind.encode())), None, many[:cut]]

    def _versioned(self, sort):
        rng = self.rng
        if sort == 2:  # ZMTP 1.0 without a signature: length, flags, an identity
            return self._old_frame(rng.randbytes(rng.randrange(5))) + self._old_frames()
        signature = b"\xff" + bytes(7) + b"\x01\x7f"
        if sort == 3:  # ZMTP 1.0 and 2.0 behind the signature of 2.0: revision, socket type, an identity
            return signature + b"\x00" + bytes([rng.randrange(12)]) + self._old_frame(b"") + self._old_frames()
        if sort == 4:
            return signature + b"\x01" + bytes([rng.choice((5, 6, rng.randrange(256)))]) + b"\0\0" + self._frames()
        minor = rng.choice((0, 1, rng.randrange(256))) if sort == 7 else sort - 5
        mechanism = rng.choice(("NULL", "NULL", "CURVE", *PARTS))
        greeting = signature + bytes([3, minor]) + mechanism.encode().ljust(20, b"\0") + bytes([rng.randrange(2)])
        return greeting + bytes(31) + self._handshake(mechanism) + self._frames()

    def _handshake(self, mechanism):
        rng = self.rng
        kind = rng.choice(("DEALER", "DEALER", "ROUTER", "REQ", "PUB", "", "x" * 200))
        metadata = self._property("Socket-Type", kind.encode())
        if rng.randrange(3) == 0:
            metadata += self._property("Identity", rng.randbytes(rng.choice((0, 1, 5, 255))))
        if rng.randrange(6) == 0:
            metadata += b"\x05" + rng.randbytes(3)
        command = {
            "PLAIN": b"\x05HELLO" + b"\x03foo\x03bar",
            "CURVE": b"\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(32 + 8 + 80),
        }.get(mechanism, b"\x05READY" + metadata)
        if rng.randrange(5) == 0:
            command = rng.choice(
                (b"\x05READY" + metadata, b"\x05ERROR\x03400", b"\x08INITIATE" + metadata, b"", b"\xffREADY")
            )
        return self._command(command) * rng.choice((1, 1, 1, 0, 2))

    def _frames(self):
        rng = self.rng
        frames = b""
        for _ in range(rng.randrange(6)):
            body = rng.choice((self.hello, self.hello, b"", rng.randbytes(rng.randrange(300))))
            ping = b"\x04PING" + rng.randbytes(rng.choice((0, 1, 2, 2, 18, 40)))
            frames += rng.choice((
                bytes([0, len(body) % 256]) + body,
                b"\x02" + struct.pack(">Q", len(body)) + body,
                bytes([1, len(body) % 256]) + body,
                b"\x02" + struct.pack(">Q", rng.choice((1 << 20, 1 << 33, (1 << 64) - 1))),
                self._command(ping),
                self._command(b"\x04PONG" + rng.randbytes(rng.randrange(20))),
                self._command(b"\x09SUBSCRIBE" + body[:20]),
                self._command(rng.randbytes(rng.randrange(9))),
                bytes([rng.randrange(256), rng.randrange(256)]),
            ))  # fmt: skip
        return frames

    def _old_frames(self):
        bodies = [self.rng.choice((self.hello[:250], b"", b"x" * 30)) for _ in range(self.rng.randrange(5))]
        return b"".join(map(self._old_frame, bodies))

    def _old_frame(self, body):
        return bytes([len(body) + 1, self.rng.choice((0, 0, 0, 1, 0xFF))]) + body

    @staticmethod
    def _command(body):
        return (b"\x04" + bytes([len(body)]) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))) + body

    @staticmethod
    def _property(name, value):
        return bytes([len(name)]) + name.encode() + struct.pack(">I", len(value)) + value


class Attack(threading.Thread):
    """Sends ``count`` streams, each over a connection that ``connect`` opens; then closes all."""

    def __init__(self, connect, count, seed, hello):
        super().__init__(name=f"streams {seed}")
        self.connect = connect
        self.count = count
        self.streams = Streams(seed, hello)
        self.rng = random.Random(seed)
        self.open = []
        self.sent = 0
        self.halt = threading.Event()

    def run(self):
        try:
            while self.sent < self.count and not self.halt.is_set():
                connection = self.connect()
                if connection is not None:
                    self.attack(connection)
                    self.sent += 1
        finally:
            for connection in self.open:
                connection.close()

    @staticmethod
    def listen(connection):
        heard = b""
        while b"READY" not in heard and (more := connection.recv(1000)):
            heard += more

    def attack(self, connection):
        rng = self.rng
        try:
            if rng.randrange(2):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if rng.randrange(4) == 0:  # as one that speaks when it is spoken to
                connection.settimeout(0.05)
                connection.recv(1)
            connection.settimeout(1.0)
            for piece in self.streams.next():
                if piece is None:
                    self.listen(connection)
                else:
                    connection.sendall(piece)
                    self.halt.wait(rng.choice((0, 0, 0.001, 0.01)))
            if rng.randrange(4) == 0:
                connection.settimeout(0.02)
                connection.recv(65536)
            elif rng.randrange(6) == 0:
                connection.shutdown(rng.choice((socket.SHUT_WR, socket.SHUT_RDWR)))
        except OSError:
            pass  # it has hung up, which it may
        if rng.randrange(8) == 0:
            self.open.append(connection)
            if len(self.open) > HALF_OPEN:
                self.open.pop(0).close()
        else:
            connection.close()


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


@pytest.mark.parametrize("running", [pytest.param(False, id="plain"), CURVE], indirect=True)
def test_nobody_ends_and_all_is_answered_under_broken_streams(running, tiny_bundle, wait_until):
    manifest = Bundle.open(tiny_bundle).manifest
    hello = wire.encode(Hello("visitor", "source", 7, 0, manifest.model_id, manifest.bundle_id))
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
