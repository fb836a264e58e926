"""Counting floating point operations with ``torch.utils.flop_counter``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

T = TypeVar("T")


def count_flops(run: Callable[[], T]) -> tuple[int, T]:
    """Operations of ``run()``, and what it returns; matrix products, convolutions and attention are counted.

    With gradients on, since the counter's own hooks ask for them, and attention by its formula: not every torch counts
    every fused kernel.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = run()
    return int(counter.get_total_flops()), out


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode while the context is open; afterwards each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
