"""Counts of floating-point operations, from ``torch.utils.flop_counter``."""

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
    """Return the operations of ``run()`` in matrix products, convolutions, and attention, and its result.

    Gradients are enabled because the counter's hooks need them. Attention runs as plain matrix products because not all
    versions of torch count all fused kernels.
    """
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        out = run()
    return int(counter.get_total_flops()), out


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode; restore the mode of each module on exit."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
