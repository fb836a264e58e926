"""``ls-edge serve``: classify images over HTTP through the reachable peers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ls_edge.cli import interrupts, options, source_options
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import open_peers
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.core.logs import set_up
from ls_edge.core.peers_file import is_loopback_host
from ls_edge.core.text import short_id
from ls_edge.device.requirements import require
from ls_edge.runtime.source.source import Source

log = logging.getLogger("ls_edge.runtime")

QUEUE = 8
"""Default of ``--queue``, as a multiple of ``--concurrency``."""
_LOOK_EVERY_S = 0.25
"""Interval of checks for a signal, in seconds."""
_SEND_WITHIN_S = 2.0
"""Time to send answers after the budget of the last request, when the server stops, in seconds."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge serve --peers peers.yaml --bundle bundle",
        "ls-edge serve --peers peers.yaml",
        "ls-edge serve --peers p.yaml --bundle b --http 127.0.0.1:80 --concurrency 8",
        "ls-edge serve --peers p.yaml --tls-cert cert.pem --tls-key key.pem",
        "ls-edge serve --peers peers.yaml --allow-host edge.example",
    ),
)
@options.PEERS
@options.SOURCE_BUNDLE
@options.text("--http", "Address to listen on.", "HOST:PORT", default="127.0.0.1:8080")
@options.path("--tls-cert", "Certificate chain (PEM), to serve HTTPS.")
@options.path("--tls-key", "Private key of --tls-cert (PEM).")
@options.path("--token-file", "Bearer tokens that clients need, one a line.")
@options.flag("--insecure-http", "Allow --http off the loopback without TLS or tokens.")
@options.text("--allow-host", "Host name of this server, in addition to the loopback.", "NAME", multiple=True)
@options.concurrency(256, "Concurrent images.")
@options.count(
    "--queue",
    f"Images that wait for others; further ones are refused with 503.  [default: {QUEUE} times --concurrency]",
    least=0,
    most=4096,
)
@options.wait("Time that an image waits for missing holders before it is refused with 503.")
@options.count(
    "--max-body", "Size limit of an encoded image.", least=1024, most=1 << 28, default=16 << 20, metavar="BYTES"
)
@source_options.SOURCE
@options.LOG_JSON
def command(
    peers: Path,
    bundle: Path | None,
    http: str,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    insecure_http: bool,
    allow_host: tuple[str, ...],
    concurrency: int,
    queue: int | None,
    wait: float,
    max_body: int,
    log_json: bool,
    **settings: Any,
) -> None:
    """Classify images over HTTP through the reachable peers.

    GET / is a page that shows the peers and classifies images. POST /predict takes an encoded image; /v2 speaks the
    Open Inference Protocol of Triton, KServe and OpenVINO Model Server. Other paths are /health/live, /health/ready,
    /status, and /metrics (for Prometheus). Requires the extra serve.

    The server listens immediately, even if blocks have no holders yet: /health/ready tells which. Off the loopback it
    needs --tls-cert, --tls-key and --token-file, or --insecure-http.

    On SIGHUP the server reads peers.yaml, the bundle, the certificate and the tokens again, without losing a
    request. On SIGTERM or Ctrl-C it refuses new requests, finishes the others, and ends with exit code 0; a second
    signal ends it immediately.
    """
    with contextlib.ExitStack() as stack:
        reload = stack.enter_context(interrupts.ReloadRequest())  # before anything that takes long
        interrupts.stop_on_ctrl_c()
        require("ls-edge serve", "serve")
        from ls_edge.runtime.serve.access import Access
        from ls_edge.runtime.serve.application import Api
        from ls_edge.runtime.serve.bodies import Bodies
        from ls_edge.runtime.serve.listener import open_listener, parse_address
        from ls_edge.runtime.serve.places import SLOW_AT_ONCE
        from ls_edge.runtime.serve.server import Certificate, HttpServer, return_memory
        from ls_edge.runtime.serve.service import Service

        return_memory()
        set_up(as_json=log_json)
        is_local = is_loopback_host(parse_address(http, "--http")[0])
        if (tls_cert is None) != (tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together; give both")
        if not is_local and not insecure_http and (tls_cert is None or token_file is None):
            raise UsageError(
                f"--http {http} is not on the loopback, so it needs --tls-cert, --tls-key and --token-file; or listen "
                "on 127.0.0.1 behind a reverse proxy, or allow it with --insecure-http"
            )
        access = Access(token_file, loopback_only=is_local, hosts=allow_host)
        tls = Certificate(tls_cert, tls_key) if tls_cert is not None and tls_key is not None else None
        queue = QUEUE * concurrency if queue is None else queue

        open_peers(peers)
        listener = stack.enter_context(open_listener(http, "--http"))
        settings["max_inflight"] = concurrency + SLOW_AT_ONCE
        source = Source.open(peers, bundle, model_wait_s=math.inf, **settings)
        service = Service(source, holder_wait_s=wait, queue=queue)
        stack.callback(service.close)
        application = Api(service, access, Bodies(max_body)).application
        stop = stack.enter_context(interrupts.StopRequest())
        server = stack.enter_context(HttpServer(listener, application, tls=tls))

        parts = {f"{peers} and the bundle": source.reload}
        if token_file is not None:
            parts = {str(token_file): access.reload, **parts}
        if tls is not None:
            parts = {f"{tls_cert} and {tls_key}": tls.reload, **parts}
        fields = {
            "url": server.url,
            "policy": settings["policy"],
            "bundle": short_id(source.bundle.manifest.bundle_id),
        }
        log.info("serving", extra=fields)
        threading.Thread(target=_reload, args=(reload, parts), name="reload", daemon=True).start()
        while not stop and source.is_open and server.is_alive:
            time.sleep(_LOOK_EVERY_S)
        if not stop:
            raise LsEdgeError("the server stopped after an internal error, see the log; start it again")
        log.info("stopping", extra={"in_flight": source.counts.in_flight})
        service.stop()
        if not server.drain(settings["budget_ms"] / 1e3 + _SEND_WITHIN_S):
            log.warning("stopped with unsent answers", extra={"in_flight": source.counts.in_flight})


def _reload(reload: interrupts.ReloadRequest, parts: dict[str, Callable[[], None]]) -> None:
    """Read files again when asked to, on a thread of its own: another bundle is waited for, and may be built."""
    while True:
        for files, read_again in parts.items() if reload.take() else ():
            try:
                read_again()
            except Exception as error:  # noqa: BLE001  such as no descriptor for a moment: it goes on with the old files
                log.warning("not reloaded", extra={"files": files, "why": str(error)})
            else:
                log.info("reloaded", extra={"files": files})
        time.sleep(_LOOK_EVERY_S)
