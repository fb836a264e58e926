"""Bands: the groups of blocks within which the order may change.

A block may run when all blocks of earlier bands have run or were skipped. The bands cut the trained order ``0 .. L-1``
into consecutive groups, so the trained order is always allowed. One band is the full freedom of LayerShuffle
(arXiv 2407.04513); one band per block is a fixed order. Most of the loss from reordering comes from the first and the
last blocks (arXiv 2407.09298), which bands can keep in place.

If stem and head are parts of a request, the stem is an additional first band and the head an additional last one.

In JSON and YAML, bands are lists of blocks, ``[[0], [1, 2, 3, 4, 5, 6], [7]]``; on a command line ``0/1-6/7``.
"""

from __future__ import annotations

import itertools
import math
import random
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ls_edge.core.arrangement import Arrangement, Wave, random_order
from ls_edge.core.errors import UsageError
from ls_edge.core.parts import ENDS, STEM, has_ends, part_name
from ls_edge.core.text import format_bands, format_ranges, parse_ranges
from ls_edge.core.validation import show_value

_Groups = Annotated[list[Annotated[list[int], Meta(min_length=1)]], Meta(min_length=1)]
WINDOWS = (2, 3, 4, 6)
"""Widths of windows in :func:`windows`."""
_HOW = "write [[0], [1, 2, 3], [4]] in a file, 0/1-3/4 on a command line"


@dataclass(frozen=True)
class Bands:
    """A partition of the blocks ``0 .. num_blocks-1`` into consecutive groups."""

    num_blocks: int
    cuts: tuple[int, ...] = ()
    """The first block of each band except the first, ascending."""

    def __post_init__(self) -> None:
        ends = (0, *self.cuts, self.num_blocks)
        if self.cuts and any(one >= two for one, two in itertools.pairwise(ends)):
            raise UsageError(f"bands that begin at {list(self.cuts)} of {self.num_blocks} blocks are not ascending")

    @classmethod
    def ladder(cls, num_blocks: int) -> list[Bands]:
        """Return bands from a fixed order to full freedom, each of which allows all orders of the previous one.

        In between, the last block and the first three, two, or one blocks keep their place, and then only the first
        block.
        """
        last = num_blocks - 1
        steps = [tuple(range(1, num_blocks)), (1, 2, 3, last), (1, 2, last), (1, last), (1,), ()]
        found = [cls(num_blocks, cuts) for cuts in steps if cuts == tuple(sorted({c for c in cuts if c < num_blocks}))]
        return [bands for at, bands in enumerate(found) if at == 0 or bands.num_orders > found[at - 1].num_orders]

    @classmethod
    def from_json(cls, value: Any, num_blocks: int | None = None) -> Bands:
        """Parse lists of blocks, or text from a command line; None means one band of ``num_blocks`` blocks.

        Raise :class:`UsageError` unless it is a partition of ``num_blocks`` blocks into ascending bands.
        """
        if value is None and num_blocks is not None:
            return cls(num_blocks)
        try:
            parsed = [parse_ranges(group) for group in value.split("/")] if isinstance(value, str) else value
            groups = list(map(sorted, msgspec.convert(parsed, _Groups)))
        except (ValueError, msgspec.ValidationError):  # the latter is not a ValueError before msgspec 0.21
            raise UsageError(f"bands {show_value(value)} are not lists of blocks; {_HOW}") from None
        shown = show_value(value if isinstance(value, str) else groups).strip("'")
        blocks = list(itertools.chain(*groups))
        for place, block in enumerate(blocks):
            if block != place:
                problem = f"expected block {place}, found block {block}"
                raise UsageError(f"bands {shown}: {problem}; list each block once, with bands in ascending order")
        if num_blocks is not None and len(blocks) != num_blocks:
            raise UsageError(
                f"bands {shown} have blocks 0 to {len(blocks) - 1}, the model has 0 to {num_blocks - 1}; name each "
                "block of the model once"
            )
        return cls(len(blocks), tuple(group[0] for group in groups[1:]))

    def to_json(self) -> list[list[int]]:
        """Return the blocks of each band."""
        return [list(group) for group in self.groups]

    def __str__(self) -> str:
        """Return the command-line notation, such as ``0/1-6/7``."""
        return format_bands(self.groups)

    @property
    def groups(self) -> tuple[range, ...]:
        """The blocks of each band."""
        return tuple(range(*pair) for pair in itertools.pairwise((0, *self.cuts, self.num_blocks)))

    @property
    def is_one(self) -> bool:
        """Whether there is one band, so that blocks may run in any order."""
        return not self.cuts

    @property
    def num_orders(self) -> int:
        """Number of allowed orders of all blocks."""
        return math.prod(math.factorial(len(group)) for group in self.groups)

    def contains(self, other: Bands) -> bool:
        """Return whether these bands allow every order that ``other`` allows."""
        return self.num_blocks == other.num_blocks and set(self.cuts) <= set(other.cuts)

    def keep(self, blocks: Sequence[int]) -> Bands:
        """Return the bands of a model that keeps only ``blocks`` (ascending), which are renumbered."""
        of = [self.band_of(block) for block in blocks]
        return Bands(len(of), tuple(at for at in range(1, len(of)) if of[at] != of[at - 1]))

    def band_of(self, block: int) -> int:
        """Return the band of a block, counted from 0; -1 for the stem, and the number of bands for the head."""
        if block in ENDS:
            return -1 if block == STEM else len(self.cuts) + 1
        return bisect_right(self.cuts, block)

    def permitted(self, remaining: Sequence[int]) -> tuple[int, ...]:
        """Return the remaining blocks that may run now, those in the first remaining band, in the given order."""
        if not remaining or not (self.cuts or has_ends(remaining)):
            return tuple(remaining)
        first = min(map(self.band_of, remaining))
        return tuple(block for block in remaining if self.band_of(block) == first)

    def in_one_go(self, remaining: Sequence[int], held: Collection[int]) -> tuple[int, ...]:
        """Return the remaining blocks that a holder of ``held`` could run before another holder must continue."""
        found: list[int] = []
        rest = tuple(remaining)
        while rest:
            now = self.permitted(rest)
            mine = [block for block in now if block in held]
            found += mine
            if len(mine) < len(now):
                break
            rest = tuple(block for block in rest if block not in now)
        return tuple(found)

    def sort(self, order: Iterable[int]) -> tuple[int, ...]:
        """Sort by band, keeping the order within each band; a uniform permutation remains uniform within bands."""
        return tuple(order) if not self.cuts else tuple(sorted(order, key=self.band_of))

    def fault(self, arrangement: Arrangement, remaining: Sequence[int] = ()) -> str:
        """Describe how an arrangement, followed by ``remaining``, violates the bands; empty if it does not."""
        for wave in arrangement.waves:
            of = {self.band_of(block) for track in wave for block in track}
            if len(wave) > 1 and len(of) > 1:
                return f"{self._label(min(of))} and {self._label(max(of))} run in parallel"
        ran, latest = arrangement.order, -1
        for place, block in enumerate((*ran, *remaining)):
            band = self.band_of(block)
            if band < latest:
                how = "runs after" if place < len(ran) else "remains behind"
                return f"{part_name(block)} of {self._label(band)} {how} {self._label(latest)}"
            latest = band
        return ""

    def name(self, band: int) -> str:
        """Return the name of a band, ``band [1-6] (2 of 3)``; empty for stem and head, and for a single band."""
        is_shown = self.cuts and 0 <= band <= len(self.cuts)
        return f"{self._label(band)} ({band + 1} of {len(self.cuts) + 1})" if is_shown else ""

    def _label(self, band: int) -> str:
        groups = self.groups
        return f"band [{format_ranges(groups[band]) if 0 <= band < len(groups) else 'stem' if band < 0 else 'head'}]"

    def some_orders(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Return all orders if there are at most ``count``, otherwise ``count`` random ones (:meth:`random_orders`)."""
        if self.num_orders > count:
            return self.random_orders(count, seed)
        parts = itertools.product(*(itertools.permutations(group) for group in self.groups))
        return [tuple(itertools.chain(*part)) for part in parts]

    def random_order(self, seed: int, index: int) -> tuple[int, ...]:
        """Draw an order that is uniform within each band, as :func:`~ls_edge.core.arrangement.random_order` does."""
        return self.sort(random_order(self.num_blocks, seed, index))

    def random_orders(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Return the first ``count`` orders of :meth:`random_order`."""
        return [self.random_order(seed, index) for index in range(count)]

    def random_subset_order(self, keep: int, seed: int, index: int, *, shuffled: bool) -> tuple[int, ...]:
        """Draw ``keep`` blocks; return them in trained order or, if ``shuffled``, in the drawn order within bands."""
        order = random_order(self.num_blocks, seed, index)[:keep]
        return self.sort(order) if shuffled else tuple(sorted(order))

    def random_waves(self, order: Sequence[int], rng: random.Random) -> Arrangement:
        """Cut each band into waves of one to four tracks of the same random length, in the sequence of ``order``."""
        waves: list[Wave] = []
        for rest in self._parts(order):
            while rest:
                count = min(rng.choice((1, 2, 2, 2, 3, 4)), len(rest))
                length = rng.randint(1, len(rest) // count)
                waves.append(tuple(tuple(rest[track * length :][:length]) for track in range(count)))
                del rest[: count * length]
        return Arrangement(tuple(waves))

    def _parts(self, order: Sequence[int]) -> list[list[int]]:
        return [list(part) for _, part in itertools.groupby(self.sort(order), key=self.band_of)]


def windows(num_blocks: int) -> list[Bands]:
    """Return bands that keep the first and the last block in place, with windows of 2, 3, 4, and 6 blocks between.

    A block moves by less than the width of its window.
    """
    last = num_blocks - 1
    return [Bands(num_blocks, (*range(1, last, width), last)) for width in WINDOWS if width < last - 1]
