"""Runs and bundles opened for ``ls-edge eval`` and ``ls-edge analyze``, and the images to evaluate on.

A bundle runs on the engines of this machine and needs no torch; a run needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import Bundle, ImageSpec
from ls_edge.core.errors import RunError, UsageError, printable
from ls_edge.data.datasets import ImageSet, require_labels, trained_on_warning
from ls_edge.device.requirements import install_command
from ls_edge.engines.pipeline import Pipeline
from ls_edge.evaluation.analysis import TokenModel


@dataclass(frozen=True)
class OpenedModel:
    """A model that is open for evaluation."""

    blocks: TokenModel
    image: ImageSpec
    classes: Sequence[str]
    trained_on: str
    """Digest of its training images."""
    model: str
    method: str
    bands: Bands
    owners: Sequence[int]
    """First block with the same weights, for each block."""
    engine: str
    """Engine and provider, as text."""


def model_folders(path: Path) -> list[Path]:
    """Return the run or bundle itself, or the runs in a folder; raise :class:`RunError` if there are none."""
    if (path / "manifest.json").is_file() or (path / "config.yaml").is_file():
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


def open_model(
    folder: Path,
    *,
    device: Literal["auto", "cpu", "cuda"],
    precision: Literal["fp32", "bf16", "fp16"],
    threads: int | None,
) -> OpenedModel:
    """Open a bundle or a run; ``device`` and ``precision`` apply to runs."""
    if (folder / "manifest.json").is_file():
        return _open_bundle(folder, threads)
    return _open_run(folder, device, precision, threads)


def bands_in_force(asked: str | None, own: Bands) -> Bands:
    """Return the ``asked`` bands or else the model's own; raise :class:`UsageError` if they do not fit the model."""
    return own if asked is None else Bands.from_json(asked, own.num_blocks)


def labelled_images(images: ImageSet, opened: OpenedModel, limit: int | None, console: Console) -> ImageSet:
    """Return the images with the labels of the model; warn if it was trained on them."""
    warning = trained_on_warning(images, opened.trained_on)
    if warning:
        console.print(Text.assemble(("warning: ", "yellow"), printable(warning)), soft_wrap=True)
    return require_labels(images, opened.classes).take(limit)


def _open_bundle(folder: Path, threads: int | None) -> OpenedModel:

    bundle = Bundle.open(folder)
    pipeline = Pipeline.open(bundle, threads=threads)
    m = bundle.manifest
    return OpenedModel(
        pipeline, m.image, m.classes, m.trained_on, m.model, m.method, bundle.bands, bundle.owners,
        f"onnxruntime {pipeline.provider}",
    )  # fmt: skip


def _open_run(
    folder: Path, device: Literal["auto", "cpu", "cuda"], precision: Literal["fp32", "bf16", "fp16"],
    threads: int | None,
) -> OpenedModel:  # fmt: skip
    try:
        import torch

        from ls_edge.training.checkpoint import load_run
        from ls_edge.training.models.torch_blocks import TorchBlocks
        from ls_edge.training.precision import choose_device, choose_precision, choose_threads
    except ImportError as error:
        raise UsageError(
            f"{folder} is a run, which needs {error.name}; to install it: {install_command('train')}; or give a bundle"
        ) from None
    chosen = choose_device(device)
    dtype = choose_precision(precision, chosen)
    run = load_run(folder, chosen)
    record = run.record
    torch.set_num_threads(choose_threads(threads, run.view))
    return OpenedModel(
        TorchBlocks(run.view, dtype), record.image, record.classes, record.trained_on, record.model, record.method,
        run.bands, run.view.owners, f"torch {torch.__version__} {chosen} {precision}",
    )  # fmt: skip
