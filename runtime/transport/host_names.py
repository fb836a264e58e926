"""Resolution of host names on separate threads, since a name service may take seconds."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections import deque
from collections.abc import Mapping

from ls_edge.core.peers_file import host_of, ip_of
from ls_edge.runtime.transport.poller import Waker

LOOK_UP_EVERY = 0.5
"""Seconds between two look-ups of a name without a link: guarantee R8 includes a peer whose address has changed."""


def numeric(address: str) -> bool:
    """Return whether the host of ``tcp://host:port`` is numeric, and the same on all machines."""
    ip = ip_of(host_of(address).strip("[]"))
    return ip is not None and not (ip.version == 6 and ip.is_link_local)


class HostNameResolver:
    """Repeated look-ups of the wanted host names, each on its own thread, so that a slow one does not delay others."""

    def __init__(self, addresses: Mapping[str, str]) -> None:
        """Resolve ``addresses``, which maps names of peers to ``tcp://host:port``."""
        self._addresses = dict(addresses)
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._looking: set[str] = set()
        """Names with a thread."""
        self._found: deque[tuple[str, tuple[str, ...], str]] = deque()
        self._waker = Waker()
        self._waker.asleep = True
        self.descriptor = self._waker.descriptor
        """Descriptor that is readable when :meth:`found` has a result."""
        self._closed = threading.Event()

    def want(self, name: str, *, wanted: bool) -> None:
        """Start or stop resolving a name; ignore unknown names."""
        with self._lock:
            if not wanted:
                self._wanted.discard(name)
            elif name in self._addresses:
                self._wanted.add(name)
                if name not in self._looking:
                    self._looking.add(name)
                    threading.Thread(target=self._run, args=(name,), name=f"look up {name}", daemon=True).start()

    def found(self) -> list[tuple[str, tuple[str, ...], str]]:
        """Return the results since the last call: name, numeric addresses, and the reason if there are none."""
        self._waker.drain()
        self._waker.asleep = True
        return [self._found.popleft() for _ in range(len(self._found))]

    def close(self) -> None:
        """Stop after the current look-ups."""
        self._closed.set()
        self._waker.close()

    def _run(self, name: str) -> None:
        while self._goes_on(name):
            self._found.append((name, *_look_up(self._addresses[name])))
            self._waker.wake()
            self._closed.wait(LOOK_UP_EVERY)

    def _goes_on(self, name: str) -> bool:
        with self._lock:
            if name in self._wanted and not self._closed.is_set():
                return True
            self._looking.discard(name)
            return False


def _look_up(address: str) -> tuple[tuple[str, ...], str]:
    host, port = host_of(address).strip("[]"), address.rpartition(":")[2]
    if _is_link_local(host):
        interface, known = host.partition("%")[2], socket.if_nameindex()
        if any(interface in (str(number), name) for number, name in known):
            return (address,), ""
        names = ", ".join(name for _, name in known)
        fault = f"and this machine has no interface {interface}, only {names}" if interface else "without an interface"
        return (), f"{address} is a link-local address {fault}; use an address that is the same on all machines"
    try:
        found = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return (
            (),
            f"cannot resolve host name {host!r} ({error}); correct its address in peers.yaml",
        )
    # IPv4 first: a peer that binds 0.0.0.0 cannot be reached over IPv6.
    ordered = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
    hosts = dict.fromkeys(str(entry[4][0]) for entry in ordered if not _is_link_local(str(entry[4][0])))
    if not hosts:
        return (), f"host name {host!r} has only link-local addresses, which need an interface; use another address"
    return tuple(f"tcp://[{one}]:{port}" if ":" in one else f"tcp://{one}:{port}" for one in hosts), ""


def _is_link_local(host: str) -> bool:
    return ":" in host and ipaddress.ip_address(host.partition("%")[0]).is_link_local
