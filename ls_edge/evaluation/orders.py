"""Orders of an evaluation, all drawn from one seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ls_edge.core.bands import Bands, windows
from ls_edge.core.errors import UsageError
from ls_edge.evaluation.settings import EvaluationSettings

DRAWS = 8
"""Number of random draws for subsets."""


@dataclass(frozen=True)
class EvaluationOrders:
    """Orders to evaluate, given the settings of an evaluation and the model's ``own`` bands."""

    settings: EvaluationSettings
    own: Bands

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` if the settings do not fit the model."""
        bad = next((count for count in self.keep if count > self.num_blocks), None)
        if bad is not None:
            raise UsageError(
                f"keep {bad} is not possible; give 1 to {self.num_blocks}, the number of blocks of the model"
            )

    @cached_property
    def bands(self) -> Bands:
        """Bands of all orders except those of :attr:`freedom`."""
        return self.settings.bands_of(self.own)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.own.num_blocks

    @cached_property
    def keep(self) -> tuple[int, ...]:
        """Numbers of blocks to keep, by default a quarter, a half, and three quarters."""
        asked = self.settings.keep
        return tuple(default_keep(self.num_blocks) if asked is None else sorted(set(asked)))

    @cached_property
    def freedom(self) -> tuple[Bands, ...]:
        """Bands whose random orders are evaluated: the model's own, :meth:`Bands.ladder`, and :func:`windows`."""
        blocks = self.num_blocks
        steps = {*Bands.ladder(blocks), *windows(blocks), self.own} if self.settings.freedom else ()
        return tuple(sorted(steps, key=lambda step: (step.num_orders, step.cuts)))

    def uniform(self) -> list[tuple[int, ...]]:
        """Return the random orders of all blocks."""
        return self.bands.random_orders(self.settings.orders, self.settings.seed)

    def all_orders(self) -> list[tuple[int, ...]]:
        """Return the distinct orders to run."""
        found = {tuple(range(self.num_blocks)), *self.uniform()}
        for keep in self.keep:
            found.update(self.subsets(keep, shuffled=False), self.subsets(keep, shuffled=True))
        for step in self.freedom:
            found.update(self.within(step))
        return sorted(found)

    def within(self, bands: Bands) -> list[tuple[int, ...]]:
        """Return the orders within one of the bands in :attr:`freedom`."""
        return bands.some_orders(self.settings.orders, self.settings.seed)

    def subsets(self, keep: int, *, shuffled: bool) -> list[tuple[int, ...]]:
        """Return random subsets of ``keep`` blocks in trained order or ``shuffled``; for all blocks, whole orders."""
        if keep == self.num_blocks:
            return self.uniform() if shuffled else [tuple(range(keep))]
        return [self.bands.random_subset_order(keep, self.settings.seed, i, shuffled=shuffled) for i in range(DRAWS)]


def default_keep(blocks: int) -> list[int]:
    """Return a quarter, a half, and three quarters of the depth."""
    return sorted({round(blocks * part / 4) for part in (1, 2, 3)} - {0, blocks})
