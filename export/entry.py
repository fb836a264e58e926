"""``ls_edge.export``: from a run to a bundle, with progress."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Literal

from ls_edge.core.callbacks import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.export.calibration import IMAGES, read_calibration
from ls_edge.export.order_costs import ORDERS
from ls_edge.export.verify import MAX_BATCH
from ls_edge.export.writer import (
    ExportResult,
    ExportSettings,
    build_engines,
    check_target,
    export_run,
    parts_of,
    steps_of,
)
from ls_edge.training.checkpoint import load_run


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
    return dataclasses.replace(exported, seconds=round(time.perf_counter() - start, 3), engines_built=built)
