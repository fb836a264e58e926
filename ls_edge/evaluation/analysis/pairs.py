"""Pairs of blocks that commute: the result of both orders of two blocks, from the tokens before the earlier one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.evaluation.measure import Mean, Measure, TokenModel

MOST_IMAGES = 256
"""Images for the pairs, the first of the sample: a mean over tokens, which more images hardly change."""


class Pairs(msgspec.Struct, frozen=True):
    """Mean of ``|g(f(x)) - f(g(x))| / |g(f(x)) - x|`` over images and tokens, for blocks ``f`` before ``g``."""

    difference: list[list[float | None]]
    """``[earlier][later]``: 0 for a pair that commutes; None for a pair in different bands, and elsewhere."""
    images: int
    inverted: list[list[float]] | None = None
    """``order_costs.inverted`` of a bundle, in nats; None if it was not measured."""

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of differences and costs over the pairs; None without costs or variation."""
        if self.inverted is None:
            return None
        found = [
            (value, cost)
            for values, costs in zip(self.difference, self.inverted, strict=True)
            for value, cost in zip(values, costs, strict=True)
            if value is not None
        ]
        if len(found) < 3:
            return None
        ranks = np.stack([_ranks([pair[side] for pair in found]) for side in (0, 1)])
        return float(np.corrcoef(ranks)[0, 1]) if ranks.std(axis=1).min() > 0 else None


class PairsMeasure(Measure):
    """Running means for each pair of a band."""

    def __init__(self, model: TokenModel, bands: Bands) -> None:
        self._model, self._bands = model, bands
        self._images = 0
        pairs = (pair for group in bands.groups for pair in itertools.combinations(group, 2))
        self._means = {pair: Mean() for pair in pairs}

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Run the pairs on a batch."""
        count = min(len(labels), MOST_IMAGES - self._images)
        if count <= 0:
            return
        self._images += count
        before = start[:count]
        for first in range(self._bands.num_blocks):
            after = self._model.block(first, before, first)
            for (one, other), mean in self._means.items():
                if one == first:
                    self._add(mean, before, after, (one, other))
            before = after

    def _add(self, mean: Mean, before: Any, after: Any, pair: tuple[int, int]) -> None:
        one, other = pair
        array_of, block = self._model.array_of, self._model.block
        trained = array_of(block(other, after, one + 1)).astype(np.float64)
        swapped = array_of(block(one, block(other, before, one), one + 1))
        added = np.linalg.norm(trained - array_of(before), axis=2)
        apart = np.linalg.norm(trained - swapped, axis=2)
        usable = added > 0
        mean.add(float((apart[usable] / added[usable]).sum()), int(usable.sum()))

    def result(self) -> Pairs:
        """Return the mean of each pair."""
        depth = range(self._bands.num_blocks)
        means = {pair: mean.mean for pair, mean in self._means.items()}
        return Pairs([[means.get((one, other)) for other in depth] for one in depth], self._images)


def _ranks(values: Sequence[float]) -> np.ndarray:
    """Return the rank of each value, the mean rank of equal ones."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    found: np.ndarray = (np.cumsum(counts) - (counts - 1) / 2)[places]
    return found
