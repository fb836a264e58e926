"""AdamW and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ls_edge.training.config import OptimConfig
from ls_edge.training.models.view import BlockView

OWN_RATES = {"vit_digits": (2e-3, 3e-3), "vit_cifar": (1.5e-3, 5e-4)}
"""Highest learning rate of a model of ours, from scratch and from weights; by trial, at 64 and 128 images a step."""


def default_rate(model: str, *, started: bool) -> float:
    """The rate where none is given: of our own small models from scratch and from weights, and of timm's likewise."""
    fresh, further = OWN_RATES.get(model, (5e-4, 1e-4))
    return further if started else fresh


def make_optimiser(view: BlockView, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW; no decay of vectors (biases, norms) and of what timm exempts (position embedding, prefix tokens)."""
    named: Any = getattr(view.model, "no_weight_decay", set)
    exempt: set[str] = set(named())
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in view.named_parameters():
        bare = parameter.ndim <= 1 or name.removeprefix("model.") in exempt
        (plain if bare else decayed).append(parameter)
    assert config.lr is not None
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Rate of ``step`` (from 0) of ``steps``: linear warm-up, then a cosine down to ``final`` of the highest."""
    assert config.lr is not None
    warm = config.warmup * steps
    if step < warm:
        return config.lr * (step + 1) / (math.floor(warm) + 1)
    part = (step - warm) / max(1.0, steps - warm)
    return config.lr * (config.final + (1 - config.final) * 0.5 * (1 + math.cos(math.pi * part)))
