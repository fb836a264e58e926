"""UMAP maps of outputs by slot and block; they need umap-learn and scikit-learn (extra ``analyze``)."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import numpy as np

from ls_edge.analysis.blocks.slot_outputs import SlotOutputs
from ls_edge.analysis.kind import MeasuredKind, sentence
from ls_edge.core.text import show_percent
from ls_edge.report.theme import Chart

NEIGHBORS = 10


class Map(msgspec.Struct, frozen=True):
    """UMAP of outputs, a point for each image."""

    of: str
    points: list[tuple[float, float]]
    blocks: list[int]
    slots: list[int]
    neighbors: float
    """Fraction of points whose slot is the most frequent one among their :data:`NEIGHBORS` nearest points."""
    chance: float


def _result(measure: SlotOutputs) -> list[Map]:
    """Fit the maps that have enough images."""
    found = []
    for of, steps in measure.mapped.items():
        if len(steps) > 2 * NEIGHBORS:
            blocks, slots, vectors = (list(each) for each in zip(*steps, strict=True))
            points = _embedded(np.stack(vectors), measure.plan.settings.seed)
            near = _neighbors(points, np.array(slots))
            shown = [(round(float(x), 3), round(float(y), 3)) for x, y in points]
            found.append(Map(of, shown, blocks, slots, near, measure.chances[measure.plan.mapped]))
    return found


def _embedded(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Return points ``[images, 2]``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about a single thread and a missing tensorflow
        from umap import UMAP

        points: np.ndarray = UMAP(n_components=2, random_state=seed, n_jobs=1).fit_transform(vectors)
    return points


def _neighbors(points: np.ndarray, slots: np.ndarray) -> float:
    """Return the fraction of points whose slot is the most frequent one among their nearest points."""
    from sklearn.neighbors import NearestNeighbors

    nearest = slots[NearestNeighbors(n_neighbors=NEIGHBORS).fit(points).kneighbors(return_distance=False)]
    return float(np.mean([np.bincount(row).argmax() == slot for row, slot in zip(nearest, slots, strict=True)]))


def _finding(found: list[Map]) -> str:
    one = found[0]
    look = "slots overlap" if one.neighbors >= 1.5 * one.chance else "the slots are mixed"
    if one.neighbors > 3 * one.chance:
        look = "the output reveals its slot, and each slot forms its own cloud"
    return sentence(
        f"{one.of}: {look}. The nearest points name the slot of {show_percent(one.neighbors)} of the points; chance is "
        f"{show_percent(one.chance)}"
    )


def _charts(found: list[Map]) -> list[Chart]:
    depth = 1 + max(max(one.blocks + one.slots) for one in found)
    drawn = [_map_chart(one, "slot", depth) for one in found]
    return drawn + [_map_chart(one, "block", depth) for one in found if len(set(one.blocks)) > 1]


def _map_chart(found: Map, by: str, depth: int) -> Chart:
    import altair as alt

    from ls_edge.report.charts.specification import block_color, chart_of, row_of, title_with_text

    rows = [
        row_of(x=x, y=y, block=block, slot=slot)
        for (x, y), block, slot in zip(found.points, found.blocks, found.slots, strict=True)
    ]
    plain: dict[str, Any] = {"title": None, "axis": None, "scale": alt.Scale(zero=False, nice=True)}
    return (
        chart_of(rows)
        .mark_circle(size=18, opacity=0.75)
        .encode(
            x=alt.X("x:Q", **plain),
            y=alt.Y("y:Q", **plain),
            color=block_color(depth, legend=True, field=by),
            tooltip=[alt.Tooltip("block:O"), alt.Tooltip("slot:O")],
        )
        .properties(
            width="container",
            height=300,
            title=title_with_text(f"{found.of[:1].upper()}{found.of[1:]}", f"colored by {by}"),
            description=f"UMAP of {found.of}: {len(rows)} points.",
        )
    )


UMAP = MeasuredKind(
    summary="maps of outputs, by slot and block",
    text="UMAP of the whole output of a block, of the logits if the model ended after it, and of the outputs of all "
    "blocks. Each point is an image in its own order; UMAP does not know slots and blocks.",
    measure=SlotOutputs,
    result=_result,
    finding=_finding,
    charts=_charts,
)
