"""``ls-edge build``: build this device's TensorRT engines of a bundle in advance."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import click

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.output import print_json
from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.files import check_folder
from ls_edge.core.parts import HEAD, STEM, part_name
from ls_edge.core.peers_file import EngineKind, load_peers
from ls_edge.core.text import counted, name_blocks, parse_ranges
from ls_edge.engines.opening import build_engines
from ls_edge.engines.tensorrt.build import EngineOptions, build_target
from ls_edge.engines.tensorrt.cache import default_folder
from ls_edge.runtime.store.store import Store


@click.command(
    cls=Command,
    examples=(
        "ls-edge build bundle",
        "ls-edge build bundle --blocks 0-5 --max-batch 8",
        "ls-edge build bundle --peers peers.yaml --name orin-0",
        "ls-edge build bundle --peers peers.yaml --name orin-0 --store store",
    ),
)
@click.argument("bundle", type=options.FILE)
@options.text("--blocks", "Blocks to build, such as 0-3,7.  [default: all, stem, and head]", "RANGES")
@options.choice("--engine", ["tensorrt"], "Engine to build.", default="tensorrt")
@options.count("--max-batch", "Largest max_batch of a peer, rounded up to 8, 16, 32, ...", most=1024)
@options.path("--peers", "peers.yaml with the blocks, max_batch and gpu_mem_limit of the peer --name.")
@options.text("--name", "Name of this device in --peers.", "NAME")
@options.path("--store", "Store of that peer to fill with the bundle, as 'ls-edge apply' does.", metavar="DIR")
@options.JSON
def command(
    bundle: Path,
    blocks: str | None,
    engine: Literal["tensorrt"],
    max_batch: int | None,
    peers: Path | None,
    name: str | None,
    store: Path | None,
    as_json: bool,
) -> None:
    """Build the engines of a bundle for this device in advance.

    Builds the engines that 'ls-edge peer' and 'ls-edge run' load for the folder BUNDLE, and keeps them in this user's
    cache. Requires TensorRT and the CUDA runtime, or TensorRT for RTX, but neither torch nor onnx.

    --store also writes the bundle into the store of the peer, which then starts with it instead of waiting for 'ls-edge
    apply'. The peer must not be running. If it uses ONNX Runtime, nothing is built.

    An engine depends on the file, the GPU, the version of TensorRT, the precision, and the largest batch. A peer that
    finds its engines in the cache starts in seconds; otherwise it builds them.
    """
    if (peers is None) != (name is None):
        raise UsageError("--peers and --name belong together; give both, or neither")
    if store is not None and peers is None:
        raise UsageError("--store holds the blocks of one peer; give --peers FILE and --name NAME too")
    if peers is not None and blocks is not None:
        raise UsageError("--blocks and --peers both say which blocks; leave one out")
    check_folder(default_folder())
    opened = Bundle.open(bundle)
    chosen: Sequence[int] = (STEM, *range(opened.num_blocks), HEAD)
    kind: EngineKind = engine
    provider: str | None = None
    gpu_mem_limit: int | None = None
    if peers is not None and name is not None:
        file = load_peers(peers)
        entry = file.of_model(opened.num_blocks).peer(name)
        chosen, max_batch, gpu_mem_limit = entry.blocks, max_batch or entry.max_batch, entry.gpu_mem_limit
        if store is not None:
            kind, provider = entry.engine, entry.provider
    elif blocks is not None:
        try:
            chosen = parse_ranges(blocks)
        except ValueError as error:
            raise UsageError(f"--blocks {blocks!r}: cannot read {str(error)!r}; write for example 0-2,7") from None
        if max(chosen) >= opened.num_blocks:
            last = opened.num_blocks - 1
            raise UsageError(f"--blocks {blocks!r}: the bundle has blocks 0 to {last}; leave block {max(chosen)} out")
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(contextlib.closing(Store(store, chosen))) if store is not None else None
        manifest = "" if place is None else place.fill(opened)
        parts = [*map(part_name, chosen)]
        built = list(
            build_engines(opened, parts, kind=kind, provider=provider, max_batch=max_batch, gpu_mem_limit=gpu_mem_limit)
        )
        if place is not None:
            place.switch(manifest)
    on = f"{build_target()}" if built else None
    up_to = EngineOptions.of(max_batch).max_batch
    if as_json:
        engines = [
            {
                "part": one.part,
                "key": one.key.digest(),
                "built": one.built,
                "bytes": len(one.plan),
                "seconds": one.seconds,
            }
            for one in built
        ]
        print_json({"provider": on, "max_batch": up_to, "engines": engines})
        return
    new = sum(found.built for found in built)
    if built:
        click.echo(
            f"{counted(len(built), 'engine')} for {on}, up to {counted(up_to, 'image')}: {new} built, "
            f"{len(built) - new} in the cache already"
        )
    if store is not None:
        click.echo(f"{store} has {name_blocks(chosen)} of {opened.folder}")
