"""The loss of a batch whose parts run in arrangements of their own, with or without a frozen model as teacher."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ls_edge.arrangement import apply
from ls_edge.training.methods.anyorder import AnyOrderSettings
from ls_edge.training.methods.step_plan import Plan
from ls_edge.training.models.view import BlockView

Criterion = Callable[[Tensor, Tensor], Tensor]


def frozen(view: BlockView) -> BlockView:
    """A copy that does not train and knows no slots: the model as it starts, in trained order."""
    twin = copy.deepcopy(view)
    twin.slots = None
    twin.readout = None
    return twin.eval().requires_grad_(False)


def soft_loss(logits: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Divergence of the answers from those ``wanted``, times the temperature's square (arXiv 1503.02531)."""
    scaled = functional.log_softmax(logits.float() / temperature, dim=-1)
    target = functional.log_softmax(wanted.float() / temperature, dim=-1)
    return functional.kl_div(scaled, target, log_target=True, reduction="batchmean") * temperature**2


def taught_loss(
    settings: AnyOrderSettings,
    view: BlockView,
    teacher: BlockView | None,
    images: Tensor,
    targets: Tensor,
    plan: Plan,
    criterion: Criterion,
) -> Tensor:
    """The mean loss of the plan's groups; images ``[B, 3, H, W]``, targets int64 ``[B]``.

    The stem runs once. Of ``n`` groups each has every ``n``-th image, so that a process's share of a batch is split as
    the whole batch would be.
    """
    t = settings.teacher
    wanted: Tensor | None = None
    if teacher is not None:
        with torch.no_grad():
            wanted = teacher(images)
    count = len(images)
    tokens = view.stem(images)
    losses: list[Tensor] = []
    for group, arrangement in enumerate(plan.groups):
        rows = slice(group, count, len(plan.groups))
        part = len(range(count)[rows])
        if not part:
            continue
        logits = view.head(apply(arrangement, tokens[rows], view.block)).float()
        loss = criterion(logits, targets[rows])
        if wanted is not None:
            loss = (1 - t.logits) * loss + t.logits * soft_loss(logits, wanted[rows], t.temperature)
        losses.append(loss * part / count)
    return torch.stack(losses).sum()
