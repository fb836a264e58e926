"""Attention rollout (arXiv 2005.00928, as in arXiv 2010.11929): the patches that reach the answer through all blocks.

The weights of each block are averaged over heads, added to the identity, normalized by row, and multiplied through all
blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind, pixels_compared
from ls_edge.core.text import counted
from ls_edge.evaluation.measure import LabeledImages, Order
from ls_edge.report.pictures import Picture

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.inspection.inspected import Inspected

MOST_IMAGES = 256
"""Maximum number of images whose rollouts in trained and in random order are compared."""


class Rollout(msgspec.Struct, frozen=True):
    """Attention rollout over the patches, row by row, for the first images."""

    correlation: float
    """Correlation of the two maps of an image, averaged over the images."""
    peak: float
    """Largest value of a map in trained order relative to its mean, averaged over the images; 1 for a constant map."""
    images: int
    pictures: list[Picture]


def rollout_of(inspected: Inspected, tokens: Tensor, order: Sequence[int]) -> np.ndarray:
    """Return the rollout of the stem's tokens over the patches, float64 ``[B, rows, columns]``.

    It is the row of the class token or, without one, the mean over tokens.
    """
    import torch

    from ls_edge.training.inspection.attention_weights import plain_attention, visible_weights

    attention, grid, prefix = plain_attention(inspected.model)
    captured: list[Tensor] = []
    with visible_weights(attention, captured):
        inspected.run(tokens, order)
    identity = torch.eye(captured[0].shape[-1], device=captured[0].device)
    joined = identity.double()
    for weights in captured:
        mixed = weights.double().mean(dim=1) + identity
        joined = mixed / mixed.sum(dim=-1, keepdim=True) @ joined
    row = joined[:, 0] if prefix else joined.mean(dim=1)
    return np.asarray(row[:, prefix:].reshape(-1, *grid).cpu())


def inspect(inspected: Inspected, batches: Sequence[LabeledImages]) -> Rollout:
    """Return the rollout of the first images in trained order and in a random order for each image."""
    from ls_edge.training.inspection.inspected import compare, images_of

    images = images_of(batches, MOST_IMAGES)

    def maps_of(number: int, order: Order) -> np.ndarray:
        return rollout_of(inspected, inspected.model.stem(images[number : number + 1]), order)

    found = compare(inspected, images, maps_of, "attention rollout")
    peak = float(np.mean([one.max() / one.mean() for one in found.trained]))
    return Rollout(found.correlation, peak, len(images), found.pictures)


def _finding(found: Rollout) -> str:
    return (
        f"In random order, attention reaches {pixels_compared(found.correlation)} patches: maps correlate by "
        f"{found.correlation:+.2f} with the maps in trained order, over {counted(found.images, 'image')}. The "
        f"strongest patch has {found.peak:.1f} times the mean."
    )


ROLLOUT = InspectedKind(
    summary="patches that reach the answer through all blocks",
    text="Attention averaged over heads, plus the identity, multiplied through the blocks: an image, the patches that "
    "reach its answer in trained order, and in a random order; white is most.",
    inspect=inspect,
    finding=_finding,
    layout="triples",
)
