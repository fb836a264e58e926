"""Run folders: ``model.safetensors``, ``config.yaml``, ``metrics.jsonl``; never pickle.

A run is written weights first, ``config.yaml`` last, each in one step, so a folder with ``config.yaml`` is a run
that loads. What resuming needs besides is in ``resume/`` (``ls_edge.training.resume``).
"""

from __future__ import annotations

import hashlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from ls_edge.core import yaml_source
from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import LsEdgeError, ModelError, RunError, UsageError
from ls_edge.core.files import write_file
from ls_edge.training.config import RunFile, RunRecord, TrainConfig, to_yaml
from ls_edge.training.methods.base import make_method
from ls_edge.training.models.small_models import build
from ls_edge.training.models.view import BlockView

WEIGHTS = "model.safetensors"
CONFIG = "config.yaml"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class LoadedRun:
    """A run that was read: the model with its weights, in evaluation mode, and what is known about it."""

    folder: Path
    view: BlockView
    config: RunFile
    record: RunRecord
    weights_sha256: str
    """Of the very bytes that were loaded."""

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.record.model

    @property
    def bands(self) -> Bands:
        """Groups of blocks within which the order changed in training."""
        return Bands.from_json(self.config.bands, self.view.num_blocks)

    @property
    def method(self) -> str:
        """Training method."""
        return self.record.method

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names in the order of the logits."""
        return self.record.classes

    @property
    def image(self) -> ImageSpec:
        """How an image file becomes the stem's input."""
        return self.record.image

    @property
    def trained_on(self) -> str:
        """Digest of the training data's file list; empty if unknown."""
        return self.record.trained_on


def save_run(folder: str | Path, view: BlockView, config: TrainConfig, record: RunRecord) -> None:
    """Write weights and configuration; whatever else is in the folder stays."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        weights = view.weights()
        if config.stored == "fp16":
            weights = {name: w.half() if w.is_floating_point() else w for name, w in weights.items()}
        write_tensors(folder / WEIGHTS, weights)
        write_config(folder, config, record)
    except OSError as error:
        raise RunError(f"cannot write the run {folder}: {error.strerror}; check the path and the free space") from None


def write_config(folder: Path, config: TrainConfig, record: RunRecord) -> None:
    """Write ``config.yaml`` alone."""
    plain = {name: getattr(config, name) for name in TrainConfig.__struct_fields__}
    write_file(folder / CONFIG, to_yaml(RunFile(**plain, run=record)).encode())


def read_record(folder: str | Path) -> tuple[RunFile, RunRecord]:
    """``config.yaml`` of a run; raises :class:`RunError` where the folder is none."""
    folder = Path(folder)
    if not (folder / CONFIG).is_file():
        raise RunError(
            f"{folder} is no run: it has no {CONFIG}; make one with 'ls-edge train --data DATA --out {folder}'"
        )
    config, _ = yaml_source.load(folder / CONFIG, RunFile)
    if config.run is None:
        raise RunError(f"{folder / CONFIG} has no section 'run': it is no run's file, or training did not get that far")
    return config, config.run


def load_run(folder: str | Path, device: str | torch.device = "cpu") -> LoadedRun:
    """Build a run's model and load its weights; raises :class:`RunError` where either cannot be."""
    folder = Path(folder)
    config, record = read_record(folder)
    tensors, digest = read_tensors(folder / WEIGHTS)
    try:
        view = build(record.model, record.model_args, record.kept)
        make_method(record.method, config.method_args).attach(view)
        view.load_weights(tensors)
        Bands.from_json(config.bands, view.num_blocks)
    except (ModelError, UsageError) as error:
        raise RunError(f"{folder}: {error}") from None
    view.to(device).eval()
    return LoadedRun(folder, view, config, record, digest)


def read_tensors(path: str | Path) -> tuple[dict[str, Tensor], str]:
    """The tensors of a ``.safetensors`` file and its sha256; raises :class:`RunError`."""
    path = Path(path)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise RunError(f"{path} is missing; copy it from where the run was made, or train again") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; check the path and its permissions") from None
    try:
        return dict(safetensors.torch.load(raw)), hashlib.sha256(raw).hexdigest()
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise RunError(f"{path} is no safetensors file ({error}); copy it again or train again") from None


def read_foreign(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a ``.safetensors`` or ``.pth`` file of any origin; a ``.pth`` is read without running its code."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return read_tensors(path)[0]
    if not path.is_file():
        raise RunError(f"{path} is neither a run folder nor a file; check --init")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old pickle protocols
            value = torch.load(path, map_location="cpu", weights_only=True)
    except LsEdgeError:
        raise
    except Exception as error:  # noqa: BLE001 - torch raises many kinds for files that it cannot read
        raise RunError(
            f"{path} is no checkpoint of plain tensors ({_why_not_tensors(error)}), and nothing else is loaded, since "
            "that would run code from the file; save the model's state_dict as .safetensors"
        ) from None
    for key in ("state_dict", "model", "model_ema", "state_dict_ema"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
            break
    if not isinstance(value, dict) or not value or not all(isinstance(v, Tensor) for v in value.values()):
        raise RunError(f"{path} holds no dictionary of tensors; save the model's state_dict")
    return {str(name).removeprefix("module."): tensor for name, tensor in value.items()}


def _why_not_tensors(error: Exception) -> str:
    """Why torch did not load a file, without its advice to load it unsafely."""
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found:
        return f"it holds Python objects, such as {found[1]}"
    return "it holds what is no tensor" if "weights_only" in str(error) else "it is cut off or never was one"


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a ``.safetensors`` file in one step."""
    plain = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    write_file(path, safetensors.torch.save(plain, metadata or {"format": "pt"}))


def append_metrics(folder: Path, line: dict[str, object]) -> None:
    """Add a line to ``metrics.jsonl``."""
    with (folder / METRICS).open("ab") as stream:
        stream.write(msgspec.json.encode(line) + b"\n")
