"""Distance and entropy of attention by block and head, in trained order.

The mean attention distance is that of arXiv 2010.11929: the distance between a patch and the patches that it attends
to, weighted by attention. timm's fused attention never holds the weights in one tensor, so it is off for this pass.
The weights are read where they enter attention's dropout, which does nothing in evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.evaluation.analysis import AttentionStatistics
from ls_edge.training.models.torch_blocks import TorchBlocks

PLAIN = ("Attention", "AttentionRope", "EvaAttention")
"""timm's attention classes whose dropout takes the weights ``[B, heads, N, N]``, each row adding up to 1."""


class AttentionMeasure:
    """Running sums over batches of images."""

    def __init__(self, model: TorchBlocks) -> None:
        self._model = model
        view = model.view
        self._attention: list[Any] = [getattr(block, "attn", None) for block in view.blocks]
        self._distance: list[Any] = [0.0] * view.num_blocks
        self._entropy: list[Any] = [0.0] * view.num_blocks
        self._images = 0
        grid = getattr(getattr(view.model, "patch_embed", None), "grid_size", None)
        odd = [type(one).__name__ for one in self._attention if type(one).__name__ not in PLAIN]
        self.reason = ""
        """Reason for the lack of results; empty if there are some."""
        if odd:
            has = "no attention" if odd[0] == "NoneType" else f"{odd[0]}, which is not plain attention"
            self.reason = f"a block of {type(view.model).__name__} has {has}"
        elif grid is None or view.token_spec.count < grid[0] * grid[1]:
            self.reason = f"the tokens of {type(view.model).__name__} do not form a grid of patches"
        else:
            self._grid: tuple[int, int] = (int(grid[0]), int(grid[1]))
            self._prefix = view.token_spec.count - self._grid[0] * self._grid[1]
            self._apart = _distances(*self._grid).to(view.device)

    @torch.inference_mode()
    def add(self, images: np.ndarray) -> None:
        """Add images float32 ``[B, 3, H, W]``; does nothing if there is a :attr:`reason`."""
        if self.reason:
            return
        captured: list[Tensor] = []
        with _visible_weights(self._attention, captured):
            tokens = self._model.stem(images)
            for index in range(self._model.num_blocks):
                tokens = self._model.block(index, tokens, index)
                distance, entropy = self._measure(captured.pop())
                self._distance[index] += distance
                self._entropy[index] += entropy
        self._images += len(images)

    def result(self) -> AttentionStatistics | None:
        """Return the means over all images; None if there is a :attr:`reason`."""
        if self.reason or not self._images:
            return None
        distance, entropy = (
            [(one / self._images).tolist() for one in sums] for sums in (self._distance, self._entropy)
        )
        return AttentionStatistics(distance, entropy, self._grid, self._prefix)

    def _measure(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return distance and entropy by head, float64, means over queries and sums over images."""
        weights = weights.double()
        entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=-1).sum(dim=0)
        patches = weights[:, :, self._prefix :, self._prefix :]
        shares = patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        distance = (shares * self._apart).sum(dim=-1).mean(dim=-1).sum(dim=0)
        return distance, entropy


def _distances(height: int, width: int) -> Tensor:
    """Return the distances between patch centers, in patches, float64 ``[N, N]``."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack((rows.flatten(), columns.flatten()), dim=1).double()
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


@contextlib.contextmanager
def _visible_weights(modules: list[Any], captured: list[Tensor]) -> Iterator[None]:
    """Turn off fused attention and capture the weights of each attention that runs."""

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured[:] = [inputs[0]]

    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.callback(module.attn_drop.register_forward_pre_hook(read).remove)
            stack.callback(setattr, module, "fused_attn", module.fused_attn)
            module.fused_attn = False
        yield
