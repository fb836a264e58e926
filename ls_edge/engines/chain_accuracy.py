"""Accuracy of a bundle's engines in trained order, on the machine and with the options that ``ls-edge bench`` times."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError
from ls_edge.core.peers_file import EngineKind
from ls_edge.engines.pipeline import Pipeline

if TYPE_CHECKING:
    from ls_edge.data.datasets import ImageSet


class ChainAccuracy(msgspec.Struct, frozen=True):
    """Top-1 of stem, blocks in trained order, and head."""

    data: str
    images: int
    top1: float


def chain_accuracy(
    bundle: Bundle,
    images: ImageSet,
    *,
    threads: int | None = None,
    batch: int = 1,
    provider: str | None = None,
    kind: EngineKind = "auto",
) -> ChainAccuracy:
    """Answer every image of a labelled set in batches; raises :class:`DataError` where there is none to be used."""
    from ls_edge.data.datasets import require_labels
    from ls_edge.data.preprocess import Preprocessor, iterate_batches

    images = require_labels(images, bundle.manifest.classes)
    right = count = 0
    with Pipeline.open(bundle, threads=threads, provider=provider, kind=kind) as pipeline:
        for pixels, labels in iterate_batches(images, Preprocessor(bundle.manifest.image), batch):
            right += int((pipeline.forward(pixels).argmax(axis=1) == labels).sum())
            count += len(labels)
    if not count:
        raise DataError(f"{images.source} has no image that can be used; check the data")
    return ChainAccuracy(images.source, count, right / count)
