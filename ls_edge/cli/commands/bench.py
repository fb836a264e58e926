"""``ls-edge bench``: time the engines of a bundle on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ls_edge.api.models import images_for
from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import note_account, print_json, warn
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import VerificationError, printable
from ls_edge.core.peers_file import EngineKind
from ls_edge.core.text import counted
from ls_edge.data.datasets import open_data
from ls_edge.engines.benchmark import Bench, bench, chain_accuracy
from ls_edge.report.terminal import open_console, print_times


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
@options.count("--batch", "Images at a time.", most=options.MAX_BATCH, default=1)
@options.duration("Time to alternate chain and monolith.")
@options.ENGINE
@options.PROVIDER
@options.text("--data", "Images to measure accuracy on, in trained order.", "DATA")
@options.count("--limit", "Number of images of DATA.")
@options.JSON
def command(
    bundle: Path, duration: float, engine: EngineKind, data: str | None, limit: int | None, as_json: bool, **asked: Any
) -> None:
    """Time the engines of a bundle on this device.

    Times the stem, each block, and the head of the folder BUNDLE, all of them as a chain, the whole model in one
    engine, and visits of 1, 2, and all blocks as a peer runs them.
    """
    opened = Bundle.open(bundle)
    m, images = opened.manifest, None
    if data is not None:  # before anything is timed
        images = images_for(open_data(data, "eval"), m.trained_on, m.classes, limit, warn)
    result = bench(opened, duration=duration, kind=engine, monolith=_monolith(opened), **asked)
    if images is not None:
        accuracy = chain_accuracy(opened, images, kind=engine, **asked)
        result = msgspec.structs.replace(result, accuracy=accuracy)
        note_account(accuracy.account)
    if as_json:
        print_json(result)
    else:
        _print(result)


def _monolith(bundle: Bundle) -> tuple[bytes | None, str]:
    """Return the model as one file and its origin, or None and the reason."""
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
        **{f"visit of {counted(int(count), 'block')}": times for count, times in result.visits_ms.items()},
    }
    print_times(f"{result.model}, {result.precision}, batch {result.batch}", result, wholes, console)
    console.print(
        f"{result.engine}, {result.provider}, {counted(result.threads, 'thread')}, {counted(result.repeats, 'run')}"
    )
    console.print(f"memory {result.memory_bytes / 2**20:.0f} MiB")
    if result.chain_over_monolith is not None:
        console.print(f"chain / monolith: {result.chain_over_monolith:.3f} (monolith: {result.monolith})")
    else:
        console.print(f"no monolith: {result.monolith_reason}")
    if result.accuracy is not None:
        found = result.accuracy
        console.print(
            f"top-1 {found.top1:.3f} in trained order, {counted(found.images, 'image')} of {printable(found.data)}"
        )
