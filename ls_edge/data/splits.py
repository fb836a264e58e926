"""Names of the splits of data sets."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

Split = Literal["train", "val", "all"]

_HELD_OUT = ("val", "validation", "valid", "dev", "test", "testing", "eval", "evaluation", "holdout")
"""Names of held-out splits; the first of them that exists is used."""
_THINGS = r"(?:images?|imgs?|data|dataset|set|split)"
_SPLIT = re.compile(
    rf"(?:{_THINGS}[-_ ]?)?"
    rf"(?:(?P<train>train|training)|(?P<held>{'|'.join(_HELD_OUT)}|hold[-_ ]out|held[-_ ]?out)|fold(?=[-_ ]?\d))"
    rf"(?:[-_ ]?(?:{_THINGS}|\d{{1,4}}))?"
)
"""Folder names, case-folded, that are splits of a data set: ``train``, ``val_images``, ``test2017``, ``fold0``."""


def split_of(name: str) -> Literal["train", "val", "fold", None]:
    """Return the kind of split that a folder name stands for, such as ``val`` for ``test_images``; None for a class."""
    found = _SPLIT.fullmatch(name.casefold())
    if found is None:
        return None
    return "train" if found["train"] else "val" if found["held"] else "fold"


def choose_part(tops: Collection[str], part: Literal["train", "eval"]) -> tuple[str | None, Split]:
    """Return the folder to use and the split that it is; None if all folders are classes.

    One of the names among others is a class (COCO has a class "train"); a single folder only wraps the classes.
    """
    kinds: dict[str | None, list[str]] = {"train": [], "val": []}
    for top in sorted(tops, key=_preference):
        kinds.setdefault(split_of(top), []).append(top)
    if kinds["train"] and kinds["val"]:
        return (kinds["train"][0], "train") if part == "train" else (kinds["val"][0], "val")
    return (*kinds["train"], *kinds["val"], None)[0] if len(tops) == 1 else None, "all"


def _preference(top: str) -> tuple[int, str]:
    found = _SPLIT.fullmatch(top.casefold())
    held = found["held"] if found is not None else None
    return _HELD_OUT.index(held) if held in _HELD_OUT else len(_HELD_OUT), top
