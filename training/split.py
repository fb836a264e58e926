"""Split of the training images: a part selects the checkpoint, and copies of a picture stay on one side.

The split depends on the content of the images and a seed, not on their names. A run hands its seed down to the runs
that start from it, and images that their start was trained on do not validate as long as others exist.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ls_edge.core.errors import DataError
from ls_edge.data.content import Digests, KnownImages
from ls_edge.data.datasets import ImageSet


@dataclass(frozen=True)
class DataSplit:
    """Indices of the images of both sides."""

    train: list[int]
    held: list[int]
    """Validation images in random order, so that the first ones are a fair sample."""
    copies: int
    """Number of images that are copies of others."""
    known: int
    """Number of validation images that the start was trained on."""


def split_images(
    images: ImageSet, digests: Digests, part: float, seed: int, known: Sequence[KnownImages] = ()
) -> DataSplit:
    """Split a set: validation gets a seeded ``part`` of the different images of each class, but not all of a class.

    ``known`` are the training images of the start. Raise :class:`DataError` for a set of one class, or without two
    different images of a class.
    """
    groups: dict[int, list[int]] = {}
    for row, digest in enumerate(digests.tolist()):
        groups.setdefault(digest, []).append(row)
    every = [each for each in known if not each.is_sample]  # leaving out a sample would hide that others are known
    in_start = {digest for each in every for digest in digests[each.contains(digests)].tolist()}
    order = sorted(groups, key=lambda digest: (digest in in_start, _draw(seed, digest)))
    by_class: dict[int, list[int]] = {}
    for digest in order:
        by_class.setdefault(_label(images, groups[digest][0]), []).append(digest)
    labels = {image.label for image in images.images}
    if len(labels) < 2:
        only = ", ".join(images.classes[label] for label in labels if label is not None) or "none"
        raise DataError(f"{images.source} has images of one class only ({only}); training needs two or more")
    held: list[int] = []
    owed = 0.5  # images from classes too small to give one each; half an image rounds it
    for _, own in sorted(by_class.items()):
        total = len(own)
        count = min(round(part * total), total - 1)
        if not count and total > 1:
            count = int(owed := owed + part * total)
            owed -= count
        held += [digest for digest in own[:-1] if digest not in in_start][:count]
    if not held:  # too few images, or all of them are known
        several = [own for own in by_class.values() if len(own) > 1]
        if not several:
            raise DataError(f"{images.source} has one different image for each class; training needs two of a class")
        part_of = sorted(itertools.chain.from_iterable(own[:-1] for own in several), key=order.index)
        held = part_of[: max(1, round(part * len(groups)))] if in_start else [max(several, key=len)[0]]
    chosen = set(held)
    return DataSplit(
        train=sorted(itertools.chain.from_iterable(groups[digest] for digest in order if digest not in chosen)),
        held=list(
            itertools.chain.from_iterable(groups[digest] for digest in sorted(held, key=partial(_draw, seed + 1)))
        ),
        copies=len(digests) - len(groups),
        known=max((each.count_in(np.array(held, np.uint64)) for each in known), default=0),
    )


def _label(images: ImageSet, row: int) -> int:
    label = images.images[row].label
    assert label is not None
    return label


def _draw(seed: int, digest: int) -> bytes:
    return hashlib.sha256(f"{seed} {digest}".encode()).digest()
