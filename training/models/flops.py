"""Counts of floating point operations, from ``torch.utils.flop_counter``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")


@dataclass(frozen=True)
class WorkProfile:
    """Operations per image of the parts of a model, in any unit; the defaults describe a model that has only blocks."""

    num_blocks: int
    stem: float = 0.0
    block: float = 1.0
    """One block without a method's modules."""
    head: float = 0.0
    added: float = 0.0
    """Modules that a method adds to each block that runs."""

    @property
    def forward(self) -> float:
        """Operations of a forward pass of the whole model, without a method's modules."""
        return self.stem + self.num_blocks * self.block + self.head


def count_flops(run: Callable[[], T]) -> tuple[int, T]:
    """Return the operations of ``run()`` and its result; matrix products, convolutions and attention count.

    Gradients are on because the counter's hooks need them. Attention runs as plain matrix products because not every
    version of torch counts every fused kernel.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = run()
    return int(counter.get_total_flops()), out


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; on exit each module gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
