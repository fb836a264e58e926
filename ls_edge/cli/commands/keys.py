"""``ls-edge keys``: create CURVE keys."""

from __future__ import annotations

from pathlib import Path

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command, Group
from ls_edge.runtime.transport.keys import new_keys


@click.group(cls=Group)
def command() -> None:
    """Create CURVE keys.

    Keys encrypt links and decide who may join.
    """


@command.command("new", cls=Command, examples=("ls-edge keys new orin-0", "ls-edge keys new laptop --out keys"))
@click.argument("name")
@options.path(
    "--out",
    "Folder for NAME.key and NAME.key_secret.",
    default=Path(),
    type=options.FOLDER,
    metavar="DIR",
    show_default="here",
)
def new(name: str, out: Path) -> None:
    """Create a key pair for the peer or source NAME.

    Prints its lines for peers.yaml. The secret file stays on the machine of NAME, for --secret-key there.
    """
    pair, public, secret = new_keys(name, out)
    key = pair.public.decode()
    click.echo(f'public_key: "{key}"')
    click.echo(f'- {{name: {name}, public_key: "{key}"}}')
    click.echo(f"wrote {public} and {secret}; the secret one is for --secret-key on its own machine only", err=True)
