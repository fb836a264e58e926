"""``ls-edge build``: build this device's TensorRT engines of a bundle ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from ls_edge.cli.command import Command
from ls_edge.core.errors import UsageError


@click.command(
    cls=Command,
    short_help="Build this device's engines of a bundle ahead.",
    examples=(
        "ls-edge build bundle",
        "ls-edge build bundle --blocks 0-5 --max-batch 8",
        "ls-edge build bundle --peers peers.yaml --name orin-0",
    ),
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--blocks", help="Blocks alone, such as 0-3,7; all blocks, stem and head where it is left out.")
@click.option("--engine", type=click.Choice(["tensorrt"]), default="tensorrt", show_default=True, help="What builds.")
@click.option(
    "--max-batch", type=click.IntRange(min=1, max=1024),
    help="Largest max_batch of a peer; engines take 8 images at least, then 16, 32 and so on.",
)  # fmt: skip
@click.option("--peers", type=click.Path(path_type=Path), help="A peers.yaml: blocks and max_batch of the peer --name.")
@click.option("--name", help="Which peer of --peers this device is.")
@click.option("--json", "as_json", is_flag=True, help="Print the engines as JSON.")
def command(
    bundle: Path, blocks: str | None, engine: Literal["tensorrt"], max_batch: int | None, peers: Path | None,
    name: str | None, as_json: bool,
) -> int:  # fmt: skip
    """Build what 'ls-edge peer' and 'ls-edge run' load on this device from the folder BUNDLE, and keep it in this
    user's cache. Needs TensorRT and cuda-bindings, not torch or onnx.

    What is in the cache already is only looked up. An engine depends on file, GPU, TensorRT, precision and the largest
    batch: a peer that finds one of the same starts in seconds, else it builds one itself.
    """  # noqa: D205
    import json

    from ls_edge.core.bundle import Bundle
    from ls_edge.core.peers_file import load_peers
    from ls_edge.core.text import parse_ranges
    from ls_edge.engines.opening import choose
    from ls_edge.engines.tensorrt_build import EngineOptions, build_part
    from ls_edge.report.formatting import counted

    if (peers is None) != (name is None):
        raise UsageError("--peers and --name belong together; give both, or neither")
    if peers is not None and blocks is not None:
        raise UsageError("--blocks and --peers both say which blocks; leave one out")
    opened = Bundle.open(bundle)
    parts = ["stem", *(f"block {index}" for index in range(opened.num_blocks)), "head"]
    if peers is not None and name is not None:
        file = load_peers(peers)
        file.check_blocks(opened.num_blocks)
        entry = file.peer(name)
        parts, max_batch = [f"block {index}" for index in entry.blocks], max_batch or entry.max_batch
    elif blocks is not None:
        try:
            chosen = parse_ranges(blocks)
        except ValueError as error:
            raise UsageError(f"--blocks {blocks!r}: cannot read {str(error)!r}; write for example 0-2,7") from None
        if max(chosen) >= opened.num_blocks:
            last = opened.num_blocks - 1
            raise UsageError(f"--blocks {blocks!r}: the bundle has blocks 0 to {last}; leave block {max(chosen)} out")
        parts = [f"block {index}" for index in chosen]
    choice = choose(opened, engine)
    options = EngineOptions.of(opened, max_batch)
    built = [build_part(opened, part, options) for part in parts]
    if as_json:
        engines = [
            {"part": found.part, "key": found.key.digest(), "built": found.built, "bytes": found.size,
             "seconds": round(found.seconds, 3)}
            for found in built
        ]  # fmt: skip
        click.echo(json.dumps({"provider": choice.provider, "max_batch": options.max_batch, "engines": engines}))
        return 0
    new = sum(found.built for found in built)
    click.echo(
        f"{counted(len(built), 'engine')} for {choice.provider}, up to {options.max_batch} images: {new} built, "
        f"{len(built) - new} in the cache already"
    )
    return 0
