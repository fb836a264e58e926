"""Teachers: trained models of any kind, whose answers are part of the targets (:meth:`Teacher.targets`).

``hard`` is the recipe of DeiT (arXiv 2012.12877) and CaiT (arXiv 2103.17239): the cross-entropy with the class that the
teacher predicts. ``soft`` is that of Hinton (arXiv 1503.02531). If a model has a second classifier for distillation, as
in DeiT, the mean of both classifiers learns from both targets.

The teacher sees the student's augmented and cropped pixels, scaled to its own image size and normalized with its own
mean and deviation. It is not part of the trained module, so it works with all methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm.data
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_edge.core.errors import ModelError, RunError, UsageError
from ls_edge.training.config import TeacherConfig
from ls_edge.training.methods.base import soft_cross_entropy
from ls_edge.training.models.small_models import create
from ls_edge.training.models.view import check_values
from ls_edge.training.precision import autocast, seeded
from ls_edge.training.runs.checkpoint import CONFIG, load_run
from ls_edge.training.runs.foreign_checkpoint import read_foreign

_timm_data: Any = timm.data


class Teacher:
    """A frozen model with its own preprocessing."""

    def __init__(
        self,
        model: nn.Module,
        *,
        size: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        columns: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """Freeze ``model``; its logit ``columns[c]`` is class ``c`` of the data, ``dtype`` is for matrix products."""
        self.model = model.to(device).eval().requires_grad_(False)
        self.size = tuple(size)
        self._mean = torch.tensor(mean, device=device)[:, None, None]
        self._std = torch.tensor(std, device=device)[:, None, None]
        self._columns = torch.tensor(list(columns), device=device)
        self._device, self._dtype = device, dtype

    def images(self, pixels: Tensor) -> Tensor:
        """Convert the student's pixels, uint8 ``[B, 3, H, W]``, to the teacher's input, float32 at its own size."""
        found = pixels.to(self._device, non_blocking=True).float() / 255
        if tuple(found.shape[2:]) != self.size:
            found = functional.interpolate(found, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return (found - self._mean) / self._std

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Return logits float32 ``[B, C]`` over the classes of the data."""
        with autocast(self._device, self._dtype):
            answers: Tensor = self.model(self.images(pixels))
        return answers.float()[:, self._columns]

    def targets(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Concatenate labels, int64 ``[B]``, and the teacher's logits to float32 ``[B, 1 + C]``."""
        return torch.cat((labels[:, None].float(), self.logits(pixels)), dim=1)


class TeacherCriterion(nn.Module):
    """Weighted loss of labels and teacher for targets from :meth:`Teacher.targets`."""

    def __init__(self, labels: nn.Module, config: TeacherConfig) -> None:
        super().__init__()
        self.labels = labels
        self.config = config

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return ``(1 - weight) * labels + weight * teacher`` for logits ``[B, C]``."""
        answers = targets[:, 1:]
        taught = (
            functional.cross_entropy(logits, answers.argmax(dim=1))
            if self.config.kind == "hard"
            else soft_cross_entropy(logits, answers, self.config.temperature)
        )
        own: Tensor = self.labels(logits, targets[:, 0].long())
        return (1 - self.config.weight) * own + self.config.weight * taught


def open_teacher(
    config: TeacherConfig, classes: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Teacher | None:
    """Return the teacher that the configuration names, or None; keep the random state unchanged.

    Raise :class:`RunError`, :class:`ModelError`, or :class:`UsageError` if it cannot be loaded or lacks a class.
    """
    if config.model is None:
        return None
    with seeded(0):  # timm draws weights before it loads others
        is_run = Path(config.model).exists()
        model, settings = (_load_run if is_run else _create)(config.model, config, classes)
    return Teacher(model, **settings, device=device, dtype=dtype)


def _load_run(folder: str, config: TeacherConfig, classes: Sequence[str]) -> tuple[nn.Module, dict[str, Any]]:
    if not (Path(folder) / CONFIG).is_file():
        raise RunError(f"--teacher {folder} is not a run: it has no {CONFIG}; give a run folder or a timm model's name")
    if config.weights is not None:
        raise UsageError(f"--teacher {folder} is a run, which has its own weights; leave teacher.weights out")
    run = load_run(folder)
    image, known = run.record.image, run.record.classes
    unknown = [name for name in classes if name not in known]
    if unknown:
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise UsageError(
            f"--teacher {folder} does not know the class {unknown[0]!r} of the data{more}; give one that was trained "
            "on these classes"
        )
    return run.view, {
        "size": image.size,
        "mean": image.mean,
        "std": image.std,
        "columns": [known.index(name) for name in classes],
    }


def _create(name: str, config: TeacherConfig, classes: Sequence[str]) -> tuple[nn.Module, dict[str, Any]]:
    stated: dict[str, Any] = {}
    try:
        if config.weights is None:
            model = create(name, pretrained=True)
        else:
            model = create(name, num_classes=len(classes))
            stated = _load_weights(model, name, config.weights)
    except ModelError as error:
        raise ModelError(f"--teacher: {error}".replace("with --init", "with --set teacher.weights=FILE")) from None
    known = int(getattr(model, "num_classes", 0))
    if known != len(classes):
        raise UsageError(
            f"--teacher {name} knows {known} classes and the data has {len(classes)}; give a run that was trained on "
            "these classes, or such weights with --set teacher.weights=FILE"
        )
    cfg = {**_timm_data.resolve_model_data_config(model), **stated}
    return model, {"size": cfg["input_size"][1:], "mean": cfg["mean"], "std": cfg["std"], "columns": range(known)}


def _load_weights(model: nn.Module, name: str, path: str) -> dict[str, Any]:
    """Load weights from a file; return the preprocessing that it states."""
    if not Path(path).is_file():
        raise RunError(f"teacher.weights {path}: there is no such file; give a .safetensors or .pth file")
    try:
        weights, stated = read_foreign(path)
        check_values(weights, model.state_dict())
        model.load_state_dict(weights)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip().rstrip(".")
        raise ModelError(
            f"{path} does not fit {name} with {getattr(model, 'num_classes', 0)} classes: {reason[:200]}; give weights "
            "of this model, trained on these classes"
        ) from None
    return stated
