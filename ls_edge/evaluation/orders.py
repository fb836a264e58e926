"""Orders and arrangements of an evaluation and of an analysis, all drawn from one seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.evaluation.measure import Order

DRAWS = 8
"""Random subsets for the accuracy of a pruned model."""


class EvaluationOrders(msgspec.Struct, frozen=True):
    """Orders to evaluate, all within ``bands``."""

    bands: Bands
    orders: int
    keep: tuple[int, ...]
    seed: int
    shapes: tuple[tuple[int, int], ...] = ()
    distances: int = 0
    freedom: tuple[Bands, ...] = ()
    """Further bands whose random orders are evaluated."""
    own_bands: Bands | None = None

    @classmethod
    def make(
        cls,
        bands: Bands,
        orders: int = 64,
        keep: Sequence[int] | None = None,
        seed: int = 0,
        *,
        arrangements: bool = False,
        kendall: bool = False,
        freedom: Bands | None = None,
    ) -> EvaluationOrders:
        """Choose the orders; ``keep`` defaults to a quarter, half and three quarters of the blocks.

        ``arrangements`` adds :func:`default_shapes`, ``kendall`` the same number of orders at graded distances, and
        ``freedom``, the model's own bands, orders within them and within :meth:`Bands.ladder`. Raises
        :class:`UsageError`.
        """
        num_blocks = bands.num_blocks
        if orders < 1:
            raise UsageError(f"orders is {orders}; evaluate at least 1")
        chosen = default_keep(num_blocks) if keep is None else sorted(set(keep))
        bad = next((count for count in chosen if not 1 <= count <= num_blocks), None)
        if bad is not None:
            raise UsageError(f"keep {bad} is not possible: the model has {num_blocks} blocks; give 1 to {num_blocks}")
        shapes = tuple(default_shapes(max(map(len, bands.groups)))) if arrangements else ()
        ladder = () if freedom is None else {*Bands.ladder(num_blocks), freedom}
        steps = tuple(sorted(ladder, key=lambda step: (step.num_orders, step.cuts)))
        return cls(bands, orders, tuple(chosen), seed, shapes, orders if kendall else 0, steps, freedom)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.bands.num_blocks

    def uniform(self) -> list[tuple[int, ...]]:
        """Return the random orders of all blocks."""
        return self.bands.random_orders(self.orders, self.seed)

    def all_orders(self) -> list[tuple[int, ...]]:
        """Return every order to run, each once."""
        found = {tuple(range(self.num_blocks)), *self.uniform()}
        for keep in self.keep:
            found.update(self.subsets(keep, shuffled=False), self.subsets(keep, shuffled=True))
        found.update(self.graded())
        for step in self.freedom:
            found.update(self.within(step))
        return sorted(found)

    def within(self, bands: Bands) -> list[tuple[int, ...]]:
        """Return the orders within one of :attr:`freedom`."""
        return bands.some_orders(self.orders, self.seed)

    def graded(self) -> list[tuple[int, ...]]:
        """Return the orders at graded distances."""
        return [self.bands.sort(order) for order in graded_orders(self.num_blocks, self.distances, self.seed)]

    def in_tracks(self, tracks: int, length: int) -> tuple[Arrangement, list[Arrangement]]:
        """Return a shape filled in trained order, and in the random orders of :data:`DRAWS` draws."""
        orders = self.bands.random_orders(DRAWS, self.seed)
        return self.bands.equal_waves(range(self.num_blocks), tracks, length), [
            self.bands.equal_waves(order, tracks, length) for order in orders
        ]

    def subsets(self, keep: int, *, shuffled: bool) -> list[tuple[int, ...]]:
        """Return the random subsets of ``keep`` blocks, in trained order or as drawn."""
        return [self.bands.random_subset_order(keep, self.seed, i, shuffled=shuffled) for i in range(DRAWS)]


def default_keep(blocks: int) -> list[int]:
    """Return quarters of the depth."""
    return sorted({round(blocks * part / 4) for part in (1, 2, 3)} - {0, blocks})


def default_shapes(blocks: int) -> list[tuple[int, int]]:
    """Return shapes for a band: two, four and all blocks at a time, and two tracks of two blocks or of half of all."""
    found = [(2, 1), (4, 1), (blocks, 1), (2, 2), (2, blocks // 2)]
    return sorted({(tracks, length) for tracks, length in found if length >= 1 and 2 <= tracks <= blocks // length})


def kendall_tau(order: Sequence[int]) -> float:
    """Return the rank correlation with the trained order: pairs in place minus inverted pairs, over all pairs."""
    pairs = list(itertools.combinations(order, 2))
    return sum(1 if one < other else -1 for one, other in pairs) / len(pairs) if pairs else 1.0


def spearman(one: np.ndarray, two: np.ndarray) -> float | None:
    """Return the rank correlation, with the mean rank of equal values; None if one of them is constant."""
    ranks = []
    for values in (one, two):
        _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[places])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1]) if np.std(ranks, axis=1).min() > 0 else None


def graded_orders(blocks: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Return orders whose Kendall tau ranges from 1 to -1; that of uniform permutations is close to 0.

    Each block moves by a fraction of a random key that grows from order to order; every other order is reversed.
    """
    found = []
    for index in range(count):
        rng = random.Random((seed << 33) ^ (index << 1) ^ 1)
        share = (index + 0.5) / count
        keys = [(1 - share) * block / max(1, blocks) + share * rng.random() for block in range(blocks)]
        order = tuple(sorted(range(blocks), key=keys.__getitem__))
        found.append(order[::-1] if index % 2 else order)
    return found


class AnalysisOrders(msgspec.Struct, frozen=True):
    """Kinds to measure, and the orders for it, all drawn from one seed."""

    bands: Bands
    kinds: tuple[str, ...]
    orders: int
    seed: int
    pool: Literal["mean", "first"] = "mean"
    """Vector of an image: the mean of its tokens, or the first one (the class token, if there is one)."""
    block: int | None = None
    """Block whose outputs are mapped; None: the one in the middle of the largest band."""

    @property
    def mapped(self) -> int:
        """Block whose outputs are mapped; raises :class:`UsageError` if the model lacks it."""
        if self.block is None:
            largest = max(self.bands.groups, key=len)
            return largest[len(largest) // 2]
        if self.block >= self.bands.num_blocks:
            raise UsageError(f"--block {self.block}: the model has blocks 0 to {self.bands.num_blocks - 1}")
        return self.block

    @property
    def trained(self) -> Order:
        """The trained order of all blocks."""
        return tuple(range(self.bands.num_blocks))

    def random(self) -> list[Order]:
        """Return the random orders of all blocks."""
        return self.bands.random_orders(self.orders, self.seed)

    def left_out(self) -> dict[int, list[Order]]:
        """Return random orders of random subsets, by the number of blocks left out."""
        num_blocks = self.bands.num_blocks
        counts = sorted({1, *(round(num_blocks * part / 4) for part in (1, 2, 3))} & set(range(1, num_blocks)))
        return {
            count: [
                self.bands.random_subset_order(num_blocks - count, self.seed, draw, shuffled=True)
                for draw in range(DRAWS)
            ]
            for count in counts
        }
