"""Plan of a training step: the arrangements that run.

Plans are Python numbers that depend only on the seed and the step. Therefore, a resumed run and all processes of a
distributed run draw the same plans, and the CPU never waits for the device to read an order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ls_edge.core.arrangement import Arrangement


@dataclass(frozen=True)
class StepPlan:
    """Arrangements of one step, each of which runs an equal share of the images, forward and backward."""

    groups: tuple[Arrangement, ...]

    @classmethod
    def plain(cls, order: Sequence[int]) -> StepPlan:
        """Return a plan that runs the whole batch in one order."""
        return cls((Arrangement.plain(order),))

    def to_json(self) -> list[Any]:
        """Return the arrangement, or a list of arrangements if there are several groups."""
        found = [item.to_json() for item in self.groups]
        return found[0] if len(found) == 1 else found


def step_rng(seed: int, step: int) -> random.Random:
    """Return the generator of a step; ``random.Random`` with an integer seed is the same on every machine."""
    return random.Random((seed << 40) ^ (step << 1) ^ 1)


def drop_blocks(blocks: Sequence[int], p: float, rng: random.Random) -> list[int]:
    """Drop each block with probability ``p`` (LayerDrop, arXiv 1909.11556), but never all of them."""
    kept = [block for block in blocks if rng.random() >= p]
    return kept or [rng.choice(list(blocks))]
