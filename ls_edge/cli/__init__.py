"""The command line: one module a command, loaded when it is called.

``ls-edge --help`` and every ``ls-edge COMMAND --help`` work without torch, timm, onnx and an engine library, so
a command module imports those inside its function.
"""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from typing import Any, NoReturn

import click

from ls_edge import __version__
from ls_edge.errors import LsEdgeError, printable

COMMANDS = {
    "train": "Fine-tune a vision transformer with its block order shuffled.",
    "eval": "Measure accuracy in trained order, in any order and with blocks missing.",
    "export": "Cut a trained model into one engine a block.",
    "verify": "Check a bundle's digests and, with its run, its numbers.",
    "keys": "Make CURVE keys.",
    "peer": "Serve blocks of a bundle.",
    "run": "Answer images through the peers that can be reached.",
    "bench": "Time the engines of a bundle on this machine.",
    "doctor": "Find what is missing or mixed up on this machine.",
    "chaos": "Answer images while peers are killed, stopped, hung and cut off.",
    "demo": "Train, export, serve and measure on embedded data, with a peer killed on the way.",
}

DEGRADED = 3
"""Exit code of a run that finished, but with an answer that skipped blocks or with a failed request."""


class Command(click.Command):
    """A command with ``--debug``, which shows the traceback behind an error."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(
            click.Option(
                ["--debug"], is_flag=True, expose_value=False, help="Show the traceback of an error.",
                callback=lambda ctx, _param, value: ctx.find_root().meta.__setitem__("ls_edge.debug", value),
            )
        )  # fmt: skip


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"ls_edge.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="ls-edge")
def cli() -> None:
    """Fine-tune vision transformers whose blocks run in any order, and run them on whatever devices can be reached."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Run the command line; every error that was foreseen is one line on standard error."""
    debug = "--debug" in (sys.argv[1:] if argv is None else argv)
    try:
        code = cli.main(args=argv, prog_name="ls-edge", standalone_mode=False)
    except click.ClickException as error:
        if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # click 8.2 and later
            error.show()
            raise SystemExit(error.exit_code) from None
        ctx = getattr(error, "ctx", None)
        where = ctx.command_path if ctx is not None else "ls-edge"
        _fail(f"{error.format_message().rstrip('.')}; see '{where} --help'", error.exit_code)
    except LsEdgeError as error:
        if debug:
            traceback.print_exc()
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted", 128 + signal.SIGINT)
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(1) from None
    raise SystemExit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    line = " ".join(printable(message).split())
    print(f"ls-edge: {line}", file=sys.stderr)  # noqa: T201
    raise SystemExit(code)
