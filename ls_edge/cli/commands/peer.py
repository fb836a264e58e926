"""``ls-edge peer``: serve blocks of a bundle until a signal stops it."""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
from pathlib import Path
from typing import Any

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import open_peers
from ls_edge.cli.interrupts import ReloadRequest
from ls_edge.cli.metrics_listener import metrics_port
from ls_edge.core.errors import UsageError
from ls_edge.core.logs import set_up
from ls_edge.device.diagnostics import examine
from ls_edge.engines.diagnostics import check_engines
from ls_edge.runtime.peer.peer import Peer
from ls_edge.runtime.protocol.messages import FindingRow

_GC_AFTER = 10_000
"""Number of new objects that starts a garbage collection (default 700); requests leave no garbage."""


@click.command(
    cls=Command,
    examples=(
        "ls-edge peer --peers peers.yaml --name orin-0 --bundle bundle",
        "ls-edge peer --peers peers.yaml --name nuc --bundle bundle",
        "ls-edge peer --peers p.yaml --name a --store store --secret-key a.key_secret",
        "ls-edge peer --peers p.yaml --name a --bundle b --metrics 127.0.0.1:9100",
    ),
)
@options.PEERS
@options.text("--name", "Name of this peer in peers.yaml.", "NAME", required=True)
@options.bundle()
@options.path("--store", "Folder for bundles from 'ls-edge apply', instead of --bundle.", metavar="DIR")
@options.SECRET_KEY
@options.choice("--engine", options.ENGINES, "Engine of the blocks; overrides peers.yaml.")
@options.threads("Threads of the engine; overrides peers.yaml.")
@options.STRICT_BUNDLE
@options.METRICS
@options.LOG_JSON
def command(
    peers: Path,
    name: str,
    bundle: Path | None,
    store: Path | None,
    metrics: str | None,
    log_json: bool,
    **settings: Any,
) -> None:
    """Serve blocks of a bundle.

    Serves the blocks that peers.yaml assigns to NAME.

    With --store, the bundle comes over the network: the peer starts with its key and an empty folder, receives bundles
    from 'ls-edge apply', and keeps the previous one.

    On SIGTERM or Ctrl-C the peer accepts no new work, finishes or hands over its requests, and ends within five seconds
    with exit code 0; a second signal ends it immediately.

    On SIGHUP it reads peers.yaml and its key again and changes its links accordingly, without losing a request.
    """
    set_up(as_json=log_json)
    if store is not None and not options.is_typed("bundle"):
        bundle = None
    if (bundle is None) == (store is None):
        raise UsageError("give either --bundle FOLDER, or --store FOLDER for bundles from 'ls-edge apply'")
    with contextlib.ExitStack() as stack:
        reload = stack.enter_context(ReloadRequest())
        file = open_peers(peers)
        # Bind the port before anything that takes long.
        serve_metrics = stack.enter_context(metrics_port(metrics)) if metrics is not None else None
        peer = Peer.open(file, name, bundle, store=store, examine=_examine, **settings)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: peer.stop())
        if serve_metrics is not None:
            from ls_edge.runtime.serve.metrics import PeerCollector

            url = serve_metrics(PeerCollector(lambda: peer.peers, lambda: peer.snapshot))
            logging.getLogger("ls_edge.runtime").info("metrics", extra={"peer": name, "url": url})
        gc.freeze()  # imported modules are never freed
        gc.set_threshold(_GC_AFTER)
        peer.serve(reload.take)


def _examine() -> list[FindingRow]:
    """Check this machine for ``ls-edge doctor --peers`` elsewhere."""
    return [FindingRow(one.status, one.what, one.detail, one.fix or "") for one in examine(check_engines)]
