"""Numbers of blocks and cores as text: ``0-3, 7``; ids and measured numbers as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

NOTHING = "\N{EN DASH}"
_RANGE = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?")
"""Four digits at most, so that a typing error does not make a list of millions."""


def short_id(digest: str) -> str:
    """Return the part of a bundle id or model id that is shown to people."""
    return digest[:12]


def format_ranges(numbers: Collection[int]) -> str:
    """Return ``0-3, 7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers of ``"0-3,7"``; raise ValueError with the part that is neither a number nor a range."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (last := int(match[2] or match[1])) < int(match[1]):
            raise ValueError(part)
        numbers.extend(range(int(match[1]), last + 1))
    return tuple(numbers)


def format_bands(groups: Iterable[Collection[int]]) -> str:
    """Return ``0/1-6/7`` for the blocks of each band."""
    return "/".join(map(format_ranges, groups))


def name_blocks(blocks: Collection[int]) -> str:
    """Return ``block 3`` or ``blocks 0-3, 7``."""
    return f"block{'' if len(blocks) == 1 else 's'} {format_ranges(blocks)}"


def show(value: float | None, unit: str = "") -> str:
    """Return a number with about three significant digits, with separators of thousands."""
    if value is None:
        return NOTHING
    digits = 0 if value == 0 or abs(value) >= 100 else 1 if abs(value) >= 3 else 2
    return f"{value:,.{digits}f}{unit}"
