"""Words of messages and tables."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 thread``, ``2 threads``, ``1,000 threads``; ``plural`` where it is not the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Return a short name for each path, no two alike: its last folders, as many as tell it from the others.

    A path that was given several times is numbered: ``bundle``, ``bundle (2)``.
    """
    whole = [os.path.abspath(path) for path in paths]
    parts = {path: Path(path).parts for path in whole}
    lengths = dict.fromkeys(parts, 1)
    while True:
        names = {path: "/".join(each[-lengths[path] :]).replace("//", "/") for path, each in parts.items()}
        taken = Counter(names.values())
        longer = {path: lengths[path] + (taken[name] > 1) for path, name in names.items()}
        if longer == lengths:  # at the latest with all of every path, which differ
            break
        lengths = longer
    seen: Counter[str] = Counter()
    found = []
    for path in whole:
        seen[path] += 1
        found.append(names[path] if seen[path] == 1 else f"{names[path]} ({seen[path]})")
    return found


def block_ranges(blocks: Sequence[int]) -> str:
    """``0-3, 7`` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for block in sorted(set(blocks)):
        if runs and block == runs[-1][1] + 1:
            runs[-1][1] = block
        else:
            runs.append([block, block])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
