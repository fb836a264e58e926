"""Principal components of the filters of the patch embedding (arXiv 2010.11929, Figure 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind
from ls_edge.core.text import counted
from ls_edge.evaluation.measure import LabeledImages, NotMeasurable
from ls_edge.report.pictures import Picture, around_gray, picture, tiles
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from ls_edge.training.inspection.inspected import Inspected

MOST_COMPONENTS = 28
"""Maximum number of principal components in the picture and the chart, as in arXiv 2010.11929, Figure 7."""


class PatchFilters(msgspec.Struct, frozen=True):
    """Principal components of the filters of the patch embedding (arXiv 2010.11929, Figure 7)."""

    explained: list[float]
    """Fraction of the variance by component, largest first."""
    smoothness: float
    """Correlation of neighboring pixels of a filter: 0 for noise, near 1 for smooth filters."""
    filters: int
    pictures: list[Picture]

    @property
    def needed(self) -> int:
        """Number of components with 90 % of the variance."""
        return min(int(np.searchsorted(np.cumsum(self.explained), 0.9)) + 1, len(self.explained))


def inspect(inspected: Inspected, _batches: Sequence[LabeledImages]) -> PatchFilters:
    """Return the principal components of a patch embedding that is one layer of RGB patches, largest variance first."""
    from torch import nn

    from ls_edge.training.inspection.inspected import class_of

    layer = getattr(inspected.model.view.patch_embedding, "proj", None)
    if not isinstance(layer, nn.Conv2d) or layer.in_channels != 3 or layer.groups != 1:
        raise NotMeasurable(f"the patch embedding of {class_of(inspected.model)} is not one layer of RGB patches")
    weights = layer.weight.detach().permute(0, 2, 3, 1).double().cpu().numpy()
    count, height, width, _ = weights.shape
    flat = weights.reshape(count, -1)
    _, sizes, components = np.linalg.svd(flat - flat.mean(axis=0), full_matrices=False)
    power = float(np.square(weights).mean()) or 1.0
    neighbors = [
        (weights[:, 1:] * weights[:, :-1]).mean() if height > 1 else 0.0,
        (weights[:, :, 1:] * weights[:, :, :-1]).mean() if width > 1 else 0.0,
    ]
    first = components[:MOST_COMPONENTS].reshape(-1, height, width, 3)
    largest = weights[np.argsort(-np.linalg.norm(flat, axis=1))[:MOST_COMPONENTS]]
    shown = [
        Picture(text, picture(tiles([around_gray(one) for one in some], 7)))
        for text, some in (("principal components", first), ("filters with the largest norms", largest))
    ]
    variances = np.square(sizes) / max(float(np.square(sizes).sum()), 1e-300)
    return PatchFilters(variances.tolist(), float(np.mean(neighbors)) / power, count, shown)


def _finding(found: PatchFilters) -> str:
    smooth = found.smoothness
    like = "smooth patterns" if smooth > 0.5 else "partly smooth patterns" if smooth > 0.15 else "noise"
    return (
        f"{found.needed} of {counted(len(found.explained), 'component')} have 90 % of the variance of "
        f"{counted(found.filters, 'filter')}. The filters look like {like}: neighboring pixels correlate by "
        f"{smooth:+.2f}."
    )


def _charts(found: PatchFilters) -> list[Chart]:
    from ls_edge.report.charts.specification import lines_chart

    shares = dict(enumerate(found.explained[:MOST_COMPONENTS], 1))
    return [lines_chart({"variance": shares}, "component", "share of the variance")]


FILTERS = InspectedKind(
    summary="principal components of the patch embedding",
    text="Principal components of the filters of the patch embedding, the largest variance first; gray is 0.",
    inspect=inspect,
    finding=_finding,
    charts=_charts,
)
