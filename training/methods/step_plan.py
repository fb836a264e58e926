"""What one step of training computes: which images go through which arrangement, and what that costs.

Draws are of plain Python numbers that depend on the seed and the number of the step alone: a resumed run draws the
same, all processes of a distributed run draw the same, and no order ever makes the device wait.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ls_edge.arrangement import Arrangement, Wave

BACKWARD = 2.0
"""Cost of a backward pass, in forward passes."""


@dataclass(frozen=True)
class Plan:
    """The arrangements of one step: each runs an equal part of the images, forwards and backwards."""

    groups: tuple[Arrangement, ...]

    @classmethod
    def plain(cls, order: Sequence[int]) -> Plan:
        """The whole batch in one order."""
        return cls((Arrangement.plain(order),))

    @property
    def arrangement(self) -> Arrangement:
        """That of the first group."""
        return self.groups[0]

    @property
    def order(self) -> tuple[int, ...]:
        """The first group's blocks."""
        return self.arrangement.order

    def to_json(self) -> list[Any]:
        """The arrangement, or a list of them where there are several groups."""
        found = [item.to_json() for item in self.groups]
        return found[0] if len(found) == 1 else found

    def cost(self, blocks: int, *, teacher: bool = False) -> float:
        """What the step costs an image, in forward passes of the whole model; three for plain training.

        The one place where cost is counted, so that methods are compared at equal training FLOPs. Stem, head and
        what a method adds to a block are not counted: they are small beside the blocks. ``teacher`` adds the forward
        pass of a frozen one.
        """
        run = sum(len(item.order) for item in self.groups) / len(self.groups)
        return (1 + BACKWARD) * run / blocks + (1.0 if teacher else 0.0)


def rng_of(seed: int, step: int) -> random.Random:
    """A generator of its own for each step; ``random.Random`` of an int is the same everywhere."""
    return random.Random((seed << 40) ^ (step << 1) ^ 1)


def thinned(blocks: Sequence[int], drop: float, rng: random.Random) -> list[int]:
    """``blocks`` without those that LayerDrop drops, each with probability ``drop``; never none."""
    kept = [block for block in blocks if rng.random() >= drop]
    return kept or [rng.choice(list(blocks))]


def in_waves(order: Sequence[int], rng: random.Random) -> Arrangement:
    """``order`` cut into waves of one to four tracks of random lengths, as several peers would run it."""
    rest = list(order)
    waves: list[Wave] = []
    while rest:
        tracks = rng.choice((1, 2, 2, 2, 3, 4))
        length = rng.randint(1, max(1, len(rest) // tracks))
        wave: list[tuple[int, ...]] = []
        for _ in range(min(tracks, len(rest))):
            if rest:
                wave.append(tuple(rest[:length]))
                del rest[:length]
        waves.append(tuple(wave))
    return Arrangement(tuple(waves))
