"""Williams squares: orders in which every block takes every slot, and follows every other block, equally often.

E. J. Williams, "Experimental designs balanced for the estimation of residual effects of treatments", Australian Journal
of Scientific Research A 2 (1949), 149-168. There the treatments are given to animals one after the other; here the
blocks run one after the other.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence


def williams_square(size: int) -> list[tuple[int, ...]]:
    """Permutations of ``0 .. size-1``: ``size`` of them for an even size, twice as many for an odd one.

    Each number stands once in each place (twice for an odd size) and directly behind each other number once (twice).
    An odd size needs two squares, the second with the rows of the first backwards.
    """
    first = [0]
    for step in range(1, size):
        first.append(step // 2 + 1 if step % 2 else size - step // 2)
    rows = [tuple((number + shift) % size for number in first) for shift in range(size)]
    return rows if size % 2 == 0 or size == 1 else [*rows, *(tuple(reversed(row)) for row in rows)]


def balanced_orders(groups: Sequence[Sequence[int]], count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """``count`` orders that run the groups of blocks one after the other, balanced within each group.

    Each group goes through the rows of its square in random order, blocks relabelled at random, and then through
    those of another one. So a single order is uniform, and over whole squares each block takes each slot of its group,
    and directly follows each other block of it, equally often.
    """
    rows = [_rows(list(group), rng) for group in groups]
    return [tuple(block for row in rows for block in next(row)) for _ in range(count)]


def _rows(group: list[int], rng: random.Random) -> Iterator[tuple[int, ...]]:
    while True:
        rng.shuffle(group)
        square = williams_square(len(group))
        rng.shuffle(square)
        for row in square:
            yield tuple(group[number] for number in row)
