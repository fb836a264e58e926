"""Attention of the class token to the patches in the class-attention layers of CaiT (arXiv 2103.17239)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind, pixels_compared
from ls_edge.core.text import counted, show_percent
from ls_edge.evaluation.measure import LabeledImages, NotMeasurable, Order
from ls_edge.report.pictures import Picture

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.inspection.inspected import Inspected


class ClassAttention(msgspec.Struct, frozen=True):
    """Attention of the class token to the patches (CaiT, arXiv 2103.17239), by layer and head."""

    entropy: list[list[float]]
    """Entropy of the attention over class token and patches in trained order, in nats."""
    own: list[list[float]]
    """Attention of the class token to itself in trained order."""
    correlation: float
    """Correlation of the two maps of an image, in trained and in random order, averaged over the images."""
    images: int
    grid: tuple[int, int]
    pictures: list[Picture]


def inspect(inspected: Inspected, batches: Sequence[LabeledImages]) -> ClassAttention:
    """Return the attention of CaiT's class token, in trained order and in random orders of the patch blocks."""
    import torch

    from ls_edge.training.inspection.attention_weights import visible_weights
    from ls_edge.training.inspection.inspected import class_of, compare, grid_of, images_of

    model, grid = inspected.model, grid_of(inspected.model)
    modules = [layer.attn for layer in getattr(model.view.model, "blocks_token_only", ())]
    if not modules or grid is None:
        raise NotMeasurable(f"{class_of(model)} has no class-attention layers")
    images, heads = images_of(batches), modules[0].num_heads

    def maps_of(number: int, order: Order) -> np.ndarray:
        captured: list[Tensor] = []
        with visible_weights(modules, captured):
            model.head(inspected.run(model.stem(images[number : number + 1]), order))
        patches = torch.cat([weights[0, :, 0, 1:].double() for weights in captured])
        return np.asarray(patches.reshape(-1, *grid).cpu())

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


def _finding(found: ClassAttention) -> str:
    own = [float(np.mean(heads)) for heads in found.own]
    entropy = [value for heads in found.entropy for value in heads]
    most = float(np.log(1 + found.grid[0] * found.grid[1]))
    sharp = "focused" if min(entropy) < 0.7 * most else "spread over nearly all patches"
    return (
        f"Class attention is {sharp}: entropy {min(entropy):.2f} to {max(entropy):.2f} nats, {most:.2f} if equal "
        f"everywhere. Layer 0 keeps {show_percent(own[0])} on the class token, the last layer {show_percent(own[-1])}. "
        f"In random order it attends to {pixels_compared(found.correlation)} patches (correlation "
        f"{found.correlation:+.2f}, {counted(found.images, 'image')})."
    )


CLASS_ATTENTION = InspectedKind(
    summary="patches that the class token attends to (CaiT)",
    text="Attention of the class token to the patches: an image, and maps in trained and in random order of the patch "
    "blocks, one row for each layer and one column for each head; white is most.",
    inspect=inspect,
    finding=_finding,
    layout="triples",
)
