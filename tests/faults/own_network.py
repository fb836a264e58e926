"""Tests in a network and with a name server of their own, where any address, port 53 and any host name may be used.

Needs Linux, root, ``ip`` and ``mount``; :func:`reason_to_skip` names what is missing. Nothing outside is changed.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import select
import shutil
import socket
import socketserver
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_TYPES = {1: socket.AF_INET, 28: socket.AF_INET6}
"""Query types A and AAAA."""


def reason_to_skip() -> str:
    """Return the reason why a thread cannot have a network of its own here, or an empty string."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a network of its own needs Linux and root"
    if not all(map(shutil.which, ("ip", "mount"))):
        return "a network of its own needs the programs ip and mount"
    try:
        in_own_network(lambda: None)()
    except (OSError, subprocess.SubprocessError) as error:
        return f"this kernel gives a thread no network of its own: {error}"
    return ""


def in_own_network(test: Callable[..., Any]) -> Callable[..., Any]:
    """Run a test in a thread whose network has a loopback, and 10.99.0.1, which never answers.

    Host names are asked of 127.0.0.1 alone. Threads and processes that the test starts are in the same network.
    """

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1, initializer=_unshare) as thread:
            return thread.submit(_prepare_and_run, Path(folder), lambda: test(*arguments, **named)).result()

    return run


def _unshare() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _prepare_and_run(folder: Path, test: Callable[[], Any]) -> Any:
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:30 attempts:1\n")
    (folder / "hosts").write_text("127.0.0.1 localhost\n")
    for command in (
        "mount --make-rprivate /",
        f"mount --bind {folder}/resolv.conf /etc/resolv.conf",
        f"mount --bind {folder}/hosts /etc/hosts",
        "ip link set lo up",
        "ip link add nowhere0 type veth peer name nowhere1",
        "ip link set nowhere1 up",
        "ip link set nowhere0 up",
        "ip addr add 10.99.0.2/24 dev nowhere0",
        "ip neigh add 10.99.0.1 lladdr 02:00:00:00:00:01 dev nowhere0",
    ):
        subprocess.run(command.split(), check=True, capture_output=True, timeout=20)
    return test()


needs_own_network = pytest.mark.skipif(bool(reason_to_skip()), reason=reason_to_skip())


class _Server(socketserver.ThreadingUDPServer):
    """Server whose answers have a socket of their own, so that those still due when it closes go out."""

    def get_request(self) -> tuple[tuple[bytes, socket.socket], tuple[str, int]]:
        (query, ours), client = super().get_request()
        return (query, ours.dup()), client


class NameServer:
    """Name server on port 53 of the loopback; ``addresses`` may be changed at any time."""

    def __init__(self, **addresses: list[str]) -> None:
        """Serve ``addresses`` of the names ``KEY.lan``."""
        self.addresses = addresses
        self.delays: dict[str, float] = {}
        """Seconds until the answer, by name, unless the server is closed before."""
        self._closed = threading.Event()
        self._server = _Server(("127.0.0.1", 53), self._answer)  # type: ignore[arg-type]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def __enter__(self) -> NameServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _answer(self, request: tuple[bytes, socket.socket], client: tuple[str, int], _: object) -> None:
        query, ours = request
        end = query.index(b"\0", 12) + 5
        name = query[13 : 13 + query[12]].decode()
        self._closed.wait(self.delays.get(name, 0.0))
        (kind,) = struct.unpack(">H", query[end - 4 : end - 2])
        family = _TYPES.get(kind)
        found = [one for one in self.addresses.get(name, []) if (":" in one) == (family == socket.AF_INET6)]
        records = [
            struct.pack(">HHHIH", 0xC00C, kind, 1, 0, len(packed)) + packed
            for packed in (socket.inet_pton(family, one) for one in found if family is not None)
        ]
        code = 0 if name in self.addresses else 3
        header = query[:2] + struct.pack(">HHHHH", 0x8180 | code, 1, len(records), 0, 0)
        with ours:
            ours.sendto(header + query[12:end] + b"".join(records), client)


class FarSide:
    """Device behind which the network's own listeners are reached at 10.98.0.2, as from far away.

    Each packet returns with source and destination exchanged.
    """

    ADDRESS = "10.98.0.2"

    def __init__(self, *, delay_s: float = 0.0, largest: int = 1500, largest_back: int | None = None) -> None:
        """Return packets after ``delay_s``; those above ``largest`` bytes vanish, as in a path with a smaller MTU.

        ``largest_back`` is the limit of packets from listeners, by default the same.
        """
        self.largest = largest
        self._largest_back = largest if largest_back is None else largest_back
        self._delay_s = delay_s
        self._device = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(self._device, _TUNSETIFF, struct.pack("16sH22x", b"far0", _IFF_TUN | _IFF_NO_PI))
        for command in ("ip addr add 10.98.0.1/24 dev far0", "ip link set far0 up"):
            subprocess.run(command.split(), check=True, capture_output=True, timeout=20)
        self._closed = threading.Event()
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> FarSide:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        os.close(self._device)

    def _run(self) -> None:
        while not self._closed.is_set():
            if select.select([self._device], [], [], 0.005)[0]:
                packet = os.read(self._device, 65536)
                if packet[0] >> 4 == 4 and len(packet) <= self._most(packet):
                    turned = packet[:12] + packet[16:20] + packet[12:16] + packet[20:]
                    self._waiting.append((time.monotonic() + self._delay_s, turned))
            while self._waiting and self._waiting[0][0] <= time.monotonic():
                os.write(self._device, self._waiting.popleft()[1])

    def _most(self, packet: bytes) -> int:
        ours, theirs = struct.unpack_from(">HH", packet, 4 * (packet[0] & 15))
        return self._largest_back if ours < theirs else self.largest  # ports of listeners are below the others
