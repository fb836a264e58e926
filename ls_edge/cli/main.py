"""The command line: one module per command, imported when the command is called.

``ls-edge --help`` and every ``ls-edge COMMAND --help`` work without torch, timm, onnx and an engine library, so
command modules import these in functions.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from ls_edge.cli import interrupts
from ls_edge.cli.command import HELP_OPTIONS, Group, describe, is_expected
from ls_edge.core.errors import LsEdgeError, printable
from ls_edge.core.logs import error_line
from ls_edge.data.frame_source import visible_name
from ls_edge.version import __version__

GROUPS = {
    "Start": {
        "demo": "Train, export, serve and measure on embedded data.",
        "doctor": "Find what is missing or misconfigured.",
    },
    "Model": {
        "train": "Fine-tune a vision transformer for any order of its blocks.",
        "eval": "Measure accuracy by order and with blocks missing.",
        "export": "Split a trained model into one ONNX file per block.",
        "verify": "Check the files of a bundle, and its outputs.",
    },
    "Fleet": {
        "keys": "Create keys.",
        "peers": "Write the peers.yaml and the keys of a fleet.",
        "peer": "Serve blocks of a bundle.",
        "apply": "Change a running fleet: model, blocks, peers.",
        "status": "Show every peer, and why one cannot be used.",
    },
    "Use": {
        "predict": "Classify images, videos and cameras.",
        "run": "Send a data set through the peers, and measure.",
        "serve": "Classify images over HTTP.",
        "report": "Compare runs in a table and on a page.",
    },
    "Plan": {
        "bench": "Time the engines of a bundle on a device.",
        "build": "Build engines in advance.",
        "plan": "Assign blocks to devices, and tell whether that pays off.",
        "simulate": "Simulate a fleet of devices that fail and return.",
    },
    "Research": {
        "analyze": "Show what each block does, and how that depends on its place.",
        "publish": "Write a run or a bundle with a model card.",
    },
}
COMMANDS = {name: text for group in GROUPS.values() for name, text in group.items()}


class _LazyGroup(Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"ls_edge.cli.commands.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # for which click would print an empty line
            raise click.Abort from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        for title, commands in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(list(commands.items()))


_URL = re.compile(r"[a-z][a-z0-9+.-]*:/.+", re.IGNORECASE)
_LOGIN = re.compile(r"(:/+)[^\s/@]*:\S*@")
"""User and password of a URL, which a message about arguments in the wrong place would repeat."""
SETTINGS = {"help_option_names": HELP_OPTIONS, "max_content_width": 80, "show_default": True}


_HELP = "Fine-tune vision transformers whose blocks run in any order, and run them on the devices that are reachable."
cli = _LazyGroup("cli", help=_HELP, context_settings=SETTINGS)
click.version_option(__version__, prog_name="ls-edge")(cli)


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line; print each expected error as one line on standard error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            with contextlib.suppress(ValueError, OSError):  # closed
                stream.reconfigure(errors="backslashreplace")  # escapes for characters that the encoding lacks
    given = sys.argv[1:] if argv is None else argv
    try:
        code = cli.main(args=argv, prog_name="ls-edge", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 and later
            error.show()
            raise SystemExit(error.exit_code) from None
        ctx = getattr(error, "ctx", None)
        where = ctx.command_path if ctx is not None else "ls-edge"
        message = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption):
            from ls_edge.core.validation import unknown_name

            message = unknown_name("option", error.option_name, error.possibilities or ())
            for argument in ctx.command.params if ctx is not None else ():
                name = argument.human_readable_name
                if isinstance(argument, click.Argument) and error.option_name[2:].upper() in re.split(r"[^A-Z]+", name):
                    message = f"{name} is an argument of this command; write it without {error.option_name!r}"
        fail(f"{message}{' See' if message.endswith('?') else '; see'} '{where} --help'", error.exit_code, given)
    except (KeyboardInterrupt, click.Abort):
        fail(interrupts.word(), interrupts.exit_code(), given)
    except BrokenPipeError:
        sys.stderr.close()
        _drop_unwritable_output()
        raise SystemExit(1) from None
    except Exception as error:
        if not is_expected(error):
            raise
        if "--debug" in given:
            click.echo(_hidden(traceback.format_exc(), given), err=True)
        fail(describe(error), error.exit_code if isinstance(error, LsEdgeError) else 1, given)
    interrupts.finishing = True
    raise SystemExit(code if isinstance(code, int) else 0)


def fail(message: str, code: int, given: Sequence[str]) -> NoReturn:
    """Print the error of a command with the arguments ``given``, and end."""
    interrupts.finishing = True
    for handler in logging.getLogger("ls_edge").handlers:
        handler.flush()  # earlier lines come first
    line = " ".join(printable(_hidden(message, given)).split())
    with contextlib.suppress(OSError):
        print(error_line(line) if "--log-json" in given else f"ls-edge: {line}", file=sys.stderr)  # noqa: T201
    _drop_unwritable_output()
    raise SystemExit(code)


def _hidden(message: str, given: Sequence[str]) -> str:
    """Return a message without the secrets in the addresses of the arguments ``given`` and of the environment."""
    typed = [*given, *(value for name, value in os.environ.items() if name.startswith("LS_EDGE_"))]
    for url in (*_URL.findall("\n".join(typed)), *(word for word in typed if visible_name(word) != word)):
        message = message.replace(url, visible_name(url)).replace(str(Path(url)), visible_name(url))
    return _LOGIN.sub(r"\1", message)


def _drop_unwritable_output() -> None:
    """Discard unwritten output; otherwise the interpreter reports the same error when it exits."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stdout.fileno())
            os.close(null)
