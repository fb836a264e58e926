"""Local peers with faults: failing engines, broken links, and lying members."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ls_edge.core.errors import LinkError
from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from tests.faults.engines import Faults, write
from tests.faults.liar import LiarCounts, read_counts
from tests.faults.proxy import Proxy

_ROOT = Path(__file__).parents[2]


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command line of a module of the tests, for a process in any folder."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    return ["env", f"PYTHONPATH={path}", sys.executable, "-m", module, *map(str, arguments)]


class FaultyCluster(LocalCluster):
    """Peers whose engines have faults (:meth:`set_faults`); that makes each call a little longer."""

    def __init__(
        self,
        folder: str | Path,
        bundle: str | Path,
        placement: Mapping[str, Sequence[int] | str],
        *,
        proxied: bool = False,
        members: Mapping[str, Sequence[int]] | None = None,
        **named: Any,
    ) -> None:
        """Write ``peers.yaml``; the other arguments are those of :class:`LocalCluster`.

        ``proxied`` puts a :class:`Proxy` in front of each peer (:attr:`proxies`). ``members`` are peers of the file,
        with their blocks, that do not run before :meth:`start_liar`.
        """
        self.proxies: dict[str, Proxy] = {}
        self._liars: dict[str, subprocess.Popen[bytes]] = {}
        self._members = dict(members or {})
        self._proxied = proxied
        super().__init__(folder, bundle, placement, **named)

    def entries(self, placement: Mapping[str, Sequence[int] | str]) -> list[dict[str, Any]]:
        """Return the peers of the file, members included; proxied peers bind another port than they announce."""
        listed = {**placement, **self._members}
        ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(len(listed) + len(placement) * self._proxied)]
        entries = [
            {"name": name, "address": address, "blocks": blocks if isinstance(blocks, str) else list(blocks)}
            for (name, blocks), address in zip(listed.items(), ports, strict=False)
        ]
        for entry, address in zip(entries, ports[len(listed) :], strict=False):
            entry["bind"] = address
        return entries

    def __enter__(self) -> FaultyCluster:
        for name in self.bundles if self._proxied else ():
            peer = self.file.peer(name)
            front, port = (int(address.rpartition(":")[2]) for address in (peer.address, peer.bind))
            self.proxies[name] = Proxy(front, ("127.0.0.1", port))
        super().__enter__()
        return self

    def close(self) -> None:
        """End all processes and proxies."""
        for name in list(self._liars):
            self.stop_liar(name)
        super().close()
        for proxy in self.proxies.values():
            proxy.close()

    def peer_command(self, name: str) -> list[str]:
        """Return the command line of a peer with faults."""
        return module_command("tests.faults.peer", self._faults_path(name), "peer")

    def set_faults(self, name: str, faults: Faults) -> None:
        """Set the faults of the engines of a peer, also for its next process."""
        write(self._faults_path(name), faults)

    def start_liar(self, name: str, lie: str, *, seed: int = 0) -> None:
        """Start a member or a source as a liar (:mod:`~tests.faults.liar`), without waiting for it."""
        self.stop_liar(name)
        self._counts_path(name).unlink(missing_ok=True)
        command = module_command("tests.faults.liar_process", self.path, self._bundle, name, lie)
        command += ["--seed", str(seed), "--counts", str(self._counts_path(name))]
        if self._keys:
            command += ["--secret-key", str(self.secret_key(name))]
        with self.log_path(name).open("ab") as log:
            self._liars[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def liar_counts(self, name: str) -> LiarCounts:
        """Return the counts of a liar; raise :class:`LinkError` if its process has ended."""
        process = self._liars.get(name)
        if process is not None and process.poll() is not None:
            raise LinkError(f"the liar {name} ended with {process.returncode}: {self.last_log_line(name)}")
        return read_counts(self._counts_path(name))

    def stop_liar(self, name: str) -> None:
        """End a liar, if it runs."""
        process = self._liars.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _faults_path(self, name: str) -> Path:
        return self.folder / f"{name}.faults"

    def _counts_path(self, name: str) -> Path:
        return self.folder / f"{name}.counts"
