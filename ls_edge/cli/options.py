"""Options and types that several commands share, each declared once.

Every command shows its defaults: ``show_default`` is set for all of them in :mod:`ls_edge.cli.main`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from click.core import ParameterSource
from msgspec import inspect

from ls_edge.core.errors import UsageError
from ls_edge.core.files import check_folder, check_standard_output, check_writable
from ls_edge.device.requirements import require

MAX_IMAGES, MAX_BATCH, MAX_THREADS = 10_000_000, 65_536, 1024
HTML, SVG, JSON_FILE = "<!doctype html.*ls-edge", "<svg", r"\s*\{"
"""Patterns of the first characters of files that commands write; see :func:`output`."""
_START = 16_384
"""Number of bytes of an existing file that are compared."""
ENGINES = ("auto", "onnx", "tensorrt")

Option = Callable[[Any], Any]
"""A decorator that adds an option to a command."""


class FilePath(click.Path):
    """Path that is not empty: the value of an unset variable would mean the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; fail if it is empty."""
        if value == "":
            self.fail("the path is empty; name a file or folder", param, ctx)
        return super().convert(value, param, ctx)


FILE = FilePath(path_type=Path)
FOLDER = FilePath(path_type=Path, file_okay=False)


class Number(click.FloatRange):
    """A number that is neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail unless it is finite and within the range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def counts(most: int) -> Callable[[str], tuple[int, ...]]:
    """Return a type of options that take whole numbers from 1 to ``most``, separated by commas."""

    def convert(value: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(item) for item in value.split(","))
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a list of numbers such as 1,4") from None
        if not all(1 <= number <= most for number in numbers):
            raise click.BadParameter(f"{value!r}: use numbers from 1 to {most}")
        return numbers

    return convert


def apply_options(*options: Option) -> Option:
    """Return a decorator that adds several options in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def text(flag: str, help_text: str, metavar: str, **settings: Any) -> Option:
    """Return an option that takes text."""
    return click.option(flag, metavar=metavar, help=help_text, **settings)


def flag(name: str, help_text: str) -> Option:
    """Return an option without a value."""
    return click.option(name, is_flag=True, help=help_text)


def count(flag: str, help_text: str, *, least: int = 1, most: int = MAX_IMAGES, **settings: Any) -> Option:
    """Return an option that takes a whole number."""
    return click.option(flag, type=click.IntRange(least, most), help=help_text, **{"metavar": "N", **settings})


def number(
    flag: str, help_text: str, metavar: str, least: float = 0, most: float = 10**9, *, above: bool = False, **more: Any
) -> Option:
    """Return an option that takes a number from ``least`` to ``most``; with ``above``, more than ``least``."""
    return click.option(flag, type=Number(least, most, min_open=above), metavar=metavar, help=help_text, **more)


def path(flag: str, help_text: str, **settings: Any) -> Option:
    """Return an option that takes a path."""
    return click.option(flag, help=help_text, **{"type": FILE, "metavar": "FILE", **settings})


def output(flag: str, help_text: str, *, draws: bool = False, ours: str = "", **settings: Any) -> Option:
    """Return an option that takes a file to write, checked before any work; with ``draws``, the extra report is too.

    An existing file is only replaced if it is empty, is not a regular file, or matches the regular expression ``ours``,
    as files of this command do.
    """

    def check(file: Path) -> None:
        check_writable(file)
        if file.is_file() and _is_foreign(file, ours):
            raise UsageError(f"{file} exists and is not a file of this command; name another file, or remove it")
        if draws:
            require(flag, "report")
        others = click.get_current_context().meta.setdefault(__name__, set())
        if file.resolve() in others:
            raise UsageError(f"{file} is the file of two options; name another file for {flag}")
        if file.is_file() or not file.exists():
            others.add(file.resolve())

    return path(flag, help_text, callback=_checked_by(check), **settings)


def output_folder(help_text: str, **settings: Any) -> Option:
    """Return an option that takes a folder to write into, checked before any work."""
    return path(
        "--out", help_text, callback=_checked_by(check_folder), **{"type": FOLDER, "metavar": "DIR", **settings}
    )


def as_json(help_text: str = "Output as JSON.") -> Option:
    """Return the option ``--json``, which checks before any work that standard output has room."""
    check = _checked_by(lambda _: check_standard_output())
    return click.option("--json", "as_json", is_flag=True, help=help_text, callback=check)


def _checked_by(check: Callable[[Any], None]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return the callback of an option whose value, if there is one, is checked before any work."""

    def callback(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        if value:
            check(value)
        return value

    return callback


def _is_foreign(path: Path, ours: str) -> bool:
    with path.open("rb") as stream:
        start = stream.read(_START)
    return bool(start) and not re.match(ours.encode(), start, re.DOTALL)


def choice(flag: str, values: Sequence[str], help_text: str, **settings: Any) -> Option:
    """Return an option with a choice of values."""
    return click.option(flag, type=click.Choice(values), help=help_text, **settings)


class Named(click.Choice[str]):
    """Choice that also accepts names that ``find`` finds in other packages."""

    def __init__(self, names: Sequence[str], find: Callable[[str], Any]) -> None:
        super().__init__(names)
        self._find = find

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the name; fail if it is unknown."""
        if value not in self.choices:
            try:
                self._find(value)
            except UsageError as error:
                self.fail(str(error), param, ctx)
        return value


def wait(help_text: str, default: float = 5.0, least: float = 0, most: float = 86_400) -> Option:
    """Return the option ``--wait``."""
    return number("--wait", help_text, "SECONDS", least, most, default=default)


def threads(help_text: str) -> Option:
    """Return the option ``--threads``."""
    return count("--threads", help_text, most=MAX_THREADS)


def concurrency(most: int, help_text: str = "Concurrent requests.") -> Option:
    """Return the option ``--concurrency``."""
    return count("--concurrency", help_text, most=most, default=4)


def peers(help_text: str = "peers.yaml, the same file on all machines.", **settings: Any) -> Option:
    """Return the option ``--peers``, which an environment variable may set."""
    return path("--peers", help_text, **{"envvar": "LS_EDGE_PEERS", "show_envvar": True, **settings})


def bundle(help_text: str = "Folder of the exported model.", **settings: Any) -> Option:
    """Return the option ``--bundle``, which an environment variable may set."""
    return path("--bundle", help_text, metavar="DIR", envvar="LS_EDGE_BUNDLE", show_envvar=True, **settings)


def secret_key(help_text: str = "NAME.key_secret, if peers.yaml has keys.") -> Option:
    """Return the option ``--secret-key``, which an environment variable may set."""
    return path("--secret-key", help_text, envvar="LS_EDGE_SECRET_KEY", show_envvar=True)


def is_typed(name: str) -> bool:
    """Return whether a parameter was given on the command line, not by the environment or a default."""
    return click.get_current_context().get_parameter_source(name) == ParameterSource.COMMANDLINE


PEERS = peers(required=True)
BUNDLE = bundle(required=True)
SOURCE_BUNDLE = bundle("Folder of the exported model.  [default: the peers' model, with all parts on peers]")
SECRET_KEY = secret_key()
STRICT_BUNDLE = flag("--strict-bundle", "Work only with peers that have exactly this bundle.")
DATA = text("--data", "Folder of class folders, a tar of one, 'digits', or a timm data set.", "DATA", required=True)
JSON = as_json()
LOG_JSON = flag("--log-json", "Write the log as JSON lines.")
METRICS = text("--metrics", "Address of Prometheus metrics (extra metrics).", "HOST:PORT")
REPORT = output("--report", "HTML report with charts to write (extra report).", draws=True, ours=HTML)

RATE = number(
    "--rate", "Images per second, at random times.  [default: the next one after each answer]", "IMAGES", above=True
)
SEED = click.option("--seed", type=int, default=0, metavar="N", help="Seed of random orders.")


PROFILES = apply_options(
    text(
        "--profiles",
        "Files of 'ls-edge bench --out'; NAME,NAME=FILE for several devices of one kind.",
        "FILE...",
        multiple=True,
        required=True,
    ),
    click.argument("more", nargs=-1, metavar=""),
    text("--source", "Profile of the machine with the images.  [default: the fastest device]", "FILE"),
    path("--run", "Document of 'ls-edge run --json', for the times of the links."),
    number("--mbit", "Megabits per second of links that were not measured.", "MBIT", 0.001, default=1000.0),
)
"""Options of commands that plan from profiles of devices."""


def settings(kind: type[msgspec.Struct]) -> Option:
    """Return an option for each setting of a struct that describes one; those of the base class come last."""
    struct: Any = inspect.type_info(kind)
    shared = len(getattr(kind.__base__, "__struct_fields__", ()))
    fields = [*struct.fields[shared:], *struct.fields[:shared]]
    return apply_options(*(_setting(field) for field in fields if getattr(field.type, "extra", None)))


def _setting(field: Any) -> Option:
    name, (help_text, metavar) = f"--{field.name.replace('_', '-')}", field.type.extra.values()
    value = field.type.type
    if isinstance(value, inspect.UnionType):
        value = next(one for one in value.types if not isinstance(one, inspect.NoneType))
    kind, default = type(value), field.default
    if kind is inspect.BoolType:
        return flag(name, help_text)
    if kind is inspect.LiteralType:
        return choice(name, value.values, help_text, default=default)
    if kind is inspect.IntType:
        more = {"required": True} if field.required else {"default": default}
        return count(name, help_text, least=value.ge, most=value.le, **more)
    if kind is inspect.VarTupleType:
        item: Any = value.item_type
        return text(name, help_text, metavar, type=_texts if type(item) is inspect.StrType else counts(item.le))
    return text(name, help_text, metavar)


def _texts(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(","))
