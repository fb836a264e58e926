"""Distance and entropy of attention by block and head in trained order, attention rollout, and class attention.

The mean attention distance is that of arXiv 2010.11929: the distance between a patch and the patches that it attends
to, weighted by attention. timm's fused attention never holds the weights in one tensor, so it is off for this pass.
A hook reads the weights as the input of attention's dropout, which does nothing in evaluation.

Attention rollout (arXiv 2005.00928, as in arXiv 2010.11929): weights averaged over heads, plus the identity, each row
adding up to 1, multiplied through the blocks. Class attention is that of CaiT (arXiv 2103.17239).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ls_edge.evaluation.analysis.inside import AttentionStatistics, ClassAttention, Rollout
from ls_edge.evaluation.measure import Order
from ls_edge.training.analysis.inspected import (
    MOST_PICTURES,
    Inspected,
    LabeledImages,
    LackingError,
    compare,
    images_of,
)

MOST_ROLLOUTS = 256
"""Images whose rollouts in trained and in random order are compared."""
MOST_CLASS_MAPS = 64
"""Images whose class attention is compared."""
PLAIN = ("Attention", "AttentionRope", "EvaAttention")
"""timm's attention classes whose dropout takes the weights ``[B, heads, N, N]``, each row adding up to 1."""


def _plain_attention(inspected: Inspected) -> tuple[list[Any], tuple[int, int], int]:
    """Return the attention of each block, the grid of patches, and the number of tokens before the patches.

    Raises :class:`LackingError` if the attention of a block is not plain.
    """
    view = inspected.model.view
    modules = [getattr(block, "attn", None) for block in view.blocks]
    odd = [type(one).__name__ for one in modules if type(one).__name__ not in PLAIN]
    if odd:
        has = "no attention" if odd[0] == "NoneType" else f"{odd[0]}, which is not plain attention"
        raise LackingError(f"a block of {inspected.name} has {has}")
    if inspected.grid is None:
        raise LackingError(f"the tokens of {inspected.name} do not form a grid of patches")
    height, width = inspected.grid
    return modules, inspected.grid, view.token_spec.count - height * width


class AttentionMeasure:
    """Running sums over batches of images; raises :class:`LackingError` for a model without plain attention."""

    def __init__(self, inspected: Inspected) -> None:
        self._model = inspected.model
        self._attention, self._grid, self._prefix = _plain_attention(inspected)
        self._apart = distances(*self._grid).to(self._model.view.device)
        self._distance: list[Any] = [0.0] * self._model.num_blocks
        self._entropy: list[Any] = [0.0] * self._model.num_blocks
        self._images = 0

    @torch.inference_mode()
    def add(self, images: np.ndarray) -> None:
        """Add a batch: means over queries, float64, and sums over images."""
        captured: list[Tensor] = []
        with _visible_weights(self._attention, captured):
            tokens = self._model.stem(images)
            for index in range(self._model.num_blocks):
                tokens = self._model.block(index, tokens, index)
                weights = captured.pop().double()
                self._entropy[index] += torch.special.entr(weights).sum(dim=-1).mean(dim=-1).sum(dim=0)
                patches = weights[:, :, self._prefix :, self._prefix :]
                shares = patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
                self._distance[index] += (shares * self._apart).sum(dim=-1).mean(dim=-1).sum(dim=0)
        self._images += len(images)

    def result(self) -> AttentionStatistics:
        """Return the means over all images."""
        distance, entropy = (
            [(one / self._images).tolist() for one in sums] for sums in (self._distance, self._entropy)
        )
        return AttentionStatistics(distance, entropy, self._grid, self._prefix)


def rollout_of(inspected: Inspected, tokens: Tensor, order: Sequence[int]) -> np.ndarray:
    """Return the rollout over the patches, float64 ``[B, rows, columns]``, of tokens of the stem.

    It is the row of the class token, else the mean over tokens.
    """
    attention, grid, prefix = _plain_attention(inspected)
    captured: list[Tensor] = []
    with _visible_weights(attention, captured):
        inspected.run(tokens, order)
    identity = torch.eye(captured[0].shape[-1], device=captured[0].device)
    joined = identity.double()
    for weights in captured:
        mixed = weights.double().mean(dim=1) + identity
        joined = mixed / mixed.sum(dim=-1, keepdim=True) @ joined
    row = joined[:, 0] if prefix else joined.mean(dim=1)
    found: np.ndarray = row[:, prefix:].reshape(-1, *grid).cpu().numpy()
    return found


def rollout(inspected: Inspected, batches: Sequence[LabeledImages]) -> Rollout:
    """Return the rollout of the first images, in trained order and in a random order for each image."""
    _, grid, _ = _plain_attention(inspected)
    images = images_of(batches, MOST_ROLLOUTS)

    def maps_of(number: int, order: Order) -> np.ndarray:
        return rollout_of(inspected, inspected.model.stem(images[number : number + 1]), order)

    found = compare(inspected, images, maps_of, "attention rollout")
    trained, random = (
        [np.round(one, 5).ravel().tolist() for one in maps[:MOST_PICTURES]] for maps in (found.trained, found.random)
    )
    peak = float(np.mean([one.max() / one.mean() for one in found.trained]))
    return Rollout(trained, random, found.correlation, peak, len(images), grid, found.pictures)


def class_attention(inspected: Inspected, batches: Sequence[LabeledImages]) -> ClassAttention:
    """Return the attention of CaiT's class token, in trained order and in random orders of the patch blocks."""
    model, grid = inspected.model, inspected.grid
    modules = [layer.attn for layer in getattr(model.view.model, "blocks_token_only", ())]
    if not modules or grid is None:
        raise LackingError(f"{inspected.name} has no class-attention layers")
    images, heads = images_of(batches, MOST_CLASS_MAPS), modules[0].num_heads

    def maps_of(number: int, order: Order) -> np.ndarray:
        captured: list[Tensor] = []
        with _visible_weights(modules, captured):
            model.head(inspected.run(model.stem(images[number : number + 1]), order))
        patches = torch.cat([weights[0, :, 0, 1:].double() for weights in captured])
        maps: np.ndarray = patches.reshape(-1, *grid).cpu().numpy()
        return maps

    found = compare(inspected, images, maps_of, "class attention", columns=heads)
    shares = torch.from_numpy(found.trained).reshape(len(images), len(modules), heads, -1)
    own = 1 - shares.sum(dim=-1)
    entropy = torch.special.entr(shares).sum(dim=-1) + torch.special.entr(own)
    return ClassAttention(
        entropy=entropy.mean(dim=0).tolist(),
        own=own.mean(dim=0).tolist(),
        correlation=found.correlation,
        images=len(images),
        grid=grid,
        pictures=found.pictures,
    )


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
