"""Listener of ``--metrics HOST:PORT``, whose port is bound before the peer or source is opened."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

from ls_edge.device.requirements import require_http

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from ls_edge.core.peers_file import PeersFile
    from ls_edge.runtime.execution.cores import EngineCores
    from ls_edge.runtime.peer.peer import Peer
    from ls_edge.runtime.serve.http_server import HttpServer
    from ls_edge.runtime.source.source import Source

MAX_SCRAPE_CONNECTIONS = 16
"""Limit of connections to the listener."""
SCRAPE_RECEIVE_S = 30.0
"""Time for a connection to deliver a whole request, in seconds."""


class MetricsListener:
    """Port for Prometheus, as a context manager."""

    def __init__(self, address: str) -> None:
        """Bind ``HOST:PORT``; raise errors that name the flag."""
        require_http("--metrics", "metrics")
        from ls_edge.runtime.serve.http_server import open_listener

        self._listener = open_listener(address, "--metrics")
        self._server: HttpServer | None = None

    def __enter__(self) -> MetricsListener:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.close()

    def serve_peer(self, peers: PeersFile, peer: Peer) -> None:
        """Serve the metrics of a peer, and log the URL."""
        from ls_edge.runtime.serve.metrics import PeerCollector

        url = self._serve(PeerCollector(peers, lambda: peer.snapshot), peer.cores)
        logging.getLogger("ls_edge.runtime").info("metrics", extra={"peer": peer.name, "url": url})

    def serve_source(self, source: Source) -> str:
        """Serve the metrics of a source; return the URL."""
        from ls_edge.runtime.serve.metrics import SourceCollector

        return self._serve(SourceCollector(source), source.cores)

    def _serve(self, collector: Collector, cores: EngineCores) -> str:
        from ls_edge.runtime.serve.http_server import HttpServer
        from ls_edge.runtime.serve.metrics import METRICS_PATH, metrics_handler, registry_of

        self._server = HttpServer(
            self._listener,
            metrics_handler(registry_of(collector)),
            name="metrics",
            max_connections=MAX_SCRAPE_CONNECTIONS,
            receive_s=SCRAPE_RECEIVE_S,
            cores=cores,
        )
        return self._server.url + METRICS_PATH
