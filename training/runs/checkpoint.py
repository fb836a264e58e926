"""Run folders: ``model.safetensors``, ``config.yaml``, and ``metrics.jsonl``; never pickle.

Weights are written first and ``config.yaml`` last, each atomically, so a folder with ``config.yaml`` is a run that
loads. During training, ``resume.safetensors`` contains the state after the last epoch: weights, the optimizer's
moments, averaged weights, and, as JSON in its metadata, the counters. Random draws depend only on seed, epoch, and
step, so they have no state.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ls_edge.core import validation
from ls_edge.core.bands import Bands
from ls_edge.core.errors import ModelError, RunError, UsageError
from ls_edge.core.files import cache_folder, local_folder, replacing, write_file
from ls_edge.training.config import RunFile, RunRecord, TrainConfig, to_yaml
from ls_edge.training.methods.registry import make_method
from ls_edge.training.models.small_models import build
from ls_edge.training.models.view import BlockView
from ls_edge.training.validation import Judgment, Validation

WEIGHTS = "model.safetensors"
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
RESUME = "resume.safetensors"
METHOD_WEIGHTS = "method.safetensors"
DIGEST = "digest"
"""Metadata key of the SHA-256 of the original ``model.safetensors``."""
_SIZES = frozenset(("patch_size", "embed_dim", "depth", "num_blocks", "num_heads", "mlp_ratio"))
"""Arguments of timm's models, other than the image size, that change the size of the model."""


@dataclass(frozen=True)
class LoadedRun:
    """A run that was read from disk, with its model in evaluation mode."""

    folder: Path
    view: BlockView
    config: RunFile
    record: RunRecord
    bands: Bands
    """Groups of blocks within which the order changed in training."""
    weights_sha256: str
    """Digest of the loaded weights."""


def shown_model(record: RunRecord, view: BlockView) -> str:
    """Return the display name of a run's model.

    It is timm's name, followed by a different image size: ``vit_small_patch14_dinov2.70px``. If arguments change the
    size of the model, timm's name would be misleading, so the name gives tokens and blocks instead.
    """
    usual: Any = view.model.pretrained_cfg
    if _SIZES.intersection(record.model_args):
        tokens = view.token_spec
        return f"{record.model.split('_')[0]}_{tokens.count}x{tokens.dim}_depth{view.num_blocks}"
    height, width = view.image_size
    size = f".{width}px" if height == width else f".{width}x{height}px"
    return record.model + ("" if view.image_size == tuple(usual["input_size"][1:]) else size)


class TrainingProgress(msgspec.Struct, frozen=True):
    """Counters of an unfinished run."""

    epochs_done: int = 0
    best_epoch: int | None = None
    best: Validation | None = None
    """Results of the best epoch."""
    last_top1: float = 0.0
    """Top-1 of the last epoch."""
    scaler: dict[str, Any] = {}
    """State of the gradient scaler (float16 on CUDA only)."""
    start: Judgment | None = None
    """Accuracy of the initial model in trained order; None if it was not trained on these classes."""
    teacher: Judgment | None = None
    data: str = ""
    """Digest of the labels, names, and contents of the training images."""
    imitated: str = ""
    """Digest of the weights that training imitates."""


def save_run(folder: str | Path, view: BlockView, config: TrainConfig, record: RunRecord) -> None:
    """Write weights and configuration; keep other files in the folder."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = view.weights()
        if config.stored == "fp16":
            weights = {name: w.half() if w.is_floating_point() else w for name, w in weights.items()}
        write_tensors(folder / WEIGHTS, weights)
        file = RunFile(**{**msgspec.structs.asdict(config), "run": record})
        write_file(folder / CONFIG, to_yaml(file).encode())
    except OSError as error:
        raise RunError(f"cannot write the run {folder}: {error.strerror}; check the path and the free space") from None


def read_record(folder: str | Path) -> tuple[RunFile, RunRecord]:
    """Return ``config.yaml`` of a run and its section ``run``; raise :class:`RunError` if the folder is not a run."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise RunError(
            f"{folder} is not a run: it has no {CONFIG}; make one with 'ls-edge train --data DATA --out {folder}'"
        )
    config, _ = validation.load_yaml(folder / CONFIG, RunFile)
    if config.run is None:
        raise RunError(f"{folder / CONFIG} has no section 'run', so it was not written by training; give a run folder")
    return config, config.run


def load_run(folder: str | Path, device: str | torch.device = "cpu") -> LoadedRun:
    """Build the model of a run and load its weights; raise :class:`RunError` if that fails."""
    folder = local_folder(folder)
    config, record = read_record(folder)
    tensors, digest = read_tensors(folder / WEIGHTS)
    try:
        view = build(record.model, record.model_args, record.kept, empty=True)
        is_own = not folder.is_relative_to(cache_folder())  # a downloaded file must not make us import code
        make_method(record.method, config.method_args, reference=is_own).attach(view)
        tensors, digest = _published(folder, tensors, view.weights()) or (tensors, digest)
        view.load_weights(tensors)
        bands = config.block_bands(view.num_blocks)
    except (ModelError, UsageError) as error:
        raise RunError(f"{folder}: {error}") from None
    return LoadedRun(folder, view.to(device).eval(), config, record, bands, digest)


def _published(folder: Path, stored: dict[str, Tensor], own: dict[str, Tensor]) -> tuple[dict[str, Tensor], str] | None:
    """Return weights and digest of a published run whose model has the weights ``own``; None for any other run.

    ``stored`` contains the tensors of its :data:`WEIGHTS`. Raise :class:`RunError` if they differ from the published
    ones.
    """
    with safetensors.safe_open(folder / WEIGHTS, framework="pt") as file:
        digest = (file.metadata() or {}).get(DIGEST)
    if digest is None:
        return None
    if (folder / METHOD_WEIGHTS).is_file():
        stored = {**stored, **read_tensors(folder / METHOD_WEIGHTS)[0]}
    tensors = {name: value for name, value in stored.items() if name in own}
    if hashlib.sha256(safetensors.torch.save(tensors, {"format": "pt"})).hexdigest() != digest:
        raise RunError(f"{folder / WEIGHTS} is not the published file (another digest); download or publish it again")
    return tensors, digest


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a ``.safetensors`` file and its SHA-256; raise :class:`RunError`.

    The tensors are views of the file, which is read when they are used.
    """
    path = Path(path)
    digest = hashlib.sha256()
    try:
        with path.open("rb") as stream:
            while chunk := stream.read(1 << 20):
                digest.update(chunk)
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, digest.hexdigest()  # noqa: SIM118
    except FileNotFoundError:
        raise RunError(f"{path} is missing; copy it from where the run was made, or train again") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"{path} is not a safetensors file ({error}); copy it again or train again") from None


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a ``.safetensors`` file atomically."""
    plain: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        if value.data_ptr() in plain:  # of a block that occurs several times
            value = value.clone()
        plain[value.data_ptr()] = name, value
    with replacing(path) as stream:
        try:
            safetensors.torch.save_file(dict(plain.values()), stream.name, metadata or {"format": "pt"})
            os.chmod(stream.name, stat.S_IMODE(os.fstat(stream.fileno()).st_mode))  # its file is for the owner alone
        except safetensors.SafetensorError as error:
            if code := re.search(r"os error (\d+)", str(error)):
                raise OSError(int(code[1]), os.strerror(int(code[1]))) from None
            raise


def save_progress(folder: Path, tensors: dict[str, Tensor], progress: TrainingProgress) -> None:
    """Write the state at the end of an epoch."""
    write_tensors(folder / RESUME, tensors, {"progress": msgspec.json.encode(progress).decode()})


def load_progress(folder: Path) -> TrainingProgress:
    """Return the counters that :func:`save_progress` wrote; raise :class:`RunError` if that fails."""
    path = folder / RESUME
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return msgspec.json.decode((file.metadata() or {}).get("progress", ""), type=TrainingProgress)
    except FileNotFoundError:
        raise RunError(f"{path} is missing, so the run cannot be resumed; train again with --overwrite") from None
    except (OSError, ValueError, safetensors.SafetensorError, msgspec.MsgspecError) as error:
        raise RunError(f"cannot use {path} ({error}); train again with --overwrite") from None


def is_finished(folder: Path, epochs: int) -> bool:
    """Return whether a run has nothing to resume, since it has all its epochs or is a copy without metrics."""
    path = folder / METRICS
    return not (folder / RESUME).exists() and (not path.exists() or path.read_bytes().count(b"\n") >= epochs)


def start_metrics(folder: Path, epochs_done: int) -> None:
    """Keep only the metrics of the first ``epochs_done`` epochs, since a killed process can leave one more line."""
    path = folder / METRICS
    lines = path.read_bytes().splitlines(keepends=True) if epochs_done and path.exists() else []
    write_file(path, b"".join(lines[:epochs_done]))


def append_metrics(folder: Path, metrics: msgspec.Struct) -> None:
    """Add a line to ``metrics.jsonl``."""
    with (folder / METRICS).open("ab") as stream:
        stream.write(msgspec.json.encode(metrics) + b"\n")
