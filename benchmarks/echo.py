"""Echo process for the raw round trips of ``hop``: ``python -m benchmarks.echo tcp|zmq|curve BYTES``.

Sends back what arrives, on one thread. Prints its port (and CURVE key) as a JSON line and exits when its standard input
ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

import zmq


def _tcp(size: int) -> dict[str, object]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = memoryview(bytearray(size))
        while receive(connection, buffer):
            connection.sendall(buffer)

    threading.Thread(target=serve, daemon=True).start()
    return {"port": server.getsockname()[1]}


def receive(connection: socket.socket, buffer: memoryview) -> bool:
    """Fill the buffer; return False if the other side has closed."""
    got = 0
    while got < len(buffer):
        count = connection.recv_into(buffer[got:])
        if not count:
            return False
        got += count
    return True


def _zmq(*, curve: bool) -> dict[str, object]:
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    endpoint: dict[str, object] = {}
    if curve:
        public, secret = zmq.curve_keypair()
        router.curve_server, router.curve_publickey, router.curve_secretkey = True, public, secret
        endpoint["key"] = public.decode()
    endpoint["port"] = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while True:
            router.send_multipart(router.recv_multipart(copy=False), copy=False)

    threading.Thread(target=serve, daemon=True).start()
    return endpoint


class Raw:
    """Our end of the raw round trips."""

    def __init__(self, kind: str, size: int, endpoint: dict[str, object]) -> None:
        """Connect to the ``endpoint`` that an echo process printed."""
        self._payload = memoryview(os.urandom(size))
        self.close: Callable[[], None]
        if kind == "tcp":
            self._connection = socket.create_connection(("127.0.0.1", int(str(endpoint["port"]))))
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._buffer = memoryview(bytearray(size))
            self.call, self.close = self._call_tcp, self._connection.close
            return
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        if "key" in endpoint:
            self._dealer.curve_serverkey = str(endpoint["key"]).encode()
            self._dealer.curve_publickey, self._dealer.curve_secretkey = zmq.curve_keypair()
        self._dealer.connect(f"tcp://127.0.0.1:{endpoint['port']}")
        self.call, self.close = self._call_zmq, lambda: self._context.destroy(linger=0)

    def _call_tcp(self) -> float:
        started = time.perf_counter()
        self._connection.sendall(self._payload)
        receive(self._connection, self._buffer)
        return time.perf_counter() - started

    def _call_zmq(self) -> float:
        started = time.perf_counter()
        self._dealer.send(self._payload, copy=False)
        self._dealer.recv(copy=False)
        return time.perf_counter() - started


def main() -> None:
    """Serve until standard input ends."""
    kind, size = sys.argv[1], int(sys.argv[2])
    print(json.dumps(_tcp(size) if kind == "tcp" else _zmq(curve=kind == "curve")), flush=True)
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    main()
