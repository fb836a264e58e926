"""``ls-edge build``: build this device's TensorRT engines of a bundle in advance."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.peers_file import load_peers
from ls_edge.core.text import parse_ranges
from ls_edge.engines.opening import choose
from ls_edge.engines.tensorrt.build import EngineOptions, build_part
from ls_edge.report.formatting import counted


@click.command(
    cls=Command,
    examples=(
        "ls-edge build bundle",
        "ls-edge build bundle --blocks 0-5 --max-batch 8",
        "ls-edge build bundle --peers peers.yaml --name orin-0",
    ),
)
@click.argument("bundle", type=options.FILE)
@options.text("--blocks", "Blocks to build, such as 0-3,7.  [default: all, stem, and head]", "RANGES")
@options.choice("--engine", ["tensorrt"], "Engine to build.", default="tensorrt")
@options.count("--max-batch", "Largest max_batch of a peer, rounded up to 8, 16, 32, ...", most=1024)
@options.path("--peers", "peers.yaml with the blocks and max_batch of the peer --name.")
@options.text("--name", "Name of this device in --peers.", "NAME")
@options.JSON
def command(
    bundle: Path,
    blocks: str | None,
    engine: Literal["tensorrt"],
    max_batch: int | None,
    peers: Path | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Build the engines of a bundle for this device in advance.

    Builds what 'ls-edge peer' and 'ls-edge run' load from the folder BUNDLE and keeps it in this user's cache. Requires
    TensorRT and the CUDA runtime, but neither torch nor onnx.

    An engine depends on file, GPU, TensorRT, precision, and the largest batch. A peer that finds its engines in the
    cache starts in seconds; otherwise it builds them.
    """
    if (peers is None) != (name is None):
        raise UsageError("--peers and --name belong together; give both, or neither")
    if peers is not None and blocks is not None:
        raise UsageError("--blocks and --peers both say which blocks; leave one out")
    opened = Bundle.open(bundle)
    ends: Sequence[str] = ("stem", "head")
    chosen: Sequence[int] = range(opened.num_blocks)
    if peers is not None and name is not None:
        file = load_peers(peers)
        file.check_blocks(opened.num_blocks)
        entry = file.peer(name)
        ends, chosen, max_batch = (), entry.blocks, max_batch or entry.max_batch
    elif blocks is not None:
        try:
            ends, chosen = (), parse_ranges(blocks)
        except ValueError as error:
            raise UsageError(f"--blocks {blocks!r}: cannot read {str(error)!r}; write for example 0-2,7") from None
        if max(chosen) >= opened.num_blocks:
            last = opened.num_blocks - 1
            raise UsageError(f"--blocks {blocks!r}: the bundle has blocks 0 to {last}; leave block {max(chosen)} out")
    choice = choose(opened, engine)
    options = EngineOptions.of(opened, max_batch)
    parts = [*ends[:1], *(f"block {index}" for index in chosen), *ends[1:]]
    built = [build_part(opened, part, options) for part in parts]
    if as_json:
        engines = [
            {"part": one.part, "key": one.key.digest(), "built": one.built, "bytes": one.size, "seconds": one.seconds}
            for one in built
        ]
        print_json({"provider": choice.provider, "max_batch": options.max_batch, "engines": engines})
        return
    new = sum(found.built for found in built)
    click.echo(
        f"{counted(len(built), 'engine')} for {choice.provider}, up to {options.max_batch} images: {new} built, "
        f"{len(built) - new} in the cache already"
    )
