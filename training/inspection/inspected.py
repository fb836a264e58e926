"""Inspection of a run: its images as pictures, and maps over them in trained and in random order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.logs import OnProgress, ignore_progress
from ls_edge.evaluation.measure import LabeledImages, Order
from ls_edge.report.pictures import Picture, picture, tiles
from ls_edge.training.models.families import evenly_spaced
from ls_edge.training.models.torch_blocks import TorchBlocks

MOST_IMAGES = 64
"""Default maximum of images whose maps are compared."""
MOST_PICTURES = 4
"""Maximum number of images or blocks that a page shows as pictures."""
SIDE = 64
"""Side of an image, or of a map over its patches, in a picture."""


@dataclass(frozen=True)
class Inspected:
    """A run with the bands and the seed of random orders and the preprocessing of its images."""

    model: TorchBlocks
    bands: Bands
    seed: int
    image: ImageSpec
    on_progress: OnProgress = ignore_progress

    @property
    def trained(self) -> Order:
        """The trained order."""
        return tuple(range(self.model.num_blocks))

    @property
    def some_blocks(self) -> tuple[int, ...]:
        """At most :data:`MOST_PICTURES` blocks, evenly spaced."""
        return evenly_spaced(self.model.num_blocks, min(MOST_PICTURES, self.model.num_blocks))

    def run(self, tokens: Tensor, order: Sequence[int]) -> Tensor:
        """Return the tokens after the blocks of an order, without gradients."""
        for slot, index in enumerate(order):
            tokens = self.model.block(index, tokens, slot)
        return tokens

    def scale(self, colors: Tensor) -> Tensor:
        """Convert colors from 0 to 1, ``[B, 3, H, W]``, to the input of the model."""
        return (colors - self._row(self.image.mean)) / self._row(self.image.std)

    def colors(self, images: np.ndarray) -> Tensor:
        """Convert inputs of the model to colors from 0 to 1, ``[B, 3, H, W]``."""
        given = torch.from_numpy(images).to(self.model.view.device)
        return (given * self._row(self.image.std) + self._row(self.image.mean)).clamp(0, 1)

    def _row(self, values: tuple[float, float, float]) -> Tensor:
        return torch.tensor(values, device=self.model.view.device).view(1, 3, 1, 1)


def grid_of(model: TorchBlocks) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of patches; None if the tokens do not form a grid."""
    grid = getattr(model.view.patch_embedding, "grid_size", None)
    if grid is None or model.view.token_spec.count < grid[0] * grid[1]:
        return None
    return int(grid[0]), int(grid[1])


def class_of(model: TorchBlocks) -> str:
    """Return the name of the class of a model."""
    return type(model.view.model).__name__


def images_of(batches: Sequence[LabeledImages], most: int = MOST_IMAGES) -> np.ndarray:
    """Return the first ``most`` images of batches."""
    return np.concatenate([images for images, _ in batches])[:most]


class Compared(NamedTuple):
    """Maps ``[images, maps, H, W]`` of images in trained order and in a random order for each image."""

    trained: np.ndarray
    random: np.ndarray
    correlation: float
    """Correlation of the two maps of an image, averaged over the images."""
    pictures: list[Picture]
    """The first images, each followed by its maps."""


def compare(
    inspected: Inspected,
    images: np.ndarray,
    maps_of: Callable[[int, Order], np.ndarray],
    text: str,
    *,
    columns: int = 1,
) -> Compared:
    """Compare maps of images in trained and in random order, with ``columns`` maps per row in pictures.

    ``maps_of`` returns the maps ``[maps, H, W]`` of an image, given its number and the order.
    """
    trained, random = [], []
    for number in range(len(images)):
        trained.append(maps_of(number, inspected.trained))
        random.append(maps_of(number, tuple(inspected.bands.random_order(inspected.seed, number))))
        inspected.on_progress(number + 1, len(images), text)
    pictures = []
    for number, colors in enumerate(inspected.colors(images[:MOST_PICTURES])):
        pictures.append(Picture(f"image {number + 1}", picture(color_picture(colors))))
        for order, maps in (("trained order", trained[number]), ("random order", random[number])):
            sheet = tiles([_map_picture(values) for values in maps], columns, 2)
            pictures.append(Picture(order, picture(sheet)))
    correlations = [correlation(*pair) for pair in zip(trained, random, strict=True)]
    return Compared(np.stack(trained), np.stack(random), float(np.mean(correlations)), pictures)


def color_picture(colors: Tensor) -> np.ndarray:
    """Return an image ``[3, H, W]`` as an array ``[SIDE, SIDE, 3]`` for a picture."""
    return np.asarray(_sized(colors.float()).permute(1, 2, 0).cpu())


def _map_picture(values: np.ndarray) -> np.ndarray:
    """Return a map ``[H, W]`` as an array ``[SIDE, SIDE]`` in which its largest value is white."""
    sized = _sized(torch.from_numpy(np.ascontiguousarray(values, np.float32))[None])[0].numpy()
    return np.asarray(sized / max(float(sized.max()), 1e-12))


def _sized(channels: Tensor) -> Tensor:
    mode = "area" if channels.shape[-2] > SIDE else "nearest"
    return functional.interpolate(channels[None], (SIDE, SIDE), mode=mode)[0]


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two arrays; 0 if one of them is constant."""
    if not one.std() or not other.std():
        return 0.0
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
