"""``ls-edge publish``: a run or a bundle with a model card, into a folder or onto the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

import click

from ls_edge.api.publishing import publish
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.report.terminal import open_console


@click.command(
    cls=Command,
    examples=(
        "ls-edge publish run --to published",
        "ls-edge publish run --to hf-hub:someone/digits-any-order",
        "ls-edge publish bundle --to hf-hub:someone/digits-bundle",
    ),
)
@click.argument("run_or_bundle", type=options.FILE)
@options.path(
    "--to",
    "New folder, or repository on the Hub.",
    type=options.FilePath(),
    metavar="DIR|hf-hub:OWNER/NAME",
    required=True,
)
@options.JSON
def command(run_or_bundle: Path, to: str, as_json: bool) -> None:
    """Write a run or a bundle with a model card into a folder, or upload it to the Hugging Face Hub.

    The card has the results of RUN_OR_BUNDLE/eval.json, written by 'ls-edge eval --json', the orders and bands, the
    cost of an image, and how to serve it; write the license into it. A run gets the config.json from which timm loads
    the plain model. 'export', 'eval', 'analyze' and --bundle read hf-hub:OWNER/NAME and hf-hub:OWNER/NAME@REVISION.

    The Hub needs huggingface_hub, and for uploads a token (HF_TOKEN).
    """
    result = publish(run_or_bundle, to)
    if as_json:
        print_json(result)
    else:
        result.show(open_console())
