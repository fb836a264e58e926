"""Base class of training methods, which is also the method ``sequential``.

A method draws the plan of each step, computes the loss, and selects the arrangements for validation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
from torch import Tensor
from torch.nn import functional

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.view import BlockView

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Function of logits ``[B, C]`` and targets that returns a scalar loss."""


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a method without settings."""


class Method:
    """Training in trained order; subclasses override what differs."""

    settings_type: ClassVar[type[msgspec.Struct]] = NoSettings
    average: ClassVar[str] = "none"
    """Value that replaces ``optim.average: auto`` for this method."""
    timm_rate: ClassVar[float | None] = None
    """Highest learning rate for timm models with weights, if it differs from ``default_rate``."""
    teacher: BlockView | None = None
    """Frozen copy of the initial model, which also runs in each step."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def default_bands(self, view: BlockView) -> Bands:
        """Return the default bands of a model."""
        return Bands(view.num_blocks)

    def reshape(self, view: BlockView, bands: Bands, source: BlockView | None, *, trained: bool) -> Sequence[int]:  # noqa: ARG002
        """Rearrange the blocks of the initial model before :meth:`attach`; return the old index for each place.

        ``source`` is the unchanged initial model with the modules of its own method, if any. ``trained`` is False if
        the weights were drawn from the seed.
        """
        return range(view.num_blocks)

    def attach(self, view: BlockView) -> None:
        """Add the modules that this method trains in addition to the model."""

    def prepare(self, view: BlockView, images: Tensor) -> None:
        """Compute initial values of these modules from images ``[N, 3, H, W]`` of the data."""

    def ignore_answers(self) -> None:
        """Do not imitate the answers of the initial model, which are wrong for these images."""

    def draw(self, bands: Bands, seed: int, step: int, progress: float = 1.0) -> StepPlan:  # noqa: ARG002
        """Return the plan of a step, counted from 0; blocks change places only within their band."""
        return StepPlan.plain(range(bands.num_blocks))

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """Return the loss of images ``[B, 3, H, W]`` with targets for ``criterion``."""
        return criterion(view(images, plan.groups[0]).float(), targets)

    def validation(self, bands: Bands, count: int, seed: int) -> list[Arrangement]:  # noqa: ARG002
        """Return the arrangements whose mean cross-entropy selects the checkpoint, the same ones in every epoch."""
        return [Arrangement.plain(range(bands.num_blocks))]


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Return the Kullback-Leibler divergence from the teacher, times the squared temperature."""
    scaled = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(teacher_logits.float() / temperature, dim=-1)
    return functional.kl_div(scaled, target, log_target=True, reduction="batchmean") * temperature**2
