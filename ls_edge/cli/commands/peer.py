"""``ls-edge peer``: serve blocks of a bundle until a signal stops it."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ls_edge.cli.command import Command
from ls_edge.core.errors import UsageError

if TYPE_CHECKING:
    from ls_edge.core.peers_file import EngineKind
    from ls_edge.runtime.protocol.messages import FindingRow

_GC_AFTER = 10_000
"""New objects after which Python looks for garbage (by itself after 700): requests leave none."""


@click.command(
    cls=Command,
    short_help="Serve blocks of a bundle.",
    examples=(
        "ls-edge peer --peers peers.yaml --name orin-0 --bundle bundle",
        "ls-edge peer --peers peers.yaml --name nuc --bundle bundle --secret-key nuc.key_secret",
        "ls-edge peer --peers peers.yaml --name orin-0 --store store --secret-key orin-0.key_secret",
        "ls-edge peer --peers peers.yaml --name orin-0 --bundle bundle --metrics 127.0.0.1:9100",
    ),
)
@click.option("--peers", required=True, type=click.Path(path_type=Path), help="The peers.yaml of all machines.")
@click.option("--name", required=True, help="Which peer of peers.yaml this process is.")
@click.option("--bundle", type=click.Path(path_type=Path), help="Folder of the exported model.")
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    help="Instead of --bundle: for ls-edge push.",
)
@click.option("--secret-key", type=click.Path(path_type=Path), help="NAME.key_secret, where peers.yaml has keys.")
@click.option("--engine", type=click.Choice(["auto", "onnx", "tensorrt"]), help="Wins over peers.yaml.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads of the engine; wins over peers.yaml.")
@click.option("--strict-bundle", is_flag=True, help="Work only with processes that have this very bundle.")
@click.option("--metrics", metavar="HOST:PORT", help="Offer figures for Prometheus there (extra metrics).")
@click.option("--until-eof", is_flag=True, hidden=True)
@click.option("--log-json", is_flag=True, help="Log lines as JSON.")
def command(
    peers: Path, name: str, bundle: Path | None, store: Path | None, secret_key: Path | None,
    engine: EngineKind | None, threads: int | None, strict_bundle: bool, metrics: str | None,
    until_eof: bool, log_json: bool,
) -> int:  # fmt: skip
    """Serve the blocks that peers.yaml gives to NAME.

    With --store the bundle comes over the network: the peer begins with its key and an empty folder, takes what
    'ls-edge push' sends it, switches when it is told to, and keeps the bundle before.

    SIGTERM or Ctrl-C: no new work, finish or hand on what is held, leave within five seconds with exit code 0; a second
    one leaves at once.
    """
    from ls_edge.cli.descriptor_limit import require_descriptors
    from ls_edge.cli.metrics_listener import MAX_SCRAPE_CONNECTIONS, MetricsListener
    from ls_edge.core.logs import set_up
    from ls_edge.core.peers_file import load_peers
    from ls_edge.runtime.peer.peer import open_peer

    set_up(as_json=log_json)
    file = load_peers(peers)
    require_descriptors(file, 0 if metrics is None else MAX_SCRAPE_CONNECTIONS)
    if (bundle is None) == (store is None):
        raise UsageError(
            "give the model as --bundle FOLDER, or --store FOLDER for what 'ls-edge push' sends; one of them"
        )
    options: dict[str, Any] = {
        "secret_key": secret_key, "engine": engine, "threads": threads, "strict_bundle": strict_bundle,
        "until_eof": until_eof, "examine": _examine,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        # The port is taken before anything that takes long is opened.
        listener = stack.enter_context(MetricsListener(metrics)) if metrics is not None else None
        peer = open_peer(file, name, bundle, store=store, **options)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: peer.stop())
        if listener is not None:
            listener.serve_peer(file, peer)
        progress = None if log_json else _progress(name)
        if progress is not None:
            peer.on_step = progress
        gc.freeze()  # what was imported stays
        gc.set_threshold(_GC_AFTER)
        peer.serve()
    return 0


def _examine() -> list[FindingRow]:
    """What ``ls-edge doctor`` finds here, for ``ls-edge doctor --peers`` elsewhere."""
    from ls_edge.cli.diagnostics import examine
    from ls_edge.runtime.protocol.messages import FindingRow

    return [FindingRow(one.status, one.what, one.detail, one.fix or "") for one in examine()]


def _progress(name: str) -> Callable[[int, int, str], None] | None:
    """A bar while engines are opened, which takes minutes where TensorRT builds them; none without a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        return None
    bar = Progress(console=console, transient=True)
    task = bar.add_task(f"{name}: engines", total=None)

    def step(done: int, total: int, text: str) -> None:
        bar.start()
        bar.update(task, completed=done, total=total, description=f"{name}: {text or 'engines'}")
        if done >= total:
            bar.stop()

    return step
