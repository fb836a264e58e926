"""Distance and entropy of attention by block and head in trained order, and attention rollout.

The mean attention distance is that of arXiv 2010.11929: the distance between a patch and the patches that it attends
to, weighted by attention. timm's fused attention never holds the weights in one tensor, so it is off for this pass.
The weights are read where they enter attention's dropout, which does nothing in evaluation.

Attention rollout (arXiv 2005.00928, as in arXiv 2010.11929): weights averaged over heads, plus the identity, each row
adding up to 1, multiplied through the blocks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.core.bands import Bands
from ls_edge.evaluation.analysis import AttentionStatistics, Rollout
from ls_edge.training.models.torch_blocks import TorchBlocks

MOST_ROLLOUTS = 256
"""Images whose rollouts in trained and in random order are compared."""
SHOWN_ROLLOUTS = 8
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

    def visible(self, captured: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Put the weights of each block that runs into ``captured``."""
        return _visible_weights(self._attention, captured)

    def of_patches(self, joined: Tensor) -> Tensor:
        """Return the part ``[B, patches]`` of a rollout ``[B, N, N]``: the class token's, else the mean."""
        row = joined[:, 0] if self._prefix else joined.mean(dim=1)
        return row[:, self._prefix :]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self._grid

    def _measure(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return distance and entropy by head, float64, means over queries and sums over images."""
        weights = weights.double()
        entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=-1).sum(dim=0)
        patches = weights[:, :, self._prefix :, self._prefix :]
        shares = patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        distance = (shares * self._apart).sum(dim=-1).mean(dim=-1).sum(dim=0)
        return distance, entropy


class RolloutMeasure:
    """Attention rollout of the first images, in trained order and each image in a random order of its own."""

    def __init__(self, model: TorchBlocks, bands: Bands, seed: int) -> None:
        self._model, self._bands, self._seed = model, bands, seed
        self._attention = AttentionMeasure(model)
        self.reason = self._attention.reason
        self._trained: list[np.ndarray] = []
        self._random: list[np.ndarray] = []

    @torch.inference_mode()
    def add(self, images: np.ndarray) -> None:
        """Add images float32 ``[B, 3, H, W]``; does nothing if there is a :attr:`reason`, or enough of them."""
        count = min(len(images), MOST_ROLLOUTS - len(self._trained))
        if self.reason or count <= 0:
            return
        start = self._model.stem(images[:count])
        first = len(self._trained)
        self._trained += list(self.rollout(start, range(self._model.num_blocks)))
        for number in range(count):
            order = self._bands.random_order(self._seed, first + number)
            self._random += list(self.rollout(start[number : number + 1], order))

    @torch.inference_mode()
    def rollout(self, tokens: Tensor, order: Iterable[int]) -> np.ndarray:
        """Return the rollout of each image over the patches, float64 ``[B, patches]``."""
        captured: list[Tensor] = []
        joined: Tensor | None = None
        with self._attention.visible(captured):
            for slot, index in enumerate(order):
                tokens = self._model.block(index, tokens, slot)
                weights = captured.pop().double().mean(dim=1)
                weights = weights + torch.eye(weights.shape[-1], device=weights.device)
                weights = weights / weights.sum(dim=-1, keepdim=True)
                joined = weights if joined is None else weights @ joined
        assert joined is not None
        found: np.ndarray = self._attention.of_patches(joined).cpu().numpy()
        return found

    def result(self) -> Rollout | None:
        """Return the comparison and the first rollouts; None if there is a :attr:`reason`."""
        if self.reason or not self._trained:
            return None
        same = [np.corrcoef(one, other)[0, 1] for one, other in zip(self._trained, self._random, strict=True)]
        peaks = [float(one.max() / one.mean()) for one in self._trained]
        trained, random = (
            [[round(float(value), 5) for value in one] for one in maps[:SHOWN_ROLLOUTS]]
            for maps in (self._trained, self._random)
        )
        return Rollout(trained, random, float(np.mean(same)), float(np.mean(peaks)), len(same), self._attention.grid)


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
