"""``ls_edge.Cluster``: peers on this machine, for as long as a ``with`` block lasts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.fleet.local_cluster import LocalCluster, even_parts
from ls_edge.runtime.source.source import Source


class Cluster:
    """Peers that serve a bundle on free ports of this machine, each in its own process.

        with Cluster("bundle", peers=3) as cluster, cluster.source() as source:
            answer = source.submit("photo.jpg").result()

    They end with the ``with`` block, and with this process if it is killed.
    """

    def __init__(self, bundle: str | Path | Bundle, peers: int | Mapping[str, Sequence[int]] = 3) -> None:
        """Plan the peers; ``peers`` is their number, or the blocks of each by name.

        With a number of peers, each holds two neighboring parts of the blocks, so that any one of them may fail.
        """
        self.bundle = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        self.placement = (
            _overlapping(self.bundle.num_blocks, peers)
            if isinstance(peers, int)
            else {name: list(blocks) for name, blocks in peers.items()}
        )
        self._folder = contextlib.ExitStack()
        self._local: LocalCluster | None = None

    def __enter__(self) -> Cluster:
        folder = self._folder.enter_context(tempfile.TemporaryDirectory(prefix="ls-edge-cluster-"))
        try:
            self._local = LocalCluster(folder, self.bundle.folder, self.placement).__enter__()
            self._local.wait_warm()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def peers(self) -> PeersFile:
        """The ``peers.yaml`` of the peers."""
        return self._running.file

    def source(self, **settings: Any) -> Source:
        """Open a source for the peers; ``settings`` are arguments of :meth:`Source.open`."""
        return Source.open(self.peers, self.bundle, **settings)

    def kill(self, name: str) -> None:
        """Kill a peer, like a power failure."""
        self._named(LocalCluster.kill, name)

    def start(self, name: str) -> None:
        """Start a peer again, and wait until it is warm."""
        self._named(LocalCluster.start, name)
        self._running.wait_warm(name)

    def close(self) -> None:
        """Stop the peers; a second call does nothing."""
        if self._local is not None:
            self._local.close()
            self._local = None
        self._folder.close()

    @property
    def _running(self) -> LocalCluster:
        if self._local is None:
            raise UsageError("the cluster is not running; use it in a with statement")
        return self._local

    def _named(self, act: Callable[[LocalCluster, str], None], name: str) -> None:
        if name not in self.placement:
            raise UsageError(f"no peer is called {name!r}; the peers are {', '.join(self.placement)}")
        act(self._running, name)

    def __repr__(self) -> str:
        held = ", ".join(f"{name} {blocks}" for name, blocks in self.placement.items())
        return f"<Cluster {'of' if self._local else 'not running:'} {held}>"


def _overlapping(num_blocks: int, count: int) -> dict[str, list[int]]:
    """Return neighboring parts of the blocks, two for each peer."""
    if not 1 <= count <= num_blocks:
        raise UsageError(f"{count} peers: this bundle needs 1 to {num_blocks}, its number of blocks")
    parts = even_parts(num_blocks, count)
    return {f"local-{place}": sorted({*parts[place], *parts[place - 1]}) for place in range(count)}
