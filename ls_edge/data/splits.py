"""Recognition of the splits of data sets by folder name."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable
from typing import Literal

Split = Literal["train", "val", "all"]

_HELD_OUT = ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation", "holdout")
"""Names of held-out splits; the first one that exists is used."""
_THINGS = r"(?:images?|imgs?|data|dataset|set|split)"
_SPLIT = re.compile(
    rf"(?:{_THINGS}[-_ ]?)?"
    rf"(?:(?P<train>train|training)|(?P<held>{'|'.join(_HELD_OUT)}|hold[-_ ]out|held[-_ ]?out)|fold(?=[-_ ]?\d))"
    rf"(?:[-_ ]?(?:{_THINGS}|\d{{1,4}}))?"
)
"""Case-folded folder names of splits, such as ``train``, ``val_images``, ``test2017``, and ``fold0``."""


def split_of(name: str) -> Literal["train", "val", "fold", None]:
    """Return the kind of split for a folder name, such as ``val`` for ``test_images``, or None for a class."""
    found = _SPLIT.fullmatch(name.casefold())
    if found is None:
        return None
    return "train" if found["train"] else "val" if found["held"] else "fold"


def choose_part(tops: Collection[str], part: Literal["train", "eval"]) -> tuple[str | None, Split]:
    """Return the folder to use and its split; the folder is None if all folders are classes.

    A name of a split among names of classes is a class (COCO has a class "train"); a single folder only wraps the
    classes. Words that all names share are ignored: ``seg_train`` and ``seg_test`` are splits.
    """
    kinds: dict[str | None, list[str]] = {"train": [], "val": []}
    own = _own_names(tops)
    for top in sorted(tops, key=lambda top: _preference(own[top])):
        kinds.setdefault(split_of(own[top]) or split_of(top), []).append(top)
    if kinds["train"] and kinds["val"]:
        return (kinds["train"][0], "train") if part == "train" else (kinds["val"][0], "val")
    return (*kinds["train"], *kinds["val"], None)[0] if len(tops) == 1 else None, "all"


def _own_names(tops: Collection[str]) -> dict[str, str]:
    """Return the names without the first and last words that all names share."""
    words = {top: re.split(r"[-_ ]+", top) for top in tops}
    first, last = _shared(words.values()), _shared(row[::-1] for row in words.values())
    return {top: " ".join(row[first : len(row) - last]) for top, row in words.items()}


def _shared(rows: Iterable[list[str]]) -> int:
    return len(list(itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))))


def _preference(top: str) -> tuple[int, str]:
    found = _SPLIT.fullmatch(top.casefold())
    held = found["held"] if found is not None else None
    return _HELD_OUT.index(held) if held in _HELD_OUT else len(_HELD_OUT), top
