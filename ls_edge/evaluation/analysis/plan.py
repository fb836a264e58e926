"""Kinds of an analysis, and the orders for them."""

from __future__ import annotations

from typing import Literal

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.evaluation.measure import Order
from ls_edge.evaluation.orders import DRAWS


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
