"""Plan of a training step: the arrangements that run.

Plans are Python numbers that depend only on the seed and the step. Therefore, a resumed run and all processes of a
distributed run draw the same plans, and the CPU never waits for the device to read an order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ls_edge.core.arrangement import Arrangement


@dataclass(frozen=True)
class StepPlan:
    """Arrangements of one step, each of which runs an equal share of the images, forward and backward."""

    groups: tuple[Arrangement, ...]
    places: tuple[int, ...] | None = None
    """Place in the whole batch of each image of a part; None for a whole batch."""

    @classmethod
    def plain(cls, order: Sequence[int]) -> StepPlan:
        """Return a plan that runs the whole batch in one order."""
        return cls((Arrangement.plain(order),))

    def parts(self, count: int) -> Iterator[tuple[Arrangement, slice | list[int]]]:
        """Yield each arrangement with the rows of its images among ``count``.

        Images take turns by their place in the whole batch, so parts of a batch and processes that share it run each
        image in the same arrangement as a single process does.
        """
        places, groups = range(count) if self.places is None else self.places, len(self.groups)
        for number, arrangement in enumerate(self.groups):
            rows = [row for row, place in enumerate(places) if place % groups == number]
            if rows:
                even = range(rows[0], rows[-1] + 1, groups)  # as always unless an image cannot be decoded
                yield arrangement, slice(even.start, even.stop, groups) if rows == list(even) else rows

    def to_json(self) -> list[Any]:
        """Return the arrangement, or a list of arrangements if there are several groups."""
        found = [item.to_json() for item in self.groups]
        return found[0] if len(found) == 1 else found


def step_rng(seed: int, step: int) -> random.Random:
    """Return the generator of a step; ``random.Random`` with an integer seed is the same on every machine."""
    return random.Random((seed << 40) ^ (step << 1) ^ 1)


def drop_blocks(blocks: Sequence[int], p: float, rng: random.Random) -> list[int]:
    """Drop each block with probability ``p`` (LayerDrop, arXiv 1909.11556), but never all of them."""
    return [block for block in blocks if rng.random() >= p] or [rng.choice(list(blocks))]
