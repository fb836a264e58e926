"""The plan of one training step: which images run in which arrangement, and what that costs.

Plans are plain Python numbers that depend on the seed and the number of the step alone. A resumed run and all processes
of a distributed run therefore draw the same plans, and no order makes the device wait.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ls_edge.core.arrangement import Arrangement

if TYPE_CHECKING:
    from torch import Tensor

    Criterion = Callable[[Tensor, Tensor], Tensor]
    """Loss of logits ``[B, C]`` and targets, a scalar."""

BACKWARD_COST = 2.0
"""Cost of a backward pass in forward passes."""


@dataclass(frozen=True)
class WorkProfile:
    """Operations of one image in the parts of a model, in any unit; by default those of a model of blocks alone.

    Of a model: :attr:`ls_edge.training.models.view.BlockView.work`.
    """

    num_blocks: int
    stem: float = 0.0
    block: float = 1.0
    """Of one block without a method's modules."""
    head: float = 0.0
    added: float = 0.0
    """What a method's modules add to each block that runs."""

    @property
    def forward(self) -> float:
        """A forward pass of the whole model without a method's modules."""
        return self.stem + self.num_blocks * self.block + self.head


@dataclass(frozen=True)
class StepPlan:
    """The arrangements of one step; each runs an equal part of the images, forwards and backwards."""

    groups: tuple[Arrangement, ...]

    @classmethod
    def plain(cls, order: Sequence[int]) -> StepPlan:
        """The whole batch in one order."""
        return cls((Arrangement.plain(order),))

    @property
    def arrangement(self) -> Arrangement:
        """The arrangement of the first group."""
        return self.groups[0]

    @property
    def order(self) -> tuple[int, ...]:
        """The blocks of the first group."""
        return self.arrangement.order

    def to_json(self) -> list[Any]:
        """The arrangement, or a list of them if there are several groups."""
        found = [item.to_json() for item in self.groups]
        return found[0] if len(found) == 1 else found

    def cost(self, work: WorkProfile, *, teacher: bool = False) -> float:
        """Cost of the step for one image, in forward passes of the whole model; 3 for plain training.

        Methods are compared at equal training FLOPs by this number. It counts the stem and the head, which run for
        every image, the blocks that the plan runs, and what the method's modules add to each. ``teacher`` adds the
        forward pass of a frozen model.
        """
        run = sum(len(item.order) for item in self.groups) / len(self.groups)
        step = work.stem + run * (work.block + work.added) + work.head
        return (1 + BACKWARD_COST) * step / work.forward + (1.0 if teacher else 0.0)


def step_rng(seed: int, step: int) -> random.Random:
    """Return the generator of one step; ``random.Random`` of an int is the same on every machine."""
    return random.Random((seed << 40) ^ (step << 1) ^ 1)


def drop_blocks(blocks: Sequence[int], p: float, rng: random.Random) -> list[int]:
    """Drop each of ``blocks`` with probability ``p`` (LayerDrop, arXiv 1909.11556), but never all of them."""
    kept = [block for block in blocks if rng.random() >= p]
    return kept or [rng.choice(list(blocks))]
