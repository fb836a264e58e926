"""Runs and bundles opened for evaluation and analysis, and the images to evaluate on.

A bundle runs on the engines of this machine and needs no torch; a run needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle, Manifest, shared_groups
from ls_edge.core.errors import DataError, RunError, printable
from ls_edge.core.files import local_folder
from ls_edge.core.logs import OnWarning, warn_in_python
from ls_edge.data.content import Overlap
from ls_edge.data.datasets import ImageRef, ImageSet, image_warnings, require_labels
from ls_edge.data.preprocess import Preprocessor, iterate_batches
from ls_edge.device.requirements import require_import
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.measure import TokenModel
from ls_edge.evaluation.settings import ModelSettings

if TYPE_CHECKING:
    from ls_edge.training.config import RunRecord


@dataclass(frozen=True)
class OpenedModel:
    """Model that is open for evaluation."""

    folder: Path
    blocks: TokenModel
    record: Manifest | RunRecord
    """Preprocessing, classes, training images and method."""
    model: str
    weights: str
    """Digest of a run's weights, or a bundle's id."""
    bands: Bands
    owners: Sequence[int]
    """First block with the same weights, for each block."""
    engine: str
    asked: ModelSettings
    warn: OnWarning = warn_in_python
    skipped: list[str] = field(default_factory=list)
    """Images of :meth:`batches` that could not be decoded."""
    counts: dict[str, int] = field(default_factory=dict)
    """Numbers of different images and of known ones in :meth:`images`."""

    def images(self, images: ImageSet) -> ImageSet:
        """Return the images with the labels of the model; warn if it was trained on some."""
        record = self.record
        taken, overlap = images_for(images, record.trained_on, record.classes, self.asked.limit, self.warn)
        self.counts.update(different=overlap.different, trained_on=overlap.known)
        return taken

    def batches(self, images: ImageSet) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pixels and labels; warn about images that cannot be decoded, and leave them out."""

        def leave_out(image: ImageRef, error: DataError) -> None:
            self.skipped.append(image.name)
            self.warn(f"left out: {error}")

        return iterate_batches(images, Preprocessor(self.record.image), self.asked.batch_size, leave_out)

    def settings(self, images: ImageSet, bands: Bands) -> dict[str, Any]:
        """Return the model, the data and the settings in force, for the JSON of the result."""
        return {
            "of": printable(self.folder),
            "data": printable(images.source),
            "part": images.part,
            "account": images.account(self.skipped),
            **self.counts,
            "model": self.model,
            "weights": self.weights,
            "method": self.record.method,
            "engine": self.engine,
            "blocks": self.blocks.num_blocks,
            **msgspec.structs.asdict(self.asked),
            "bands": bands.to_json(),
            "shared": shared_groups(self.owners),
        }


def images_for(
    images: ImageSet, trained_on: str, classes: Sequence[str], limit: int | None, warn: OnWarning
) -> tuple[ImageSet, Overlap]:
    """Return the images with the labels of a model; warn if it was trained on some, or a class has no images."""
    for text in image_warnings(images):
        warn(text)
    taken = require_labels(images, classes).take(limit)
    return taken, Overlap.of(taken, trained_on, warn)


def is_bundle(path: Path) -> bool:
    """Return whether a folder is a bundle."""
    return (path / "manifest.json").is_file()


def model_folders(path: Path) -> list[Path]:
    """Return the run or bundle itself, or the runs in a folder; raise :class:`RunError` if there are none."""
    path = local_folder(path)
    if is_bundle(path) or (path / "config.yaml").is_file():
        return [path]
    if path.is_file():
        raise RunError(f"{path} is a file; give the folder of a run (config.yaml) or of a bundle (manifest.json)")
    runs = sorted(inner.parent for inner in path.glob("*/config.yaml")) if path.is_dir() else []
    if not runs:
        raise RunError(
            f"{path} is neither a run (config.yaml) nor a bundle (manifest.json), nor a folder of runs; make one with "
            "'ls-edge train' or 'ls-edge export'"
        )
    return runs


@contextlib.contextmanager
def open_model(folder: Path, settings: ModelSettings, warn: OnWarning) -> Iterator[OpenedModel]:
    """Open a bundle or a run; torch's threads are restored on exit."""
    if is_bundle(folder):
        bundle = Bundle.open(folder)
        with Pipeline.open(bundle, threads=settings.threads) as pipeline:
            m, is_onnx = bundle.manifest, pipeline.choice.kind == "onnx"
            engine = f"onnxruntime {pipeline.provider}" if is_onnx else pipeline.provider
            own = (m, m.model, m.bundle_id, bundle.bands, bundle.owners)
            in_force = msgspec.structs.replace(settings, device="auto", precision=m.precision)  # these are for runs
            yield OpenedModel(folder, pipeline, *own, engine, in_force, warn)
        return
    require_import(f"{folder} is a run, which", ("torch", "timm", "safetensors"), "train", instead="; or give a bundle")
    import torch

    from ls_edge.training.models.torch_blocks import TorchBlocks
    from ls_edge.training.precision import choose_device, choose_precision, choose_threads, own_torch_state
    from ls_edge.training.runs.checkpoint import load_run, shown_model

    chosen = choose_device(settings.device)
    dtype = choose_precision(settings.precision, chosen)
    with own_torch_state():
        run = load_run(folder, chosen)
        if run.record.unfinished:
            warn(f"{folder}: {run.record.problem}")
        r, engine = run.record, f"torch {torch.__version__} {chosen} {settings.precision}"
        about = (r, shown_model(r, run.view), run.weights_sha256, run.bands, run.view.owners, engine, settings, warn)
        torch.set_num_threads(choose_threads(settings.threads, run.view))
        yield OpenedModel(folder, TorchBlocks(run.view, dtype), *about)
