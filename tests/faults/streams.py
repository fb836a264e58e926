"""Hostile streams of bytes: ZMTP of every version, truncated and closed anywhere.

One generator for the tests and for the fault ``garbage`` of the chaos tests.
"""

from __future__ import annotations

import itertools
import random
import socket
import struct
import threading
from collections.abc import Callable

_HALF_OPEN = 24
"""Number of connections left open, silent in the middle of a stream."""
_MECHANISMS = ("NULL", "PLAIN", "CURVE", "GSSAPI", "ls-edge", "")


class Streams:
    """Seeded streams of bytes: a greeting of some version, what follows it there, and where it goes wrong."""

    def __init__(self, seed: int, hello: bytes) -> None:
        """``hello`` is a valid HELLO that may be part of a stream."""
        self.rng = random.Random(seed)
        self.hello = hello
        self.sort = itertools.cycle(range(10))

    def next(self) -> list[bytes | None]:
        """Return a stream in pieces to write one after the other; None means to read from the other side first."""
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

    def _after_handshake(self) -> list[bytes | None]:
        """Return unexpected frames after a valid handshake, sometimes many."""
        rng = self.rng
        greeting = (
            b"\xff" + bytes(7) + b"\x01\x7f" + bytes([3, rng.randrange(2)]) + b"NULL".ljust(20, b"\0") + bytes(32)
        )
        kind = rng.choice(("DEALER", "ROUTER"))
        many = self._frames() * rng.choice((1, 1, 1, 200, 3000))
        cut = rng.randrange(len(many) + 1)
        return [greeting + self._command(b"\x05READY" + self._property("Socket-Type", kind.encode())), None, many[:cut]]

    def _versioned(self, sort: int) -> bytes:
        rng = self.rng
        if sort == 2:  # ZMTP 1.0 without a signature: length, flags, an identity
            return self._old_frame(rng.randbytes(rng.randrange(5))) + self._old_frames()
        signature = b"\xff" + bytes(7) + b"\x01\x7f"
        if sort == 3:  # ZMTP 1.0 and 2.0 behind the signature of 2.0: revision, socket type, an identity
            return signature + b"\x00" + bytes([rng.randrange(12)]) + self._old_frame(b"") + self._old_frames()
        if sort == 4:
            return signature + b"\x01" + bytes([rng.choice((5, 6, rng.randrange(256)))]) + b"\0\0" + self._frames()
        minor = rng.choice((0, 1, rng.randrange(256))) if sort == 7 else sort - 5
        mechanism = rng.choice(("NULL", "NULL", "CURVE", *_MECHANISMS))
        greeting = signature + bytes([3, minor]) + mechanism.encode().ljust(20, b"\0") + bytes([rng.randrange(2)])
        return greeting + bytes(31) + self._handshake(mechanism) + self._frames()

    def _handshake(self, mechanism: str) -> bytes:
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

    def _frames(self) -> bytes:
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

    def _old_frames(self) -> bytes:
        bodies = [self.rng.choice((self.hello[:250], b"", b"x" * 30)) for _ in range(self.rng.randrange(5))]
        return b"".join(map(self._old_frame, bodies))

    def _old_frame(self, body: bytes) -> bytes:
        return bytes([len(body) + 1, self.rng.choice((0, 0, 0, 1, 0xFF))]) + body

    @staticmethod
    def _command(body: bytes) -> bytes:
        return (b"\x04" + bytes([len(body)]) if len(body) < 256 else b"\x06" + struct.pack(">Q", len(body))) + body

    @staticmethod
    def _property(name: str, value: bytes) -> bytes:
        return bytes([len(name)]) + name.encode() + struct.pack(">I", len(value)) + value


class Attack(threading.Thread):
    """Sends ``count`` streams, each over a connection that ``connect`` opens; then closes all."""

    def __init__(
        self, connect: Callable[[], socket.socket | None], count: int, seed: int, hello: bytes, every_s: float = 0.0
    ) -> None:
        """``every_s``: minimum time between two streams. Setting :attr:`halt` ends the attack."""
        super().__init__(name=f"streams {seed}")
        self.connect = connect
        self.count = count
        self.streams = Streams(seed, hello)
        self.rng = random.Random(seed)
        self.every_s = every_s
        self.open: list[socket.socket] = []
        self.sent = 0
        self.halt = threading.Event()

    def run(self) -> None:
        """Send the streams."""
        try:
            while self.sent < self.count and not self.halt.is_set():
                connection = self.connect()
                if connection is not None:
                    self.attack(connection)
                    self.sent += 1
                    self.halt.wait(self.every_s)
        finally:
            for connection in self.open:
                connection.close()

    @staticmethod
    def listen(connection: socket.socket) -> None:
        """Wait for the other side's handshake."""
        heard = b""
        while b"READY" not in heard and (more := connection.recv(1000)):
            heard += more

    def attack(self, connection: socket.socket) -> None:
        """Send one stream."""
        rng = self.rng
        try:
            if rng.randrange(2):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if rng.randrange(4) == 0:  # like a client that waits for the other side
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
            pass  # the peer may hang up
        if rng.randrange(8) == 0:
            self.open.append(connection)
            if len(self.open) > _HALF_OPEN:
                self.open.pop(0).close()
        else:
            connection.close()
