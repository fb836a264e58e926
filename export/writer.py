"""Write a bundle: parts into a folder beside the target, everything verified, the manifest, then one rename.

Until the rename nothing at the target changes, and a folder that was left behind by a kill has no manifest, so
it is never taken for a bundle. An older bundle at the target is replaced only then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

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
from ls_edge.errors import BundleError, RunError, UsageError
from ls_edge.export.merge import merge
from ls_edge.export.onnx_parts import trace, trace_blocks
from ls_edge.export.split import head_piece, portable, stem_piece
from ls_edge.export.structure import OPSET, check, to_bytes
from ls_edge.export.verify import Verified, generated_images, verify_numbers
from ls_edge.runtime.chain import Chain
from ls_edge.runtime.engines import signature_of
from ls_edge.training.checkpoint import LoadedRun

Step = Callable[[str], None]
"""Told what comes next: stem, each block, head, verification."""


@dataclass(frozen=True)
class Exported:
    """A bundle that was written, and what was measured on the way."""

    bundle: Bundle
    verified: Verified


def steps_of(blocks: int) -> int:
    """How often :func:`export_run` reports a step."""
    return blocks + 3


def export_run(
    run: LoadedRun,
    out: str | Path,
    *,
    whole: bool = False,
    images: np.ndarray | None = None,
    source: str = "generated",
    step: Step = lambda _: None,
) -> Exported:
    """Export ``run`` to the folder ``out`` in float32.

    ``images`` (float32 ``[8, 3, H, W]``, from ``source``) are what it is verified on, generated ones otherwise;
    ``whole`` adds the model in one file. Raises :class:`UsageError` where ``out`` holds something else,
    :class:`ls_edge.errors.VerificationError` where a part is not what PyTorch computes, and
    :class:`BundleError` where it cannot be written; ``out`` is as before then.
    """
    out = Path(out)
    check_target(out)
    try:
        with _beside(out) as folder:
            manifest = _write_parts(run, folder, whole=whole, step=step)
            step("verification")
            if images is None:
                images, source = generated_images(run.image), "generated"
            with Chain.open(Bundle(folder, manifest), threads=1, provider="cpu") as chain:
                verified = verify_numbers(run.view, chain, images, source=source, precision=manifest.precision)
            write_manifest(folder, msgspec.structs.replace(manifest, verified=verified.to_json()))
            _replace(folder, out)
    except OSError as error:
        raise BundleError(f"cannot write {out}: {error.strerror or error}; check the path and the free space") from None
    return Exported(Bundle.open(out), verified)


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


def _write_parts(run: LoadedRun, folder: Path, *, whole: bool, step: Step) -> Manifest:
    view = portable(run.view)
    spec = run.view.token_spec
    tokens = (spec.count, spec.dim)
    if run.view.classes_count != len(run.classes):
        raise RunError(
            f"{run.folder}: the model has {run.view.classes_count} logits and the run {len(run.classes)} class names; "
            "train it again"
        )
    interface = interface_of(run.image, spec, run.view.blocks_count, len(run.classes), needs_slot=view.needs_slot)
    draft = Manifest(
        schema=SCHEMA, bundle_id="", model_id=model_id_of(run.weights_sha256, interface), model=run.model,
        method=run.method, classes=run.classes, image=run.image, tokens=spec, needs_slot=view.needs_slot,
        precision="fp32", opset=OPSET, parts=Parts(_NONE, _NONE, ()), trained_on=run.trained_on,
    )  # fmt: skip

    def write(name: str, file: str, raw: bytes) -> Part:
        check(raw, name, signature_of(draft, name))
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(raw)
        return Part(file, hashlib.sha256(raw).hexdigest(), len(raw))

    step("stem")
    stem = to_bytes(trace(stem_piece(view, run.image.size)), "stem")
    stem_part = write("stem", "stem.onnx", stem)
    step("block 0")
    blocks, block_parts = [], []
    for index, model in enumerate(trace_blocks(view, tokens)):
        raw = to_bytes(model, f"block {index}")
        block_parts.append(write(f"block {index}", f"blocks/{index:02d}.onnx", raw))
        if whole:
            blocks.append(raw)
        step(f"block {index + 1}" if index + 1 < run.view.blocks_count else "head")
    head = to_bytes(trace(head_piece(view, tokens)), "head")
    head_part = write("head", "head.onnx", head)
    whole_part = write("whole", "whole.onnx", merge(stem, blocks, head)) if whole else None
    parts = Parts(stem_part, head_part, tuple(block_parts), whole_part)
    return msgspec.structs.replace(draft, parts=parts, bundle_id=bundle_id_of(interface, draft.precision, parts))


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
