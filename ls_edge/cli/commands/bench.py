"""``ls-edge bench``: what the engines of a bundle take on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
import msgspec

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.times_table import print_times
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import VerificationError, printable
from ls_edge.data.datasets import ImageSet, open_data, require_labels, trained_on_warning
from ls_edge.engines.benchmark import Bench, bench, chain_accuracy
from ls_edge.report.formatting import counted
from ls_edge.report.terminal import open_console


@click.command(
    cls=Command,
    examples=(
        "ls-edge bench bundle",
        "ls-edge bench bundle --threads 1 --batch 4 --json",
        "ls-edge bench bundle --data val --limit 500",
    ),
)
@click.argument("bundle", type=options.FILE)
@options.threads("Threads of the engines.  [default: all cores]")
@options.count("--batch", "Images at a time.", most=options.MAX_BATCH, default=1, show_default=True)
@click.option(
    "--duration",
    type=options.Number(0, 10**6, min_open=True),
    default=4.0,
    show_default=True,
    metavar="SECONDS",
    help="Time to alternate chain and monolith.",
)
@options.ENGINE
@options.PROVIDER
@click.option("--data", metavar="DATA", help="Images to measure accuracy on, in trained order.")
@options.count("--limit", "Number of images of DATA.")
@options.JSON
def command(
    bundle: Path,
    threads: int | None,
    batch: int,
    duration: float,
    engine: Literal["auto", "onnx", "tensorrt"],
    provider: str | None,
    data: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """Time the engines of a bundle on this device.

    Times stem, blocks, and head of the folder BUNDLE, the chain of them, and the whole model in one engine.
    """
    opened = Bundle.open(bundle)
    images = None if data is None else _images(data, limit, opened)
    result = bench(
        opened, threads=threads, batch=batch, duration=duration, provider=provider, kind=engine,
        monolith=_monolith(opened),
    )  # fmt: skip
    if images is not None:
        accuracy = chain_accuracy(opened, images, threads=threads, batch=batch, provider=provider, kind=engine)
        result = msgspec.structs.replace(result, accuracy=accuracy)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    else:
        _print(result)


def _images(data: str, limit: int | None, bundle: Bundle) -> ImageSet:
    """The images, with a warning where the model was trained on them; found before anything is timed."""
    images = open_data(data, "eval")
    warning = trained_on_warning(images, bundle.manifest.trained_on)
    if warning:
        click.echo(f"ls-edge: warning: {printable(warning)}", err=True)
    return require_labels(images, bundle.manifest.classes).take(limit)


def _monolith(bundle: Bundle) -> tuple[bytes | None, str]:
    """The model in one file and where it came from, or None and why there is none."""
    if bundle.manifest.parts.whole is not None:
        return bundle.read("whole"), "whole.onnx"
    try:
        from ls_edge.export.merge import merge
    except ImportError:
        return None, "the bundle has no whole.onnx, and merging its parts needs onnx: pip install onnx"
    blocks = [bundle.read(f"block {index}") for index in range(bundle.num_blocks)]
    try:
        return merge(bundle.read("stem"), blocks, bundle.read("head")), "merged from the parts"
    except VerificationError as error:
        return None, str(error)


def _print(result: Bench) -> None:
    console = open_console()
    wholes = {
        "chain": result.chain_ms,
        "monolith": result.monolith_ms,
        "monolith, default options": result.monolith_default_ms,
    }
    print_times(f"{result.model}, {result.precision}, batch {result.batch}", result, wholes, console)
    console.print(
        f"{result.engine}, {result.provider}, {counted(result.threads, 'thread')}, {counted(result.repeats, 'run')}"
    )
    if result.chain_over_monolith is not None:
        console.print(f"chain / monolith: {result.chain_over_monolith:.3f} (monolith: {result.monolith})")
    else:
        console.print(f"no monolith: {result.monolith_reason}")
    if result.accuracy is not None:
        found = result.accuracy
        console.print(
            f"top-1 {found.top1:.3f} in trained order, {counted(found.images, 'image')} of {printable(found.data)}"
        )
