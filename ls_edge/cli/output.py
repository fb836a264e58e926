"""Output of commands: JSON on standard output, warnings on standard error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from ls_edge.core.errors import printable
from ls_edge.core.files import write_output


def print_json(document: Any, *, one_line: bool = False) -> None:
    """Print a document in UTF-8, independent of the locale."""
    encoded = msgspec.json.encode(document)
    click.echo(encoded if one_line else msgspec.json.format(encoded, indent=1))


def write_json(path: Path, document: Any) -> None:
    """Write a document to a file that the user named."""
    write_output(path, msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")


def warn_each(texts: Iterable[str]) -> None:
    """Print warnings."""
    for text in texts:
        warn(text)


def warn(text: str) -> None:
    """Print a warning."""
    click.echo(f"ls-edge: warning: {printable(text)}", err=True)


def note_account(account: Mapping[str, Any]) -> None:
    """Describe the images and the ignored files on standard error."""
    from ls_edge.data.datasets import describe

    click.echo(describe(account), err=True)
