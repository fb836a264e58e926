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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import onnx
import torch

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import (
    MANIFEST,
    NOT_FOLDED,
    SCHEMA,
    Bundle,
    Manifest,
    Part,
    Parts,
    bundle_id_of,
    interface_of,
    manifest_bands,
    model_id_of,
    write_manifest,
)
from ls_edge.core.errors import BundleError, RunError, UsageError, VerificationError
from ls_edge.engines.engine import signature_of
from ls_edge.engines.pipeline import Pipeline
from ls_edge.export.calibration import RANGE_IMAGES, Calibration, activation_ranges
from ls_edge.export.canonical import OPSET, check, to_bytes
from ls_edge.export.fp16 import to_half
from ls_edge.export.int8 import quantise_dynamic, quantise_explicit
from ls_edge.export.merge import group, merge
from ls_edge.export.order_costs import ORDERS, measure_order_costs, ranking_warnings
from ls_edge.export.targets import PartsView, ends_of, head_target, prepare_for_export, stem_target
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

ENGINE_COSINE = 0.999
"""Least cosine of logits between engines that were built here and the files that they were built from."""

Step = Callable[[str], None]
"""Called before each step with its name: stem, each block, head, verification, and the uses of calibration images."""


@dataclass(frozen=True)
class ExportSettings:
    """Options of an export."""

    precision: Literal["fp32", "fp16", "int8"] = "fp32"
    engine: Literal["onnx", "tensorrt"] = "onnx"
    """The engine that will run the files; only int8 differs."""
    blocks_per_part: int = 1
    """Neighbouring blocks in one file."""
    max_batch: int = MAX_BATCH
    """Largest batch that is verified."""
    whole: bool = False
    """Whether the model is written in one file too."""
    cost_orders: int = ORDERS
    """Orders whose cost is measured on calibration images; 0 for none."""
    bands: str | None = None
    """Other bands (``ls_edge.core.bands``) than the run's own, of the model's blocks."""
    fold_ends: bool = False
    """Whether stem and head run a first and a last band, where these are smaller than the largest one."""


_DEFAULT = ExportSettings()


@dataclass(frozen=True)
class Exported:
    """A bundle that was written, and its verification."""

    bundle: Bundle
    verified: Verified
    warnings: tuple[str, ...] = ()
    """Warnings for the user, a line each."""


def steps_of(num_parts: int, *, calibrated: bool = False) -> int:
    """How often :func:`export_run` calls ``on_step``."""
    return num_parts + 3 + (3 if calibrated else 0)


def parts_of(run: LoadedRun, settings: ExportSettings = _DEFAULT) -> PartsView:
    """The run's model by the parts that an export writes; raises as :func:`export_run` where there are no such."""
    bands = _bands_of(run, settings)
    folded = ends_of(bands) if settings.fold_ends else NOT_FOLDED
    return PartsView(run.view, settings.blocks_per_part, bands, folded)


def _bands_of(run: LoadedRun, settings: ExportSettings) -> Bands:
    return run.bands if settings.bands is None else Bands.from_json(settings.bands, run.view.num_blocks)


def export_run(
    run: LoadedRun,
    out: str | Path,
    settings: ExportSettings = _DEFAULT,
    *,
    calibration: Calibration | None = None,
    on_step: Step = lambda _: None,
) -> Exported:
    """Export ``run`` to the folder ``out``.

    It is verified on the images of ``calibration``, without them on generated ones. On an error ``out`` is unchanged.
    Raises :class:`UsageError` if ``out`` holds something else or int8 for TensorRT has no calibration,
    :class:`ls_edge.core.errors.ModelError` if the blocks cannot be grouped by ``settings.blocks_per_part``,
    :class:`ls_edge.core.errors.VerificationError` if a part differs from PyTorch, and :class:`BundleError` if the
    folder
    cannot be written.
    """
    out = Path(out)
    check_target(out)
    check_trained(run)
    if settings.precision == "int8" and settings.engine == "tensorrt" and calibration is None:
        raise UsageError("int8 for TensorRT needs ranges of activations: give images with --calibrate DATA")
    view = parts_of(run, settings)
    try:
        with _temporary_folder(out) as folder:
            manifest = _write_parts(run, view, folder, settings, calibration, on_step)
            verified = _verify(Bundle(folder, manifest), view, settings, calibration, on_step)
            costs: dict[str, Any] = {}
            warnings = [f"{run.folder}: {run.record.problem}"] if run.record.problem else []
            if not run.bands.contains(_bands_of(run, settings)):
                warnings.append(
                    f"the bands {settings.bands} allow orders that {run.folder} was not trained for (its bands are "
                    f"{run.bands}); measure what they cost with 'ls-edge eval --bands {settings.bands}'"
                )
            if calibration is not None:
                on_step("order costs")
                if settings.cost_orders:
                    found = measure_order_costs(view, calibration.fit, calibration.source, orders=settings.cost_orders)
                    costs = msgspec.to_builtins(found)
                    warnings += ranking_warnings(found)
            manifest = msgspec.structs.replace(manifest, verified=verified.to_json(), order_costs=costs)
            write_manifest(folder, manifest)
            _replace(folder, out)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror or error}; check the path and the free space") from None
    return Exported(Bundle.open(out), verified, tuple(warnings))


def _verify(
    bundle: Bundle, view: PartsView, settings: ExportSettings, calibration: Calibration | None, on_step: Step
) -> Verified:
    on_step("verification")
    batches = batches_of(settings.max_batch)
    if calibration is None:
        images, source = generated_images(bundle.manifest.image, sum(batches)), "generated"
    else:
        images, source = calibration.held_out.images, calibration.source
    with Pipeline.open(bundle, threads=1, provider="cpu") as chain:
        precision = settings.precision
        result = verify_numbers(view, chain, images, source=source, precision=precision, batches=batches)
        if calibration is not None:
            on_step("accuracy")
            if calibration.held_out.labels is not None:
                verify_accuracy(view, chain, calibration.held_out, result)
    result.notes["blocks_per_part"] = settings.blocks_per_part
    if settings.precision == "int8":
        result.notes["int8"] = "explicit" if settings.engine == "tensorrt" else "dynamic"
    return result


def build_engines(bundle: Bundle, *, on_status: Callable[[str], None] = lambda _: None) -> str | None:
    """Build this device's TensorRT engines of a bundle into the cache and compare them with the files.

    Returns what they run on; None where TensorRT is not installed here, since the devices build their own. Not run on
    hardware yet. Raises :class:`ls_edge.core.errors.EngineError` where one cannot be built and
    :class:`VerificationError` where the engines and ONNX Runtime disagree.
    """
    if importlib.util.find_spec("tensorrt") is None:
        return None
    images = generated_images(bundle.manifest.image, 3)
    with (
        Pipeline.open(bundle, kind="tensorrt", on_step=lambda _done, _total, text: on_status(text)) as built,
        Pipeline.open(bundle, kind="onnx", threads=1, provider="cpu") as files,
    ):
        found = cosine(built.forward(images), files.forward(images))
        if not found >= ENGINE_COSINE:
            raise VerificationError(
                f"the TensorRT engines of {bundle.folder} give logits with a cosine of {found:.5f} to the files' own, "
                f"the tolerance is {ENGINE_COSINE}; use --engine onnx there and report this"
            )
        return built.provider


def check_trained(run: LoadedRun) -> None:
    """Raise :class:`RunError` if training did not finish one epoch."""
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
    on_step: Step,
) -> Manifest:
    view = prepare_for_export(run.view)
    spec = run.view.token_spec
    tokens = (spec.count, spec.dim)
    if run.view.num_classes != len(run.classes):
        raise RunError(
            f"{run.folder}: the model has {run.view.num_classes} logits and the run {len(run.classes)} class names; "
            "train it again"
        )
    folded = parts.folded
    interface = interface_of(
        run.image, spec, parts.bands, len(run.classes), needs_slot=view.needs_slot, folded=folded
    )  # fmt: skip
    draft = Manifest(
        schema=SCHEMA, bundle_id="", model_id=model_id_of(run.weights_sha256, interface), model=run.model,
        method=run.method, classes=run.classes, image=run.image, tokens=spec, needs_slot=view.needs_slot,
        precision=settings.precision, opset=OPSET, parts=Parts(_NONE, _NONE, ()), trained_on=run.trained_on,
        bands=manifest_bands(parts.bands), folded=msgspec.UNSET if folded == NOT_FOLDED else folded,
    )  # fmt: skip

    def write(name: str, file: str, raw: bytes) -> Part:
        check(raw, name, signature_of(draft, name))
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(raw)
        return Part(file, hashlib.sha256(raw).hexdigest(), len(raw))

    ends = to_half if settings.precision == "fp16" else _unchanged
    on_step("stem")
    stem = to_bytes(ends(trace(stem_target(view, run.image.size, folded.stem))), "stem")
    stem_part = write("stem", "stem.onnx", stem)
    on_step("block 0")
    block_parts: list[Part] = []
    raws = []
    for index, model in enumerate(
        _grouped(_blocks(parts.of(view), tokens, settings, calibration, on_step), parts.per_part)
    ):
        raw = to_bytes(model, f"block {index}")
        digest = hashlib.sha256(raw).hexdigest()
        same = next((part for part in block_parts if part.sha256 == digest), None)  # blocks that share their weights
        block_parts.append(same or write(f"block {index}", f"blocks/{index:02d}.onnx", raw))
        if settings.whole:
            raws.append(raw)
        on_step(f"block {index + 1}" if index + 1 < parts.parts else "head")
    head = to_bytes(ends(trace(head_target(view, tokens, folded.head))), "head")
    head_part = write("head", "head.onnx", head)
    whole_part = write("whole", "whole.onnx", merge(stem, raws, head)) if settings.whole else None
    written = Parts(stem_part, head_part, tuple(block_parts), whole_part)
    return msgspec.structs.replace(draft, parts=written, bundle_id=bundle_id_of(interface, draft.precision, written))


def _blocks(
    parts: PartsView,
    tokens: tuple[int, int],
    settings: ExportSettings,
    calibration: Calibration | None,
    on_step: Step,
) -> Iterator[onnx.ModelProto]:
    """Each block in the precision that is asked for."""
    traced = trace_blocks(parts.view, tokens, parts.folded)
    ranges: list[dict[str, float]] = []
    if calibration is not None:
        on_step("ranges")
    if settings.precision == "int8" and settings.engine == "tensorrt":
        assert calibration is not None
        blocks = list(traced)
        with torch.no_grad():
            images = calibration.fit.images[:RANGE_IMAGES]
            starts = [parts.stem(torch.from_numpy(images[i : i + 8])) for i in range(0, len(images), 8)]
        of_blocks = Bands(len(blocks), tuple(cut * parts.per_part for cut in parts.bands.cuts))
        owners = parts.view.owners[parts.folded.stem : parts.folded.stem + len(blocks)]
        ranges = _shared_ranges(activation_ranges(blocks, torch.cat(starts).numpy(), of_blocks), owners)
        traced = iter(blocks)
    for index, model in enumerate(traced):
        if settings.precision == "fp16":
            yield to_half(model)
        elif settings.precision == "int8":
            yield quantise_explicit(model, ranges[index]) if ranges else quantise_dynamic(model)
        else:
            yield model


def _shared_ranges(ranges: list[dict[str, float]], owners: Sequence[int]) -> list[dict[str, float]]:
    """The largest of each range among blocks that share their weights, and so their file."""
    found: dict[int, dict[str, float]] = {}
    for owner, item in zip(owners, ranges, strict=True):
        largest = found.setdefault(owner, {})
        for name, value in item.items():
            largest[name] = max(largest.get(name, 0.0), value)
    return [found[owner] for owner in owners]


def _grouped(models: Iterator[onnx.ModelProto], size: int) -> Iterator[onnx.ModelProto]:
    while taken := list(itertools.islice(models, size)):
        yield taken[0] if size == 1 else group(taken)


def _unchanged(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


_NONE = Part("", "", 0)


@contextlib.contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
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
    with _temporary_folder(out) as attic:
        older = attic / "older"
        out.rename(older)
        try:
            folder.rename(out)
        except OSError:
            older.rename(out)
            raise
