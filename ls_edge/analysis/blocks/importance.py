"""Accuracy and loss with each block left out, and with each block moved to the other end of its band."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ls_edge.analysis.kind import MeasuredKind, Score, number_text, sentence
from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.core.text import NOTHING
from ls_edge.evaluation.measure import Order, Scores, TokenModel
from ls_edge.report.theme import Chart


class BlockImportance(msgspec.Struct, frozen=True):
    """Loss and accuracy without a block, or with the block in another slot."""

    block: int
    importance: float | None
    """Increase of the loss without the block."""
    left_out: Score
    moved_to: int | None
    """Slot at the farther end of its band; None if its band has no other slot."""
    moved: Score | None


class Importance(msgspec.Struct, frozen=True):
    """Importance of each block."""

    trained: Score
    blocks: list[BlockImportance]

    @property
    def costs(self) -> str:
        """The most and the least important block, in words; empty if no loss is finite."""
        known = [(one.importance, one.block) for one in self.blocks if one.importance is not None]
        if not known:
            return ""
        (least, dispensable), (most, needed) = min(known), max(known)
        return f"leaving out block {needed} costs most, {most:+.3f} nats, and block {dispensable} least, {least:+.3f}"


class ImportanceMeasure(Scores):
    """Scores in trained order, without each block, and with each block at the other end of its band."""

    def __init__(self, _: TokenModel, plan: AnalysisPlan) -> None:
        self._trained = plan.trained
        self._variants: list[tuple[Order, int | None, Order]] = []
        for block in self._trained:
            band = plan.bands.groups[plan.bands.band_of(block)]
            first, last = band.start, band.stop - 1
            # The farther end of the band; from the middle, the last slot.
            slot = None if first == last else last if block - first <= last - block else first
            without = tuple(one for one in self._trained if one != block)
            moved = self._trained if slot is None else (*without[:slot], block, *without[slot:])
            self._variants.append((without, slot, moved))
        super().__init__(
            {self._trained, *(order for without, _, moved in self._variants for order in (without, moved))}
        )

    def result(self) -> Importance:
        """Return the importance of each block."""
        trained, blocks = self._score(self._trained), []
        for block, (without, slot, order) in enumerate(self._variants):
            left_out = self._score(without)
            importance = None if left_out.loss is None or trained.loss is None else left_out.loss - trained.loss
            moved = None if slot is None else self._score(order)
            blocks.append(BlockImportance(block, importance, left_out, slot, moved))
        return Importance(trained, blocks)

    def _score(self, order: Order) -> Score:
        return Score(self.top1(order), self.loss(order))


def _finding(found: Importance) -> str:
    trained, costs = found.trained.loss or 0.0, found.costs
    moved = [
        (one.moved.loss - trained, one.block, one.moved_to)
        for one in found.blocks
        if one.moved is not None and one.moved.loss is not None
    ]
    if not costs or not moved:
        return sentence(costs or "no loss is finite")
    worst, block, slot = max(moved)
    return sentence(f"{costs}; moving block {block} to slot {slot} is the worst move, {worst:+.3f}")


def _charts(found: Importance) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import bars_chart, row_of, tooltip_of

    trained = found.trained.loss
    rows = [
        row_of(
            block=one.block,
            what=what,
            value=score.loss - trained,
            top1=score.top1,
            slot="" if what == "left out" else str(one.moved_to),
        )
        for one in found.blocks
        for what, score in (("left out", one.left_out), ("moved", one.moved))
        if score is not None and score.loss is not None and trained is not None
    ]
    tips = [alt.Tooltip("slot:N", title="to slot"), tooltip_of("value", "added to the loss")]
    tips.append(tooltip_of("top1", "accuracy"))
    return [bars_chart(rows, ["left out", "moved"], "added to the loss, nats", tips)] if rows else []


def _columns(found: Importance) -> dict[str, list[str]]:
    top1 = found.trained.top1
    moved = [None if one.moved is None else one.moved.top1 - top1 for one in found.blocks]
    return {
        "loss without": [number_text(one.importance, "+.3f") for one in found.blocks],
        "accuracy without": [_points(one.left_out.top1 - top1) for one in found.blocks],
        "moved to": [NOTHING if one.moved_to is None else str(one.moved_to) for one in found.blocks],
        "accuracy moved": [NOTHING if change is None else _points(change) for change in moved],
    }


def _points(share: float) -> str:
    return f"{100 * share:+.1f} points"


def _empty_cells(found: Importance, _: Sequence[Sequence[int]]) -> str:
    if all(one.moved is not None for one in found.blocks):
        return ""
    return f"{NOTHING} under moved to: the band of the block has no other slot"


IMPORTANCE = MeasuredKind(
    summary="loss and accuracy without a block, and with it moved",
    text="Increase of the loss, in nats, without a block, and with the block at the other end of its band.",
    measure=ImportanceMeasure,
    result=ImportanceMeasure.result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
    empty_cells=_empty_cells,
    in_terminal=False,
)
