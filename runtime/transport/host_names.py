"""Resolution of host names on a separate thread, since a name service may take seconds."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Mapping

from ls_edge.runtime.transport.poller import Waker

LOOK_UP_EVERY = 2.0
"""Seconds between two attempts to resolve a name without a link: the name may be added, or its address change."""


def numeric(address: str) -> bool:
    """Return whether the host of ``tcp://host:port`` is numeric."""
    try:
        ipaddress.ip_address(_host_and_port(address)[0])
    except ValueError:
        return False
    return True


class HostNameResolver:
    """Thread that resolves host names repeatedly while they are wanted."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Resolve ``addresses``, which maps names of peers to ``tcp://host:port``; all are wanted at first."""
        self._addresses = dict(addresses)
        self._wanted = set(addresses)
        self._found: deque[tuple[str, tuple[str, ...], str]] = deque()
        self._waker = Waker()
        self._waker.asleep = True
        self.descriptor = self._waker.descriptor
        """Descriptor that is readable when :meth:`found` has a result."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="host names", daemon=True)
        self._thread.start()

    def want(self, name: str, *, wanted: bool) -> None:
        """Continue or stop to resolve a name; unknown names are ignored."""
        if name in self._addresses:
            (self._wanted.add if wanted else self._wanted.discard)(name)

    def found(self) -> list[tuple[str, tuple[str, ...], str]]:
        """Return the results since the last call: name, numeric addresses, and the reason if there are none."""
        self._waker.drain()
        self._waker.asleep = True
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """Stop after the current attempt."""
        self._closed.set()
        self._waker.close()

    def _run(self) -> None:
        while not self._closed.is_set():
            for name in [name for name in self._addresses if name in self._wanted]:
                if self._closed.is_set():
                    return
                self._found.append((name, *_look_up(self._addresses[name])))
                self._waker.wake()
            self._closed.wait(LOOK_UP_EVERY)


def _look_up(address: str) -> tuple[tuple[str, ...], str]:
    host, port = _host_and_port(address)
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (
            (),
            f"cannot resolve host name {host!r} ({error}); correct its address in peers.yaml",
        )
    # IPv4 first: a peer that binds 0.0.0.0 cannot be reached over IPv6.
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    hosts = dict.fromkeys(str(entry[4][0]) for entry in ordered if "%" not in str(entry[4][0]))
    return tuple(f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in hosts), ""


def _host_and_port(address: str) -> tuple[str, str]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port
