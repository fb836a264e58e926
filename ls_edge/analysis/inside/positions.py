"""Similarity of the position embeddings of patches (arXiv 2010.11929, Figure 7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind
from ls_edge.evaluation.measure import LabeledImages, NotMeasurable
from ls_edge.report.pictures import Picture, picture, shades, tiles
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from ls_edge.training.inspection.inspected import Inspected

MOST_QUERIES = 8
"""Maximum number of rows and of columns of patches whose similarities are shown."""


class PositionEmbeddings(msgspec.Struct, frozen=True):
    """Cosine similarity of the position embeddings of patches (arXiv 2010.11929, Figure 7)."""

    by_distance: list[tuple[float, float]]
    """Distances in patches, and the mean cosine of the pairs at each distance."""
    correlation: float
    """Correlation of the cosine with the distance over all pairs."""
    pictures: list[Picture]


def inspect(inspected: Inspected, _batches: Sequence[LabeledImages]) -> PositionEmbeddings:
    """Return the cosine similarity of each patch's position embedding with all others."""
    from torch import Tensor
    from torch.nn import functional

    from ls_edge.training.inspection.attention_weights import distances
    from ls_edge.training.inspection.inspected import class_of, correlation, grid_of

    embedding, grid = getattr(inspected.model.view.model, "pos_embed", None), grid_of(inspected.model)
    if not isinstance(embedding, Tensor) or grid is None or embedding.shape[1] < grid[0] * grid[1]:
        raise NotMeasurable(f"{class_of(inspected.model)} has no position embedding for each patch")
    vectors = functional.normalize(embedding.detach()[0, -grid[0] * grid[1] :].double().cpu(), dim=1)
    cosine = (vectors @ vectors.T).numpy()
    apart = distances(*grid).numpy()
    pairs = apart > 0
    rings = np.round(apart).astype(int)
    by_distance = [(float(ring), float(cosine[pairs & (rings == ring)].mean())) for ring in np.unique(rings[pairs])]
    rows, columns = (np.unique(np.linspace(0, side - 1, MOST_QUERIES).astype(int)) for side in grid)
    queries = [shades(cosine[row * grid[1] + column].reshape(grid)) for row in rows for column in columns]
    text = "each tile: one patch compared with all others, from black (least similar) to white"
    shown = [Picture(text, picture(tiles(queries, len(columns))))]
    return PositionEmbeddings(by_distance, correlation(cosine[pairs], apart[pairs]), shown)


def _finding(found: PositionEmbeddings) -> str:
    (_, near), (apart, far) = found.by_distance[0], found.by_distance[-1]
    grid = (
        "close patches have similar embeddings"
        if found.correlation < -0.3
        else "embeddings do not reflect the distance between patches"
    )
    return (
        f"Neighbors have a cosine of {near:+.2f}, patches {apart:.0f} apart {far:+.2f}: {grid} (correlation with the "
        f"distance {found.correlation:+.2f}). They are added before the blocks, so the order does not change them."
    )


def _charts(found: PositionEmbeddings) -> list[Chart]:
    from ls_edge.report.charts.specification import lines_chart

    cosines = {round(apart): cosine for apart, cosine in found.by_distance}
    return [lines_chart({"cosine": cosines}, "distance in patches", "mean cosine")]


POSITIONS = InspectedKind(
    summary="similarity of position embeddings",
    text="Cosine similarity of the position embeddings of patches, by their distance, and for some patches with all "
    "others.",
    inspect=inspect,
    finding=_finding,
    charts=_charts,
)
