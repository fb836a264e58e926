"""Peers in network namespaces joined by a bridge; packets between them can be dropped.

Needs root, ``ip`` and a kernel with namespaces, veth and bridge; :func:`reason_to_skip` names what is missing.
All names begin with ``lsedge-``, the process id and a number; addresses are 10.201.0.0/24 and exist only inside.
Nothing outside the namespaces is touched, and nothing remains after a failure.

``netem`` is not used, since many kernels lack it: for delay and loss see ``tests.faults.proxy``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ls_edge.core.errors import LinkError
from ls_edge.runtime.fleet.local_cluster import LocalCluster

if TYPE_CHECKING:
    from typing_extensions import Self

_CLONE_NEWNET = 0x40000000
_BRIDGE = "hub"
_COUNT = itertools.count()


def reason_to_skip() -> str:
    """Return the reason why namespaces cannot be created here, or an empty string."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (package iproute2)"
    try:
        with Net("x"):
            return ""
    except NetError as error:
        return f"this kernel does not let this process create network namespaces, veth pairs and bridges: {error}"


class NetError(LinkError):
    """A command of iproute2 failed."""


class Net:
    """Namespaces ``names``, each with one cable ``eth0`` into a common bridge."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._prefix = f"lsedge-{os.getpid()}-{next(_COUNT)}-"
        self._made: list[str] = []

    def __enter__(self) -> Net:
        try:
            self._add(_BRIDGE)
            hub = self.ns(_BRIDGE)
            _ip("-n", hub, "link", "add", "br0", "type", "bridge")
            _ip("-n", hub, "link", "set", "br0", "up")
            for name in self.names:
                self._add(name)
                there = ("peer", f"to-{name}", "netns", hub)
                _ip("link", "add", "eth0", "netns", self.ns(name), "type", "veth", *there)
                _ip("-n", hub, "link", "set", f"to-{name}", "master", "br0", "up")
                _ip("-n", self.ns(name), "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    _ip("-n", self.ns(name), "link", "set", device, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ns(self, name: str) -> str:
        """Return the full name of a namespace."""
        return self._prefix + name

    def close(self) -> None:
        """Kill all processes in the namespaces and remove them."""
        while self._made:
            _remove(self._made.pop())

    def address(self, name: str) -> str:
        """Return the IPv4 address of a namespace."""
        return f"10.201.0.{self.names.index(name) + 1}"

    def cut(self, one: str, other: str, *, on: bool = True) -> None:
        """Drop all packets from ``other`` to ``one`` silently; ``on=False`` undoes it."""
        _ip("-n", self.ns(other), "route", "add" if on else "del", "blackhole", self.address(one))

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Create sockets and threads of this thread in the namespace of ``name``."""
        with open("/proc/thread-self/ns/net") as home, open(f"/run/netns/{self.ns(name)}") as there:
            _setns(there.fileno())
            try:
                yield
            finally:
                _setns(home.fileno())

    def _add(self, name: str) -> None:
        self._made.append(self.ns(name))
        _ip("netns", "add", self.ns(name))


class NamespaceCluster(LocalCluster):
    """Peers in the namespaces of a :class:`Net`, one in each, with CURVE keys; warm once entered."""

    def __init__(
        self,
        net: Net,
        folder: str | Path,
        bundle: str | Path,
        placement: Mapping[str, Sequence[int] | str],
    ) -> None:
        """Write ``peers.yaml`` and the keys into ``folder``."""
        self.net = net
        self.bundle = bundle
        super().__init__(folder, bundle, placement, sources=["laptop"], keys=True)
        self.source_key = self.secret_key("laptop")

    def __enter__(self) -> Self:
        try:
            super().__enter__()
            self.wait_warm()
        except BaseException:
            self.close()
            raise
        return self

    def entries(self, placement: Mapping[str, Sequence[int] | str]) -> list[dict[str, Any]]:
        """Return the peers of the file with the addresses of their namespaces."""
        return [
            {**entry, "address": f"tcp://{self.net.address(entry['name'])}:5555"}
            for entry in super().entries(placement)
        ]

    def peer_command(self, name: str) -> list[str]:
        """Return the command line of a peer in its namespace."""
        return ["ip", "netns", "exec", self.net.ns(name), *super().peer_command(name)]


def _remove(full: str) -> None:
    with contextlib.suppress(NetError):
        for pid in _call("ip", "netns", "pids", full).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", full)


def _setns(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode != 0:
        raise NetError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
