"""Accuracy by block and slot."""

from __future__ import annotations

import msgspec
import numpy as np

from ls_edge.analysis.blocks.slot_outputs import SlotOutputs
from ls_edge.analysis.kind import MeasuredKind, block_names
from ls_edge.core.text import name_blocks, show_percent
from ls_edge.report.theme import Chart

BEYOND_CHANCE = 5.0
"""Number of standard errors between the best and worst slot above which a block depends on its slot."""


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
    spans = []
    for block, (row, counts) in enumerate(zip(found.accuracy, found.images, strict=True)):
        known = [(value, slot) for slot, value in enumerate(row) if value is not None]
        if len(known) > 1:
            mean = float(np.mean([value for value, _ in known]))
            chance = BEYOND_CHANCE * (mean * (1 - mean) / min(count for count in counts if count)) ** 0.5
            spans.append((max(known)[0] - min(known)[0], chance, block, min(known), max(known)))
    if not spans:
        return "Every block has a single slot."
    span, _, block, (worst, bad), (best, good) = max(spans)
    steady = [one for difference, chance, one, *_ in spans if difference <= chance]
    if len(steady) == len(spans):
        return f"No block depends on its slot: accuracies differ by {100 * span:.1f} points at most, as by chance."
    return (
        f"The slot of block {block} matters most: {show_percent(best)} of the answers are right with it in slot "
        f"{good}, {show_percent(worst)} in slot {bad}. "
        + (f"No difference beyond chance for {name_blocks(steady)}." if steady else "It matters for all blocks.")
    )


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
