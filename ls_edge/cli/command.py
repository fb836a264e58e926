"""Base classes of commands, and descriptions of errors."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import click

HELP_OPTIONS = ["-h", "--help"]
DEGRADED = 3
"""Exit code of a run that finished, but with an answer that skipped blocks or with a failed request."""


class Group(click.Group):
    """Group of commands with both names of its help option in every context."""

    def get_help_option_names(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return both names; see :meth:`Command.get_help_option_names`."""
        return HELP_OPTIONS


class Command(click.Command):
    """Command with ``--debug``, which shows the traceback of an error, and examples at the end of its help."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        """Make a command; ``examples`` are command lines as a user types them."""
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        # main() looks for --debug among the arguments, since parsing may be what fails.
        self.params.append(
            click.Option(["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error.")
        )

    def get_help_option_names(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return both names, since click caches the option that it creates first for all contexts."""
        return HELP_OPTIONS

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and report engines that it builds."""
        from ls_edge.core.logs import show_engine_status

        show_engine_status()
        return super().invoke(ctx)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, one per line and never wrapped, so that they can be copied."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            formatter.write("\nExamples:\n")
            for example in self.examples:
                formatter.write(f"  {example}\n")


def exit_code(answered: int, imperfect: int) -> int:
    """Return 1 if nothing was answered, 3 if some answers skipped blocks or some requests failed, else 0."""
    return (DEGRADED if imperfect else 0) if answered else 1


def describe(error: BaseException) -> str:
    """Describe an expected error in one line, with advice."""
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:200]!r} holds bytes that are not UTF-8; rename that file or folder"
    if isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        return f"not enough memory{why}; use a smaller batch, or end other programs"
    if not isinstance(error, OSError):
        return str(error)
    what = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        what = f"{error.filename}: {what}"
    if error.errno == errno.ENOSPC:
        return f"{what}; make room where the output goes"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{what}; allow more files and sockets, for example with 'ulimit -n 1024'"
    return f"{what} (--debug shows where)"
