"""Calibration images, with which an export measures ranges of activations and accuracy.

Half of the images are for fitting ranges; the other half is held out to evaluate the result. Both halves are
spread evenly over the classes. All images are kept in memory: 0.6 MB for each image of 224 x 224 pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

from ls_edge.core.bands import Bands
from ls_edge.core.bundle import ImageSpec
from ls_edge.core.errors import DataError
from ls_edge.core.logs import OnWarning, warn_in_python
from ls_edge.data.datasets import ImageRef, ImageSet, match_classes, open_data
from ls_edge.data.preprocess import Preprocessor, iterate
from ls_edge.engines.onnxruntime import open_session
from ls_edge.engines.providers import CPU
from ls_edge.export.canonical import to_bytes
from ls_edge.export.int8 import linear_layers

IMAGES = 512
"""Maximum number of images; every second one is held out for verification."""
LEAST = 16
"""Minimum number of images for meaningful accuracies."""
RANGE_IMAGES = 64
"""Number of images used to measure activation ranges."""
RANGE_ORDERS = 2
"""Number of random orders used to measure ranges, in addition to the trained order."""
PERCENTILE = 99.99
"""Percentile of the magnitudes in a batch that becomes the range; larger values are clipped."""


@dataclass(frozen=True)
class Samples:
    """Preprocessed images, float32 ``[n, 3, H, W]``, and their labels, int64 ``[n]``, if they have any."""

    images: np.ndarray
    labels: np.ndarray | None

    def __len__(self) -> int:
        return len(self.images)

    def batches(self, size: int) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Yield images and labels, ``size`` at a time."""
        for start in range(0, len(self), size):
            rows = slice(start, start + size)
            yield self.images[rows], None if self.labels is None else self.labels[rows]


@dataclass(frozen=True)
class Calibration:
    """Images from DATA, half of them for fitting and half held out."""

    source: str
    fit: Samples
    held_out: Samples
    account: dict[str, Any] = field(default_factory=dict)
    """See :meth:`ls_edge.data.datasets.ImageSet.account`."""


def read_calibration(
    data: str | ImageSet,
    image: ImageSpec,
    classes: Sequence[str],
    on_warning: OnWarning = warn_in_python,
) -> Calibration:
    """Read up to :data:`IMAGES` images of DATA; skip images that cannot be decoded, with a warning.

    Raise :class:`DataError` if fewer than :data:`LEAST` remain or if the classes differ from the model's.
    """
    found = data if isinstance(data, ImageSet) else open_data(str(data), "eval")
    matched = match_classes(found, classes) if found.classes else found
    taken = matched.take(IMAGES if matched.live else min(IMAGES, len(matched)))
    images, labels, unreadable = [], [], list[str]()

    def leave_out(image: ImageRef, error: DataError) -> None:
        unreadable.append(image.name)
        on_warning(f"left out: {error}")

    for _, ref, array in iterate(taken, Preprocessor(image), leave_out):
        images.append(array)
        labels.append(ref.label)
    if len(images) < LEAST:
        raise DataError(
            f"{found.source}: at least {LEAST} images are needed, {len(images)} can be read; give a folder of more"
        )
    known = all(label is not None for label in labels)
    fit, held_out = (
        Samples(np.stack(images[start::2]), np.array(labels[start::2], dtype=np.int64) if known else None)
        for start in (0, 1)
    )
    return Calibration(found.source, fit, held_out, taken.account(unreadable) | {"images": len(images)})


def activation_ranges(blocks: Iterable[onnx.ModelProto], tokens: np.ndarray, bands: Bands) -> list[dict[str, float]]:
    """Return the largest magnitudes in the inputs of each block's linear layers, by the name of the input.

    The ``tokens`` ``[n, N, D]`` of the stem run through the blocks in trained order and in random orders within
    ``bands``, since blocks run in both.
    """
    watched: list[tuple[Any, list[str], bool]] = []
    last = None
    for index, block in enumerate(blocks):
        if block is last:  # blocks that share their weights share a session
            watched.append(watched[-1])
            continue
        last = block
        model, names = _watched(block)
        session = open_session(to_bytes(model, f"block {index}"), f"block {index}", provider=CPU, threads=1)
        watched.append((session, names, len(block.graph.input) > 1))
    ranges: list[dict[str, float]] = [dict.fromkeys(names, 0.0) for _, names, _ in watched]
    for order in [tuple(range(len(watched))), *bands.random_orders(RANGE_ORDERS, seed=0)]:
        for start in range(0, min(len(tokens), RANGE_IMAGES), 8):
            now = tokens[start : start + 8]
            for slot, index in enumerate(order):
                session, names, takes_slot = watched[index]
                inputs = {"tokens": now}
                if takes_slot:
                    inputs["slot"] = np.full(len(now), slot, np.int64)
                now, *seen = session.run(None, inputs)
                for name, values in zip(names, seen, strict=True):
                    largest = float(np.percentile(np.abs(values), PERCENTILE))
                    ranges[index][name] = max(ranges[index][name], largest)
    return ranges


def _watched(block: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """Return a copy of the block with the inputs of its linear layers as additional outputs, and their names."""
    model = onnx.ModelProto()
    model.CopyFrom(block)
    names = list(dict.fromkeys(linear.activations for linear in linear_layers(block)))
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    return model, names
