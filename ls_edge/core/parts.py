"""Numbers of the parts of a model: a block has its index, stem and head have :data:`STEM` and :data:`HEAD`.

These are the two largest 16-bit numbers, so they are the same in messages and files for models of any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

STEM, HEAD = 65534, 65535
ENDS: dict[int, Literal["stem", "head"]] = {STEM: "stem", HEAD: "head"}
ShownPart = int | Literal["stem", "head"]
"""Part in a document: a block by number, stem and head by name."""


def part_name(part: int) -> str:
    """Return the name of a part in a bundle: ``stem``, ``head``, or, for example, ``block 3``."""
    return ENDS.get(part) or f"block {part}"


def shown_parts(parts: Iterable[int]) -> tuple[ShownPart, ...]:
    """Return parts for documents and logs: the stem first, the blocks in the given order, the head last."""
    return tuple(ENDS.get(part, part) for part in sorted(parts, key=lambda part: (part == HEAD) - (part == STEM)))


def has_ends(order: Sequence[int]) -> bool:
    """Return whether parts in an allowed order include the stem or the head."""
    return bool(order) and (order[0] == STEM or order[-1] == HEAD)
