"""Write a bundle: parts into a folder beside the target, everything verified, the manifest, then one rename.

Until the rename nothing at the target changes, and a folder that was left behind by a kill has no manifest, so
it is never taken for a bundle. An older bundle at the target is replaced only then.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import onnx
import torch

from ls_edge.bundle import (
    MANIFEST,
    SCHEMA,
    Bundle,
    Manifest,
    Part,
    Parts,
    bundle_id_of,
    interface_of,
    model_id_of,
    write_manifest,
)
from ls_edge.engines.engine import signature_of
from ls_edge.engines.pipeline import Pipeline
from ls_edge.errors import BundleError, RunError, UsageError, VerificationError
from ls_edge.export.calibration import RANGE_IMAGES, Calibration, activation_ranges
from ls_edge.export.canonical import OPSET, check, to_bytes
from ls_edge.export.fp16 import to_half
from ls_edge.export.int8 import quantise_dynamic, quantise_explicit
from ls_edge.export.merge import group, merge
from ls_edge.export.order_costs import ORDERS, doubts, measure_order_costs
from ls_edge.export.targets import PartsView, head_piece, portable, stem_piece
from ls_edge.export.trace_onnx import trace, trace_blocks
from ls_edge.export.verify import (
    MAX_BATCH,
    Verified,
    batches_of,
    cosine,
    generated_images,
    verify_accuracy,
    verify_numbers,
)
from ls_edge.training.checkpoint import LoadedRun
from ls_edge.training.models.view import BlockView

ENGINE_COSINE = 0.999
"""Least cosine of logits between engines that were built here and the files that they were built from."""

Step = Callable[[str], None]
"""Told what comes next: stem, each part, head, verification, and what calibration images are for."""


@dataclass(frozen=True)
class ExportSettings:
    """What is to be written."""

    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    engine: Literal["onnx", "tensorrt"] = "onnx"
    """What will run the files; only int8 differs."""
    blocks_per_part: int = 1
    """Neighbouring blocks in one file."""
    max_batch: int = MAX_BATCH
    """Largest batch that is verified."""
    whole: bool = False
    """Whether the model is written in one file too."""
    cost_orders: int = ORDERS
    """Orders whose cost is measured on calibration images; 0 for none."""


_DEFAULT = ExportSettings()


@dataclass(frozen=True)
class Exported:
    """A bundle that was written, and what was measured on the way."""

    bundle: Bundle
    verified: Verified
    warnings: tuple[str, ...] = ()
    """What the user should know, each in a line."""


def steps_of(blocks: int, settings: ExportSettings = _DEFAULT, *, calibrated: bool = False) -> int:
    """How often :func:`export_run` reports a step for a model of so many blocks."""
    return blocks // settings.blocks_per_part + 3 + (3 if calibrated else 0)


def export_run(
    run: LoadedRun,
    out: str | Path,
    settings: ExportSettings = _DEFAULT,
    *,
    calibration: Calibration | None = None,
    step: Step = lambda _: None,
) -> Exported:
    """Export ``run`` to the folder ``out``.

    It is verified on the images of ``calibration``, on generated ones without. Raises :class:`UsageError` where
    ``out`` holds something else or int8 for TensorRT has no calibration, :class:`ls_edge.errors.ModelError` where
    the blocks cannot be grouped so, :class:`ls_edge.errors.VerificationError` where a part is not what PyTorch
    computes, and :class:`BundleError` where it cannot be written; ``out`` is as before then.
    """
    out = Path(out)
    check_target(out)
    check_trained(run)
    if settings.precision == "int8" and settings.engine == "tensorrt" and calibration is None:
        raise UsageError("int8 for TensorRT needs ranges of activations: give images with --calibrate DATA")
    view = PartsView(run.view, settings.blocks_per_part)
    try:
        with _beside(out) as folder:
            manifest = _write_parts(run, view, folder, settings, calibration, step)
            verified = _verify(Bundle(folder, manifest), view, settings, calibration, step)
            costs: dict[str, Any] = {}
            warnings = [f"{run.folder}: {run.record.problem}"] if run.record.problem else []
            if calibration is not None:
                step("order costs")
                if settings.cost_orders:
                    found = measure_order_costs(view, calibration.fit, calibration.source, orders=settings.cost_orders)
                    costs = msgspec.to_builtins(found)
                    warnings += doubts(found)
            manifest = msgspec.structs.replace(manifest, verified=verified.to_json(), order_costs=costs)
            write_manifest(folder, manifest)
            _replace(folder, out)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror or error}; check the path and the free space") from None
    return Exported(Bundle.open(out), verified, tuple(warnings))


def _verify(
    bundle: Bundle, view: PartsView, settings: ExportSettings, calibration: Calibration | None, step: Step
) -> Verified:
    step("verification")
    batches = batches_of(settings.max_batch)
    if calibration is None:
        images, source = generated_images(bundle.manifest.image, sum(batches)), "generated"
    else:
        images, source = calibration.held_out.images, calibration.source
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        precision = settings.precision
        result = verify_numbers(view, chain, images, source=source, precision=precision, batches=batches)
        if calibration is not None:
            step("accuracy")
            if calibration.held_out.labels is not None:
                verify_accuracy(view, chain, calibration.held_out, result)
    result.notes["blocks_per_part"] = settings.blocks_per_part
    if settings.precision == "int8":
        result.notes["int8"] = "explicit" if settings.engine == "tensorrt" else "dynamic"
    return result


def build_engines(bundle: Bundle, *, on_status: Callable[[str], None] = lambda _: None) -> str | None:
    """Build this device's TensorRT engines of a bundle into the cache and compare them with the files.

    Returns what they run on; None where TensorRT is not installed here, since the devices build their own. Not run on
    hardware yet. Raises :class:`ls_edge.errors.EngineError` where one cannot be built and
    :class:`VerificationError` where the engines and ONNX Runtime disagree.
    """
    if importlib.util.find_spec("tensorrt") is None:
        return None
    images = generated_images(bundle.manifest.image, 3)
    with (
        Pipeline.open(bundle, kind="tensorrt", on_status=on_status) as built,
        Pipeline.open(bundle, kind="onnx", threads=1, provider="cpu") as files,
    ):
        found = cosine(built.forward(images), files.forward(images))
        if not found >= ENGINE_COSINE:
            raise VerificationError(
                f"the TensorRT engines of {bundle.folder} give logits with a cosine of {found:.5f} to the files' own, "
                f"the bar is {ENGINE_COSINE}; use --engine onnx there and report this"
            )
        return built.provider


def check_trained(run: LoadedRun) -> None:
    """Raise :class:`RunError` for a run that was to be trained and has the weights it started with."""
    if run.record.problem and run.record.best_epoch is None:
        raise RunError(
            f"{run.folder}: {run.record.problem}; go on with 'ls-edge train --resume', train again with a lower --lr, "
            "or, for a model that is not trained, with --epochs 0"
        )


def check_target(out: Path) -> None:
    """Raise :class:`UsageError` where ``out`` is neither new, empty, nor a bundle and nothing else."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is no folder; give --out a new one")
    if not out.exists():
        return
    names = sorted(
        path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink()
    )
    foreign = [name for name in names if name != MANIFEST and not name.endswith(".onnx")]
    if foreign:
        raise UsageError(f"{out} holds {foreign[0]!r}, which is no part of a bundle; give --out a new folder")
    if names and MANIFEST not in names:
        raise UsageError(f"{out} is not empty and is no bundle (it holds {names[0]!r}); give --out a new folder")


def _write_parts(
    run: LoadedRun,
    parts: PartsView,
    folder: Path,
    settings: ExportSettings,
    calibration: Calibration | None,
    step: Step,
) -> Manifest:
    view = portable(run.view)
    spec = run.view.token_spec
    tokens = (spec.count, spec.dim)
    if run.view.num_classes != len(run.classes):
        raise RunError(
            f"{run.folder}: the model has {run.view.num_classes} logits and the run {len(run.classes)} class names; "
            "train it again"
        )
    interface = interface_of(run.image, spec, parts.parts, len(run.classes), needs_slot=view.needs_slot)
    draft = Manifest(
        schema=SCHEMA, bundle_id="", model_id=model_id_of(run.weights_sha256, interface), model=run.model,
        method=run.method, classes=run.classes, image=run.image, tokens=spec, needs_slot=view.needs_slot,
        precision=settings.precision, opset=OPSET, parts=Parts(_NONE, _NONE, ()), trained_on=run.trained_on,
    )  # fmt: skip

    def write(name: str, file: str, raw: bytes) -> Part:
        check(raw, name, signature_of(draft, name))
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(raw)
        return Part(file, hashlib.sha256(raw).hexdigest(), len(raw))

    ends = to_half if settings.precision == "fp16" else _as_it_is
    step("stem")
    stem = to_bytes(ends(trace(stem_piece(view, run.image.size))), "stem")
    stem_part = write("stem", "stem.onnx", stem)
    step("block 0")
    block_parts, raws = [], []
    for index, model in enumerate(_grouped(_blocks(view, tokens, settings, calibration, step), parts.per_part)):
        raw = to_bytes(model, f"block {index}")
        block_parts.append(write(f"block {index}", f"blocks/{index:02d}.onnx", raw))
        if settings.whole:
            raws.append(raw)
        step(f"block {index + 1}" if index + 1 < parts.parts else "head")
    head = to_bytes(ends(trace(head_piece(view, tokens))), "head")
    head_part = write("head", "head.onnx", head)
    whole_part = write("whole", "whole.onnx", merge(stem, raws, head)) if settings.whole else None
    written = Parts(stem_part, head_part, tuple(block_parts), whole_part)
    return msgspec.structs.replace(draft, parts=written, bundle_id=bundle_id_of(interface, draft.precision, written))


def _blocks(
    view: BlockView,
    tokens: tuple[int, int],
    settings: ExportSettings,
    calibration: Calibration | None,
    step: Step,
) -> Iterator[onnx.ModelProto]:
    """Each block in the precision that is asked for."""
    traced = trace_blocks(view, tokens)
    ranges: list[dict[str, float]] = []
    if calibration is not None:
        step("ranges")
    if settings.precision == "int8" and settings.engine == "tensorrt":
        assert calibration is not None
        blocks = list(traced)
        with torch.no_grad():
            images = calibration.fit.images[:RANGE_IMAGES]
            starts = [view.stem(torch.from_numpy(images[i : i + 8])) for i in range(0, len(images), 8)]
        ranges = activation_ranges(blocks, torch.cat(starts).numpy())
        traced = iter(blocks)
    for index, model in enumerate(traced):
        if settings.precision == "fp16":
            yield to_half(model)
        elif settings.precision == "int8":
            yield quantise_explicit(model, ranges[index]) if ranges else quantise_dynamic(model)
        else:
            yield model


def _grouped(models: Iterator[onnx.ModelProto], size: int) -> Iterator[onnx.ModelProto]:
    while taken := list(itertools.islice(models, size)):
        yield taken[0] if size == 1 else group(taken)


def _as_it_is(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


_NONE = Part("", "", 0)


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new folder next to ``out``, on the same file system; removed at the end if it is still there."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.absolute().name}."))
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, out: Path) -> None:
    """Put ``folder`` in the place of ``out``; an older bundle there comes back where that fails."""
    if not out.exists():
        folder.rename(out)
        return
    check_target(out)
    with _beside(out) as attic:
        older = attic / "older"
        out.rename(older)
        try:
            folder.rename(out)
        except OSError:
            older.rename(out)
            raise
