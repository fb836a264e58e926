"""``ls-edge serve``: answer images over HTTP through the reachable peers."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import Any

import click

from ls_edge.cli import interrupts, options
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import open_peers
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.logs import set_up
from ls_edge.device.requirements import require_http
from ls_edge.runtime.source.source import Source

_LOOK_EVERY_S = 0.25
"""Interval of checks for a signal, in seconds."""
_SEND_WITHIN_S = 2.0
"""Time to send answers after the budget of the last request when the server stops, in seconds."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge serve --peers peers.yaml --bundle bundle",
        "ls-edge serve --peers peers.yaml --bundle bundle --http 127.0.0.1:8000 --concurrency 8",
        "ls-edge serve --peers peers.yaml --bundle bundle --http 0.0.0.0:8080 --insecure-http",
    ),
)
@options.PEERS
@options.BUNDLE
@options.text("--http", "Address to listen on.", "HOST:PORT", default="127.0.0.1:8080")
@options.flag("--insecure-http", "Allow --http off the loopback, without encryption and login.")
@options.concurrency(256, "Images at the same time; more are refused with 503.")
@options.wait("Time that an image waits for missing holders before it is refused with 503.")
@options.count(
    "--max-body", "Size limit of an encoded image.", least=1024, most=1 << 28, default=16 << 20, metavar="BYTES"
)
@options.SOURCE
@options.LOG_JSON
def command(
    peers: Path,
    bundle: Path,
    http: str,
    insecure_http: bool,
    concurrency: int,
    wait: float,
    max_body: int,
    log_json: bool,
    **settings: Any,
) -> None:
    """Answer images over HTTP through the reachable peers.

    POST /predict takes an encoded image as its body. Other paths are /health/live, /health/ready, /status, and
    /metrics (for Prometheus). Requires the extra serve.

    The server listens immediately, even if blocks have no holders yet: /health/ready tells which.

    On SIGTERM or Ctrl-C the server refuses new requests, finishes the others, and ends with exit code 0; a second
    signal ends it immediately.
    """
    require_http("ls-edge serve", "serve")
    from ls_edge.runtime.serve.http_server import HttpServer, is_loopback_host, open_listener, parse_address
    from ls_edge.runtime.serve.http_service import MAX_IDLE_CONNECTIONS, RECEIVE_S, SPARE_THREADS, HttpService

    set_up(as_json=log_json)
    if not insecure_http and not is_loopback_host(parse_address(http, "--http")[0]):
        raise UsageError(
            f"--http {http} is not on the loopback, and HTTP has neither encryption nor login; listen on 127.0.0.1 "
            "behind a reverse proxy with TLS, or allow it with --insecure-http"
        )
    connections = concurrency + MAX_IDLE_CONNECTIONS
    file = open_peers(peers, connections)
    opened = Bundle.open(bundle)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(http, "--http"))
        source = stack.enter_context(Source.open(file, opened, max_inflight=concurrency, **settings))
        service = HttpService(source, holder_wait_s=wait)
        stop = stack.enter_context(interrupts.StopRequest())
        server = HttpServer(
            listener,
            service.handle,
            name="http",
            threads=concurrency + SPARE_THREADS,
            max_body=max_body,
            max_connections=connections,
            receive_s=RECEIVE_S,
            cores=source.cores,
        )
        stack.enter_context(server)
        log = logging.getLogger("ls_edge.runtime")
        about = {"policy": settings["policy"], "bundle": opened.manifest.bundle_id[:16]}
        log.info("serving", extra={"url": server.url, **about})
        while not stop and source.is_open and server.is_alive:
            time.sleep(_LOOK_EVERY_S)
        if not stop:
            raise LsEdgeError("the server stopped after an internal error, see the log; start it again")
        log.info("stopping", extra={"in_flight": source.counts.in_flight})
        service.stop()
        if not server.drain(settings["budget_ms"] / 1e3 + _SEND_WITHIN_S):
            log.warning("stopped with unsent answers", extra={"in_flight": source.counts.in_flight})
