"""``ls-edge keys``: make CURVE keys."""

from __future__ import annotations

from pathlib import Path

import click

from ls_edge.cli.command import Command, Group


@click.group(cls=Group)
def command() -> None:
    """Make CURVE keys, which encrypt links and decide who may join."""


@command.command("new", cls=Command, examples=("ls-edge keys new orin-0", "ls-edge keys new laptop --out keys"))
@click.argument("name")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("."), metavar="DIR", show_default="here",
    help="Where to write NAME.key and NAME.key_secret.",
)  # fmt: skip
def new(name: str, out: Path) -> None:
    """Make a key pair for the peer or source NAME and print its lines for peers.yaml.

    The secret file stays on the machine of NAME and goes to --secret-key there.
    """
    from ls_edge.core.errors import UsageError
    from ls_edge.runtime.transport.keys import new_keys

    if out.exists() and not out.is_dir():
        raise UsageError(f"--out {out} is no folder; name one")
    pair, public, secret = new_keys(name, out)
    key = pair.public.decode()
    click.echo(f'public_key: "{key}"')
    click.echo(f'- {{name: {name}, public_key: "{key}"}}')
    click.echo(f"wrote {public} and {secret}; the secret one is for --secret-key on its own machine only", err=True)
