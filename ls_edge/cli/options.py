"""Options and types that several commands share, each declared once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ls_edge.runtime.routing.policies import POLICIES

WAIT_S = 5.0
"""Default of ``--wait``: time for holders that are starting."""

FILE = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
MAX_IMAGES, MAX_BATCH, MAX_THREADS = 10_000_000, 65_536, 1024

Option = Callable[[Any], Any]
"""A decorator that adds an option to a command."""


class Number(click.FloatRange):
    """A number that is neither NaN nor infinite."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; fail if it is not finite or out of range."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def apply_options(*options: Option) -> Option:
    """Return a decorator that adds several options in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def count(flag: str, text: str, *, least: int = 1, most: int = MAX_IMAGES, **settings: Any) -> Option:
    """Return an option that takes a whole number."""
    return click.option(flag, type=click.IntRange(least, most), help=text, **{"metavar": "N", **settings})


def path(flag: str, text: str, **settings: Any) -> Option:
    """Return an option that takes a path."""
    return click.option(flag, help=text, **{"type": FILE, "metavar": "FILE", **settings})


def choice(flag: str, values: list[str], text: str, **settings: Any) -> Option:
    """Return an option with a choice of values."""
    return click.option(flag, type=click.Choice(values), help=text, **settings)


def wait(text: str, default: float = WAIT_S, least: float = 0, most: float = 86_400) -> Option:
    """Return the option ``--wait``."""
    return click.option(
        "--wait", type=Number(least, most), default=default, show_default=True, metavar="SECONDS", help=text
    )


def bands(default: str) -> Option:
    """Return the option ``--bands``."""
    return click.option(
        "--bands",
        metavar="BANDS",
        help=f"Groups in which blocks may be reordered, such as 0/1-6/7.  [default: {default}]",
    )


def threads(text: str) -> Option:
    """Return the option ``--threads``."""
    return count("--threads", text, most=MAX_THREADS)


def batch_size(default: int) -> Option:
    """Return the option ``--batch-size``."""
    return count("--batch-size", "Images at a time.", most=MAX_BATCH, default=default, show_default=True)


PEERS = path("--peers", "peers.yaml, the same file on all machines.", required=True)
BUNDLE = path("--bundle", "Folder of the exported model.", required=True, metavar="DIR")
SECRET_KEY = path("--secret-key", "NAME.key_secret, if peers.yaml has keys.")
STRICT_BUNDLE = click.option("--strict-bundle", is_flag=True, help="Only peers with exactly this bundle.")
DATA = click.option(
    "--data", required=True, metavar="DATA", help="Folder of class folders, a tar of one, 'digits', or a timm data set."
)
LIMIT = count("--limit", "Number of images; more than the data has repeats them.")
JSON = click.option("--json", "as_json", is_flag=True, help="Output as JSON.")
LOG_JSON = click.option("--log-json", is_flag=True, help="Log lines as JSON.")
METRICS = click.option("--metrics", metavar="HOST:PORT", help="Address of Prometheus metrics (extra metrics).")
REPORT = path("--report", "HTML report with charts to write (extra report).")

POLICY = choice(
    "--policy", list(POLICIES), "Choice of the next block and holder.", default="nearest", show_default=True
)
CONCURRENCY = count("--concurrency", "Requests at the same time.", most=1_000_000, default=4, show_default=True)
BUDGET_MS = click.option(
    "--budget-ms",
    type=Number(1, 600_000),
    default=10_000.0,
    show_default=True,
    metavar="MS",
    help="Time limit of a request.",
)
MAX_SKIPS = count("--max-skips", "Blocks that an answer may skip.  [default: a quarter]", least=0, most=65_536)
SEED = click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="Seed of random orders.")

DEVICE = choice("--device", ["auto", "cpu", "cuda"], "Device of a run's model.", default="auto", show_default=True)
PRECISION = choice(
    "--precision",
    ["fp32", "bf16", "fp16"],
    "Precision of a run's matrix products; a bundle has its own.",
    default="fp32",
    show_default=True,
)
ENGINE = choice("--engine", ["auto", "onnx", "tensorrt"], "Engine of the parts.", default="auto")
PROVIDER = click.option("--provider", metavar="NAME", help="cpu, cuda, or an ONNX Runtime execution provider.")

ENDS = apply_options(
    threads("Threads of stem and head; overrides peers.yaml.  [default: 1]"),
    choice("--engine", ["auto", "onnx", "tensorrt"], "Engine of stem and head; overrides peers.yaml."),
    click.option("--provider", metavar="NAME", help="ONNX Runtime provider of stem and head; overrides peers.yaml."),
)
"""Options of the parts that a source runs itself."""
