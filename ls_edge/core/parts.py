"""Numbers of the parts of a model: blocks have their index, stem and head the numbers below.

They are the two largest that fit 16 bits, so that they mean the same in messages and files for a model of any size.
"""

from __future__ import annotations

from collections.abc import Sequence

STEM, HEAD = 65534, 65535
ENDS = {STEM: "stem", HEAD: "head"}


def part_name(part: int) -> str:
    """Return the name of a part in a bundle: ``stem``, ``block 3`` or ``head``."""
    return ENDS.get(part) or f"block {part}"


def has_ends(order: Sequence[int]) -> bool:
    """Return whether parts in an allowed order include the stem or the head."""
    return bool(order) and (order[0] == STEM or order[-1] == HEAD)
