"""Distance and entropy of attention by block and head in trained order, attention rollout, and class attention.

The mean attention distance is that of arXiv 2010.11929: the distance between a patch and the patches that it attends
to, weighted by attention. timm's fused attention never holds the weights in one tensor, so it is off for this pass.
The weights are read where they enter attention's dropout, which does nothing in evaluation.

Attention rollout (arXiv 2005.00928, as in arXiv 2010.11929): weights averaged over heads, plus the identity, each row
adding up to 1, multiplied through the blocks. Class attention is that of CaiT (arXiv 2103.17239).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.evaluation.analysis.inside import AttentionStatistics, ClassAttention, Rollout
from ls_edge.training.analysis.inspected import (
    MOST_PICTURES,
    FirstImages,
    Inspected,
    Look,
    compared_pictures,
    correlation,
)

MOST_ROLLOUTS = 256
"""Images whose rollouts in trained and in random order are compared."""
PLAIN = ("Attention", "AttentionRope", "EvaAttention")
"""timm's attention classes whose dropout takes the weights ``[B, heads, N, N]``, each row adding up to 1."""


class AttentionMeasure(Look):
    """Running sums over batches of images."""

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        view = self.model.view
        self._attention: list[Any] = [getattr(block, "attn", None) for block in view.blocks]
        self._distance: list[Any] = [0.0] * view.num_blocks
        self._entropy: list[Any] = [0.0] * view.num_blocks
        self._images = 0
        odd = [type(one).__name__ for one in self._attention if type(one).__name__ not in PLAIN]
        self.grid = inspected.grid or (0, 0)
        """Rows and columns of patches."""
        if odd:
            has = "no attention" if odd[0] == "NoneType" else f"{odd[0]}, which is not plain attention"
            self.reason = f"a block of {inspected.name} has {has}"
        elif inspected.grid is None:
            self.reason = f"the tokens of {inspected.name} do not form a grid of patches"
        else:
            self._prefix = view.token_spec.count - self.grid[0] * self.grid[1]
            self._apart = distances(*self.grid).to(view.device)

    @torch.inference_mode()
    def add(self, images: np.ndarray, labels: np.ndarray) -> None:  # noqa: ARG002
        """Add a batch; does nothing if there is a :attr:`reason`."""
        if self.reason:
            return
        captured: list[Tensor] = []
        with _visible_weights(self._attention, captured):
            tokens = self.model.stem(images)
            for index in range(self.model.num_blocks):
                tokens = self.model.block(index, tokens, index)
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
        return AttentionStatistics(distance, entropy, self.grid, self._prefix)

    def visible(self, captured: list[Tensor]) -> contextlib.AbstractContextManager[None]:
        """Put the weights of each block that runs into ``captured``."""
        return _visible_weights(self._attention, captured)

    def of_patches(self, joined: Tensor) -> Tensor:
        """Return the part ``[B, patches]`` of a rollout ``[B, N, N]``: the class token's, else the mean."""
        row = joined[:, 0] if self._prefix else joined.mean(dim=1)
        return row[:, self._prefix :]

    def _measure(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return distance and entropy by head, float64, means over queries and sums over images."""
        weights = weights.double()
        entropy = torch.special.entr(weights).sum(dim=-1).mean(dim=-1).sum(dim=0)
        patches = weights[:, :, self._prefix :, self._prefix :]
        shares = patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        distance = (shares * self._apart).sum(dim=-1).mean(dim=-1).sum(dim=0)
        return distance, entropy


class RolloutMeasure(FirstImages):
    """Attention rollout of the first images, in trained order and each image in a random order of its own."""

    most = MOST_ROLLOUTS

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        self._attention = AttentionMeasure(inspected)
        self.reason = self._attention.reason

    def rollout(self, tokens: Tensor, order: Iterable[int]) -> np.ndarray:
        """Return the rollout over the patches, float64 ``[B, patches]``, of tokens of the stem."""
        captured: list[Tensor] = []
        joined: Tensor | None = None
        with self._attention.visible(captured):
            for slot, index in enumerate(order):
                tokens = self.model.block(index, tokens, slot)
                weights = captured.pop().double().mean(dim=1)
                weights = weights + torch.eye(weights.shape[-1], device=weights.device)
                weights = weights / weights.sum(dim=-1, keepdim=True)
                joined = weights if joined is None else weights @ joined
        assert joined is not None
        found: np.ndarray = self._attention.of_patches(joined).cpu().numpy()
        return found

    @torch.inference_mode()
    def result(self) -> Rollout | None:
        """Return the comparison and the first rollouts; None if there is a :attr:`reason`."""
        if self.reason or not self._kept:
            return None
        trained, random = [], []
        for number, image in enumerate(self.images()):
            start = self.model.stem(image[None])
            trained.append(self.rollout(start, self.inspected.trained)[0])
            random.append(self.rollout(start, self.inspected.random_order(number))[0])
        grid = self._attention.grid
        maps = {
            name: [[one.reshape(grid)] for one in each[:MOST_PICTURES]]
            for name, each in (("trained order", trained), ("random order", random))
        }
        return Rollout(
            trained=[[round(float(value), 5) for value in one] for one in trained[:MOST_PICTURES]],
            random=[[round(float(value), 5) for value in one] for one in random[:MOST_PICTURES]],
            correlation=float(np.mean([correlation(*pair) for pair in zip(trained, random, strict=True)])),
            peak=float(np.mean([one.max() / one.mean() for one in trained])),
            images=len(trained),
            grid=grid,
            pictures=compared_pictures(self.inspected.colors(self.images()[:MOST_PICTURES]), maps),
        )


class ClassAttentionMeasure(FirstImages):
    """Attention of CaiT's class token, in trained order and each image in a random order of its patch blocks."""

    most = 64

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        layers = getattr(self.model.view.model, "blocks_token_only", ())
        self._attention = [layer.attn for layer in layers]
        if not self._attention:
            self.reason = f"{inspected.name} has no class-attention layers"

    @torch.inference_mode()
    def result(self) -> ClassAttention | None:
        """Return entropies, and maps of the first images; None if there is a :attr:`reason`."""
        if self.reason or not self._kept:
            return None
        grid, images = self.inspected.grid, self.images()
        assert grid is not None
        trained = torch.cat([self._weights(image[None], self.inspected.trained) for image in images])
        random = torch.cat(
            [self._weights(image[None], self.inspected.random_order(number)) for number, image in enumerate(images)]
        )
        maps = [one[..., 1:].reshape(*one.shape[:-1], *grid).cpu().numpy() for one in (trained, random)]
        layers, heads = trained.shape[1:3]
        pairs = zip(*(one.reshape(-1, grid[0] * grid[1]) for one in maps), strict=True)
        shown = {
            name: [list(one.reshape(layers * heads, *grid)) for one in each[:MOST_PICTURES]]
            for name, each in zip(("trained order", "random order"), maps, strict=True)
        }
        return ClassAttention(
            entropy=torch.special.entr(trained).sum(dim=-1).mean(dim=0).tolist(),
            own=trained[..., 0].mean(dim=0).tolist(),
            correlation=float(np.mean([correlation(*pair) for pair in pairs])),
            images=len(images),
            grid=grid,
            pictures=compared_pictures(self.inspected.colors(images[:MOST_PICTURES]), shown, heads),
        )

    def _weights(self, images: np.ndarray, order: Iterable[int]) -> Tensor:
        """Return the weights ``[B, layers, heads, 1 + patches]``, the class token first."""
        tokens = self.model.stem(images)
        for slot, index in enumerate(order):
            tokens = self.model.block(index, tokens, slot)
        captured: list[Tensor] = []
        with _visible_weights(self._attention, captured):
            self.model.head(tokens)
        return torch.stack([one[:, :, 0].double() for one in captured], dim=1)


def distances(height: int, width: int) -> Tensor:
    """Return the distances between patch centers, in patches, float64 ``[N, N]``."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    places = torch.stack((rows.flatten(), columns.flatten()), dim=1).double()
    return torch.cdist(places, places, compute_mode="donot_use_mm_for_euclid_dist")


@contextlib.contextmanager
def _visible_weights(modules: list[Any], captured: list[Tensor]) -> Iterator[None]:
    """Turn off fused attention and capture the weights of each attention that runs."""

    def read(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured.append(inputs[0])

    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.callback(module.attn_drop.register_forward_pre_hook(read).remove)
            stack.callback(setattr, module, "fused_attn", module.fused_attn)
            module.fused_attn = False
        yield
