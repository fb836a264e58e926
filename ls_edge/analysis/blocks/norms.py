"""Norm of a block's addition to the tokens, by slot."""

from __future__ import annotations

import msgspec
import numpy as np

from ls_edge.analysis.blocks.slot_outputs import SlotOutputs
from ls_edge.analysis.kind import MeasuredKind
from ls_edge.core.text import counted
from ls_edge.report.theme import Chart

BINS = 24
_RIDGE = 54
"""Height of a ridge in pixels."""
_OVERLAP = 1.6
"""Height of the highest ridge relative to the distance between two rows."""


class AddedNorms(msgspec.Struct, frozen=True):
    """Norm of a block's addition to the pooled token relative to the block's largest norm, by block and slot."""

    mean: list[list[float | None]]
    shares: list[list[list[float]]]
    """Histograms from 0 to 1 as fractions of the images; empty for a slot without images."""
    pool: str
    images: int


def _result(measure: SlotOutputs) -> AddedNorms:
    mean: list[list[float | None]] = []
    shares = []
    for steps in measure.steps:
        slots = np.array([slot for slot, _, _ in steps])
        norms = np.array([np.linalg.norm(added) for _, _, added in steps], dtype=np.float64)
        norms /= max(norms.max(), np.finfo(np.float64).tiny)
        parts = [norms[slots == slot] for slot in range(len(measure.steps))]
        mean.append([float(part.mean()) if len(part) else None for part in parts])
        counts = [np.histogram(part, BINS, (0.0, 1.0))[0] / max(1, len(part)) for part in parts]
        shares.append([count.tolist() if len(part) else [] for part, count in zip(parts, counts, strict=True)])
    return AddedNorms(mean, shares, measure.plan.settings.pool, measure.kept)


def _finding(found: AddedNorms) -> str:
    near, away = 0, []
    rows = [(block, [(v, s) for s, v in enumerate(row) if v is not None]) for block, row in enumerate(found.mean)]
    movable = [(block, known) for block, known in rows if len(known) > 1]
    if not movable:
        return "Every block has a single slot."
    for block, known in movable:
        near += abs(max(known)[1] - block) <= 1
        if own := next((value for value, slot in known if slot == block), 0.0):
            away.append(float(np.mean([value for value, slot in known if slot != block])) / own)
    place = f"{near} of {counted(len(movable), 'block')} add most within one slot of their trained place"
    if not away:
        return f"{place}; no random order ran a block in its own slot."
    return f"{place}. On average, they add {np.mean(away):.2f} times the norm of their own slot in other slots."


def _charts(found: AddedNorms) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import block_color, chart_of, row_of

    depth = len(found.shares)
    peak = max((max(bins) for row in found.shares for bins in row if bins), default=1.0)
    rows = []
    for block, row in enumerate(found.shares):
        base = depth - 1 - block
        for slot, bins in enumerate(row):
            for place, share in enumerate(bins):
                top = base + _OVERLAP * share / peak
                rows.append(row_of(block=block, slot=slot, x=(place + 0.5) / len(bins), base=base, top=top))
    x = alt.X("x:Q", title="norm of what the block adds, over its largest", scale=alt.Scale(domain=[0, 1]))
    scale = alt.Scale(domain=[0, depth - 1 + _OVERLAP], nice=False)
    axis = alt.Axis(values=list(range(depth)), labelExpr=f"{depth - 1} - datum.value", grid=True, labelOverlap=False)
    y = alt.Y("top:Q", title="block", scale=scale, axis=axis)
    paint = block_color(depth, legend=True, field="slot")
    ridges = chart_of(rows).encode(x=x, y=y, color=paint, detail=alt.Detail("block:O"))
    tips = [alt.Tooltip("block:O"), alt.Tooltip("slot:O")]
    described = "; ".join(
        f"block {block}: " + ", ".join("-" if value is None else f"{value:.2f}" for value in row)
        for block, row in enumerate(found.mean)
    )
    return [
        alt.layer(
            ridges.mark_area(opacity=0.3, interpolate="monotone").encode(y2=alt.Y2("base:Q"), tooltip=tips),
            ridges.mark_line(strokeWidth=1.2, interpolate="monotone"),
        ).properties(width="container", height=_RIDGE * depth, description=f"Means by slot. {described}.")
    ]


NORMS = MeasuredKind(
    summary="norm of what a block adds, by slot",
    text="Norm of what a block adds to the pooled token of an image, by slot: the height is the fraction of the "
    "images.",
    measure=SlotOutputs,
    result=_result,
    finding=_finding,
    charts=_charts,
)
