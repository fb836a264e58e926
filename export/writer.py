"""Export of a run to a bundle: write the parts to a folder next to the target, verify them, and rename the folder.

The target does not change before the rename. A folder that remains after a kill has no manifest, so it cannot be
mistaken for a bundle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import onnx
import torch
from rich.console import Console

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import (
    MANIFEST,
    NOT_FOLDED,
    SCHEMA,
    Bundle,
    Manifest,
    PartFile,
    PartFiles,
    bundle_id_of,
    interface_of,
    manifest_bands,
    model_id_of,
    shared_groups,
    write_manifest,
)
from ls_edge.core.errors import BundleError, EngineError, RunError, UsageError, VerificationError, printable
from ls_edge.core.logs import OnProgress, OnWarning, ignore_progress, warn_in_python
from ls_edge.data.datasets import ImageSet
from ls_edge.engines.engine import signature_of
from ls_edge.engines.measuring import reference_outputs
from ls_edge.engines.onnxruntime import onnxruntime_module
from ls_edge.engines.pipeline import Pipeline
from ls_edge.engines.tensorrt.build import this_device
from ls_edge.export.calibration import RANGE_IMAGES, Calibration, activation_ranges, read_calibration
from ls_edge.export.canonical import HALF_SCALES, OPSET, check, digest_of_graph, identify, to_bytes
from ls_edge.export.fp16 import LARGEST, beyond_half, nodes_in_float, to_half
from ls_edge.export.int8 import quantize_dynamic, quantize_explicit
from ls_edge.export.merge import merge
from ls_edge.export.settings import ExportSettings
from ls_edge.export.targets import PartsView, ends_of, head_target, prepare_for_export, stem_target
from ls_edge.export.trace_onnx import trace, trace_blocks
from ls_edge.export.verify import (
    Verified,
    batches_of,
    check_half_range,
    cosine,
    generated_images,
    int8_form,
    range_orders,
    verify_accuracy,
    verify_numbers,
)
from ls_edge.report.bundle import print_export
from ls_edge.report.shown import Shown
from ls_edge.training.precision import own_torch_state
from ls_edge.training.runs.checkpoint import LoadedRun, load_run, shown_model

ENGINE_COSINE = 0.999
"""Minimum cosine between the logits of engines built on this machine and those of the files they were built from."""

Step = Callable[[str], None]
"""Callback that receives the name of the next step: a part, verification, or a use of calibration images."""
HEADROOM = 4.0
"""Safety factor for the range of float16, since other images give larger values.

For the half-precision values of a ViT-S/14, the largest value over 256 photos is up to 3.5 times that over generated
images.
"""


def _ignore(_step: str) -> None:
    """Ignore the name of a step."""


_DEFAULT = ExportSettings()


@dataclass(frozen=True)
class ExportResult(Shown):
    """A bundle that was written and verified."""

    bundle: Bundle
    warnings: tuple[str, ...]
    seconds: float = 0.0
    engines_built: str | None = None
    """Device of the TensorRT engines that were built; None if there are none."""
    account: dict[str, Any] | None = None
    """Description of the calibration images (:meth:`ls_edge.data.datasets.ImageSet.account`); None without any."""

    def show(self, console: Console) -> None:
        """Print the files, the bands, and what was verified."""
        print_export(self.document(), console)

    def document(self) -> dict[str, Any]:
        """Return the document of ``export --json``."""
        bundle, manifest = self.bundle, self.bundle.manifest
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
            "account": self.account,
            "verified": manifest.verified,
            "seconds": self.seconds,
            "engines_built": self.engines_built,
            "warnings": self.warnings,
        }


def steps_of(num_parts: int, *, calibrated: bool = False) -> int:
    """Return the number of times that :func:`export_run` calls ``on_step``."""
    return num_parts + 3 + (2 if calibrated else 0)


def parts_of(run: LoadedRun, settings: ExportSettings = _DEFAULT) -> PartsView:
    """Return the run's model as the parts that an export writes; raise as :func:`export_run` does."""
    bands = _bands_of(run, settings)
    return PartsView(run.view, bands, ends_of(bands) if settings.fold_ends else NOT_FOLDED)


def _bands_of(run: LoadedRun, settings: ExportSettings) -> Bands:
    return run.bands if settings.bands is None else Bands.from_json(settings.bands, run.view.num_blocks)


@own_torch_state()
def export(
    run: str | Path,
    out: str | Path,
    *,
    calibrate: str | ImageSet | None = None,
    on_progress: OnProgress = ignore_progress,
    on_warning: OnWarning = warn_in_python,
    **settings: Any,
) -> ExportResult:
    """Split a trained model into one ONNX file per block, verify the files, and write a bundle, as ``ls-edge export``.

    ``settings`` are fields of :class:`ExportSettings`, such as ``precision``. Errors are those of :func:`export_run`.
    A bundle in ``out`` is replaced only by a verified one.
    """
    start = time.perf_counter()
    asked = ExportSettings.of(settings)
    asked.check(is_calibrated=calibrate is not None)
    onnxruntime_module()
    check_target(Path(out))
    loaded = load_run(run)
    parts = parts_of(loaded, asked).num_blocks  # raises for bad settings before images are read
    images = None
    if calibrate is not None:
        images = read_calibration(calibrate, loaded.record.image, loaded.record.classes, on_warning)
    steps, total = itertools.count(), steps_of(parts, calibrated=images is not None)
    exported = export_run(
        loaded, out, asked, calibration=images, on_step=lambda text: on_progress(next(steps), total, text)
    )
    built = (
        build_engines(exported.bundle, asked.max_batch, lambda text: on_progress(total, total, text))
        if asked.engine == "tensorrt"
        else None
    )
    for warning in exported.warnings:
        on_warning(warning)
    return dataclasses.replace(exported, seconds=round(time.perf_counter() - start, 3), engines_built=built)


def export_run(
    run: LoadedRun,
    out: str | Path,
    settings: ExportSettings = _DEFAULT,
    *,
    calibration: Calibration | None = None,
    on_step: Step = _ignore,
) -> ExportResult:
    """Export ``run`` to the folder ``out``, and verify it on the images of ``calibration`` or on generated ones.

    If an error occurs, ``out`` is unchanged. Raise :class:`UsageError` if ``out`` contains something else or int8 for
    TensorRT has no calibration, :class:`ls_edge.core.errors.ModelError` if the blocks cannot be grouped,
    :class:`VerificationError` if a part differs from PyTorch, and :class:`BundleError` if the folder cannot be written.
    """
    out = Path(out)
    check_target(out)
    _check_run(run)
    settings.check(is_calibrated=calibration is not None)
    parts = parts_of(run, settings)
    warnings = [f"{run.folder}: {run.record.problem}"] if run.record.problem else []
    if not run.bands.contains(_bands_of(run, settings)):
        warnings.append(
            f"the bands {settings.bands} allow orders that {run.folder} was not trained for (its bands are "
            f"{run.bands}); measure their cost with 'ls-edge eval --bands {settings.bands}'"
        )
    try:
        with _temporary_folder(out) as folder:
            manifest, in_float = _write_in_range(run, parts, folder, settings, calibration, on_step)
            warnings += [
                f"{part}: {', '.join(nodes)} run in float32, because values come close to {LARGEST:,.0f}, the largest "
                "number of float16, or exceed it"
                for part, nodes in in_float.items()
            ]
            verified = _verify(Bundle(folder, manifest), parts, settings, calibration, on_step)
            verified.notes.update({"float32": in_float} if in_float else {})
            manifest = msgspec.structs.replace(manifest, verified=verified.to_json())
            write_manifest(folder, manifest)
            _replace(folder, out)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror or error}; check the path and the free space") from None
    account = None if calibration is None else calibration.account
    return ExportResult(Bundle.open(out), tuple(warnings), account=account)


def _verify(
    bundle: Bundle, parts: PartsView, settings: ExportSettings, calibration: Calibration | None, on_step: Step
) -> Verified:
    on_step("verification")
    if calibration is None:
        images, source = generated_images(bundle.manifest.image), "generated"
    else:
        images, source = calibration.held_out.images, calibration.source
    with Pipeline.on_demand(bundle) as chain:
        result = verify_numbers(
            parts,
            chain,
            images,
            source=source,
            precision=settings.precision,
            batches=batches_of(settings.max_batch),
        )
        if calibration is not None:
            on_step("accuracy")
            if calibration.held_out.labels is not None:
                verify_accuracy(parts, chain, calibration.held_out, result)
        outputs = reference_outputs(bundle, chain.executor.run)
        # Boards compare their engines with these values, since they may not have another engine.
        result.notes["outputs"] = {name: [float(f"{value:.7g}") for value in found] for name, found in outputs.items()}
    result.notes.update(int8_form(bundle))
    return result


def build_engines(bundle: Bundle, max_batch: int, on_status: Callable[[str], None] = lambda _: None) -> str | None:
    """Build the TensorRT engines of a bundle for this device, in the cache, and compare them with the files.

    Return the device that they run on, or None without TensorRT or a GPU. Not run on hardware yet. Raise
    :class:`ls_edge.core.errors.EngineError` if an engine cannot be built, and :class:`VerificationError` if the engines
    and ONNX Runtime disagree.
    """
    try:
        this_device()
    except EngineError:
        return None
    images = generated_images(bundle.manifest.image, 3)
    with (
        Pipeline.open(
            bundle, kind="tensorrt", max_batch=max_batch, on_step=lambda _done, _total, text: on_status(text)
        ) as built,
        Pipeline.open(bundle, kind="onnx", threads=1, provider="cpu") as files,
    ):
        found = cosine(built.forward(images), files.forward(images))
        if not found >= ENGINE_COSINE:
            raise VerificationError(
                f"the logits of the TensorRT engines of {bundle.folder} have a cosine of {found:.5f} with those of the "
                f"files, the tolerance is {ENGINE_COSINE}; run with --engine onnx there and report this"
            )
        return built.provider


def _check_run(run: LoadedRun) -> None:
    if run.record.unfinished:
        raise RunError(
            f"{run.folder}: {run.record.problem}; continue with 'ls-edge train --resume', train again with a lower "
            "--lr, or, for an untrained model, with --epochs 0"
        )
    if run.view.num_classes != len(run.record.classes):
        raise RunError(
            f"{run.folder}: the model has {run.view.num_classes} logits and the run {len(run.record.classes)} class "
            "names; train it again"
        )


def check_target(out: Path) -> None:
    """Raise :class:`UsageError` unless ``out`` is new, empty, or contains only a bundle."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{out} is not a folder; give --out a new one")
    if not out.exists():
        return
    if out.is_mount():
        raise UsageError(f"{out} is a mount point, which a bundle cannot replace; give --out a folder in it")
    if Path.cwd().is_relative_to(out.resolve()):
        raise UsageError(f"{out} is or holds the working folder, which a bundle cannot replace; give --out another one")
    names = sorted(
        path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink()
    )
    foreign = [name for name in names if name != MANIFEST and not name.endswith(".onnx")]
    if foreign:
        raise UsageError(f"{out} contains {foreign[0]!r}, which is not part of a bundle; give --out a new folder")
    if names and MANIFEST not in names:
        raise UsageError(f"{out} is not empty and not a bundle (it contains {names[0]!r}); give --out a new folder")


def _draft(run: LoadedRun, parts: PartsView, settings: ExportSettings) -> Manifest:
    record, view, folded = run.record, run.view, parts.folded
    interface = interface_of(
        record.image, view.token_spec, parts.bands, record.classes, needs_slot=view.needs_slot, folded=folded
    )
    none = PartFile("", "", 0)
    return Manifest(
        schema=SCHEMA,
        bundle_id="",
        model_id=model_id_of(run.weights_sha256, interface),
        model=shown_model(record, view),
        method=record.method,
        classes=record.classes,
        image=record.image,
        tokens=view.token_spec,
        needs_slot=view.needs_slot,
        precision=settings.precision,
        opset=HALF_SCALES[0] if settings.is_explicit else OPSET,
        parts=PartFiles(none, none, ()),
        trained_on=record.trained_on,
        bands=manifest_bands(parts.bands),
        folded=msgspec.UNSET if folded == NOT_FOLDED else folded,
    )


def _write_in_range(
    run: LoadedRun,
    parts: PartsView,
    folder: Path,
    settings: ExportSettings,
    calibration: Calibration | None,
    on_step: Step,
) -> tuple[Manifest, dict[str, list[str]]]:
    """Write the parts; return the manifest, and the nodes by part that run in float32 to avoid overflow.

    Parts whose files have values that may exceed the range of float16 are written again.
    """
    image = run.record.image
    images = generated_images(image) if calibration is None else calibration.fit.images
    wide: dict[str, set[str]] = {}
    while True:
        manifest, in_float = _write_parts(run, parts, folder, settings, calibration, on_step, wide)
        bundle = Bundle(folder, manifest)
        found = beyond_half(bundle, images, range_orders(parts.bands), LARGEST / HEADROOM)
        if all(wide.get(part, set()).issuperset(names) for part, names in found.items()):
            if found:  # within the range, but without headroom
                check_half_range(bundle, images)
            return manifest, in_float
        for part, names in found.items():
            wide.setdefault(part, set()).update(names)
        for index, owner in enumerate(bundle.owners):
            wide[f"block {index}"] = wide.get(f"block {owner}", set())
        on_step = _ignore  # the same steps again


def _write_parts(
    run: LoadedRun,
    parts: PartsView,
    folder: Path,
    settings: ExportSettings,
    calibration: Calibration | None,
    on_step: Step,
    wide: Mapping[str, Collection[str]],
) -> tuple[Manifest, dict[str, list[str]]]:
    draft = _draft(run, parts, settings)
    exported = parts.of(prepare_for_export(run.view))
    written: dict[bytes, PartFile] = {}
    in_float: dict[str, list[str]] = {}

    def write(name: str, file: str, model: onnx.ModelProto, *, half: bool = settings.precision == "fp16") -> PartFile:
        written_as = to_half(model, wide.get(name, ())) if half else model
        digest = digest_of_graph(written_as)
        if digest not in written:  # blocks that share their weights share a file, which is named after the first block
            identify(written_as, name, draft)
            raw = to_bytes(written_as, name)
            check(raw, name, signature_of(draft, name))
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(raw)
            written[digest] = PartFile(file, hashlib.sha256(raw).hexdigest(), len(raw))
            if half and wide.get(name):
                in_float[name] = nodes_in_float(model, wide[name])
        return written[digest]

    on_step("stem")
    stem = write("stem", "stem.onnx", trace(stem_target(exported)))
    on_step("block 0")
    blocks: list[PartFile] = []
    for index, model in enumerate(_blocks(exported, settings, calibration, on_step)):
        blocks.append(write(f"block {index}", f"blocks/{index:02d}.onnx", model, half=settings.halves_blocks))
        on_step(f"block {index + 1}" if index + 1 < parts.num_blocks else "head")
    head = write("head", "head.onnx", trace(head_target(exported)))
    whole = None
    if settings.whole:
        raws = [(folder / part.file).read_bytes() for part in (stem, *blocks, head)]
        whole = write(
            "whole", "whole.onnx", onnx.load_model_from_string(merge(raws[0], raws[1:-1], raws[-1])), half=False
        )
    manifest = msgspec.structs.replace(draft, parts=PartFiles(stem, head, tuple(blocks), whole))
    bundle_id = bundle_id_of(Bundle(folder, manifest).interface, manifest.precision, manifest.parts)
    return msgspec.structs.replace(manifest, bundle_id=bundle_id), in_float


def _blocks(
    parts: PartsView, settings: ExportSettings, calibration: Calibration | None, on_step: Step
) -> Iterator[onnx.ModelProto]:
    if calibration is not None:
        on_step("ranges")
    if not settings.is_explicit:
        traced = trace_blocks(parts.view, parts.folded)
        yield from traced if settings.precision != "int8" else map(quantize_dynamic, traced)
        return
    assert calibration is not None
    with torch.no_grad():
        images = calibration.fit.images[:RANGE_IMAGES]
        starts = [parts.stem(torch.from_numpy(images[i : i + 8])) for i in range(0, len(images), 8)]
    ranges = activation_ranges(trace_blocks(parts.view, parts.folded), torch.cat(starts).numpy(), parts.bands)
    owners = parts.view.owners[parts.folded.stem : parts.view.num_blocks - parts.folded.head]
    yield from map(quantize_explicit, trace_blocks(parts.view, parts.folded), _shared_ranges(ranges, owners))


def _shared_ranges(ranges: list[dict[str, float]], owners: Sequence[int]) -> list[dict[str, float]]:
    """Return the maximum of each range over blocks that share a file because they share their weights."""
    found: dict[int, dict[str, float]] = {}
    for owner, item in zip(owners, ranges, strict=True):
        largest = found.setdefault(owner, {})
        largest.update({name: max(largest.get(name, 0.0), value) for name, value in item.items()})
    return [found[owner] for owner in owners]


@contextlib.contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """Create a folder next to ``out``, on the same file system; remove it at the end if it still exists."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = parent / f".{out.absolute().name}.{secrets.token_hex(4)}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _replace(folder: Path, out: Path) -> None:
    """Move ``folder`` to ``out``; after an error or a signal, restore the previous bundle."""
    if not out.exists():
        folder.rename(out)
        return
    check_target(out)
    with _temporary_folder(out) as attic:
        older = attic / "older"
        try:
            out.rename(older)
            folder.rename(out)
        finally:
            if not out.exists():
                older.rename(out)
