"""Pairs of blocks that commute."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np

from ls_edge.analysis.kind import MeasuredKind, block_names
from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.evaluation.measure import Mean, Measure, TokenModel
from ls_edge.report.theme import Chart

MOST_IMAGES = 256
"""Maximum number of images to measure; more images hardly change a mean over tokens."""


class Pairs(msgspec.Struct, frozen=True):
    """Mean of ``|g(f(x)) - f(g(x))| / |g(f(x)) - x|`` over images and tokens, for a block ``f`` before ``g``."""

    difference: list[list[float | None]]
    """``[earlier][later]``: 0 for a pair that commutes; None across bands and outside the upper triangle."""
    images: int


class PairsMeasure(Measure):
    """Running means for each pair of a band."""

    def __init__(self, model: TokenModel, plan: AnalysisPlan) -> None:
        self._model, self._trained = model, plan.trained
        self._images = 0
        pairs = (pair for group in plan.bands.groups for pair in itertools.combinations(group, 2))
        self._means = {pair: Mean() for pair in pairs}

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Run all pairs on a batch."""
        count = min(len(labels), MOST_IMAGES - self._images)
        if count <= 0:
            return
        self._images += count
        before = start[:count]
        for one in self._trained:
            after = self._model.block(one, before, one)
            for (first, other), mean in self._means.items():
                if first == one:
                    self._add(mean, before, after, one, other)
            before = after

    def _add(self, mean: Mean, before: Any, after: Any, one: int, other: int) -> None:
        array_of, block = self._model.array_of, self._model.block
        trained = array_of(block(other, after, one + 1)).astype(np.float64)
        swapped = array_of(block(one, block(other, before, one), one + 1))
        added = np.linalg.norm(trained - array_of(before), axis=2)
        apart = np.linalg.norm(trained - swapped, axis=2)
        usable = added > 0
        mean.add(float((apart[usable] / added[usable]).sum()), int(usable.sum()))

    def result(self) -> Pairs:
        """Return the mean of each pair."""
        means = {pair: mean.mean for pair, mean in self._means.items()}
        return Pairs([[means.get((one, other)) for other in self._trained] for one in self._trained], self._images)


def _finding(found: Pairs) -> str:
    pairs = [
        (value, one, other)
        for one, row in enumerate(found.difference)
        for other, value in enumerate(row)
        if value is not None
    ]
    if not pairs:
        return "The bands have no pair of blocks that may change places."
    low, high = min(pairs), max(pairs)
    return (
        f"Blocks {low[1]} and {low[2]} commute best: exchanging them changes {low[0]:.2f} of what both add; "
        f"{high[1]} and {high[2]} commute worst, with {high[0]:.2f}."
    )


def _charts(found: Pairs) -> list[Chart]:
    from ls_edge.report.charts.specification import square_of

    blocks, titles = block_names(found.difference), ("earlier block", "later block")
    return [square_of(found.difference, blocks, titles, "difference over what both add")]


PAIRS = MeasuredKind(
    summary="blocks that commute",
    text="Difference between both orders of two blocks, from the tokens before the earlier one, over what both add: 0 "
    "for a pair that commutes.",
    measure=PairsMeasure,
    result=PairsMeasure.result,
    finding=_finding,
    charts=_charts,
)
