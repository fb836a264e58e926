"""Arrangements: the order in which blocks run, and the blocks that run in parallel.

An arrangement is a sequence of waves. A wave is one or more tracks that start from the same tokens, and a track is a
sequence of block indices. The additions of the tracks of a wave are summed in track order, so that a replay adds the
same numbers in the same order:

    t  ->  t + (track_0(t) - t) + (track_1(t) - t) + ...

A plain order is a single track. The notation is nested lists, such as ``[[[3, 7], [0, 5]], [[1, 2], [4, 6]]]`` for two
waves of two tracks of two blocks, or a flat list for a plain order.

The slot of a block is the number of blocks that ran before it on its own path, including all earlier waves (the
"position" of LayerShuffle, arXiv 2407.04513, section 3).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ls_edge.core.errors import UsageError

Track = tuple[int, ...]
Wave = tuple[Track, ...]


T = TypeVar("T", bound=Any)


@dataclass(frozen=True)
class Arrangement:
    """Waves of tracks of block indices; tracks are not empty, and a block occurs at most once."""

    waves: tuple[Wave, ...]

    def __post_init__(self) -> None:
        seen: set[int] = set()
        for wave in self.waves:
            if not wave or not all(wave):
                raise UsageError(f"arrangement {self.to_json()}: a wave or track is empty; leave it out")
            for block in (b for track in wave for b in track):
                if block < 0 or block in seen:
                    what = "is negative" if block < 0 else "runs twice"
                    raise UsageError(
                        f"arrangement {self.to_json()}: block {block} {what}; name each block once, from 0"
                    )
                seen.add(block)

    @classmethod
    def plain(cls, order: Sequence[int]) -> Arrangement:
        """Return the arrangement that runs blocks one after the other."""
        return cls(waves=(((tuple(order)),),) if order else ())

    def to_json(self) -> list[Any]:
        """Return a flat list for a plain order, otherwise nested lists."""
        if self.is_plain:
            return list(self.order)
        return [[list(track) for track in wave] for wave in self.waves]

    @property
    def is_plain(self) -> bool:
        """Whether no two blocks run in parallel."""
        return all(len(wave) == 1 for wave in self.waves)

    @property
    def order(self) -> tuple[int, ...]:
        """All blocks, wave by wave and track by track; for a plain order, the order in which they run."""
        return tuple(block for wave in self.waves for track in wave for block in track)


def apply(arrangement: Arrangement, tokens: T, run_block: Callable[[int, T, int], T]) -> T:
    """Run ``run_block(block, tokens, slot)`` for each block of the arrangement, and return the last tokens.

    Training, verification, and replay all call this function, with torch tensors or numpy arrays ``[B, N, D]``.
    """
    before = 0
    for wave in arrangement.waves:
        outs = []
        for track in wave:
            out = tokens
            for position, block in enumerate(track):
                out = run_block(block, out, before + position)
            outs.append(out)
        tokens = join(tokens, outs)
        before += sum(len(track) for track in wave)
    return tokens


def join(start: T, outs: Sequence[T]) -> T:
    """Return ``start`` plus the addition of each track of a wave, given the outputs ``outs`` of the tracks."""
    if len(outs) == 1:
        return outs[0]
    total = start
    for out in outs:
        total = total + (out - start)
    return total


def random_order(blocks: int, seed: int, index: int) -> tuple[int, ...]:
    """Return permutation number ``index`` in the sequence of ``seed``, the same on every machine.

    All orders are drawn here. Unlike torch's generators, ``random.Random`` with an integer seed is stable across Python
    versions and platforms.
    """
    order = list(range(blocks))
    random.Random((seed << 32) ^ index).shuffle(order)
    return tuple(order)
