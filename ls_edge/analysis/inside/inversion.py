"""Images reconstructed from the tokens after a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ls_edge.analysis.kind import InspectedKind
from ls_edge.core.text import counted
from ls_edge.evaluation.measure import LabeledImages
from ls_edge.report.pictures import Picture, picture
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.inspection.inspected import Inspected

STEPS = 300
IMAGES = 2


class Inversion(msgspec.Struct, frozen=True):
    """Images reconstructed from the tokens after each block, by gradient descent on the squared distance of tokens.

    Distances are relative to the squared norm of the tokens and averaged over the images.
    """

    blocks: list[int]
    noise: list[float]
    """Distance of the initial noise."""
    reached: list[float]
    shifted: list[float]
    """Distance of the image after Gaussian noise of 1/20 of the pixel range was added."""
    images: int
    pictures: list[Picture]

    @property
    def factors(self) -> list[float]:
        """Factors by which descent lowered the distance, by block."""
        return [noise / max(reached, 1e-12) for noise, reached in zip(self.noise, self.reached, strict=True)]


def inspect(inspected: Inspected, batches: Sequence[LabeledImages]) -> Inversion:
    """Reconstruct the first images from their tokens after some blocks."""
    import torch

    from ls_edge.training.inspection.gradients import NOISE, descend, gray_noise, run_blocks
    from ls_edge.training.inspection.inspected import color_picture, images_of

    blocks, target = inspected.some_blocks, inspected.colors(images_of(batches, IMAGES))
    generator = torch.Generator().manual_seed(inspected.seed)
    moved = target + NOISE * torch.randn(target.shape, generator=generator).to(target.device)
    noise, reached, shifted = [], [], []
    shown = [Picture(f"image {number + 1}", picture(color_picture(one))) for number, one in enumerate(target)]
    for number, index in enumerate(blocks):
        with torch.no_grad():
            wanted = run_blocks(inspected, target, range(index + 1))

        def distance(colors: Tensor, index: int = index, wanted: Tensor = wanted) -> Tensor:
            apart = run_blocks(inspected, colors, range(index + 1)) - wanted
            return (apart.square().sum(dim=(1, 2)) / wanted.square().sum(dim=(1, 2)).clamp_min(1e-12)).mean()

        start = gray_noise(inspected, len(target))
        made = descend(start, distance, STEPS)
        noise.append(float(distance(start).detach()))
        shifted.append(float(distance(moved).detach()))
        reached.append(float(distance(made).detach()))
        shown += [Picture(f"from block {index}", picture(color_picture(one))) for one in made]
        inspected.on_progress(number + 1, len(blocks), "inversion")
    return Inversion(list(blocks), noise, reached, shifted, len(target), shown)


def _finding(found: Inversion) -> str:
    factors = found.factors
    pairs = zip(found.blocks, found.reached, found.shifted, strict=True)
    closer = [block for block, reached, shifted in pairs if reached < shifted]
    return (
        f"Descent lowers the distance by a factor of {factors[0]:,.0f} after block {found.blocks[0]} and "
        f"{factors[-1]:,.0f} after block {found.blocks[-1]}; it comes closer than the image with slight noise in "
        f"{len(closer)} of {counted(len(found.blocks), 'block')}."
    )


def _charts(found: Inversion) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import lines_chart

    distances = {"noise at the start": found.noise, "image with slight noise": found.shifted, "reached": found.reached}
    series = {
        name: {block: max(value, 1e-9) for block, value in zip(found.blocks, values, strict=True)}
        for name, values in distances.items()
    }
    return [lines_chart(series, "block", "distance", scale=alt.Scale(type="log"))]


INVERSION = InspectedKind(
    summary="images made from a block's output",
    text="Images that gradient descent makes from noise until their tokens after a block match those of an image: "
    "details that do not return were discarded by the blocks. Distances are relative to the norm of the tokens.",
    inspect=inspect,
    finding=_finding,
    charts=_charts,
    layout="pairs",
)
