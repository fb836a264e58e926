"""Write the command reference from the commands' own help: ``python docs/reference.py``.

The text depends on the commands alone, not on the terminal; a test compares it with ``docs/commands.md``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from ls_edge.cli.command import Command
from ls_edge.cli.main import SETTINGS, cli

WIDTH = 100

_HEAD = """# Commands

The `--help-all` of every command. `make docs` generates this file; change the help texts instead.

Exit codes: 0 success, 1 failure, 2 wrong usage or configuration, 3 finished but degraded (some answer skipped blocks or
failed), 130 after Ctrl-C, 143 after SIGTERM (`peer` and `serve` finish their work and exit with 0). An error is one
line on standard error; `--debug` adds the traceback.

To complete commands, options, and their values in your shell, add one line to its start-up file:

```bash
eval "$(_LS_EDGE_COMPLETE=bash_source ls-edge)"     # ~/.bashrc
eval "$(_LS_EDGE_COMPLETE=zsh_source ls-edge)"      # ~/.zshrc
_LS_EDGE_COMPLETE=fish_source ls-edge | source      # ~/.config/fish/config.fish
```
"""


def reference() -> str:
    """Return the whole of ``docs/commands.md``."""
    sections = [_HEAD]
    for context in _contexts(_context(cli, "ls-edge", None)):
        command = context.command
        help_ = (command.full_help(context) if isinstance(command, Command) else command.get_help(context)).rstrip()
        sections.append(f"## {context.command_path}\n\n```text\n{help_}\n```\n")
    return "\n".join(sections)


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    settings: dict[str, Any] = {**SETTINGS, "terminal_width": WIDTH, "color": False}
    return click.Context(command, info_name=name, parent=parent, **settings)


def _contexts(context: click.Context) -> Iterator[click.Context]:
    yield context
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            if command is not None and not command.hidden:
                yield from _contexts(_context(command, name, context))


if __name__ == "__main__":
    sys.stdout.buffer.write(reference().encode())  # UTF-8, whatever the locale
