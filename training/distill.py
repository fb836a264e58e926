"""Losses in which one arrangement learns from another one, or from a frozen model."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ls_edge.arrangement import apply
from ls_edge.training.anyorder import AnyOrderSettings
from ls_edge.training.plans import Plan
from ls_edge.training.view import BlockView

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
    """The mean loss of the plan's passes; images ``[B, 3, H, W]``, targets int64 ``[B]``.

    The stem runs once; passes with a share of the images take turns (:func:`_rows`).
    """
    t = settings.teacher
    wanted: Tensor | None = None
    shown: Tensor | None = None
    if teacher is not None:
        with torch.no_grad():
            shown = apply(teacher.arrangement(None), teacher.stem(images), teacher.block)
            wanted = teacher.head(shown)
    count = len(images)
    tokens = view.stem(images)
    losses: list[Tensor] = []
    answers: list[Tensor] = []
    for item, rows in zip(plan.passes, _rows(plan, count), strict=True):
        part = len(range(count)[rows])
        if not part:
            continue
        last = apply(item.arrangement, tokens[rows], view.block)
        logits = view.head(last).float()
        answers.append(logits)
        loss = criterion(logits, targets[rows])
        guide = wanted[rows] if wanted is not None else None
        if guide is None and settings.sandwich and len(answers) > 1:
            guide = answers[0].detach()
        if guide is not None and t.logits:
            loss = (1 - t.logits) * loss + t.logits * soft_loss(logits, guide, t.temperature)
        if shown is not None and t.features:
            loss = loss + t.features * _apart(last, shown[rows])
        losses.append(loss * part / count)
    whole = torch.stack(losses).sum() / max(1.0, sum(item.share for item in plan.passes))
    if settings.mutual:
        one, other = answers
        both = soft_loss(one, other.detach(), t.temperature) + soft_loss(other, one.detach(), t.temperature)
        whole = whole + settings.mutual * both / 2
    return whole


def _rows(plan: Plan, count: int) -> list[slice]:
    """Which images each pass has: of ``n`` groups each has every ``n``-th image.

    So a process's share of a batch is split as the whole batch would be.
    """
    if all(item.share == 1 for item in plan.passes):
        return [slice(0, count)] * len(plan.passes)
    groups = len(plan.passes)
    return [slice(first, count, groups) for first in range(groups)]


def _apart(tokens: Tensor, shown: Tensor) -> Tensor:
    """Mean squared distance of normalised tokens ``[B, N, D]``."""
    shape = tokens.shape[-1:]
    return functional.mse_loss(
        functional.layer_norm(tokens.float(), shape), functional.layer_norm(shown.float(), shape)
    )
