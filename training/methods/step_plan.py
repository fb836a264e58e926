"""Plan of a training step: the arrangements that run, and their cost.

Plans are Python numbers that depend only on the seed and the step. Therefore, a resumed run and all processes of a
distributed run draw the same plans, and the CPU never waits for the device to read an order.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ls_edge.core.arrangement import Arrangement
from ls_edge.training.models.flops import WorkProfile

BACKWARD_COST = 2.0
"""Cost of a backward pass, in forward passes."""


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

    def cost(self, work: WorkProfile, *, teacher: bool = False) -> float:
        """Return the cost per image in forward passes of the whole model; plain training costs 3.

        The cost allows for comparing methods at equal training FLOPs. It includes stem, head, the blocks that run, and
        the modules that the method adds to each block. ``teacher`` adds the forward pass of a frozen model.
        """
        run = sum(len(item.order) for item in self.groups) / len(self.groups)
        step = work.stem + run * (work.block + work.added) + work.head
        return (1 + BACKWARD_COST) * step / work.forward + (1.0 if teacher else 0.0)


def step_rng(seed: int, step: int) -> random.Random:
    """Return the generator of a step; ``random.Random`` with an integer seed is the same on every machine."""
    return random.Random((seed << 40) ^ (step << 1) ^ 1)


def drop_blocks(blocks: Sequence[int], p: float, rng: random.Random) -> list[int]:
    """Drop each block with probability ``p`` (LayerDrop, arXiv 1909.11556), but never all of them."""
    kept = [block for block in blocks if rng.random() >= p]
    return kept or [rng.choice(list(blocks))]
