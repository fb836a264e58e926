"""Optimizer, learning rate schedule, and averaged weights: AdamW, timm's schedules, and torch's AveragedModel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import timm.optim
import timm.scheduler
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from ls_edge.training.config import OptimConfig
from ls_edge.training.models.view import BlockView

if TYPE_CHECKING:
    from ls_edge.training.methods.base import Method

_optim: Any = timm.optim  # both re-export their functions without declaring them
_scheduler: Any = timm.scheduler
Tensors = tuple[Tensor, ...] | list[Tensor]

SMALL_MODEL_RATES = {"vit_digits": (2e-3, 3e-3), "vit_cifar": (1.5e-3, 5e-4)}
"""Highest learning rates of small models from scratch and from weights, by trial with 64 and 128 images per step."""
TIMM_RATES = (5e-4, 1e-4)
"""The same rates for all timm models; higher rates diverge for some, lower rates need more epochs."""
EMA_WARMUP = 10
"""Warm-up of an exponential average in steps; a longer one gives the initial weights more influence."""


def default_rate(model: str, method: Method, *, from_weights: bool) -> float:
    """Return the highest learning rate for a configuration that does not set it."""
    if from_weights and model not in SMALL_MODEL_RATES and method.timm_rate is not None:
        return method.timm_rate
    return SMALL_MODEL_RATES.get(model, TIMM_RATES)[from_weights]


def make_optimizer(view: BlockView, config: OptimConfig) -> torch.optim.Optimizer:
    """Return AdamW without weight decay for vectors (biases, norms) and parameters that timm exempts.

    A slot module with a ``lr_factor`` has its own group, without weight decay and with a rate scaled by the factor.
    """
    exempt: Callable[[], Any] = getattr(view.model, "no_weight_decay", set)
    groups = _optim.param_groups_weight_decay(
        view, config.weight_decay, no_weight_decay_list=[f"model.{name}" for name in exempt()]
    )
    assert config.lr is not None
    if view.slots is not None and view.slots.lr_factor is not None:
        own = list(view.slots.parameters())
        ids = set(map(id, own))
        for group in groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
        groups.append({"params": own, "weight_decay": 0.0, "lr_scale": view.slots.lr_factor})  # timm's schedule scales
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimConfig, steps: int) -> Any:
    """Return timm's schedule; ``step_update(step)`` sets the rate of a step, counted from 0.

    The rate rises linearly over the fraction ``config.warmup`` of the steps and then falls, along a cosine or a line,
    to the fraction ``config.final`` of the highest rate. Without a warm-up, the line is that of Hugging Face's Trainer,
    ``1 - step / steps``.
    """
    assert config.lr is not None
    warmup = math.floor(config.warmup * steps)
    linear = config.schedule == "linear"
    return (_scheduler.PolyLRScheduler if linear else _scheduler.CosineLRScheduler)(
        optimizer,
        t_initial=max(2, steps - warmup),  # timm warns about a cosine of one step
        lr_min=config.lr * config.final,
        warmup_t=warmup,
        warmup_lr_init=config.lr / (warmup + 1),
        warmup_prefix=True,
        t_in_epochs=False,
        **({"power": 1.0} if linear else {}),
    )


def make_averaged_model(view: BlockView, config: OptimConfig) -> AveragedModel | None:
    """Return a copy of ``view`` for averaged weights, or None.

    ``ema`` is an exponential average whose memory grows with the steps up to ``average_decay``.
    """
    if config.average != "ema":
        return None

    # torch's own function does not warm up the weight, max(1 - decay, 9 / (10 + n)), so random initial weights would
    # dominate the average in a short training. The count n stays on the device, so that steps do not wait for it.
    @torch.no_grad()
    def update(averaged: Tensors, current: Tensors, count: Tensor | int) -> None:
        weight = ((EMA_WARMUP - 1) / (EMA_WARMUP + torch.as_tensor(count))).clamp(min=1 - config.average_decay)
        for mean, value in zip(averaged, current, strict=True):
            if mean.is_floating_point():
                mean.lerp_(value, weight.to(mean.dtype))
            else:
                mean.copy_(value)

    return AveragedModel(view, multi_avg_fn=update, use_buffers=True)
