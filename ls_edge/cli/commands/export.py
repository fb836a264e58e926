"""``ls-edge export``: from a run to a bundle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from rich.progress import Progress
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.core.bundle import shared_groups
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import format_bands
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.report.formatting import counted
from ls_edge.report.terminal import PlainTable, open_console, print_table


@click.command(
    cls=Command,
    examples=(
        "ls-edge export run --out bundle --per-block",
        "ls-edge export run --out bundle --precision int8 --calibrate photos",
        "ls-edge export run --out bundle --precision fp16 --engine tensorrt",
    ),
)
@click.argument("run", type=options.FILE)
@options.path("--out", "Folder to write.", required=True, metavar="BUNDLE")
@click.option("--per-block", is_flag=True, help="One engine per block, which is the default.")
@options.count(
    "--blocks-per-part",
    "Adjacent blocks per engine; peers.yaml then counts parts.",
    most=10_000,
    default=1,
    show_default=True,
)
@options.choice(
    "--precision",
    ["fp32", "fp16", "int8"],
    "Precision of the engines: fp16 for GPUs, int8 for CPUs and TensorRT.",
    default="fp32",
    show_default=True,
)
@options.choice(
    "--engine",
    ["onnx", "tensorrt"],
    "Engine that will run the files; decides how int8 is written.",
    default="onnx",
    show_default=True,
)
@click.option("--calibrate", metavar="DATA", help="Images to fit int8 and order costs to, and to verify on.")
@options.count(
    "--calibrate-images",
    "Number of these images; every second one is held out for verification.",
    least=16,
    most=1_000_000,
    default=512,
    show_default=True,
)
@options.count("--max-batch", "Largest batch to verify.", most=options.MAX_BATCH, default=8, show_default=True)
@options.count(
    "--cost-orders",
    "Orders to measure on --calibrate, for the policies 'quality' and 'parallel'.",
    least=0,
    most=100_000,
    default=256,
    show_default=True,
)
@options.bands("those of the run")
@click.option(
    "--fold-ends", is_flag=True, help="Fold a first band into the stem and a last one into the head, if small."
)
@click.option("--whole", is_flag=True, help="Also write the model as one file, whole.onnx.")
@options.JSON
def command(
    run: Path,
    out: Path,
    per_block: bool,
    blocks_per_part: int,
    precision: Literal["fp32", "fp16", "int8"],
    engine: Literal["onnx", "tensorrt"],
    calibrate: str | None,
    calibrate_images: int,
    max_batch: int,
    cost_orders: int,
    bands: str | None,
    fold_ends: bool,
    whole: bool,
    as_json: bool,
) -> None:
    """Split a trained model into one engine per block.

    Splits the model of the folder RUN into stem, blocks, and head, verifies them against PyTorch, and writes a bundle.
    An existing bundle is replaced only after the new one is verified.
    """
    if per_block and blocks_per_part != 1:
        raise UsageError(f"--per-block and --blocks-per-part {blocks_per_part} contradict each other; leave one out")
    if precision == "int8" and engine == "tensorrt" and calibrate is None:
        raise UsageError("int8 for TensorRT needs ranges of activations; give images with --calibrate DATA")

    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is no folder; give --out a new one")
    try:
        import onnx  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        from ls_edge.device.requirements import install_command

        raise UsageError(f"export needs {error.name}; to install it: {install_command('export', 'cpu')}") from None

    from ls_edge.export.calibration import read_calibration
    from ls_edge.export.writer import ExportSettings, build_engines, check_target, export_run, parts_of, steps_of
    from ls_edge.training.checkpoint import load_run

    start = time.perf_counter()
    onnxruntime_module()
    check_target(out)
    loaded = load_run(run)
    settings = ExportSettings(precision, engine, blocks_per_part, max_batch, whole, cost_orders, bands, fold_ends)
    parts = parts_of(loaded, settings).num_blocks  # refused before anything is shown
    calibration = None
    if calibrate is not None:
        calibration = read_calibration(calibrate, loaded.record.image, loaded.record.classes, calibrate_images)
    with Progress(console=open_console(stderr=True), transient=True) as progress:
        total = steps_of(parts, calibrated=calibration is not None)
        task = progress.add_task("export", total=total)

        def step(what: str) -> None:
            progress.update(task, description=f"export: {what}", advance=1)

        exported = export_run(loaded, out, settings, calibration=calibration, on_step=step)
        built = None
        if engine == "tensorrt":
            built = build_engines(exported.bundle, on_status=lambda text: progress.update(task, description=text))
            if built is None:
                progress.console.print(
                    "TensorRT is not installed here; the devices build their engines from these files"
                )
    summary = _summary(out, exported.bundle, time.perf_counter() - start)
    summary["engines_built"] = built
    summary["warnings"] = exported.warnings
    for warning in exported.warnings:
        click.echo(f"ls-edge: warning: {warning}", err=True)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(summary), indent=1).decode())
    else:
        _print(summary)


def _summary(out: Path, bundle: Any, seconds: float) -> dict[str, Any]:

    manifest = bundle.manifest
    return {
        "bundle": printable(out),
        "bundle_id": manifest.bundle_id,
        "model_id": manifest.model_id,
        "model": manifest.model,
        "method": manifest.method,
        "blocks": len(manifest.parts.blocks),
        "bands": bundle.bands.to_json(),
        "folded": msgspec.to_builtins(bundle.folded),
        "shared": shared_groups(bundle.owners),
        "tokens": msgspec.to_builtins(manifest.tokens),
        "precision": manifest.precision,
        "opset": manifest.opset,
        "bytes": {name: part.bytes for name, part in manifest.part_names()},
        "seconds": round(seconds, 3),
        "verified": manifest.verified,
        "order_costs": {name: manifest.order_costs[name] for name in ("orders", "images", "trained", "random", "fit")}
        if manifest.order_costs
        else None,
    }


def _print(summary: dict[str, Any]) -> None:

    sizes, verified = summary["bytes"], summary["verified"]
    blocks = [size for name, size in sizes.items() if name.startswith("block")]
    table = PlainTable.of("", "", show_header=False, box=None)
    rows = {
        "bundle": f"{summary['bundle']}  ({summary['bundle_id'][:12]})",
        "model": f"{summary['model']}, {summary['method']}, {summary['precision']}, opset {summary['opset']}",
        "tokens": "{count} x {dim} {dtype}".format(**summary["tokens"]),
        "files": f"stem {_kb(sizes['stem'])}, {_blocks(summary, len(blocks))} of {_kb(max(blocks))}, "
        f"head {_kb(sizes['head'])}" + (f", whole {_kb(sizes['whole'])}" if "whole" in sizes else ""),
        "bands": _bands(summary),
        "verified": f"{shown(verified)}, each part and all together in trained and shuffled orders, "
        f"batches of {', '.join(map(str, verified['batches']))}, {verified['images']} images",
        "orders": _costs(summary["order_costs"]),
        "time": f"{summary['seconds']:.1f} s",
    }
    for key, value in rows.items():
        if not value:
            continue
        table.add_row(Text(key, "bold"), value)
    print_table(table)


def _blocks(summary: dict[str, Any], count: int) -> str:

    files = count - sum(len(group) - 1 for group in summary["shared"])
    return counted(count, "block") if files == count else f"{counted(count, 'block')} in {counted(files, 'file')}"


def _bands(summary: dict[str, Any]) -> str:

    bands, folded = summary["bands"], summary["folded"]
    found = [f"{format_bands(bands)} (blocks change places within each)"] if len(bands) > 1 else []
    found += [f"{counted(folded[part], 'block')} folded into the {part}" for part in ("stem", "head") if folded[part]]
    return ", ".join(found)


def _costs(costs: dict[str, Any] | None) -> str:
    if costs is None:
        return ""
    return (
        f"{costs['orders']} on {costs['images']} images: loss {costs['trained']['loss']:.3f} as trained, "
        f"{costs['random']['loss']:.3f} in random order; estimates rank others by {costs['fit']['spearman']:.2f}"
    )


def shown(verified: dict[str, Any]) -> str:
    """The numbers of a manifest's ``verified`` in words."""
    if verified["measure"] == "cosine":
        text = f"cosine {verified['min_cosine']:.5f} with {verified['reference']} (tolerance {verified['tolerance']:g})"
    else:
        text = (
            f"within {verified['max_rel_error']:.1e} of {verified['reference']} (tolerance {verified['tolerance']:.0e})"
        )
    if verified["top1"] is not None:
        text += ", top-1 {bundle:.4f} against {pytorch:.4f} on {images} images".format(**verified["top1"])
    return text


def _kb(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} KB"
