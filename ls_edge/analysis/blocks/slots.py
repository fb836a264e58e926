"""Accuracy by block and slot."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from ls_edge.analysis.blocks.slot_outputs import SlotOutputs
from ls_edge.analysis.kind import MeasuredKind, block_names
from ls_edge.core.text import counted, name_blocks, show_percent
from ls_edge.evaluation.spread import LEVEL, chi_square_p, holm
from ls_edge.report.theme import Chart


class SlotAccuracy(msgspec.Struct, frozen=True):
    """Accuracy over the images whose order had a block in a slot, by block and slot; None without such an image."""

    accuracy: list[list[float | None]]
    images: list[list[int]]


def _result(measure: SlotOutputs) -> SlotAccuracy:
    return SlotAccuracy(
        [[one.mean for one in slots] for slots in measure.right],
        [[one.count for one in slots] for slots in measure.right],
    )


def _finding(found: SlotAccuracy) -> str:
    """Test by chi-square, corrected for all blocks, if accuracy depends on the slot of a block."""
    rows: dict[int, list[tuple[float, int, int]]] = {}
    for block, cells in enumerate(zip(found.accuracy, found.images, strict=True)):
        known = [
            (value, count, slot) for slot, (value, count) in enumerate(zip(*cells, strict=True)) if value is not None
        ]
        if len(known) > 1:
            rows[block] = known
    if not rows:
        return "Every block has a single slot."
    ps = dict(zip(rows, holm([_chance(row) for row in rows.values()]), strict=True))
    proven = [block for block in rows if ps[block] < LEVEL]
    if not proven:
        images = max(sum(count for _, count, _ in row) for row in rows.values())
        return (
            f"Cannot tell with {counted(images, 'image')} whether the slot of a block matters: differences between "
            "slots may be chance. Use more images."
        )
    block = min(proven, key=lambda one: (ps[one], one))
    (worst, few, bad), (best, many, good) = min(rows[block]), max(rows[block])
    pairs = len(rows[block]) * (len(rows[block]) - 1) / 2
    error = (worst * (1 - worst) / few + best * (1 - best) / many) ** 0.5
    half = NormalDist().inv_cdf(1 - LEVEL / 2 / pairs) * error + (1 / few + 1 / many) / 2
    low, high = max(0.0, best - worst - half), min(1.0, best - worst + half)
    return (
        f"The slot of block {block} matters: {show_percent(best)} of the answers are right with it in slot {good}, "
        f"{show_percent(worst)} in slot {bad}, a difference of {100 * (best - worst):.1f} points (95 % CI "
        f"{100 * low:.1f} to {100 * high:.1f}). Beyond chance for {name_blocks(proven)} of "
        f"{counted(len(rows), 'block')}."
    )


def _chance(row: Sequence[tuple[float, int, int]]) -> float:
    """Return the probability of such differences between slots of equal accuracy."""
    total = sum(count for _, count, _ in row)
    mean = sum(value * count for value, count, _ in row) / total
    if not 0 < mean < 1:
        return 1.0
    return chi_square_p(sum(n * (value - mean) ** 2 for value, n, _ in row) / (mean * (1 - mean)), len(row) - 1)


def _charts(found: SlotAccuracy) -> list[Chart]:
    from ls_edge.report.charts.specification import square_of

    table = [[None if value is None else 100 * value for value in row] for row in found.accuracy]
    return [square_of(table, block_names(table), ("block", "slot"), "right answers, %", text_of="{:.0f}".format)]


SLOTS = MeasuredKind(
    summary="accuracy by block and slot",
    text="Accuracy, in percent, over the images whose random order had the block in that slot.",
    measure=SlotOutputs,
    result=_result,
    finding=_finding,
    charts=_charts,
)
