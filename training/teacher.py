"""Distillation from a trained teacher of any kind: what it answers for a batch, and the loss that uses it.

``hard`` is the recipe of DeiT (arXiv 2012.12877, "hard-label distillation"), which CaiT (arXiv 2103.17239) takes over:
half of the loss is the cross-entropy with the class that the teacher names. ``soft`` is Hinton's (arXiv 1503.02531).
DeiT's classifier of its distillation token is not trained apart: where a model has one, the mean of its two classifiers
learns both.

The teacher sees the very pixels of the student, augmented and cropped, scaled to its own image size and normalised
with its own mean and deviation. It is not part of the module that is trained: its answers travel with the labels
(:meth:`Teacher.targets`), so every method can have one, beside a frozen copy of the start where the method has that
(``ls_edge.training.methods.anyorder``).
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
from ls_edge.training.checkpoint import CONFIG, load_run, read_foreign
from ls_edge.training.config import TeacherConfig
from ls_edge.training.methods.distillation import soft_cross_entropy
from ls_edge.training.models.flops import count_flops
from ls_edge.training.models.small_models import create
from ls_edge.training.precision import autocast, preserve_rng_state

_timm_data: Any = timm.data


class Teacher:
    """A frozen model with its own preprocessing and the columns of its logits that are the classes of the data."""

    def __init__(
        self,
        model: nn.Module,
        *,
        size: tuple[int, int],
        mean: Sequence[float],
        std: Sequence[float],
        columns: Sequence[int],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``columns[c]`` is the teacher's logit of class ``c`` of the data; ``dtype`` that of its matrix products."""
        self.model = model.to(device).eval().requires_grad_(False)
        self.size = size
        self._mean = torch.tensor(mean, device=device)[:, None, None]
        self._std = torch.tensor(std, device=device)[:, None, None]
        self._columns = torch.tensor(list(columns), device=device)
        self._device, self._dtype = device, dtype

    def images(self, pixels: Tensor) -> Tensor:
        """Pixels uint8 ``[B, 3, H, W]`` of the student as the teacher's input, float32 at its own size."""
        found = pixels.to(self._device, non_blocking=True).float() / 255
        if tuple(found.shape[2:]) != self.size:
            found = functional.interpolate(found, self.size, mode="bicubic", antialias=True).clamp(0, 1)
        return (found - self._mean) / self._std

    @torch.no_grad()
    def logits(self, pixels: Tensor) -> Tensor:
        """Logits float32 ``[B, C]`` over the classes of the data."""
        with autocast(self._device, self._dtype):
            answers: Tensor = self.model(self.images(pixels))
        return answers.float()[:, self._columns]

    def targets(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Labels int64 ``[B]`` and the teacher's logits side by side, float32 ``[B, 1 + C]``, for the criterion."""
        return torch.cat((labels[:, None].float(), self.logits(pixels)), dim=1)

    def flops(self) -> int:
        """Operations of a forward pass for one image."""
        images = torch.zeros(1, 3, *self.size, device=self._device)
        return count_flops(lambda: self.model(images))[0]


class TeacherCriterion(nn.Module):
    """The criterion of logits ``[B, C]`` and :meth:`Teacher.targets`: labels and teacher, weighted."""

    def __init__(self, labels: nn.Module, config: TeacherConfig) -> None:
        super().__init__()
        self.labels = labels
        self.config = config

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """``(1 - weight) * labels + weight * teacher``."""
        answers = targets[:, 1:]
        if self.config.kind == "hard":
            taught = functional.cross_entropy(logits, answers.argmax(dim=1))
        else:
            taught = soft_cross_entropy(logits, answers, self.config.temperature)
        own: Tensor = self.labels(logits, targets[:, 0].long())
        return (1 - self.config.weight) * own + self.config.weight * taught


def open_teacher(
    config: TeacherConfig, classes: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Teacher | None:
    """The teacher that the configuration names, None where it names none; the random state stays as it is.

    Raises :class:`RunError`, :class:`ModelError` or :class:`UsageError` for one that cannot be had, or that does not
    know the classes.
    """
    if config.model is None:
        return None
    with preserve_rng_state():
        if Path(config.model).exists():
            return _of_run(config, classes, device, dtype)
        return _of_timm(config, config.model, classes, device, dtype)


def _of_run(config: TeacherConfig, classes: Sequence[str], device: torch.device, dtype: torch.dtype) -> Teacher:
    folder = Path(str(config.model))
    if not (folder / CONFIG).is_file():
        raise RunError(
            f"--teacher {folder} is no run: it has no {CONFIG}; give a run folder or the name of a timm model"
        )
    if config.weights is not None:
        raise UsageError(f"--teacher {folder} is a run, which has its own weights; leave --teacher-weights out")
    run = load_run(folder)
    unknown = [name for name in classes if name not in run.classes]
    if unknown:
        raise UsageError(
            f"--teacher {folder} does not know the class {unknown[0]!r} of the data"
            f"{f' and {len(unknown) - 1} more' if len(unknown) > 1 else ''}; give one that was trained on these classes"
        )
    return Teacher(
        run.view, size=run.image.size, mean=run.image.mean, std=run.image.std,
        columns=[run.classes.index(name) for name in classes], device=device, dtype=dtype,
    )  # fmt: skip


def _of_timm(
    config: TeacherConfig, name: str, classes: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Teacher:
    try:
        if config.weights is None:
            model = create(name, pretrained=True)
        else:
            model = create(name, num_classes=len(classes))
            _load(model, name, config.weights)
    except ModelError as error:
        raise ModelError(f"--teacher: {error}".replace("with --init", "with --teacher-weights")) from None
    known = int(getattr(model, "num_classes", 0))
    if known != len(classes):
        raise UsageError(
            f"--teacher {name} knows {known} classes and the data has {len(classes)}; give a run that was trained on "
            "these classes, or such weights with --teacher-weights FILE"
        )
    cfg = _timm_data.resolve_model_data_config(model)
    height, width = cfg["input_size"][1:]
    return Teacher(
        model, size=(int(height), int(width)), mean=cfg["mean"], std=cfg["std"], columns=range(known), device=device,
        dtype=dtype,
    )  # fmt: skip


def _load(model: nn.Module, name: str, path: str) -> None:
    if not Path(path).is_file():
        raise RunError(f"--teacher-weights {path}: there is no such file; give a .safetensors or .pth file")
    found, own = read_foreign(path), model.state_dict()
    for key in (*own, *found):
        there, here = (list(state[key].shape) if key in state else "missing" for state in (found, own))
        if there != here:
            raise ModelError(
                f"{path} does not fit {name} with {getattr(model, 'num_classes', 0)} classes: {key!r} is {there} in "
                f"the file and {here} in the model; give weights of this model, trained on these classes"
            )
    model.load_state_dict(found)
