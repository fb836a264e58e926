"""``ls-edge export``: from a run to a bundle."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from ls_edge.cli import options
from ls_edge.cli.command import Command
from ls_edge.cli.inputs import require_extras
from ls_edge.cli.output import print_json, warn
from ls_edge.core.bundle import shared_groups
from ls_edge.core.errors import UsageError, printable
from ls_edge.core.text import byte_size, counted, format_bands, short_id
from ls_edge.device.hardware import cpu_features, has_nvidia
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.report.progress import StepProgress
from ls_edge.report.terminal import PlainTable, print_table

_FAST_INT8 = ("amx_int8", "avx512_vnni", "avx_vnni", "i8mm", "asimddp")
"""Instructions of CPUs that multiply int8 faster than float32."""


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
@options.flag("--per-block", "One engine per block, which is the default.")
@options.count("--blocks-per-part", "Adjacent blocks per engine; peers.yaml then counts parts.", most=10_000, default=1)
@options.choice(
    "--precision",
    ["fp32", "fp16", "int8"],
    "Precision of the engines: fp16 for GPUs, int8 for CPUs.",
    default="fp32",
)
@options.choice("--engine", options.ENGINES[1:], "Target engine; determines how int8 is written.", default="onnx")
@options.text("--calibrate", "Images to calibrate int8, measure order costs, and verify.", "DATA")
@options.count(
    "--calibrate-images",
    "Number of these images; every second one is held out for verification.",
    least=16,
    most=1_000_000,
    default=512,
)
@options.count("--max-batch", "Largest batch to verify.", most=options.MAX_BATCH, default=8)
@options.count(
    "--cost-orders",
    "Orders to measure on --calibrate, for the policies 'quality' and 'parallel'.",
    least=0,
    most=100_000,
    default=256,
)
@options.bands("those of the run")
@options.flag("--fold-ends", "Fold a first band into the stem and a last one into the head, if small.")
@options.flag("--whole", "Also write the model as one file, whole.onnx.")
@options.JSON
def command(
    run: Path,
    out: Path,
    per_block: bool,
    calibrate: str | None,
    calibrate_images: int,
    as_json: bool,
    **asked: Any,
) -> None:
    """Split a trained model into one engine per block.

    Splits the model of the folder RUN into stem, blocks, and head, verifies them against PyTorch, and writes a bundle.
    An existing bundle is replaced only after the new one is verified.

    fp16 is faster on GPUs and int8 on CPUs with VNNI or AMX; the output says which is fast on this machine.
    """
    if per_block and asked["blocks_per_part"] != 1:
        raise UsageError(f"--per-block contradicts --blocks-per-part {asked['blocks_per_part']}; leave one out")
    tensorrt = asked["engine"] == "tensorrt"
    if asked["precision"] == "int8" and tensorrt and calibrate is None:
        raise UsageError("int8 for TensorRT needs ranges of activations; give images with --calibrate DATA")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a folder; give --out a new one")
    require_extras("export", ("onnx", "torch"), "export", "cpu")
    from ls_edge.export.calibration import read_calibration
    from ls_edge.export.writer import ExportSettings, build_engines, check_target, export_run, parts_of, steps_of
    from ls_edge.training.checkpoint import load_run

    start = time.perf_counter()
    onnxruntime_module()
    check_target(out)
    loaded = load_run(run)
    settings = ExportSettings(**asked)
    parts = parts_of(loaded, settings).num_blocks  # refused before anything is shown
    images = None
    if calibrate is not None:
        images = read_calibration(calibrate, loaded.record.image, loaded.record.classes, calibrate_images)
    steps = itertools.count()
    with StepProgress("export") as progress:
        total = steps_of(parts, calibrated=images is not None)
        exported = export_run(
            loaded, out, settings, calibration=images, on_step=lambda text: progress(next(steps), total, text)
        )
        built = None
        if tensorrt:
            built = build_engines(exported.bundle, on_status=lambda text: progress(total, total, text))
    if tensorrt and built is None:
        click.echo("TensorRT is not installed here; the devices build their engines from these files", err=True)
    seconds = round(time.perf_counter() - start, 3)
    summary = {**_summary(out, exported.bundle), "seconds": seconds, "engines_built": built}
    summary["warnings"] = exported.warnings
    for warning in exported.warnings:
        warn(warning)
    if as_json:
        print_json(summary)
    else:
        _print(summary)


def _summary(out: Path, bundle: Any) -> dict[str, Any]:
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
        "bundle": f"{summary['bundle']}  ({short_id(summary['bundle_id'])})",
        "model": f"{summary['model']}, {summary['method']}, {summary['precision']}, opset {summary['opset']}",
        "tokens": "{count} x {dim} {dtype}".format(**summary["tokens"]),
        "files": f"stem {byte_size(sizes['stem'])}, {_blocks(summary, len(blocks))} of {byte_size(max(blocks))}, "
        f"head {byte_size(sizes['head'])}" + (f", whole {byte_size(sizes['whole'])}" if "whole" in sizes else ""),
        "bands": _bands(summary),
        "verified": f"{shown(verified)}, each part and all together in trained and shuffled orders, "
        f"batches of {', '.join(map(str, verified['batches']))}, {verified['images']} images",
        "orders": _costs(summary["order_costs"]),
        "here": speed_here(summary["precision"], has_gpu=has_nvidia(), features=cpu_features()),
        "time": f"{summary['seconds']:.1f} s",
    }
    for key, value in rows.items():
        if value:
            table.add_row(Text(key, "bold"), value)
    print_table(table)


def speed_here(precision: str, *, has_gpu: bool, features: Collection[str]) -> str:
    """Say whether this machine runs a precision fast, and which one it runs faster."""
    fast_int8 = next((name for name in _FAST_INT8 if name in features), "")
    for_cpu = f"its CPU runs int8 faster ({fast_int8})" if fast_int8 else "its CPU runs none faster than fp32"
    if precision == "fp16":
        return "fast on the GPU of this machine" if has_gpu else f"not faster than fp32 on this machine: {for_cpu}"
    if precision == "int8":
        slow = "its CPU has neither VNNI nor AMX, so compare with fp32 by ls-edge bench"
        return f"on this machine {f'fast on the CPU ({fast_int8})' if fast_int8 else slow}"
    return f"on this machine {'the GPU runs fp16 faster, and ' if has_gpu else ''}{for_cpu}"


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
    """Return the numbers of a manifest's ``verified`` in words."""
    if verified["measure"] == "cosine":
        text = f"cosine {verified['min_cosine']:.5f} with {verified['reference']} (tolerance {verified['tolerance']:g})"
    else:
        text = (
            f"within {verified['max_rel_error']:.1e} of {verified['reference']} (tolerance {verified['tolerance']:.0e})"
        )
    if verified["top1"] is not None:
        text += ", top-1 {bundle:.4f} against {pytorch:.4f} on {images} images".format(**verified["top1"])
    return text
