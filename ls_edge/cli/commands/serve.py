"""``ls-edge serve``: answer images over HTTP, through the peers that can be reached."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ls_edge.cli import interrupts
from ls_edge.cli.command import Command
from ls_edge.cli.holder_check import WAIT_S
from ls_edge.core.errors import LsEdgeError, UsageError
from ls_edge.runtime.routing.policies import POLICIES

if TYPE_CHECKING:
    from ls_edge.core.peers_file import EngineKind

_LOOK_EVERY_S = 0.25
"""How often it is looked whether a signal came."""
_SEND_WITHIN_S = 2.0
"""How long answers may take to be sent, after the budget of the last request, when the server is stopped."""
_MIB = 1 << 20


@click.command(
    cls=Command,
    short_help="Answer images over HTTP, through the peers that can be reached.",
    examples=(
        "ls-edge serve --peers peers.yaml --bundle bundle",
        "ls-edge serve --peers peers.yaml --bundle bundle --http 127.0.0.1:8000 --concurrency 8",
        "ls-edge serve --peers peers.yaml --bundle bundle --http 0.0.0.0:8080 --insecure-http",
    ),
)
@click.option("--peers", required=True, type=click.Path(path_type=Path), help="The peers.yaml of all machines.")
@click.option("--bundle", required=True, type=click.Path(path_type=Path), help="Folder of the exported model.")
@click.option("--http", default="127.0.0.1:8080", show_default=True, metavar="HOST:PORT", help="Where to listen.")
@click.option("--insecure-http", is_flag=True, help="Allow --http off the loopback: no encryption and no login.")
@click.option(
    "--policy", type=click.Choice(list(POLICIES)),
    default="nearest", show_default=True, help="How the next block is chosen.",
)  # fmt: skip
@click.option(
    "--concurrency", type=click.IntRange(min=1, max=256), default=4, show_default=True,
    help="Images at once; further ones are refused with 503.",
)  # fmt: skip
@click.option(
    "--budget-ms", type=click.FloatRange(min=1), default=10_000.0, show_default=True,
    help="Time for an image; a request may ask for less.",
)  # fmt: skip
@click.option("--max-skips", type=click.IntRange(min=0), help="Blocks an answer may leave out.  [default: a quarter]")
@click.option("--seed", type=int, default=0, show_default=True, help="Draws the orders of the policy random.")
@click.option(
    "--wait", type=click.FloatRange(min=0, max=86_400), default=WAIT_S, show_default=True, metavar="SECONDS",
    help="How long an image waits where blocks have no holder, before it is refused with 503.",
)  # fmt: skip
@click.option(
    "--max-body", type=click.IntRange(min=1024, max=1 << 28), default=16 * _MIB, show_default=True, metavar="BYTES",
    help="Largest encoded image.",
)  # fmt: skip
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of stem and head; wins over peers.yaml, else 1."
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["auto", "onnx", "tensorrt"]), help="Of stem and head; wins over peers.yaml."
)
@click.option("--provider", help="Of ONNX Runtime, for stem and head; wins over peers.yaml.")
@click.option("--secret-key", type=click.Path(path_type=Path), help="NAME.key_secret, where peers.yaml has keys.")
@click.option("--strict-bundle", is_flag=True, help="Use only peers that serve this very bundle.")
@click.option("--log-json", is_flag=True, help="Log lines as JSON.")
def command(
    peers: Path, bundle: Path, http: str, insecure_http: bool, policy: str, concurrency: int, budget_ms: float,
    max_skips: int | None, seed: int, wait: float, max_body: int, threads: int | None, engine: EngineKind | None,
    provider: str | None, secret_key: Path | None, strict_bundle: bool, log_json: bool,
) -> int:  # fmt: skip
    """Answer images over HTTP, through the peers that can be reached (extra serve).

    POST /predict takes an encoded image as its body. There are also /health/live, /health/ready, /status and /metrics
    (for Prometheus).

    It listens at once, whether or not blocks have holders: /health/ready says which have none.

    SIGTERM or Ctrl-C: no new requests, those that are being answered are, exit code 0; a second one ends at once.
    """
    from ls_edge.cli.descriptor_limit import require_descriptors
    from ls_edge.core.bundle import Bundle
    from ls_edge.core.logs import set_up
    from ls_edge.core.peers_file import load_peers
    from ls_edge.device.requirements import require_http

    require_http("ls-edge serve", "serve")
    from ls_edge.runtime.serve.http_server import HttpServer, is_loopback_host, open_listener, parse_address
    from ls_edge.runtime.serve.http_service import MAX_IDLE_CONNECTIONS, RECEIVE_S, SPARE_THREADS, HttpService

    set_up(as_json=log_json)
    if not insecure_http and not is_loopback_host(parse_address(http, "--http")[0]):
        raise UsageError(
            f"--http {http} is not on the loopback, and HTTP has no encryption and no login; listen on 127.0.0.1 "
            "behind a reverse proxy with TLS, or allow it with --insecure-http"
        )
    file = load_peers(peers)
    connections = concurrency + MAX_IDLE_CONNECTIONS
    require_descriptors(file, connections)
    opened = Bundle.open(bundle)
    from ls_edge.runtime.source.source import Source

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(open_listener(http, "--http"))
        source = stack.enter_context(
            Source.open(
                file, opened, policy=policy, secret_key=secret_key, strict_bundle=strict_bundle, budget_ms=budget_ms,
                max_skips=max_skips, seed=seed, max_inflight=concurrency, threads=threads, engine=engine,
                provider=provider,
            )
        )  # fmt: skip
        service = HttpService(source, holder_wait_s=wait)
        stop = stack.enter_context(interrupts.StopRequest())
        server = stack.enter_context(
            HttpServer(
                listener, service.handle, name="http", threads=concurrency + SPARE_THREADS, max_body=max_body,
                max_connections=connections, receive_s=RECEIVE_S, cores=source.cores,
            )
        )  # fmt: skip
        log = logging.getLogger("ls_edge.runtime")
        log.info("serving", extra={"url": server.url, "policy": policy, "bundle": opened.manifest.bundle_id[:16]})
        while not stop and source.is_open and server.is_alive:
            time.sleep(_LOOK_EVERY_S)
        if not stop:
            raise LsEdgeError("the server has ended by an internal error, which is in the log; start it again")
        log.info("stopping", extra={"in_flight": source.counts.in_flight})
        service.stop()
        if not server.drain(budget_ms / 1e3 + _SEND_WITHIN_S):
            log.warning("stopped with unsent answers", extra={"in_flight": source.counts.in_flight})
    return 0
