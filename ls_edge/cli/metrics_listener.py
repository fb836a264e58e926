"""Listener of ``--metrics HOST:PORT``, whose port is bound before the peer or source is opened."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ls_edge.device.requirements import require

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ls_edge.runtime.execution.cores import EngineCores
    from ls_edge.runtime.peer.peer import Peer
    from ls_edge.runtime.serve.scrape_server import ScrapeServer
    from ls_edge.runtime.source.source import Source


class MetricsListener:
    """Port for Prometheus, as a context manager."""

    def __init__(self, address: str) -> None:
        """Bind ``HOST:PORT``; raise errors that name the flag."""
        require("--metrics", "metrics")
        from ls_edge.runtime.serve.listener import open_listener

        self._listener = open_listener(address, "--metrics")
        self._server: ScrapeServer | None = None

    def __enter__(self) -> MetricsListener:
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.close()

    def serve_peer(self, peer: Peer) -> None:
        """Serve the metrics of a peer, and log the URL."""
        from ls_edge.runtime.serve.metrics import PeerCollector

        url = self._serve(PeerCollector(lambda: peer.peers, lambda: peer.snapshot), peer.cores)
        logging.getLogger("ls_edge.runtime").info("metrics", extra={"peer": peer.name, "url": url})

    def serve_source(self, source: Source) -> str:
        """Serve the metrics of a source; return the URL."""
        from ls_edge.runtime.serve.metrics import SourceCollector

        return self._serve(SourceCollector(lambda: source), source.thread.cores)

    def _serve(self, collector: Collector, cores: EngineCores) -> str:
        from ls_edge.runtime.serve.metrics import registry_of
        from ls_edge.runtime.serve.scrape_server import ScrapeServer

        self._server = ScrapeServer(self._listener, registry_of(collector), cores)
        return self._server.url
