"""Options of commands that send requests, apart from the other options because they load the policies."""

from __future__ import annotations

import click

from ls_edge.cli import options
from ls_edge.runtime.routing.policies import POLICIES, find_policy

POLICY = click.option(
    "--policy",
    type=options.Named(list(POLICIES), find_policy),
    help="Choice of the next block and holder.",
    default="nearest",
)
SOURCE = options.apply_options(
    POLICY,
    options.number("--budget-ms", "Time limit of a request.", "MS", 1, 600_000, default=10_000.0),
    options.count("--max-skips", "Blocks that an answer may skip.  [default: a quarter]", least=0, most=65_536),
    options.SEED,
    options.threads("Threads of stem and head; overrides peers.yaml.  [default: 1]"),
    options.choice("--engine", options.ENGINES, "Engine of stem and head; overrides peers.yaml."),
    options.text("--provider", "ONNX Runtime provider of stem and head; overrides peers.yaml.", "NAME"),
    options.SECRET_KEY,
    options.STRICT_BUNDLE,
)
"""Options that are arguments of ``Source.open``, with the same names."""
