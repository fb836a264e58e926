"""Formatting of lists of blocks, ids, names, and numbers for messages, tables, and charts."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ls_edge.core.errors import printable
from ls_edge.core.parts import ENDS, HEAD, STEM, ShownPart

NOTHING = "\N{EN DASH}"
_RANGE = re.compile(r"\s*(\d{1,4})\s*(?:-\s*(\d{1,4})\s*)?")
"""Number or range; at most four digits, so that a typing error does not create a list of millions."""
MAX_SHOWN_EXPLANATION = 500
"""Maximum length of an explanation that is sent or logged, in characters."""
MAX_NUMBERS = 1024
"""Maximum length of a list, except for its last range."""


def one_line(text: str, longest: int = MAX_SHOWN_EXPLANATION) -> str:
    """Return ``text`` without unprintable characters, cut to ``longest`` characters."""
    return "".join(one if one.isprintable() else "?" for one in printable(text)[:longest])


def short_id(digest: str) -> str:
    """Return the prefix of a bundle or model id that is shown to users."""
    return digest[:12]


def format_ranges(numbers: Collection[ShownPart]) -> str:
    """Return ``0-3, 7`` for 0, 1, 2, 3, and 7; stem and head, by number or name, come first and last."""
    runs: list[list[int]] = []
    names = {ENDS.get(number, "") if isinstance(number, int) else number for number in numbers}
    for number in sorted({number for number in numbers if isinstance(number, int)} - ENDS.keys()):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ", ".join(["stem"] * ("stem" in names) + texts + ["head"] * ("head" in names))


def parse_ranges(text: str) -> tuple[int, ...]:
    """Return the numbers in ``"0-3,7"``; raise ValueError with the text that is neither a number nor a range."""
    numbers: list[int] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None or (last := int(match[2] or match[1])) < int(match[1]) or len(numbers) > MAX_NUMBERS:
            raise ValueError(part)
        numbers.extend(range(int(match[1]), last + 1))
    return tuple(numbers)


def format_bands(groups: Iterable[Collection[int]]) -> str:
    """Return ``0/1-6/7`` for the blocks of each band."""
    return "/".join(map(format_ranges, groups))


def name_blocks(blocks: Collection[int]) -> str:
    """Return ``block 3`` or ``blocks 0-3, 7``; with stem or head ``the stem and blocks 0-3``."""
    numbered = set(blocks) - ENDS.keys()
    named = [f"block{'' if len(numbered) == 1 else 's'} {format_ranges(numbered)}"] if numbered or not blocks else []
    return " and ".join(["the stem"] * (STEM in blocks) + named + ["the head"] * (HEAD in blocks))


def show(value: float | None, unit: str = "") -> str:
    """Return a number with one decimal, below 1 with two digits, from 100 with none, and thousands separators."""
    if value is None:
        return NOTHING
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}{unit}"
    digits = 0 if value == 0 or abs(value) >= 100 else 1 if abs(value) >= 1 else 2
    return f"{value:,.{digits}f}{unit}"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 thread``, ``2 threads``, ``1,000 threads``; ``plural`` is by default the noun with an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def distinct_names(paths: Sequence[str | Path]) -> list[str]:
    """Return a distinct name for each path, with as many of its last parts as needed.

    A path that occurs several times is numbered: ``bundle``, ``bundle (2)``.
    """
    whole = [os.path.abspath(path) for path in paths]
    parts = {path: Path(path).parts for path in whole}
    lengths = dict.fromkeys(parts, 1)
    while True:
        names = {path: "/".join(each[-lengths[path] :]).replace("//", "/") for path, each in parts.items()}
        taken = Counter(names.values())
        longer = {path: lengths[path] + (taken[name] > 1) for path, name in names.items()}
        if longer == lengths:  # always reached, since whole paths differ
            break
        lengths = longer
    seen: Counter[str] = Counter()
    found = []
    for path in whole:
        seen[path] += 1
        found.append(names[path] if seen[path] == 1 else f"{names[path]} ({seen[path]})")
    return found


def byte_size(count: int) -> str:
    """Return a number of bytes in powers of 1000, such as ``605 KB`` or ``1.2 MB``."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 99.5 else f"{size:.1f} {unit}"


def bands_text(groups: Sequence[Sequence[int]]) -> str:
    """Return ``, in the bands 0/1-6/7``, or an empty text for one band."""
    return f", in the bands {format_bands(groups)}" if len(groups) > 1 else ""


def shorten(text: object, limit: int) -> str:
    """Shorten long text in the middle, which is the least informative part of a file name."""
    whole = printable(text)
    if len(whole) <= limit:
        return whole
    head = (limit - 1) // 2
    return f"{whole[:head]}…{whole[len(whole) - (limit - 1 - head) :]}"


def engine_name(engine: str) -> str:
    """Return ``onnx CPU`` for ``onnx CPUExecutionProvider (...)``: library and device, without the reasons."""
    return printable(engine.partition(" (")[0].replace("ExecutionProvider", ""))


def class_name(index: int | None, classes: Sequence[str]) -> str:
    """Return the shortened name of a class, or its number if it has no name."""
    if index is None:
        return NOTHING
    return shorten(classes[index] if index < len(classes) else str(index), 40)


def show_ms(value: float | None) -> str:
    """Return milliseconds as ``0.42 ms``, ``9.1 ms``, ``131 ms``, or ``2.4 s``."""
    if value is None:
        return NOTHING
    if value >= 1000:
        return show(value / 1000, " s")
    return f"{show(value)} ms"


def show_percent(share: float | None) -> str:
    """Return a fraction as ``81.3 %``."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def show_nines(share: float) -> str:
    """Return a fraction with two significant digits in its complement: ``99.77 %``, ``99.9987 %``, ``100 %``."""
    missing = 100 * (1 - share)
    if missing < 1e-7:
        return "100 %"
    return f"{100 * share:.{max(1, 1 - math.floor(math.log10(missing)))}f} %"


def show_hours(hours: float) -> str:
    """Return hours as ``12 s``, ``3.5 min``, ``40 h``, or ``1,200 h``."""
    if hours >= 1:
        return show(hours, " h")
    return show(60 * hours, " min") if hours >= 1 / 60 else show(3600 * hours, " s")
