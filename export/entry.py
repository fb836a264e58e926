"""``ls_edge.export``: from a run to a bundle, with progress and a result that prints."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Console

from ls_edge.core.bundle import Bundle, shared_groups
from ls_edge.core.callbacks import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.core.errors import printable
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.export.calibration import IMAGES, read_calibration
from ls_edge.export.order_costs import ORDERS
from ls_edge.export.verify import MAX_BATCH
from ls_edge.export.writer import ExportSettings, build_engines, check_target, export_run, parts_of, steps_of
from ls_edge.report.bundle import print_export
from ls_edge.report.shown import Shown
from ls_edge.training.checkpoint import load_run


@dataclass(frozen=True)
class ExportResult(Shown):
    """A bundle that was written and verified."""

    bundle: Bundle
    seconds: float
    engines_built: str | None
    """Device of the TensorRT engines that were built; None if there are none."""
    warnings: tuple[str, ...]

    def show(self, console: Console) -> None:
        """Print the files, the bands, and what was verified."""
        print_export(self.document(), console)

    def document(self) -> dict[str, Any]:
        """Return the document of ``export --json``."""
        bundle, manifest = self.bundle, self.bundle.manifest
        costs = manifest.order_costs
        return {
            "bundle": printable(bundle.folder),
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
            "order_costs": {name: costs[name] for name in ("orders", "images", "trained", "random", "fit")}
            if costs
            else None,
            "seconds": self.seconds,
            "engines_built": self.engines_built,
            "warnings": self.warnings,
        }


def export(
    run: str | Path,
    out: str | Path,
    *,
    precision: Literal["fp32", "fp16", "int8"] = "fp32",
    engine: Literal["onnx", "tensorrt"] = "onnx",
    calibrate: str | None = None,
    calibrate_images: int = IMAGES,
    blocks_per_part: int = 1,
    max_batch: int = MAX_BATCH,
    cost_orders: int = ORDERS,
    bands: str | None = None,
    fold_ends: bool = False,
    whole: bool = False,
    on_progress: OnProgress = ignore_progress,
    on_warning: OnWarning = warn_in_python,
) -> ExportResult:
    """Split a trained model into one engine per block, verify them, and write a bundle; as ``ls-edge export``.

    Errors are those of :func:`ls_edge.export.writer.export_run`; only a verified bundle replaces one in ``out``.
    """
    start = time.perf_counter()
    onnxruntime_module()
    check_target(Path(out))
    loaded = load_run(run)
    settings = ExportSettings(precision, engine, blocks_per_part, max_batch, whole, cost_orders, bands, fold_ends)
    parts = parts_of(loaded, settings).num_blocks  # refused before anything is read
    images = None
    if calibrate is not None:
        images = read_calibration(calibrate, loaded.record.image, loaded.record.classes, calibrate_images)
    steps, total = itertools.count(), steps_of(parts, calibrated=images is not None)
    exported = export_run(
        loaded, out, settings, calibration=images, on_step=lambda text: on_progress(next(steps), total, text)
    )
    built = None
    if engine == "tensorrt":
        built = build_engines(exported.bundle, on_status=lambda text: on_progress(total, total, text))
    for warning in exported.warnings:
        on_warning(warning)
    return ExportResult(exported.bundle, round(time.perf_counter() - start, 3), built, exported.warnings)
