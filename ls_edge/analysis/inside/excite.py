"""Images that excite a channel of a block's addition to the tokens, by gradient ascent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ls_edge.analysis.kind import InspectedKind
from ls_edge.core.text import counted
from ls_edge.evaluation.measure import LabeledImages
from ls_edge.report.pictures import Picture, picture

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.inspection.inspected import Inspected

STEPS = 200


class Excitation(msgspec.Struct, frozen=True):
    """Images from gradient ascent on a channel of a block's addition, averaged over the tokens."""

    blocks: list[int]
    channels: list[int]
    noise: list[float]
    """Value of the initial noise."""
    most: list[float]
    """Largest value over images of the data."""
    reached: list[float]
    images: int
    pictures: list[Picture]


def inspect(inspected: Inspected, batches: Sequence[LabeledImages]) -> Excitation:
    """Return, for each of some blocks, an image that excites the channel that varies most over the data."""
    import torch

    from ls_edge.training.inspection.gradients import descend, gray_noise
    from ls_edge.training.inspection.inspected import color_picture, images_of

    blocks, colors = inspected.some_blocks, inspected.colors(images_of(batches))
    channels, noise, most, reached, shown = [], [], [], [], []
    for number, index in enumerate(blocks):
        with torch.no_grad():
            added = _added(inspected, index, colors).mean(dim=1)
        channel = int(added.std(dim=0, correction=0).argmax())

        def loss(some: Tensor, index: int = index, channel: int = channel) -> Tensor:
            return -_added(inspected, index, some)[..., channel].mean()

        start = gray_noise(inspected, 1)
        raised = descend(start, loss, STEPS, smooth=True)
        channels.append(channel)
        most.append(float(added[:, channel].max()))
        noise.append(-float(loss(start).detach()))
        reached.append(-float(loss(raised).detach()))
        shown.append(Picture(f"block {index}, channel {channel}", picture(color_picture(raised[0]))))
        inspected.on_progress(number + 1, len(blocks), "images that excite a block")
    return Excitation(list(blocks), channels, noise, most, reached, len(colors), shown)


def _added(inspected: Inspected, index: int, colors: Tensor) -> Tensor:
    """Return a block's addition to the tokens in trained order, ``[B, N, D]``."""
    from ls_edge.training.inspection.gradients import run_blocks

    before = run_blocks(inspected, colors, range(index))
    after: Tensor = inspected.model.view.block(index, before, index)
    return after - before


def _finding(found: Excitation) -> str:
    beyond = [block for block, most, value in zip(found.blocks, found.most, found.reached, strict=True) if value > most]
    one, last = found.blocks[0], found.blocks[-1]
    return (
        f"Ascent exceeds the largest value of {counted(found.images, 'image')} in {len(beyond)} of "
        f"{counted(len(found.blocks), 'block')}: from {found.noise[0]:+.2f} to {found.reached[0]:+.2f} in block {one} "
        f"(images: {found.most[0]:+.2f}), from {found.noise[-1]:+.2f} to {found.reached[-1]:+.2f} in block {last} "
        f"(images: {found.most[-1]:+.2f})."
    )


EXCITE = InspectedKind(
    summary="images that raise a channel of a block",
    text="Images that gradient ascent makes from noise for the channel that varies most in what a block adds; blur and "
    "shifts suppress noise.",
    inspect=inspect,
    finding=_finding,
    layout="pairs",
)
