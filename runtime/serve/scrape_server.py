"""HTTP server of ``--metrics HOST:PORT``: prometheus-client's application on the standard library's server."""

from __future__ import annotations

import socket
import socketserver
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from ls_edge.core.closing import Closing
from ls_edge.device.worker import introduce_thread
from ls_edge.runtime.peer.cores import EngineCores
from ls_edge.runtime.serve.http.listener import MAX_SCRAPE_CONNECTIONS, url_of

SCRAPE_SILENCE_S = 10.0
"""Seconds without a byte after which a connection to ``--metrics`` is closed."""


class ScrapeServer(Closing):
    """Server of a registry on its own threads, started by the constructor; a context manager."""

    def __init__(self, listener: socket.socket, registry: CollectorRegistry, cores: EngineCores | None = None) -> None:
        """Serve on a listening socket and take ownership of it. The threads avoid the engine's cores."""
        self.url = url_of(listener) + "/metrics"
        self._server = _Server(listener)
        self._server.set_app(make_wsgi_app(registry))
        with (cores or EngineCores()).others():  # threads started here stay on these cores
            self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Close the port; open connections end with their requests."""
        self._server.shutdown()
        self._server.server_close()

    def _run(self) -> None:
        introduce_thread("metrics")
        self._server.serve_forever(poll_interval=0.1)


class _Handler(WSGIRequestHandler):
    timeout = SCRAPE_SILENCE_S

    def log_message(self, *_: object) -> None:
        """Log nothing: any client can cause messages."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # HTTPServer.server_bind would look the host up in DNS.
        self.server_name, self.server_port = map(str, listener.getsockname()[:2])  # type: ignore[assignment]
        self.setup_environ()
        self._places = threading.BoundedSemaphore(MAX_SCRAPE_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on its own thread, or close it if there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection until it ends."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: any client can cause errors."""
