"""Evaluation of a model in many orders of its blocks, with numpy only.

All orders of a batch of images are visited as a tree: the stem runs once, and the common beginning of several orders is
computed once. Memory holds the tokens after each block of the current path.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ls_edge.core.errors import DataError
from ls_edge.evaluation.classes import ClassCounts

Order = tuple[int, ...]
LabeledImages = tuple[np.ndarray, np.ndarray]
"""Images float32 ``[B, 3, H, W]`` and labels int ``[B]``."""
Floats = npt.NDArray[np.float64]


class NotMeasurable(Exception):
    """A model that cannot provide the input of a measure; the message is the reason."""


class BlockModel(Protocol):
    """Stem, blocks, and head of a torch model or of a bundle's engines, with their own type of tokens."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""

    def stem(self, images: np.ndarray, /) -> Any:
        """Convert images float32 ``[B, 3, H, W]`` to tokens."""

    def block(self, index: int, tokens: Any, slot: int, /) -> Any:
        """Run block ``index`` on tokens; ``slot`` is the number of blocks that ran before."""

    def head(self, tokens: Any, /) -> np.ndarray:
        """Convert tokens to logits ``[B, C]``."""


class TokenModel(BlockModel, Protocol):
    """A model whose tokens can be read."""

    def array_of(self, tokens: Any, /) -> np.ndarray:
        """Return tokens as an array float32 ``[B, N, D]``."""


class Measure:
    """Statistics over some orders, updated with each batch; subclasses override the hooks that they need."""

    orders: Collection[Order] = ()

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Begin a batch, given the tokens of the stem."""

    def look(self, path: Sequence[int], tokens: Any) -> None:
        """Receive the tokens after the last block of ``path``, the blocks that have run.

        Paths are visited depth first in ascending order, so the trained order is the first complete path. The tokens
        before the last block were received earlier, with the path without it; a measure must keep what it needs.
        """

    def add(self, order: Order, logits: np.ndarray) -> None:
        """Receive the logits ``[B, C]`` of an order in :attr:`orders`."""

    def end(self) -> None:
        """End a batch."""


class Mean:
    """Running mean."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, total: float, count: int) -> None:
        """Add the sum of ``count`` values."""
        self.total += total
        self.count += count

    @property
    def mean(self) -> float | None:
        """The mean; None without values or if it is not finite."""
        value = self.total / self.count if self.count else math.nan
        return value if math.isfinite(value) else None


class Scores(Measure):
    """Accuracy and loss of each order."""

    def __init__(self, orders: Iterable[Order]) -> None:
        self.orders = dict.fromkeys(orders)
        self._counts: dict[Order, Floats] = {}
        self._loss = {order: Mean() for order in self.orders}

    def begin(self, start: Any, labels: np.ndarray) -> None:  # noqa: ARG002
        """Keep the labels of a batch."""
        self._labels = labels

    def add(self, order: Order, logits: np.ndarray) -> None:
        """Count images, correct answers, and answers by class."""
        named, classes = logits.argmax(axis=1), logits.shape[1]
        numbers = (self._labels, self._labels[named == self._labels], named)
        counted = np.array([np.bincount(each, minlength=classes) for each in numbers], np.float64)
        self._counts[order] = self._counts.get(order, np.zeros_like(counted)) + counted
        losses = -log_softmax(logits)[np.arange(len(self._labels)), self._labels]
        self._loss[order].add(float(losses.sum()), len(self._labels))

    def top1(self, order: Order) -> float:
        """Return the accuracy of an order."""
        return float(self._counts[order][1].sum()) / self._loss[order].count

    def counts(self, orders: Sequence[Order]) -> ClassCounts:
        """Return the counts by class, as means over some orders."""
        images, right, answers = np.mean([self._counts[order] for order in orders], axis=0).tolist()
        return ClassCounts(tuple(map(int, images)), tuple(right), tuple(answers))

    def loss(self, order: Order) -> float | None:
        """Return the mean cross-entropy of an order in nats."""
        return self._loss[order].mean


def measure_orders(
    model: BlockModel,
    batches: Iterable[LabeledImages],
    measures: Sequence[Measure],
    *,
    owners: Sequence[int] | None = None,
    on_batch: Callable[[int], None] = lambda _: None,
) -> int:
    """Run the orders of all measures on each batch; return the number of images.

    ``on_batch`` receives the number of images so far. ``owners`` has an index for each block; orders that differ only
    in blocks with the same index run once. Raise :class:`DataError` without images.
    """
    alike: dict[Order, list[Order]] = {}
    for order in sorted({order for measure in measures for order in measure.orders}):
        alike.setdefault(order if owners is None else tuple(owners[block] for block in order), []).append(order)
    wanted = [(measure, set(measure.orders)) for measure in measures]
    images = 0
    for pixels, labels in batches:
        start = model.stem(pixels)
        for measure in measures:
            measure.begin(start, labels)
        for path, logits in walk(model, start, list(alike), measures):
            for order in alike[path]:
                for measure, orders in wanted:
                    if order in orders:
                        measure.add(order, logits)
        for measure in measures:
            measure.end()
        images += len(labels)
        on_batch(images)
    if not images:
        raise DataError("there are no images to evaluate on; check the data")
    return images


def walk(
    model: BlockModel, start: Any, orders: Sequence[Order], measures: Sequence[Measure] = ()
) -> Iterable[tuple[Order, np.ndarray]]:
    """Yield each order with its logits, given the tokens of the stem; ``measures`` receive each step once."""
    path: list[int] = []
    tokens: list[Any] = [start]
    for order in sorted(orders):
        common = 0
        while common < min(len(path), len(order)) and path[common] == order[common]:
            common += 1
        del path[common:], tokens[common + 1 :]
        for slot in range(common, len(order)):
            tokens.append(model.block(order[slot], tokens[-1], slot))
            path.append(order[slot])
            for measure in measures:
                measure.look(path, tokens[-1])
        yield order, model.head(tokens[-1])


def starts_of(orders: Iterable[Order]) -> Counter[Order]:
    """Count the orders by each sequence of blocks that they begin with."""
    return Counter(order[:end] for order in orders for end in range(1, len(order) + 1))


def log_softmax(logits: np.ndarray) -> Floats:
    """Return log probabilities ``[B, C]``, float64."""
    shifted: Floats = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
