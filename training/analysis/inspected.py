"""A run under inspection, the interface of what inspects it, and its images as pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.callbacks import OnProgress, ignore_progress
from ls_edge.data.pictures import picture, tiles
from ls_edge.evaluation.analysis.inside import Picture
from ls_edge.evaluation.measure import Order
from ls_edge.training.models.families import evenly_spaced
from ls_edge.training.models.torch_blocks import TorchBlocks

MOST_PICTURES = 4
"""Images, or blocks, of which a page shows pictures."""
SIDE = 64
"""Side of an image, or of a map over its patches, in a picture."""


@dataclass(frozen=True)
class Inspected:
    """A run, the bands and the seed of random orders, and the scaling of its images."""

    model: TorchBlocks
    bands: Bands
    seed: int
    image: ImageSpec
    on_progress: OnProgress = ignore_progress

    @property
    def trained(self) -> Order:
        """The trained order."""
        return tuple(range(self.model.num_blocks))

    def random_order(self, number: int) -> Order:
        """Return the random order of an image."""
        return tuple(self.bands.random_order(self.seed, number))

    @property
    def some_blocks(self) -> tuple[int, ...]:
        """At most :data:`MOST_PICTURES` blocks, evenly spaced."""
        return evenly_spaced(self.model.num_blocks, min(MOST_PICTURES, self.model.num_blocks))

    @property
    def patch_embedding(self) -> Any:
        """Patch embedding of the model: ``patch_embed``, or ``stem`` in mixers."""
        return self.model.view.patch_embedding

    @property
    def grid(self) -> tuple[int, int] | None:
        """Rows and columns of patches; None if the tokens do not form a grid."""
        grid = getattr(self.patch_embedding, "grid_size", None)
        if grid is None or self.model.view.token_spec.count < grid[0] * grid[1]:
            return None
        return int(grid[0]), int(grid[1])

    @property
    def name(self) -> str:
        """Name of the class of the model."""
        return type(self.model.view.model).__name__

    def scale(self, colors: Tensor) -> Tensor:
        """Return colors 0 to 1, ``[B, 3, H, W]``, as the model takes them."""
        return (colors - self._row(self.image.mean)) / self._row(self.image.std)

    def colors(self, images: np.ndarray) -> Tensor:
        """Return the colors 0 to 1 of images that the model takes."""
        given = torch.from_numpy(images).to(self.model.view.device)
        return (given * self._row(self.image.std) + self._row(self.image.mean)).clamp(0, 1)

    def _row(self, values: tuple[float, float, float]) -> Tensor:
        return torch.tensor(values, device=self.model.view.device).view(1, 3, 1, 1)


class Look:
    """Base of measures of a run: batches of images first, then one result."""

    reason = ""
    """Reason for the lack of results; empty if there are some."""

    def __init__(self, inspected: Inspected) -> None:
        self.inspected, self.model = inspected, inspected.model

    def add(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Add images float32 ``[B, 3, H, W]`` and labels int ``[B]``."""

    def result(self) -> Any:
        """Return the document of all images; None if there is a :attr:`reason`."""
        raise NotImplementedError


class FirstImages(Look):
    """Base of measures of the first images only."""

    most = 0

    def __init__(self, inspected: Inspected) -> None:
        super().__init__(inspected)
        self._kept: list[np.ndarray] = []

    def add(self, images: np.ndarray, labels: np.ndarray) -> None:  # noqa: ARG002
        """Keep the first images."""
        room = self.most - sum(map(len, self._kept))
        if room > 0 and not self.reason:
            self._kept.append(images[:room].copy())

    def images(self) -> np.ndarray:
        """Return the kept images."""
        return np.concatenate(self._kept)


def color_picture(colors: Tensor) -> np.ndarray:
    """Return one image ``[3, H, W]`` as an array ``[SIDE, SIDE, 3]`` for a picture."""
    height = colors.shape[-2]
    sized = functional.interpolate(colors[None].float(), (SIDE, SIDE), mode="area" if height > SIDE else "nearest")
    shown: np.ndarray = sized[0].permute(1, 2, 0).cpu().numpy()
    return shown


def map_picture(values: np.ndarray) -> np.ndarray:
    """Return a map ``[H, W]`` with its largest value as white, ``[SIDE, SIDE]``."""
    given = torch.from_numpy(np.ascontiguousarray(values, np.float32))[None, None]
    sized = functional.interpolate(given, (SIDE, SIDE), mode="area" if values.shape[0] > SIDE else "nearest")[
        0, 0
    ].numpy()
    shown: np.ndarray = sized / max(float(sized.max()), 1e-12)
    return shown


def compared_pictures(colors: Tensor, maps: dict[str, list[list[np.ndarray]]], columns: int = 1) -> list[Picture]:
    """Return a picture of each image, each followed by one of its maps of every kind, ``columns`` in a row."""
    found = []
    for number, one in enumerate(colors):
        found.append(Picture(f"image {number + 1}", picture(color_picture(one))))
        for text, of_images in maps.items():
            sheet = tiles([map_picture(values) for values in of_images[number]], columns, 2)
            found.append(Picture(text, picture(sheet)))
    return found


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the correlation of two arrays; 0 if one of them is constant."""
    if not one.std() or not other.std():
        return 0.0
    return float(np.corrcoef(one.ravel(), other.ravel())[0, 1])
