"""``ls-edge export``: from a run to a bundle.

This version writes float32 ONNX files, one a block; the other precisions and TensorRT are refused by name.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import msgspec

from ls_edge.cli import Command
from ls_edge.errors import UsageError


@click.command(cls=Command, short_help="Cut a trained model into one engine a block.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="BUNDLE", help="Folder to write.")
@click.option(
    "--per-block", is_flag=True, expose_value=False, help="One engine a block; the only form, so the default."
)
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "int8"]), default="fp32", show_default=True,
    help="Numbers in the engines; this version has fp32.",
)  # fmt: skip
@click.option(
    "--engine", type=click.Choice(["onnx", "tensorrt"]), default="onnx", show_default=True,
    help="What the engines are for; this version has onnx.",
)  # fmt: skip
@click.option("--calibrate", metavar="DATA", help="Verify on images of this data instead of generated ones.")
@click.option("--whole", is_flag=True, help="Write the model in one file too, as whole.onnx.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    run: Path,
    out: Path,
    precision: str,
    engine: str,
    calibrate: str | None,
    whole: bool,
    as_json: bool,
) -> None:
    """Cut the model of the folder RUN into stem, blocks and head, verify them against PyTorch, write a bundle.

    A bundle that is there already is replaced, but only after the new one was verified.
    """
    if precision != "fp32":
        raise UsageError(f"precision {precision} is not available yet in this version; use --precision fp32")
    if engine != "onnx":
        raise UsageError(f"engine {engine} is not available yet in this version; use --engine onnx")
    try:
        import onnx  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError(f"export needs {error.name}; install it with pip install 'ls-edge[export,cpu]'") from None
    from rich.console import Console
    from rich.progress import Progress

    from ls_edge.export.verify import images_of
    from ls_edge.export.writer import check_target, export_run, steps_of
    from ls_edge.training.checkpoint import load_run

    start = time.perf_counter()
    check_target(out)
    loaded = load_run(run)
    images = images_of(calibrate, loaded.image) if calibrate is not None else None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("export", total=steps_of(loaded.view.blocks_count))

        def step(what: str) -> None:
            progress.update(task, description=f"export: {what}", advance=1)

        exported = export_run(loaded, out, whole=whole, images=images, source=calibrate or "generated", step=step)
    summary = _summary(out, exported.bundle.manifest, time.perf_counter() - start)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        _print(summary)


def _summary(out: Path, manifest: Any, seconds: float) -> dict[str, Any]:
    return {
        "bundle": str(out),
        "bundle_id": manifest.bundle_id,
        "model_id": manifest.model_id,
        "model": manifest.model,
        "method": manifest.method,
        "blocks": len(manifest.parts.blocks),
        "tokens": msgspec.to_builtins(manifest.tokens),
        "precision": manifest.precision,
        "opset": manifest.opset,
        "bytes": {name: part.bytes for name, part in manifest.part_names()},
        "seconds": round(seconds, 3),
        "verified": manifest.verified,
    }


def _print(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    sizes, verified = summary["bytes"], summary["verified"]
    blocks = [size for name, size in sizes.items() if name.startswith("block")]
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "bundle": f"{summary['bundle']}  ({summary['bundle_id'][:12]})",
        "model": f"{summary['model']}, {summary['method']}, {summary['precision']}, opset {summary['opset']}",
        "tokens": "{count} x {dim} {dtype}".format(**summary["tokens"]),
        "files": f"stem {_kb(sizes['stem'])}, {len(blocks)} blocks of {_kb(max(blocks))}, head {_kb(sizes['head'])}"
        + (f", whole {_kb(sizes['whole'])}" if "whole" in sizes else ""),
        "verified": f"within {verified['max_rel_error']:.1e} of {verified['reference']} (bar {verified['bar']:.0e}), "
        f"each part and the chain in trained and shuffled orders, {verified['images']} images",
        "time": f"{summary['seconds']:.1f} s",
    }
    for key, value in rows.items():
        table.add_row(f"[bold]{key}[/bold]", value)
    Console(soft_wrap=True).print(table)


def _kb(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} KB"
