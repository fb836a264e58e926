"""``ls-edge peers``: write the peers.yaml and the keys of a fleet."""

from __future__ import annotations

import ipaddress
import platform
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command, Group
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import write_output
from ls_edge.core.peers_file import is_loopback, is_name
from ls_edge.runtime.transport.keys import new_keys

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
    may fail; edit peers.yaml to distribute the blocks. Prints the commands that copy the files to each board and start
    its peer.
    """
    source = source or platform.node().split(".")[0]
    fleet = _named(hosts)
    if source in dict(fleet):
        raise UsageError(f"{source!r} is the source and a board; give another name with --source or NAME=HOST")
    path = out / "peers.yaml"
    if path.exists():
        raise UsageError(f"{path} exists and is not overwritten; give another --out, or remove it first")
    blocks = f"0-{(_BLOCKS if bundle is None else Bundle.open(bundle).num_blocks) - 1}"
    existing = [file for name in (source, *dict(fleet)) for file in out.glob(f"{name}.key*")]
    if existing:
        raise UsageError(f"{existing[0]} exists and is not overwritten; give another --out, or remove it first")
    keys = {name: new_keys(name, out)[0].public.decode() for name in (source, *dict(fleet))}
    lines = ["sources:", f'  - {{name: {source}, public_key: "{keys[source]}", may_push: true}}', "peers:"]
    ports = Counter[str]()
    for name, host in fleet:
        port = _PORT + ports[host]
        address = f"tcp://{host}:{port}"
        bind = address if is_loopback(address) else f"tcp://0.0.0.0:{port}"
        lines += [f'  - {{name: {name}, address: "{address}", bind: "{bind}", blocks: "{blocks}",']
        lines += [f'     public_key: "{keys[name]}"}}']
        ports[host] += 1
    write_output(path, "\n".join(lines) + "\n")
    click.echo(f"wrote {path} and the keys of {source}, {', '.join(dict(fleet))}", err=True)
    for name, host in fleet:
        files = [shlex.quote(str(file)) for file in (path, out / f"{name}.key_secret")]
        click.echo(f"# copy the files of {name}:\nscp {' '.join(files)} {host}:")
        click.echo(
            f"# on {name}:\nls-edge peer --peers peers.yaml --name {name} --store store --secret-key {name}.key_secret"
        )


def _named(hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and host of each board."""
    found: list[tuple[str, str]] = []
    for number, text in enumerate(hosts):
        name, equals, host = text.rpartition("=")
        if not equals:
            name = f"peer-{number}" if _is_address(host) else host.split(".")[0]
        if not is_name(name) or not host:
            raise UsageError(f"{text!r} is not a host; write orin-0, 10.0.0.11 or orin-0=10.0.0.11")
        if name in dict(found):
            raise UsageError(f"two boards are called {name!r}; name them, for example {name}-b={host}")
        found.append((name, f"[{host}]" if ":" in host else host))
    return found


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
