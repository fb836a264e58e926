"""``ls-edge status``: show the state of every peer, and why a peer cannot be used."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import DEBUG, Command, exit_code
from ls_edge.cli.inputs import peers_to_ask
from ls_edge.cli.output import print_json
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.parts import ENDS, ShownPart, shown_parts
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.text import counted, engine_name, format_ranges, name_blocks, short_id
from ls_edge.report.tables import STATE_STYLES
from ls_edge.report.terminal import PlainTable, as_list, fits, open_console, print_table
from ls_edge.runtime.clients.status import Observer, PeerStatus, unreached, unreached_text
from ls_edge.runtime.protocol.codecs import codec_of

_EVERY_S = 1.0
"""Interval between two looks of ``--watch``, in seconds."""
_BY_KEY = {"accepted": "green", "refused": "red", "none": "dim", "unknown": "dim"}


@click.command(
    cls=Command,
    debug="Write the latest events of the peers to standard error, and the traceback of an error.",
    examples=(
        "ls-edge status --peers peers.yaml",
        "ls-edge status --peers peers.yaml --secret-key laptop.key_secret --json",
        "ls-edge status --peers peers.yaml --watch",
        "ls-edge status --peers peers.yaml --check",
    ),
)
@options.PEERS
@options.SECRET_KEY
@options.flag("--check", "Only check and describe peers.yaml, without the network.")
@options.flag("--watch", "Look again every second, until Ctrl-C; with --json, a line for each look.")
@options.wait("Time for a peer to answer.", default=3.0, least=0.1, most=600)
@options.JSON
def command(
    peers: Path,
    secret_key: Path | None,
    check: bool,
    watch: bool,
    wait: float,
    as_json: bool,
) -> int:
    """Show the state of every peer, and why a peer cannot be used.

    Shows whether each peer of peers.yaml is reachable, accepts our key, and is warm; its blocks and queue; and the
    reason if it cannot be used. Names peers that have no link to each other. Sends no images.

    Exit code 3 if some peer is not alive, 1 if none is. With --check: 0, or 2 and the first mistake in the file.
    """
    if check:
        if watch:
            raise UsageError("--check reads only the file, so there is nothing to watch; leave out --check or --watch")
        _check(load_peers(peers), as_json=as_json)
        return 0
    file, keys = peers_to_ask(peers, secret_key)
    with Observer(file, keys=keys) as observer:
        if watch:
            _watch(observer, file, wait, as_json=as_json)
        found = observer.look(wait)
        if click.get_current_context().meta[DEBUG]:
            for name, text in observer.events(wait).items():
                for line in text.splitlines():
                    click.echo(f"{name} {line}", err=True)
    if as_json:
        print_json(document_of(found))
    else:
        console = open_console()
        print_table(_table(found), console)
        for line in remarks(found, file):
            console.print(line)
    alive = sum(status.state == PeerState.ALIVE for status in found.values())
    return exit_code(alive, len(found) - alive)


def _watch(observer: Observer, file: PeersFile, wait: float, *, as_json: bool) -> None:
    """Show the peers every second until the command is interrupted."""
    console = open_console()
    is_live = console.is_terminal and not as_json
    live = Live(console=console, auto_refresh=False, screen=not console.is_dumb_terminal)
    with live if is_live else contextlib.nullcontext():
        while True:
            found = observer.look(wait)
            if as_json:
                print_json(document_of(found), one_line=True)
            else:
                table = _table(found)
                notes = [Text(line, style="yellow", no_wrap=False, overflow="fold") for line in remarks(found, file)]
                if is_live:
                    shown = [table] if fits(table, console) else as_list(table)
                    live.update(Group(*shown, *notes), refresh=True)
                else:
                    print_table(table, console)
                    for note in notes:
                        console.print(note)
            observer.wait_until(lambda: False, _EVERY_S)


def document_of(found: Mapping[str, PeerStatus]) -> dict[str, Any]:
    """Return the document of ``--json``."""
    return {"peers": found, "unreached": unreached(found)}


def remarks(found: Mapping[str, PeerStatus], file: PeersFile) -> Iterator[str]:
    """Describe problems of the fleet: different models, missing links, and parts with few holders."""
    if len(models := {status.model_id for status in found.values() if status.model_id}) > 1:
        yield f"peers serve {len(models)} different models, which do not work together"
    if lacking := unreached(found):
        yield unreached_text(lacking)
    for name, status in found.items():
        if status.reached_through:
            yield f"{name} is reached through {', '.join(status.reached_through)}, but not from here"
    alive = {
        name: status.blocks
        for name, status in found.items()
        if status.state == PeerState.ALIVE or status.reached_through
    }
    holders = _holders(alive, file, _count([*alive.values(), *(peer.blocks.numbered for peer in file.peers)]))
    ways = {name: found[name].leads_to for name in alive if found[name].leads_to}
    seen_behind = set().union(*ways.values())
    if beyond := [part for part, names in holders.items() if not names and ENDS.get(part, part) in seen_behind]:
        yield f"{name_blocks(beyond)}: out of sight, behind {', '.join(ways)}"
    yield from _gaps({part: names for part, names in holders.items() if part not in beyond})


def _table(found: Mapping[str, PeerStatus]) -> PlainTable:
    """Return the table, with the column ``why`` if a peer cannot be used."""
    explained = any(status.reason for status in found.values())
    headings = ["peer", "state", "key", "blocks", ">queue", ">credits", ">block", ">latency", "bundle", "engine"]
    table = PlainTable(*headings, *["why"] * explained)
    for name, status in found.items():
        cells: list[str | Text] = [
            name,
            Text(status.state, style=STATE_STYLES[status.state]),
            Text(status.key, style=_BY_KEY[status.key]),
            format_ranges(status.blocks),
            "" if status.queue is None else f"{status.queue}",
            "" if status.credits is None else f"{status.credits}",
            "" if status.block_ms is None else f"{status.block_ms:.1f} ms",
            "" if status.latency_ms is None else f"{status.latency_ms:.1f} ms",
            Text(short_id(printable(status.bundle_id or "")), style="dim"),
            Text(engine_name(status.engine), style="dim"),
        ]
        table.add_row(*cells, *[status.reason or ""] * explained)
    return table


def _count(held: Iterable[Collection[ShownPart]]) -> int:
    """Return the number of blocks up to the last one that is held."""
    return 1 + max((part for parts in held for part in parts if isinstance(part, int) and part not in ENDS), default=-1)


def _holders(parts_of: Mapping[str, Collection[ShownPart]], file: PeersFile, count: int) -> dict[int, list[str]]:
    """Return the holders of each block, and of stem and head if a peer of the file has them."""
    ends = [end for end in ENDS if any(end in peer.blocks for peer in file.peers)]
    return {
        part: [name for name, held in parts_of.items() if ENDS.get(part, part) in held]
        for part in (*range(count), *ends)
    }


def _gaps(holders: Mapping[int, list[str]]) -> Iterator[str]:
    """Name parts without a holder, and parts with only one."""
    if unheld := [part for part, names in holders.items() if not names]:
        yield f"{name_blocks(unheld)}: no holder"
    blocks, ends = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for part, names in holders.items():
        if len(names) == 1:
            (ends if part in ENDS else blocks)[names[0]].append(part)
    if blocks:
        where = ", ".join(f"{format_ranges(parts)} only on {name}" for name, parts in blocks.items())
        noun = "blocks" if sum(map(len, blocks.values())) > 1 else "block"
        yield f"{noun} {where}; if one is lost, answers skip its blocks or fail"
    for name, parts in ends.items():
        yield f"{name_blocks(parts)} only on {name}; if it is lost, sources without a bundle get no answers"


def _check(file: PeersFile, *, as_json: bool) -> None:
    file.check_codecs(codec_of)
    count = _count(peer.blocks.numbered for peer in file.peers)
    file = file.of_model(count) if count else file  # without a number, the file does not tell how many blocks there are
    holders = _holders({peer.name: shown_parts(peer.blocks) for peer in file.peers}, file, count)
    if as_json:
        document: dict[str, Any] = {
            "peers": {
                peer.name: {"address": peer.address, "blocks": shown_parts(peer.blocks.listed) or ["all"]}
                for peer in file.peers
            },
            "sources": [source.name for source in file.sources],
            "keys": file.uses_keys,
            "insecure": file.insecure,
            "holders": {str(ENDS.get(part, part)): names for part, names in holders.items()},
        }
        print_json(document)
        return
    keys = "with keys" if file.uses_keys else "insecure, without keys" if file.insecure else "on the loopback, no keys"
    sources = ", ".join(source.name for source in file.sources) or "any"
    peers = counted(len(file.peers), "peer")
    blocks = counted(count, "block") if all(peer.blocks.listed for peer in file.peers) else "all blocks"
    click.echo(f"{file.path}: valid; {peers}, {blocks}, {keys}, sources: {sources}")
    for peer in file.peers:
        bind = "" if peer.bind == peer.address else f", listens on {peer.bind}"
        click.echo(f"  {peer.name}  {peer.address}{bind}  blocks {format_ranges(peer.blocks.listed) or 'all'}")
    for line in _gaps(holders):
        click.echo(line)
