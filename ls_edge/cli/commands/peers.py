"""``ls-edge peers``: write the peers.yaml and the keys of a fleet."""

from __future__ import annotations

import itertools
import platform
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command, Group
from ls_edge.cli.peers_text import with_entry, without_entry, write_checked
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.peers_file import (
    check_name,
    host_of,
    ip_of,
    is_host,
    is_ipv6,
    is_loopback,
    is_name,
    load_peers,
    place_of_key,
)
from ls_edge.core.text import format_ranges
from ls_edge.core.validation import yaml_text
from ls_edge.device.diagnostics import PEER_MIB
from ls_edge.runtime.transport.keys import KeyPair, new_keys

_PORT = 5555
_BLOCKS = 12
"""Number of blocks of ViT-Ti, ViT-S and ViT-B."""


@click.group(cls=Group)
def command() -> None:
    """Describe a fleet in a peers.yaml."""


@command.command(
    "new",
    cls=Command,
    examples=(
        "ls-edge peers new orin-0 orin-1 --bundle bundle",
        "ls-edge peers new pi-0=10.0.0.11 pi-1=10.0.0.12 --source laptop --out fleet",
    ),
)
@click.argument("hosts", nargs=-1, required=True, metavar="[NAME=]HOST...")
@options.bundle("Model that sets the number of blocks.  [default: 12 blocks]")
@options.text("--source", "Name of the machine that sends images and pushes models.  [default: the host name]", "NAME")
@options.output_folder("Folder for peers.yaml and keys.", default=Path(), show_default="here")
def new(hosts: tuple[str, ...], bundle: Path | None, source: str | None, out: Path) -> None:
    """Write peers.yaml and the keys of a fleet.

    Each HOST is the name or address of a board, as other machines reach it. Every board gets all blocks, so any of them
    may fail; edit peers.yaml to split the model. Prints the commands that copy the files to each board and start
    its peer.
    """
    source = source or platform.node().split(".")[0]
    check_name(source)
    fleet = _named(hosts)
    if source in dict(fleet):
        raise UsageError(f"{source!r} is the source and a board; give another name with --source or NAME=HOST")
    path = out / "peers.yaml"
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten; give another --out, or remove it first")
    model = None if bundle is None else Bundle.open(bundle)
    count = _BLOCKS if model is None else model.num_blocks
    existing = [file for name in (source, *dict(fleet)) for file in out.glob(f"{name}.key*")]
    if existing:
        raise UsageError(f"{existing[0]} exists and is not overwritten; give another --out, or remove it first")
    keys = {name: _new_keys(name, out)[0].public.decode() for name in (source, *dict(fleet))}
    lines = ["sources:", f'  - {{name: {yaml_text(source)}, public_key: "{keys[source]}", may_push: true}}', "peers:"]
    if model is not None:
        mib = PEER_MIB + 1.05 * sum(model.memory_of([f"block {index}" for index in range(count)])) / 2**20
        need = f"a peer with blocks 0-{count - 1} needs {mib:,.0f} MiB of memory on a CPU; for less, use 'ls-edge plan'"
        lines.insert(-1, f"# {need}")
        click.echo(need, err=True)
    ports = Counter[str]()
    for name, host in fleet:
        lines.append(f"  - {_entry(name, host, _PORT + ports[host], f'0-{count - 1}', keys[name])}")
        ports[host] += 1
    write_output(path, "\n".join(lines) + "\n")
    click.echo(f"wrote {path} and the keys of {source}, {', '.join(dict(fleet))}", err=True)
    for name, host in fleet:
        _print_start(path, out / f"{name}.key_secret", name, host)


@command.command(
    "add",
    cls=Command,
    examples=("ls-edge peers add orin-2 --into peers.yaml", "ls-edge peers add pi-3=10.0.0.13 --into peers.yaml"),
)
@click.argument("host", metavar="[NAME=]HOST")
@options.output("--into", "peers.yaml to write the entry into.", required=True)
@options.text("--blocks", "Blocks of the board.  [default: all that the file names]", "BLOCKS")
@options.output_folder("Folder for the key.", default=Path(), show_default="here")
def add(host: str, into: Path, blocks: str | None, out: Path) -> None:
    """Write the entry and the key of another board.

    Prints the commands that start it, and the one that makes the running fleet follow the file.
    """
    (name, address), *_ = _named([host])
    file = load_peers(into)
    if not file.uses_keys:
        raise UsageError(f"{into} has no keys; write the entry by hand, or make a file with 'ls-edge peers new'")
    if name in {*(peer.name for peer in file.peers), *(source.name for source in file.sources)}:
        raise UsageError(f"{into} already has {name!r}; give another NAME=HOST, or use 'ls-edge peers replace'")
    named = sorted({block for peer in file.peers for block in peer.blocks.numbered})
    used = {peer.address for peer in file.peers}
    port = next(port for port in itertools.count(_PORT) if f"tcp://{address}:{port}" not in used)
    pair, _, secret = _new_keys(name, out)
    try:
        entry = _entry(name, address, port, blocks or (format_ranges(named) if named else "all"), pair.public.decode())
        write_checked(into, with_entry(into, entry))
    except BaseException:  # without the entry, the key would only prevent another attempt
        for path in (secret, secret.with_suffix(".key")):
            path.unlink()
        raise
    click.echo(f"wrote {name} into {into}, and its key to {secret}", err=True)
    _print_start(into, secret, name, address)
    _print_apply(into)


@command.command("remove", cls=Command, examples=("ls-edge peers remove orin-1 --into peers.yaml",))
@click.argument("name")
@options.output("--into", "peers.yaml to remove the entry from.", required=True)
def remove(name: str, into: Path) -> None:
    """Remove the entry of a board.

    Prints the command that makes the running fleet follow the file; the board then hands on its requests.
    """
    write_checked(into, without_entry(into, name))
    click.echo(f"removed {name} from {into}", err=True)
    _print_apply(into)


@command.command("replace", cls=Command, examples=("ls-edge peers replace orin-1 --into peers.yaml --out new-keys",))
@click.argument("name")
@options.output("--into", "peers.yaml to write the new key into.", required=True)
@options.output_folder("Folder for the new key.", default=Path(), show_default="here")
def replace(name: str, into: Path, out: Path) -> None:
    """Give the entry of a board a new key, for another board that takes its place.

    Prints the commands that start it, and the one that makes the running fleet follow the file.
    """
    host = host_of(load_peers(into).peer(name).address)
    before, after = place_of_key(into, name)
    pair, _, secret = _new_keys(name, out)
    write_checked(into, f'{before}"{pair.public.decode()}"{after}')
    click.echo(f"wrote the new key of {name} into {into}, and the secret one to {secret}", err=True)
    _print_start(into, secret, name, host)
    _print_apply(into)


def _new_keys(name: str, out: Path) -> tuple[KeyPair, Path, Path]:
    """Make a key pair; git ignores secret keys in its folder unless that has its own rules."""
    made = new_keys(name, out)
    if not (ignored := out / ".gitignore").exists():
        ignored.write_text("*.key_secret\n")
    return made


def _entry(name: str, host: str, port: int, blocks: str, key: str) -> str:
    """Return an entry of peers.yaml."""
    address = f"tcp://{host}:{port}"
    everywhere = f"tcp://[::]:{port}" if host.startswith("[") else f"tcp://0.0.0.0:{port}"
    bind = address if is_loopback(address) else everywhere
    name = yaml_text(name)
    return f'{{name: {name}, address: "{address}", bind: "{bind}", blocks: "{blocks}",\n     public_key: "{key}"}}'


def _print_start(path: Path, secret: Path, name: str, host: str) -> None:
    """Print the commands that copy the files of a board and start its peer."""
    files = " ".join(shlex.quote(str(file)) for file in (path, secret))
    click.echo(f"# copy the files of {name}:\nscp {files} {host}:")
    start = f"ls-edge peer --peers {shlex.quote(path.name)} --name {name} --store store --secret-key {secret.name}"
    click.echo(f"# on {name}:\n{start}")


def _print_apply(path: Path) -> None:
    click.echo(f"# then, here:\nls-edge apply {shlex.quote(str(path))} --bundle BUNDLE --secret-key SOURCE.key_secret")


def _named(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and host of each board."""
    found: list[tuple[str, str]] = []
    for number, text in enumerate(hosts):
        name, equals, host = text.rpartition("=")
        host = f"[{host}]" if is_ipv6(host) else host
        if not equals:
            name = f"peer-{number}" if ip_of(host.strip("[]")) is not None else host.split(".")[0]
        if not is_name(name) or not is_host(host):
            raise UsageError(f"{text!r} is not a host; write orin-0, 10.0.0.11 or orin-0=10.0.0.11, without a port")
        if name in dict(found):
            raise UsageError(f"two boards are called {name!r}; name them, for example {name}-b={host}")
        found.append((name, host))
    return found
