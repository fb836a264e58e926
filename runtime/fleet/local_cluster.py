"""Peers on this machine: processes of ``ls-edge peer`` that are started, killed and restarted.

Used by the demo and by tests, and for trying a placement without boards.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ls_edge.core.closing import Closing
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.validation import dump_yaml
from ls_edge.device.child import module_command
from ls_edge.runtime.transport.keys import new_keys

if TYPE_CHECKING:
    from typing_extensions import Self
START_S = 60.0
"""Seconds for peers to start: a slow board takes several to import the modules, two busy cores took 20."""
_PORTS = range(10_000, 32_768)
"""Ports for peers: Linux dials from higher ports, so a link to a dead peer's port cannot take that port itself."""


class LocalCluster(Closing):
    """Peers of a placement on free loopback ports; a context manager that leaves no process behind.

    The processes end when their standard input, a pipe from this process, is closed.
    """

    def __init__(
        self,
        folder: str | Path,
        bundle: str | Path,
        placement: Mapping[str, Sequence[int] | str],
        *,
        each: Mapping[str, Any] | None = None,
        arguments: Sequence[str] = (),
        sources: Sequence[str] = (),
        keys: bool = False,
        stores: bool = False,
    ) -> None:
        """Write ``peers.yaml`` and, with ``keys``, a key pair for each process into ``folder``.

        ``each`` has further keys for every peer in the file, ``arguments`` further arguments of ``ls-edge peer``, and
        ``sources`` the names of sources in the file. With ``stores``, each peer starts with an empty store instead of
        the bundle, and the sources may push. Blocks may be text, as in ``peers.yaml``.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.bundles = dict.fromkeys(placement, Path(bundle))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._arguments = list(arguments)
        self._log_from: dict[str, int] = {}
        self._free_ports: Callable[[], object] = lambda: None
        entries = self.entries(placement)
        names = [*(entry["name"] for entry in entries), *sources] if keys else []
        public = {name: {"public_key": new_keys(name, self.folder)[0].public.decode()} for name in names}
        self._keys, self._stores = keys, stores
        peers = [{"threads": 1, **entry, **(each or {}), **public.get(entry["name"], {})} for entry in entries]
        more = {"may_push": True} if stores else {}
        listed = [{"name": name, **public.get(name, {}), **more} for name in sources]
        self.path = self.folder / "peers.yaml"
        self.path.write_text(dump_yaml({"sources": listed, "peers": peers}), encoding="utf-8")
        self.file: PeersFile = load_peers(self.path)

    def entries(self, placement: Mapping[str, Sequence[int] | str]) -> list[dict[str, Any]]:
        """Return the peers of ``peers.yaml``, each with an address."""
        sockets = contextlib.ExitStack()
        ports = _hold_ports(len(placement), sockets)
        self._free_ports = weakref.finalize(self, sockets.close)
        return [
            {
                "name": name,
                "address": f"tcp://127.0.0.1:{port}",
                "blocks": held if isinstance(held, str) else list(held),
            }
            for (name, held), port in zip(placement.items(), ports, strict=True)
        ]

    def __enter__(self) -> Self:
        self.start(*self.bundles)
        return self

    def start(self, *names: str) -> None:
        """Start peers that are not running."""
        for name in names:
            if self.alive(name):
                raise UsageError(f"peer {name!r} is already running")
            self._close_input(name)
            command = [*self.peer_command(name), "--peers", str(self.path), "--name", name]
            command += ["--store", str(self.store(name))] if self._stores else ["--bundle", str(self.bundles[name])]
            command += self._arguments
            if self._keys:
                command += ["--secret-key", str(self.secret_key(name))]
            # The secret key of this process must not become that of a peer.
            environment = {key: value for key, value in os.environ.items() if key != "LS_EDGE_SECRET_KEY"}
            environment["PYTHONUTF8"] = "1"  # a process that starts itself again would lose the end of its input
            self._log_from[name] = self.log_path(name).stat().st_size if self.log_path(name).exists() else 0
            with self.log_path(name).open("ab") as log:
                self.processes[name] = subprocess.Popen(  # noqa: S603  our own interpreter and arguments
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
                )

    def peer_command(self, name: str) -> list[str]:  # noqa: ARG002
        """Return the command that starts a peer, without its arguments."""
        return [*module_command("ls_edge.runtime.fleet.local_peer"), "peer"]

    def secret_key(self, name: str) -> Path | None:
        """Return the file of the secret key of a peer or source; None without keys."""
        return self.folder / f"{name}.key_secret" if self._keys else None

    def store(self, name: str) -> Path:
        """Return the store of a peer."""
        return self.folder / f"{name}.store"

    def _close_input(self, name: str) -> None:
        stdin = self.processes[name].stdin if name in self.processes else None
        if stdin is not None:
            stdin.close()

    def alive(self, name: str) -> bool:
        """Return whether the process of a peer exists, running or stopped."""
        process = self.processes.get(name)
        return process is not None and process.poll() is None

    def signal(self, name: str, number: int) -> None:
        """Send a signal to a peer, if it is running."""
        if self.alive(name):
            self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Kill a peer and wait until its process is gone."""
        self.signal(name, signal.SIGKILL)
        self.processes[name].wait()

    def terminate(self, name: str, timeout: float = 60.0) -> int:
        """Terminate a peer and return its exit code."""
        self.signal(name, signal.SIGTERM)
        return self.processes[name].wait(timeout)

    def log_path(self, name: str) -> Path:
        """Return the log file of a peer."""
        return self.folder / f"{name}.log"

    def wait_warm(self, *names: str, timeout: float = START_S) -> None:
        """Wait until peers (by default all) have logged that they are warm.

        Raise :class:`LinkError` with the last line of the log if a peer ends or takes too long.
        """
        self._wait_logged(names, (b" warm ", b'"warm"'), "become warm", timeout)

    def wait_settled(self, *names: str, timeout: float = START_S) -> None:
        """Wait until peers have logged that they are warm or waiting for a bundle."""
        self._wait_logged(names, (b" warm ", b'"warm"', b"waiting for a bundle"), "start", timeout)

    def _wait_logged(self, names: Sequence[str], texts: Sequence[bytes], what: str, timeout: float) -> None:
        end = time.monotonic() + timeout
        waiting = set(names or self.bundles)
        while waiting:
            for name in sorted(waiting):
                if self._logged(name, texts):
                    waiting.discard(name)
                elif not self.alive(name) or time.monotonic() > end:
                    slow = f" in {timeout:g} s (is this machine busy?)" if self.alive(name) else ""
                    raise LinkError(f"peer {name} did not {what}{slow}: {self.last_log_line(name)}")
            time.sleep(0.02)

    def last_log_line(self, name: str) -> str:
        """Return the last line of the log of a peer."""
        path = self.log_path(name)
        lines = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return lines[-1] if lines else "its log is empty"

    def close(self) -> None:
        """Terminate all peers and release their ports."""
        self._stop()
        self._free_ports()

    def _stop(self) -> None:
        """Terminate all peers, and kill any that still run after two seconds."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
        end = time.monotonic() + 2.0
        for process in self.processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, end - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()
        for name in self.processes:
            self._close_input(name)

    def _logged(self, name: str, texts: Sequence[bytes]) -> bool:
        path = self.log_path(name)
        log = path.read_bytes()[self._log_from.get(name, 0) :] if path.exists() else b""
        return any(text in log for text in texts)


def even_parts(num_blocks: int, count: int) -> list[range]:
    """Divide the blocks into ``count`` parts, equal in size up to one block."""
    edges = [num_blocks * place // count for place in range(count + 1)]
    return [range(*pair) for pair in itertools.pairwise(edges)]


def free_ports(count: int) -> list[int]:
    """Return loopback ports that are probably free, below those from which Linux dials."""
    with contextlib.ExitStack() as sockets:
        return _hold_ports(count, sockets)


def _hold_ports(count: int, sockets: contextlib.ExitStack) -> list[int]:
    """Return free ports, reserved until the sockets close; libzmq can listen on them meanwhile."""
    ports: list[int] = []
    while len(ports) < count:
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        held = socket.socket()
        try:
            held.bind(("127.0.0.1", port))
        except OSError:  # in use
            held.close()
            continue
        # If all its sockets have SO_REUSEADDR, a port without a listener can be bound again; those of libzmq have it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sockets.enter_context(held)
        ports.append(port)
    return ports
