"""What ``ls_edge.evaluation.analysis`` measures, as running sums over batches, and the documents of the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ls_edge.core.bands import Bands

Order = tuple[int, ...]
Floats = NDArray[np.float64]

MOST_CKA_IMAGES = 1000
"""Images over which similarity is computed, the first of the sample: a kernel matrix of each step is in memory."""


class Score(msgspec.Struct, frozen=True):
    """Accuracy and mean cross-entropy in nats."""

    top1: float
    loss: float | None


class BlockImportance(msgspec.Struct, frozen=True):
    """What the answers lose without a block, or with the block in another slot."""

    block: int
    importance: float | None
    """Loss without the block less the loss in trained order."""
    left_out: Score
    """All others in trained order."""
    moved_to: int | None
    """The slot at the farther end of its band; None where its band has no other slot."""
    moved: Score | None


class Importance(msgspec.Struct, frozen=True):
    """The importance of each block."""

    trained: Score
    blocks: list[BlockImportance]


class Contribution(msgspec.Struct, frozen=True):
    """``|f(x) - x| / |x|`` of a block ``f``, mean over images and tokens."""

    trained: list[float | None]
    """By block, each in its own slot."""
    random: list[list[float | None]]
    """By block and slot, mean over the random orders that have the block there; None where none has."""
    orders: int


class Similarity(msgspec.Struct, frozen=True):
    """How alike the tokens after each step are, and what a block adds in trained and in random orders."""

    steps: list[str]
    """``stem``, then the blocks."""
    cka: list[list[float | None]]
    """Linear centred kernel alignment of pooled tokens, by step and step; None where they are all equal."""
    pool: str
    cka_images: int
    cosine: list[float | None]
    """By block: between what it adds to a token in trained order and in random orders; None where it adds nothing."""
    orders: int


class AnswersCompared(msgspec.Struct, frozen=True):
    """Answers in some orders beside those in trained order."""

    left_out: int
    """Blocks."""
    same_class: float
    """Share of answers with the class of the trained order, over images and orders."""
    all_same_class: float
    """Share of images whose class is that of the trained order in all of the orders."""
    total_variation: float | None
    """Mean of half the sum of the differences between the probabilities of the classes."""
    orders: int


class Agreement(msgspec.Struct, frozen=True):
    """How far answers are those of the trained order."""

    random: AnswersCompared
    left_out: list[AnswersCompared]
    """Random subsets in random order, by how many blocks they lack."""


class _Sum:
    """A mean in the making."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, total: float, count: int) -> None:
        self.total += total
        self.count += count

    @property
    def mean(self) -> float | None:
        """None where there is nothing, or it is not finite."""
        value = self.total / self.count if self.count else math.nan
        return value if math.isfinite(value) else None


class ImportanceMeasure:
    """Accuracy and loss in trained order, without each block, and with each block at the other end of its band."""

    def __init__(self, bands: Bands) -> None:
        self._trained = tuple(range(bands.num_blocks))
        self._moves = [_moved_to(bands, block) for block in self._trained]
        self._right: dict[Order, int] = {}
        self._loss: dict[Order, _Sum] = {}
        for order in (self._trained, *map(self._without, self._trained), *map(self._moved, self._trained)):
            self._right[order], self._loss[order] = 0, _Sum()

    @property
    def orders(self) -> Sequence[Order]:
        """What has to run."""
        return list(self._right)

    def add(self, order: Order, logits: np.ndarray, labels: np.ndarray) -> None:
        """Take in the logits ``[B, C]`` of an order; another one's than :attr:`orders` are left aside."""
        if order in self._right:
            self._right[order] += int((logits.argmax(axis=1) == labels).sum())
            losses = -_log_softmax(logits)[np.arange(len(labels)), labels]
            self._loss[order].add(float(losses.sum()), len(labels))

    def result(self) -> Importance:
        """The importance of each block."""
        trained = self._score(self._trained)
        blocks = []
        for block, moved_to in enumerate(self._moves):
            without = self._score(self._without(block))
            importance = None if without.loss is None or trained.loss is None else without.loss - trained.loss
            moved = None if moved_to is None else self._score(self._moved(block))
            blocks.append(BlockImportance(block, importance, without, moved_to, moved))
        return Importance(trained, blocks)

    def _score(self, order: Order) -> Score:
        loss = self._loss[order]
        return Score(self._right[order] / loss.count, loss.mean)

    def _without(self, block: int) -> Order:
        return tuple(one for one in self._trained if one != block)

    def _moved(self, block: int) -> Order:
        others = list(self._without(block))
        slot = self._moves[block]
        others.insert(block if slot is None else slot, block)
        return tuple(others)


def _moved_to(bands: Bands, block: int) -> int | None:
    """The slot at the end of the block's band that is farther from it, its last one in the middle; None of one slot."""
    band = bands.groups[bands.band_of(block)]
    first, last = band.start, band.stop - 1
    if first == last:
        return None
    return last if block - first <= last - block else first


class AgreementMeasure:
    """Answers in random orders and with blocks left out, beside those in trained order."""

    def __init__(self, trained: Order, random: Sequence[Order], left_out: Mapping[int, Sequence[Order]]) -> None:
        self._trained = trained
        self._groups = {0: list(random), **{count: list(orders) for count, orders in left_out.items()}}
        self._same = {order: 0 for orders in self._groups.values() for order in orders}
        self._distance = {order: _Sum() for order in self._same}
        self._always = dict.fromkeys(self._groups, 0)
        self._images = 0
        self._all: dict[int, np.ndarray] = {}
        self._members: dict[Order, list[int]] = {}
        for count, orders in self._groups.items():
            for order in set(orders):
                self._members.setdefault(order, []).append(count)

    @property
    def orders(self) -> Sequence[Order]:
        """What has to run."""
        return list(self._same)

    def add(self, order: Order, logits: np.ndarray, trained: np.ndarray) -> None:
        """Take in the logits ``[B, C]`` of an order and of the trained one, of the same images."""
        if order == self._trained:
            self._images += len(logits)
        if order not in self._same:
            return
        same = logits.argmax(axis=1) == trained.argmax(axis=1)
        self._same[order] += int(same.sum())
        difference = np.abs(np.exp(_log_softmax(logits)) - np.exp(_log_softmax(trained)))
        self._distance[order].add(float(difference.sum()) / 2, len(logits))
        for count in self._members[order]:
            before = self._all.get(count)
            self._all[count] = same if before is None else before & same

    def end_batch(self) -> None:
        """Count the images of the batch that had one class in all orders."""
        for count, same in self._all.items():
            self._always[count] += int(same.sum())
        self._all.clear()

    def result(self) -> Agreement:
        """The agreement of random orders, and by the number of blocks that were left out."""
        first, *rest = (self._compared(count) for count in self._groups)
        return Agreement(first, rest)

    def _compared(self, count: int) -> AnswersCompared:
        orders = self._groups[count]
        distances = [self._distance[order].mean for order in orders]
        known = [distance for distance in distances if distance is not None]
        return AnswersCompared(
            left_out=count, same_class=sum(self._same[order] for order in orders) / len(orders) / self._images,
            all_same_class=self._always[count] / self._images,
            total_variation=sum(known) / len(known) if len(known) == len(orders) else None, orders=len(orders),
        )  # fmt: skip


class TokenMeasures:
    """What blocks add to tokens, in trained and in random orders; it looks on as all orders are walked."""

    def __init__(
        self, array_of: Callable[[Any], np.ndarray], trained: Order, random: Sequence[Order], pool: str
    ) -> None:
        self._array_of = array_of
        self._trained = trained
        self._random = list(random)
        self._pool = pool
        self._times: dict[Order, int] = {}
        for order in self._random:
            for end in range(1, len(order) + 1):
                self._times[order[:end]] = self._times.get(order[:end], 0) + 1
        self._own = [_Sum() for _ in trained]
        self._by_slot = [[_Sum() for _ in trained] for _ in trained]
        self._cosine = [_Sum() for _ in trained]
        self._arrays: list[np.ndarray] = []
        self._added: dict[int, tuple[np.ndarray, Floats]] = {}
        """By block: what it added in trained order to this batch, and the norms of that."""
        self._pooled: list[list[Floats]] = [[] for _ in range(len(trained) + 1)]

    @property
    def orders(self) -> Sequence[Order]:
        """What has to run."""
        return [self._trained, *self._random]

    def begin(self, start: Any) -> None:
        """Begin a batch with the tokens of the stem."""
        self._arrays = [self._array_of(start)]
        self._added = {}
        self._keep(0, self._arrays[0])

    def look(self, path: Sequence[int], tokens: Any, /) -> None:
        """Take in the tokens after the last block of ``path``."""
        here = tuple(path)
        in_place = here == self._trained[: len(here)]
        times = self._times.get(here, 0)
        if not in_place and not times:
            return
        block, slot = here[-1], len(here) - 1
        after = self._array_of(tokens)
        del self._arrays[slot + 1 :]
        before = self._arrays[slot]
        self._arrays.append(after)
        added = after - before
        norms, inputs = _norms(added), _norms(before)
        usable = inputs > 0
        ratio = float((norms[usable] / inputs[usable]).sum())
        count = int(usable.sum())
        if in_place:  # walked ahead of every path that leaves the trained order
            self._own[block].add(ratio, count)
            self._added[block] = added, norms
            self._keep(slot + 1, after)
        self._by_slot[block][slot].add(times * ratio, times * count)
        if times:
            usual, usual_norms = self._added[block]
            usable = (norms > 0) & (usual_norms > 0)
            products = np.einsum("bnd,bnd->bn", added, usual, dtype=np.float64)[usable]
            cosines = products / (norms[usable] * usual_norms[usable])
            self._cosine[block].add(times * float(cosines.sum()), times * int(usable.sum()))

    def contribution(self) -> Contribution:
        """By block and slot."""
        return Contribution(
            trained=[one.mean for one in self._own],
            random=[[one.mean for one in slots] for slots in self._by_slot], orders=len(self._random),
        )  # fmt: skip

    def similarity(self) -> Similarity:
        """Of the steps in trained order, and of what blocks add in other orders."""
        steps = [np.concatenate(pooled) for pooled in self._pooled]
        return Similarity(
            steps=["stem", *map(str, self._trained)], cka=cka_matrix(steps), pool=self._pool,
            cka_images=len(steps[0]), cosine=[one.mean for one in self._cosine], orders=len(self._random),
        )  # fmt: skip

    def _keep(self, step: int, tokens: np.ndarray) -> None:
        room = MOST_CKA_IMAGES - sum(map(len, self._pooled[step]))
        some = tokens[:room]
        if len(some):
            self._pooled[step].append(
                some.mean(axis=1, dtype=np.float64) if self._pool == "mean" else some[:, 0].astype(np.float64)
            )


def cka_matrix(steps: Sequence[Floats]) -> list[list[float | None]]:
    """Linear centred kernel alignment (arXiv 1905.00414) of each two of some representations ``[images, D]``.

    With centred kernels ``K = X X'`` and ``L = Y Y'``: ``<K, L> / (|K| |L|)``. None where a kernel is all zeros.
    """
    kernels = []
    for values in steps:
        centred = values - values.mean(axis=0)
        kernel = centred @ centred.T
        size = float(np.linalg.norm(kernel))
        # Of equal rows the mean leaves no more than errors of rounding.
        alike = size <= 1e-20 * max(float(np.square(values).sum()), 1e-300)
        kernels.append(None if alike or not math.isfinite(size) else kernel / size)
    return [
        [None if one is None or other is None else min(1.0, float(np.vdot(one, other))) for other in kernels]
        for one in kernels
    ]


def _norms(values: np.ndarray) -> Floats:
    found: Floats = np.sqrt(np.einsum("bnd,bnd->bn", values, values, dtype=np.float64))
    return found


def _log_softmax(logits: np.ndarray) -> Floats:
    """Logarithms of the probabilities ``[B, C]``."""
    shifted: Floats = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    found: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found
