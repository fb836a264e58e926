"""Pixels on which the answer depends, according to the gradient of its logit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind, pixels_compared
from ls_edge.core.text import counted, show_percent
from ls_edge.evaluation.measure import LabeledImages, Order
from ls_edge.report.pictures import Picture

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.inspection.inspected import Inspected


class Saliency(msgspec.Struct, frozen=True):
    """Gradient of the answer's logit with respect to the pixels, as the maximum magnitude over the colors."""

    top_share: float
    """Share of a map in the tenth of the pixels with the largest gradients: 0.1 for a map that is equal everywhere."""
    correlation: float
    """Correlation of the two maps of an image, averaged over the images."""
    images: int
    pictures: list[Picture]


def inspect(inspected: Inspected, batches: Sequence[LabeledImages]) -> Saliency:
    """Return the gradients of the answer's logit in trained order and in a random order for each image."""
    from ls_edge.training.inspection.inspected import compare, images_of

    images = images_of(batches)
    answers = inspected.model.head(inspected.run(inspected.model.stem(images), inspected.trained)).argmax(axis=1)

    def maps_of(number: int, order: Order) -> np.ndarray:
        colors = inspected.colors(images[number : number + 1])
        return saliency_map(inspected, colors, order, int(answers[number]))[None]

    found = compare(inspected, images, maps_of, "saliency")
    ranked = np.sort(found.trained.reshape(len(images), -1), axis=1)
    tenth = max(1, ranked.shape[1] // 10)
    shares = ranked[:, -tenth:].sum(axis=1) / np.maximum(ranked.sum(axis=1), 1e-300)
    return Saliency(float(np.mean(shares)), found.correlation, len(images), found.pictures)


def saliency_map(inspected: Inspected, colors: Tensor, order: Order, answer: int) -> np.ndarray:
    """Return the magnitude of the gradient of a class's logit by pixel, ``[H, W]``, as the maximum over the colors."""
    import torch

    from ls_edge.training.inspection.gradients import run_blocks

    colors = colors.detach().requires_grad_()
    logits = inspected.model.view.head(run_blocks(inspected, colors, order))[0]
    (slope,) = torch.autograd.grad(logits[answer], colors)
    return np.asarray(slope[0].abs().amax(dim=0).double().cpu())


def _finding(found: Saliency) -> str:
    if not found.top_share:
        return "The answer does not depend on the pixels."
    return (
        f"A tenth of the pixels has {show_percent(found.top_share)} of the gradient. In random order, the answer "
        f"depends on {pixels_compared(found.correlation)} pixels: maps correlate by {found.correlation:+.2f}, over "
        f"{counted(found.images, 'image')}."
    )


SALIENCY = InspectedKind(
    summary="pixels on which the answer depends",
    text="Gradient of the answer's logit by pixel, the largest of its colors: an image, its map in trained order, and "
    "the map of the same class in a random order.",
    inspect=inspect,
    finding=_finding,
    layout="triples",
)
