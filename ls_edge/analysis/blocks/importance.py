"""Accuracy and loss with each block left out, and with each block moved to the other end of its band.

Findings about accuracy are McNemar tests on the same images, corrected for all blocks.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from ls_edge.analysis.kind import MeasuredKind, Score, number_text, sentence
from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.core.text import NOTHING, counted
from ls_edge.evaluation.measure import Order, Scores, TokenModel
from ls_edge.evaluation.spread import LEVEL, holm, sign_test_p
from ls_edge.report.theme import Chart


class Changes(msgspec.Struct, frozen=True):
    """Numbers of images that are right only in trained order (``lost``) or only in another order (``won``)."""

    lost: int
    won: int
    images: int

    @property
    def cost(self) -> float:
        """Accuracy that the change costs."""
        return (self.lost - self.won) / self.images

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % CI of :attr:`cost` for paired differences, with continuity correction."""
        changed, net = self.lost + self.won, self.lost - self.won
        half = (1.96 * math.sqrt(changed - net**2 / self.images) + 1) / self.images
        return self.cost - half, self.cost + half


class BlockImportance(msgspec.Struct, frozen=True):
    """Loss and accuracy without a block, or with the block in another slot."""

    block: int
    importance: float | None
    """Increase of the loss without the block."""
    left_out: Score
    moved_to: int | None
    """Slot at the farther end of its band; None if its band has no other slot."""
    moved: Score | None
    left_out_changes: Changes
    moved_changes: Changes | None


class Importance(msgspec.Struct, frozen=True):
    """Importance of each block."""

    trained: Score
    blocks: list[BlockImportance]

    @property
    def costs(self) -> str:
        """Statement about the block that costs most accuracy if left out, or that all costs may be chance."""
        return self._said({f"leaving out block {one.block}": one.left_out_changes for one in self.blocks})

    @property
    def moves(self) -> str:
        """Statement about the move that costs most accuracy, or that all costs may be chance; empty without moves."""
        return self._said(
            {
                f"moving block {one.block} to slot {one.moved_to}": one.moved_changes
                for one in self.blocks
                if one.moved_changes is not None
            }
        )

    def _said(self, changes: dict[str, Changes]) -> str:
        """Describe the changes after McNemar tests, corrected for both kinds of change (Holm)."""
        if not changes:
            return ""
        tests = 2 * len(self.blocks)
        ps = holm([*(sign_test_p(one.lost, one.won) for one in changes.values()), *[1.0] * (tests - len(changes))])
        proven = {name: one for (name, one), p in zip(changes.items(), ps, strict=False) if p < LEVEL and one.cost > 0}
        if proven:
            name, worst = max(proven.items(), key=lambda item: item[1].cost)
            low, high = (100 * end for end in worst.interval)
            more = f"; {len(proven)} of {len(changes)} cost accuracy" if len(changes) > 1 else ""
            return (
                f"{name} costs most: {100 * worst.cost:.1f} points of accuracy (95 % CI {low:.1f} to {high:.1f}){more}"
            )
        worst = max(changes.values(), key=lambda one: abs(one.cost))
        return (
            f"cannot tell with {counted(worst.images, 'image')} whether {next(iter(changes)).split()[0]} a block costs "
            f"accuracy: the largest change, {_points(-worst.cost)}, may be chance; use more images"
        )


class ImportanceMeasure(Scores):
    """Scores in trained order, without each block, and with each block at the other end of its band."""

    def __init__(self, _: TokenModel, plan: AnalysisPlan) -> None:
        self._trained = plan.trained
        self._variants: list[tuple[Order, int | None, Order]] = []
        self._changes: dict[Order, tuple[int, int, int]] = {}
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

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Begin a batch."""
        super().begin(start, labels)
        self._answers: dict[Order, np.ndarray] = {}

    def add(self, order: Order, logits: np.ndarray) -> None:
        """Count the correct answers, and remember them."""
        super().add(order, logits)
        self._answers[order] = logits.argmax(axis=1) == self._labels

    def end(self) -> None:
        """Count the answers that differ from those in trained order."""
        trained = self._answers[self._trained]
        for order, right in self._answers.items():
            lost, won, images = self._changes.get(order, (0, 0, 0))
            lost, won = lost + int((trained & ~right).sum()), won + int((right & ~trained).sum())
            self._changes[order] = lost, won, images + len(right)

    def result(self) -> Importance:
        """Return the importance of each block."""
        trained, blocks = self._score(self._trained), []
        for block, (without, slot, order) in enumerate(self._variants):
            left_out = self._score(without)
            importance = None if left_out.loss is None or trained.loss is None else left_out.loss - trained.loss
            moved = None if slot is None else self._score(order)
            changes = [Changes(*self._changes[one]) for one in (without, order)]
            moves = None if slot is None else changes[1]
            blocks.append(BlockImportance(block, importance, left_out, slot, moved, changes[0], moves))
        return Importance(trained, blocks)

    def _score(self, order: Order) -> Score:
        return Score(self.top1(order), self.loss(order))


def _finding(found: Importance) -> str:
    return " ".join(map(sentence, filter(None, (found.costs, found.moves))))


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
    return f"{round(100 * share, 1) + 0.0:+.1f} points"  # + 0.0 turns -0.0 into 0.0


IMPORTANCE = MeasuredKind(
    summary="loss and accuracy without a block, and with it moved",
    text="Increase of the loss, in nats, without a block, and with the block at the other end of its band, "
    "if that has several blocks.",
    measure=ImportanceMeasure,
    result=ImportanceMeasure.result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
    in_terminal=False,
)
