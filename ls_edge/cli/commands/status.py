"""``ls-edge status``: the state of every peer, and the reason if it cannot be used."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import DEGRADED, Command
from ls_edge.cli.descriptor_limit import require_descriptors
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.logs import set_up
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.records import PeerState
from ls_edge.core.text import format_ranges, name_blocks
from ls_edge.report.tables import STATE_STYLES
from ls_edge.report.terminal import PlainTable, open_console, print_table
from ls_edge.runtime.clients.status import Observer, PeerStatus
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.transport.keys import load_secret

_EVERY_S = 1.0
"""Interval of ``--watch``, in seconds."""
_BY_KEY = {"accepted": "green", "refused": "red", "none": "dim", "unknown": "dim"}


@click.command(
    cls=Command,
    examples=(
        "ls-edge status --peers peers.yaml",
        "ls-edge status --peers peers.yaml --watch",
        "ls-edge status --peers peers.yaml --secret-key laptop.key_secret --json",
        "ls-edge status --peers peers.yaml --check --bundle bundle",
    ),
)
@options.PEERS
@options.SECRET_KEY
@options.path("--bundle", "Bundle to compare with.", metavar="DIR")
@click.option("--check", is_flag=True, help="Only check and describe peers.yaml, without the network.")
@click.option("--watch", is_flag=True, help="Repeat until Ctrl-C.")
@options.wait("Time for a peer to answer.", default=3.0, least=0.1, most=600)
@click.option("--json", "as_json", is_flag=True, help="Output as JSON; with --watch, one line per second.")
def command(
    peers: Path, secret_key: Path | None, bundle: Path | None, check: bool, watch: bool, wait: float, as_json: bool
) -> int:
    """Show the state of every peer, and why a peer cannot be used.

    Shows whether each peer of peers.yaml is reachable, accepts our key, and is warm; its blocks and queue; and the
    reason if it cannot be used. Sends no images.

    Exit code 3 if some peer is not alive, 1 if none is. With --check: 0, or 2 and the first mistake in the file; with
    --bundle, a block that the bundle lacks is also a mistake.
    """
    if check and watch:
        raise UsageError("--check does not look at peers, so there is nothing to watch; leave one out")
    file = load_peers(peers)
    file.check_codecs(CODECS)
    opened = None if bundle is None else Bundle.open(bundle)
    if opened is not None:
        file.check_blocks(opened.num_blocks)
    if check:
        _print_check(file, opened, as_json=as_json)
        return 0
    set_up(as_json=False, level=50)  # the table shows what peers report
    require_descriptors(file)

    with Observer(file, keys=None if secret_key is None else load_secret(secret_key)) as observer:
        if watch:
            _watch(observer, opened, wait, as_json=as_json)
        found = _compared(observer.look(wait), opened)
    if as_json:
        click.echo(json.dumps(_document(found), indent=2))
    else:
        _print(found, file)
    alive = sum(status.state == PeerState.ALIVE for status in found.values())
    return 0 if alive == len(found) else DEGRADED if alive else 1


def _compared(found: Mapping[str, PeerStatus], bundle: Bundle | None) -> dict[str, PeerStatus]:
    """Add a reason for each peer that serves another model than ``bundle``, or another bundle of it."""
    result = dict(found)
    for name, status in found.items():
        if bundle is None or status.model_id is None or status.reason is not None:
            continue
        manifest = bundle.manifest
        if status.model_id != manifest.model_id:
            reason = f"it serves model {status.model_id[:16]}, --bundle is {manifest.model_id[:16]}"
            result[name] = msgspec.structs.replace(status, state=PeerState.REFUSED, reason=reason)
        elif status.bundle_id != manifest.bundle_id:
            reason = f"another bundle of the same model: {str(status.bundle_id)[:16]}, not {manifest.bundle_id[:16]}"
            result[name] = msgspec.structs.replace(status, reason=reason)
    return result


def _document(found: Mapping[str, PeerStatus]) -> dict[str, Any]:

    return {"peers": {name: msgspec.to_builtins(status) for name, status in found.items()}}


def _watch(observer: Any, bundle: Bundle | None, wait: float, *, as_json: bool) -> None:
    """Look repeatedly, until Ctrl-C."""
    if as_json:
        while True:
            click.echo(json.dumps(_document(_compared(observer.look(wait), bundle))))
            observer.listen(_EVERY_S)
    console = open_console()
    if not console.is_terminal:
        while True:
            _print(_compared(observer.look(wait), bundle), observer.peers)
            observer.listen(_EVERY_S)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            found = _compared(observer.look(wait), bundle)
            live.update(_table(found), refresh=True)
            observer.listen(_EVERY_S)


def _print(found: Mapping[str, PeerStatus], file: PeersFile) -> None:

    console = open_console()
    print_table(_table(found), console)
    models = {status.model_id for status in found.values() if status.model_id}
    if len(models) > 1:
        console.print(f"peers serve {len(models)} different models, which do not work together", soft_wrap=True)
    for line in _gaps({name: s.blocks if s.state == PeerState.ALIVE else () for name, s in found.items()}, file):
        console.print(line, soft_wrap=True)


def _table(found: Mapping[str, PeerStatus]) -> Table:

    table = PlainTable()
    for name in ("peer", "state", "key", "blocks"):
        table.add_column(name)
    for name in ("queue", "latency"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("bundle", "engine", "why"):
        table.add_column(name)
    for name, status in found.items():
        table.add_row(
            Text(printable(name)),
            Text(status.state, style=STATE_STYLES[status.state]),
            Text(status.key, style=_BY_KEY[status.key]),
            format_ranges(status.blocks),
            "" if status.queue is None else f"{status.queue}",
            "" if status.latency_ms is None else f"{status.latency_ms:.1f} ms",
            Text(printable(status.bundle_id or "")[:8], style="dim"),
            Text(printable(status.engine), style="dim"),
            Text(printable(status.reason or status.address), style="" if status.reason else "dim"),
        )
    return table


def _gaps(blocks_of: Mapping[str, tuple[int, ...]], file: PeersFile, blocks: int | None = None) -> list[str]:
    """Return lines about blocks with no holder or only one; ``blocks`` defaults to those of the file."""
    count = 1 + max(block for peer in file.peers for block in peer.blocks) if blocks is None else blocks
    holders: dict[int, list[str]] = {block: [] for block in range(count)}
    for name, held in blocks_of.items():
        for block in held:
            holders.setdefault(block, []).append(name)
    unheld = [block for block, names in holders.items() if not names]
    one = [block for block, names in holders.items() if len(names) == 1]
    lines = []
    if unheld:
        lines.append(f"{name_blocks(unheld)}: no holder")
    if one:
        lines.append(f"{name_blocks(one)}: one holder only; without it answers skip {_them(one)} or fail")
    return lines


def _them(blocks: list[int]) -> str:
    return "it" if len(blocks) == 1 else "them"


def _print_check(file: PeersFile, bundle: Bundle | None, *, as_json: bool) -> None:

    count = bundle.num_blocks if bundle is not None else 1 + max(block for peer in file.peers for block in peer.blocks)
    holders = {block: [peer.name for peer in file.peers if block in peer.blocks] for block in range(count)}
    if as_json:
        document = {
            "peers": {peer.name: {"address": peer.address, "blocks": list(peer.blocks)} for peer in file.peers},
            "sources": [source.name for source in file.sources],
            "keys": file.uses_keys,
            "insecure": file.insecure,
            "holders": {str(block): names for block, names in holders.items()},
            "bundle_id": None if bundle is None else bundle.manifest.bundle_id,
        }
        click.echo(json.dumps(document, indent=2))
        return
    keys = "with keys" if file.uses_keys else "insecure, without keys" if file.insecure else "on the loopback, no keys"
    sources = ", ".join(source.name for source in file.sources) or "any"
    many = "" if len(file.peers) == 1 else "s"
    click.echo(f"{file.path}: in order; {len(file.peers)} peer{many}, {count} blocks, {keys}, sources: {sources}")
    for peer in file.peers:
        bind = "" if peer.bind == peer.address else f", listens on {peer.bind}"
        click.echo(f"  {peer.name}  {peer.address}{bind}  blocks {format_ranges(peer.blocks)}")
    for line in _gaps({peer.name: peer.blocks for peer in file.peers}, file, count):
        click.echo(line)
    if bundle is None:
        click.echo("without a bundle, its blocks were not compared; give --bundle FOLDER")
