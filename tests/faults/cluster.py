"""Local peers with faults: failing engines and broken links."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ls_edge.runtime.fleet.local_cluster import LocalCluster, free_ports
from tests.faults.engines import Faults, write
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
        **named: Any,
    ) -> None:
        """Write ``peers.yaml``; the other arguments are those of :class:`LocalCluster`.

        ``proxied`` puts a :class:`Proxy` in front of each peer (:attr:`proxies`).
        """
        self.proxies: dict[str, Proxy] = {}
        self._proxied = proxied
        super().__init__(folder, bundle, placement, **named)

    def entries(self, placement: Mapping[str, Sequence[int] | str]) -> list[dict[str, Any]]:
        """Return the peers of the file; proxied peers bind another port than they announce."""
        ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(len(placement) * (1 + self._proxied))]
        entries = [
            {"name": name, "address": address, "blocks": blocks if isinstance(blocks, str) else list(blocks)}
            for (name, blocks), address in zip(placement.items(), ports, strict=False)
        ]
        for entry, address in zip(entries, ports[len(placement) :], strict=False):
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
        super().close()
        for proxy in self.proxies.values():
            proxy.close()

    def peer_command(self, name: str) -> list[str]:
        """Return the command line of a peer with faults."""
        return module_command("tests.faults.peer", self._faults_path(name), "peer")

    def set_faults(self, name: str, faults: Faults) -> None:
        """Set the faults of the engines of a peer, also for its next process."""
        write(self._faults_path(name), faults)

    def _faults_path(self, name: str) -> Path:
        return self.folder / f"{name}.faults"
