"""The loss of a batch whose groups run in arrangements of their own, with or without a frozen model as teacher."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from ls_edge.core.arrangement import apply
from ls_edge.training.methods.step_plan import StepPlan
from ls_edge.training.models.view import BlockView

if TYPE_CHECKING:
    from ls_edge.training.methods.step_plan import Criterion


def frozen_copy(view: BlockView) -> BlockView:
    """Copy a view without its predictor, in evaluation mode and without gradients; what conditions its blocks stays."""
    twin = copy.deepcopy(view)
    twin.predictor = None
    return twin.eval().requires_grad_(False)


def soft_cross_entropy(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence from the teacher, times the squared temperature (arXiv 1503.02531)."""
    scaled = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(teacher_logits.float() / temperature, dim=-1)
    return functional.kl_div(scaled, target, log_target=True, reduction="batchmean") * temperature**2


def distillation_loss(
    view: BlockView,
    teacher: BlockView | None,
    images: Tensor,
    targets: Tensor,
    plan: StepPlan,
    criterion: Criterion,
    *,
    weight: float,
    temperature: float,
) -> Tensor:
    """The mean loss of the plan's groups; images ``[B, 3, H, W]``, targets int64 ``[B]``.

    ``weight`` is that of the soft targets, 0 to 1; the labels have the rest. The stem runs once. Of ``n`` groups
    each has every ``n``-th image, so that a process's share of a batch is split as the whole batch would be.
    """
    soft_targets: Tensor | None = None
    if teacher is not None:
        with torch.no_grad():
            soft_targets = teacher(images)
    count = len(images)
    tokens = view.stem(images)
    losses: list[Tensor] = []
    for group, arrangement in enumerate(plan.groups):
        rows = slice(group, count, len(plan.groups))
        size = len(range(count)[rows])
        if not size:
            continue
        logits = view.head(apply(arrangement, tokens[rows], view.block)).float()
        loss = criterion(logits, targets[rows])
        if soft_targets is not None:
            soft = soft_cross_entropy(logits, soft_targets[rows], temperature)
            loss = (1 - weight) * loss + weight * soft
        losses.append(loss * size / count)
    return torch.stack(losses).sum()
