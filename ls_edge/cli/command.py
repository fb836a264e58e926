"""Base classes of commands, and descriptions of errors."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Any

import click

from ls_edge.core.errors import THREAD_LIMIT, LsEdgeError

HELP_OPTIONS = ["-h", "--help"]
DEGRADED = 3
"""Exit code of a run that finished, but with an answer that skipped blocks or with a failed request."""


def _both_help_options(self: click.Command, ctx: click.Context) -> list[str]:  # noqa: ARG001
    """Return both names, since click caches the option that it creates first for all contexts."""
    return HELP_OPTIONS


class Group(click.Group):
    """Group of commands with both names of its help option in every context."""

    get_help_option_names = _both_help_options

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command; an unknown name fails with a similar one, which may be an option."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            from ls_edge.core.validation import unknown_name  # which takes long to import

            options = [name for option in self.get_params(ctx) for name in option.opts]
            ctx.fail(unknown_name("command", args[0], [*self.list_commands(ctx), *options]))
        return super().resolve_command(ctx, args)


DEBUG = "ls_edge.debug"
"""Key of a context's ``meta`` whose value is whether ``--debug`` was given."""
RARE = frozenset(
    ("batch_size", "engine", "log_json", "provider", "seed", "strict_bundle", "threads", "token_file", "wait",
     "workers")
)  # fmt: skip
"""Parameters that ``--help`` leaves out, unless its text names them, and ``--help-all`` shows."""
EVERYWHERE = ("--json", "--debug", "--help", "--help-all")
"""Options that one line at the end of the help names."""
_RANGE = re.compile(r"(?:; )?-?\d[\d.]*<=?x(?:<=?\d+)?|(?:; )?x>=?-?\d[\d.]*")
_MOST_SHOWN = 1000
"""Largest end of a range that help shows: nobody meets larger ones."""


class Command(click.Command):
    """Command with ``--debug``, short and full help, and examples at their end."""

    get_help_option_names = _both_help_options

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        debug: str = "Show the traceback of an error.",
        **kwargs: Any,
    ) -> None:
        """Make a command; ``examples`` are command lines as a user types them, ``debug`` is the help of ``--debug``."""
        super().__init__(*args, **kwargs)
        self.examples = tuple(examples)
        self._shows_all = False
        # main() looks for --debug among the arguments, since parsing may be what fails.
        self.params.append(
            click.Option(
                ["--debug"],
                is_flag=True,
                expose_value=False,
                callback=lambda ctx, _parameter, value: ctx.meta.__setitem__(DEBUG, value),
                help=debug,
            )
        )
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show all options and exit.",
            )
        )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, and report engines that it builds."""
        from ls_edge.core.logs import show_engine_status

        show_engine_status()
        return super().invoke(ctx)

    def full_help(self, ctx: click.Context) -> str:
        """Return the help with all options."""
        self._shows_all = True
        try:
            return self.get_help(ctx)
        finally:
            self._shows_all = False

    def _show_all(self, ctx: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            click.echo(self.full_help(ctx))
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options that most people set, or all of them, and one line with those of all commands."""
        rows, names, told = [], set(), " ".join((self.help or "", *self.examples))
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            name = parameter.opts[-1]
            names.add(name)
            is_rare = name in EVERYWHERE or (parameter.name in RARE and name not in told)
            if record is not None and record[0] and (self._shows_all or not is_rare):
                rows.append((record[0], _without_large_range(record[1])))
        with formatter.section("Options"):
            formatter.write_dl(rows)
        if not self._shows_all:
            formatter.write(f"\nAlso: {', '.join(name for name in EVERYWHERE if name in names)}\n")

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, one per line and never wrapped, so that they can be copied."""
        super().format_epilog(ctx, formatter)
        if self.examples:
            formatter.write("\nExamples:\n")
            for example in self.examples:
                formatter.write(f"  {example}\n")


def _without_large_range(text: str) -> str:
    """Return a help text without its range if that has no end that a person can meet."""

    def shown(found: re.Match[str]) -> str:
        ends = re.findall(r"[\d.]+", found[0])
        return found[0] if len(ends) == 2 and float(ends[1]) <= _MOST_SHOWN else ""

    return _RANGE.sub(shown, text).replace("  []", "").replace("[; ", "[")


def exit_code(answered: int, imperfect: int) -> int:
    """Return 1 if nothing was answered, 3 if some answers skipped blocks or some requests failed, else 0."""
    return (DEGRADED if imperfect else 0) if answered else 1


def is_thread_limit(error: BaseException) -> bool:
    """Return whether a thread or a process could not be started because there are too many."""
    return (isinstance(error, RuntimeError) and "can't start new thread" in str(error)) or (
        isinstance(error, BlockingIOError) and error.errno == errno.EAGAIN
    )


def is_expected(error: Exception) -> bool:
    """Return whether an error is described in one line, without a traceback."""
    return (
        isinstance(error, (LsEdgeError, OSError, UnicodeEncodeError, MemoryError))
        or is_thread_limit(error)
        or _is_of_sockets(error)
        or type(error).__name__ == "OutOfMemoryError"  # of torch, which few commands load
        or "DefaultCPUAllocator: " in str(error)
    )


def _is_of_sockets(error: BaseException) -> bool:
    return type(error).__name__ == "ZMQError"  # by name, because not every command loads zmq


def describe(error: BaseException) -> str:
    """Describe an expected error in one line, with advice."""
    if _is_of_sockets(error):
        error = OSError(getattr(error, "errno", None), str(error))
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object[:200]!r} holds bytes that are not UTF-8; rename that file or folder"
    if isinstance(error, MemoryError):
        why = f" ({error})" if str(error) else ""
        return f"not enough memory{why}; use a smaller batch, or end other programs"
    if is_thread_limit(error):
        return THREAD_LIMIT
    if not isinstance(error, OSError):
        return str(error)
    what = error.strerror or str(error) or type(error).__name__
    if what.startswith("No usable temporary directory"):
        return f"{what}; mount a folder, such as docker --tmpfs /tmp, or set TMPDIR"
    if error.filename is not None:
        what = f"{error.filename}: {what}"
    if error.errno == errno.ENOSPC:
        return f"{what}; make room where the output goes"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"{what}; allow more files and sockets, for example with 'ulimit -n 1024'"
    return f"{what} (--debug shows where)"
