"""Averaged weights: what training validates and keeps instead of the last step's, where that is asked for.

``ema``: an exponential mean whose memory grows with the steps up to ``decay``. ``swa`` (arXiv 1803.05407): the plain
mean over the last part of training; before it begins the weights are the model's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn


class Average:
    """A second set of float weights beside a module's; :meth:`update` after each step."""

    def __init__(self, module: nn.Module, kind: Literal["ema", "swa"], decay: float, begin: float) -> None:
        self._pairs = [(name, value) for name, value in module.state_dict().items() if value.is_floating_point()]
        self._kind = kind
        self._decay = decay
        self._begin = begin
        self.tensors = {name: value.detach().clone() for name, value in self._pairs}

    @torch.no_grad()
    def update(self, step: int, steps: int) -> None:
        """Take in the weights after step ``step`` (from 0) of ``steps``."""
        if self._kind == "ema":
            weight = 1 - min(self._decay, (1 + step) / (10 + step))
        else:
            since = step - int(self._begin * steps)
            weight = 1.0 if since < 0 else 1 / (since + 1)
        mean = [self.tensors[name] for name, _ in self._pairs]
        torch._foreach_lerp_(mean, [value.detach() for _, value in self._pairs], weight)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the average where the module's weights are, and those back afterwards."""
        own = {name: value.detach().clone() for name, value in self._pairs}
        self._put(self.tensors)
        try:
            yield
        finally:
            self._put(own)

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in self._pairs:
            value.detach().copy_(values[name])

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Go on from these."""
        for name, value in self.tensors.items():
            value.copy_(tensors[name])
