"""``ls-edge keys``: create CURVE keys."""

from __future__ import annotations

from pathlib import Path

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command, Group
from ls_edge.core.files import write_output
from ls_edge.core.peers_file import place_of_key
from ls_edge.core.validation import yaml_text
from ls_edge.runtime.transport.keys import new_keys


@click.group(cls=Group)
def command() -> None:
    """Create CURVE keys.

    Keys encrypt links and decide who may join.
    """


@command.command(
    "new",
    cls=Command,
    examples=(
        "ls-edge keys new orin-0",
        "ls-edge keys new laptop --out keys",
        "ls-edge keys new orin-0 --into peers.yaml",
    ),
)
@click.argument("name")
@options.output_folder("Folder for NAME.key and NAME.key_secret.", default=Path(), show_default="here")
@options.output("--into", "peers.yaml to write the public key into, at its entry NAME.")
def new(name: str, out: Path, into: Path | None) -> None:
    """Create a key pair for the peer or source NAME.

    Prints the lines for peers.yaml. Keep the secret file on the machine of NAME, and give it to --secret-key there.
    """
    place = None if into is None else place_of_key(into, name)
    pair, public, secret = new_keys(name, out)
    key = pair.public.decode()
    if into is not None and place is not None:
        write_output(into, f'{place[0]}"{key}"{place[1]}')
        click.echo(f"wrote the public key of {name} to {into}", err=True)
    click.echo(f'public_key: "{key}"')
    click.echo(f'- {{name: {yaml_text(name)}, public_key: "{key}"}}')
    click.echo(f"wrote {public} and {secret}; the secret one is for --secret-key on its own machine only", err=True)
