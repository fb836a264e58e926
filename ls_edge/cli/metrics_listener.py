"""Metrics endpoint for ``--metrics HOST:PORT``, bound before the peer or source is opened."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ls_edge.device.requirements import require

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

CLIENT_S = 10.0
"""Maximum time for a client to send its request, in seconds; Prometheus waits as long for answers."""


@contextlib.contextmanager
def metrics_port(address: str) -> Iterator[Callable[[Collector], str]]:
    """Serve ``HOST:PORT``, and yield a function that adds a collector and returns the URL.

    Errors name the flag.
    """
    require("--metrics", "metrics")
    from prometheus_client import CollectorRegistry, start_http_server

    from ls_edge.runtime.serve.listener import open_listener, parse_address, url_of
    from ls_edge.runtime.serve.metrics import add_collectors

    host, port = parse_address(address, "--metrics")
    open_listener(address, "--metrics").close()  # for its errors: prometheus_client opens the socket itself
    registry = CollectorRegistry(auto_describe=False)
    server, thread = start_http_server(port, host, registry)

    # Any client can break a connection, which would write a traceback to the log, or leave one open forever.
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    server.RequestHandlerClass.timeout = CLIENT_S  # type: ignore[attr-defined]

    def serve(collector: Collector) -> str:
        add_collectors(registry, collector)
        return url_of(server.socket) + "/metrics"

    try:
        yield serve
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
