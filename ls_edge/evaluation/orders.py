"""The orders and arrangements that an evaluation runs, all drawn from one seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError

DRAWS = 8
"""Random subsets over which the accuracy of a pruned model is averaged."""


class EvaluationOrders(msgspec.Struct, frozen=True):
    """Which orders are evaluated, all of them within ``bands``."""

    bands: Bands
    orders: int
    keep: tuple[int, ...]
    seed: int
    shapes: tuple[tuple[int, int], ...] = ()
    """Tracks a wave and blocks a track."""
    distances: int = 0
    """Orders at graded distances from the trained one."""
    freedom: tuple[Bands, ...] = ()
    """Bands within each of which accuracy in random order is measured too."""
    own_bands: Bands | None = None
    """Of those the model's own."""

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
        """``keep`` None is a quarter, a half and three quarters of the blocks; raises :class:`UsageError`.

        ``arrangements`` adds :func:`default_shapes`, ``kendall`` as many orders again at graded distances.
        ``freedom`` are the model's own bands: orders within :meth:`Bands.ladder` and within those.
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
        """How many blocks."""
        return self.bands.num_blocks

    def uniform(self) -> list[tuple[int, ...]]:
        """The random orders of all blocks."""
        return self.bands.random_orders(self.orders, self.seed)

    def all_orders(self) -> list[tuple[int, ...]]:
        """Every order to run, each once."""
        found = {tuple(range(self.num_blocks)), *self.uniform()}
        for keep in self.keep:
            found.update(self.subsets(keep, shuffled=False), self.subsets(keep, shuffled=True))
        found.update(self.graded())
        for step in self.freedom:
            found.update(self.within(step))
        return sorted(found)

    def within(self, bands: Bands) -> list[tuple[int, ...]]:
        """The orders within one of :attr:`freedom`."""
        return bands.some_orders(self.orders, self.seed)

    def graded(self) -> list[tuple[int, ...]]:
        """The orders at graded distances."""
        return [self.bands.sort(order) for order in graded_orders(self.num_blocks, self.distances, self.seed)]

    def in_tracks(self, tracks: int, length: int) -> tuple[Arrangement, list[Arrangement]]:
        """A shape filled in trained order, and in the random orders of :data:`DRAWS` draws."""
        orders = self.bands.random_orders(DRAWS, self.seed)
        return self.bands.equal_waves(range(self.num_blocks), tracks, length), [
            self.bands.equal_waves(order, tracks, length) for order in orders
        ]

    def subsets(self, keep: int, *, shuffled: bool) -> list[tuple[int, ...]]:
        """The random subsets of ``keep`` blocks, in trained order or as drawn."""
        return [self.bands.random_subset_order(keep, self.seed, i, shuffled=shuffled) for i in range(DRAWS)]


def default_keep(blocks: int) -> list[int]:
    """Quarters of the depth."""
    return sorted({round(blocks * part / 4) for part in (1, 2, 3)} - {0, blocks})


def default_shapes(blocks: int) -> list[tuple[int, int]]:
    """Of a band of ``blocks`` blocks: two, four and all at a time, and two tracks of two blocks or of half of all."""
    found = [(2, 1), (4, 1), (blocks, 1), (2, 2), (2, blocks // 2)]
    return sorted({(tracks, length) for tracks, length in found if length >= 1 and 2 <= tracks <= blocks // length})


def kendall_tau(order: Sequence[int]) -> float:
    """Rank correlation of ``order`` with the trained order: pairs in place less pairs inverted, over all pairs."""
    pairs = list(itertools.combinations(order, 2))
    return sum(1 if one < other else -1 for one, other in pairs) / len(pairs) if pairs else 1.0


def graded_orders(blocks: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Orders whose Kendall tau spreads from 1 to -1, which uniform permutations crowd around 0.

    Each block moves by a share of a random key, the share growing from order to order; every other is backwards.
    """
    found = []
    for index in range(count):
        rng = random.Random((seed << 33) ^ (index << 1) ^ 1)
        share = (index + 0.5) / count
        keys = [(1 - share) * block / max(1, blocks) + share * rng.random() for block in range(blocks)]
        order = tuple(sorted(range(blocks), key=keys.__getitem__))
        found.append(order[::-1] if index % 2 else order)
    return found
