"""Measures of :mod:`ls_edge.evaluation.analysis`, and the documents of their results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ls_edge.evaluation.measure import Floats, Mean, Measure, Order, Scores, TokenModel, log_softmax, starts_of
from ls_edge.evaluation.orders import AnalysisOrders, spearman

MOST_CKA_IMAGES = 1000
"""Images over which similarity is computed, the first of the sample: memory holds a kernel matrix of each step."""


class Score(msgspec.Struct, frozen=True):
    """Accuracy and mean cross-entropy in nats."""

    top1: float
    loss: float | None


class BlockImportance(msgspec.Struct, frozen=True):
    """Loss and accuracy without a block, or with the block in another slot."""

    block: int
    importance: float | None
    """Increase of the loss without the block."""
    left_out: Score
    moved_to: int | None
    """Slot at the farther end of its band; None if its band has no other slot."""
    moved: Score | None


class Importance(msgspec.Struct, frozen=True):
    """Importance of each block."""

    trained: Score
    blocks: list[BlockImportance]


class Contribution(msgspec.Struct, frozen=True):
    """Mean of ``|f(x) - x| / |x|`` of a block ``f`` over images and tokens."""

    trained: list[float | None]
    random: list[list[float | None]]
    """Means by block and slot over the random orders with the block there; None without such an order."""
    orders: int


class Similarity(msgspec.Struct, frozen=True):
    """Similarity of the tokens after each step, and of what a block adds in trained and in random orders."""

    steps: list[str]
    cka: list[list[float | None]]
    """Linear centered kernel alignment of pooled tokens, for each two steps; None if all are equal."""
    pool: str
    cka_images: int
    cosine: list[float | None]
    """Cosine by block between its additions to a token in trained and random orders; None if it adds nothing."""
    orders: int


class AnswersCompared(msgspec.Struct, frozen=True):
    """Agreement of the answers in some orders with those in trained order."""

    left_out: int
    same_class: float
    """Fraction of answers with the class of the trained order, over images and orders."""
    all_same_class: float
    """Fraction of images with the class of the trained order in all orders."""
    total_variation: float | None
    """Mean of half the sum of the absolute differences of the class probabilities."""
    orders: int


class Agreement(msgspec.Struct, frozen=True):
    """Agreement of answers with the trained order."""

    random: AnswersCompared
    left_out: list[AnswersCompared]


class ImportanceMeasure(Scores):
    """Scores in trained order, without each block, and with each block at the other end of its band."""

    def __init__(self, _: TokenModel, plan: AnalysisOrders) -> None:
        self._trained = plan.trained
        self._variants: list[tuple[Order, int | None, Order]] = []
        for block in self._trained:
            band = plan.bands.groups[plan.bands.band_of(block)]
            first, last = band.start, band.stop - 1
            # The farther end of the band, the last one from the middle.
            slot = None if first == last else last if block - first <= last - block else first
            without = tuple(one for one in self._trained if one != block)
            moved = self._trained if slot is None else (*without[:slot], block, *without[slot:])
            self._variants.append((without, slot, moved))
        super().__init__(
            {self._trained, *(order for without, _, moved in self._variants for order in (without, moved))}
        )

    def importance(self) -> Importance:
        """Return the importance of each block."""
        trained, blocks = self._score(self._trained), []
        for block, (without, slot, order) in enumerate(self._variants):
            left_out = self._score(without)
            importance = None if left_out.loss is None or trained.loss is None else left_out.loss - trained.loss
            moved = None if slot is None else self._score(order)
            blocks.append(BlockImportance(block, importance, left_out, slot, moved))
        return Importance(trained, blocks)

    def _score(self, order: Order) -> Score:
        return Score(self.top1(order), self.loss(order))


class AgreementMeasure(Measure):
    """Answers in random orders and with blocks left out, compared with those in trained order."""

    def __init__(self, _: TokenModel, plan: AnalysisOrders) -> None:
        self._trained = plan.trained
        self._groups = {0: plan.random(), **plan.left_out()}
        self.orders = {plan.trained, *(order for orders in self._groups.values() for order in orders)}
        self._logits: dict[Order, np.ndarray] = {}
        self._same = {order: Mean() for order in self.orders}
        self._distance = {order: Mean() for order in self.orders}
        self._always = {count: Mean() for count in self._groups}

    def add(self, order: Order, logits: np.ndarray) -> None:
        """Keep the logits of a batch."""
        self._logits[order] = logits

    def end(self) -> None:
        """Compare the orders of a batch."""
        trained = self._logits[self._trained]
        probabilities = np.exp(log_softmax(trained))
        same = {}
        for order, logits in self._logits.items():
            same[order] = logits.argmax(axis=1) == trained.argmax(axis=1)
            self._same[order].add(float(same[order].sum()), len(logits))
            difference = np.abs(np.exp(log_softmax(logits)) - probabilities)
            self._distance[order].add(float(difference.sum()) / 2, len(logits))
        for count, orders in self._groups.items():
            always = np.all([same[order] for order in orders], axis=0)
            self._always[count].add(float(always.sum()), len(trained))
        self._logits.clear()

    def agreement(self) -> Agreement:
        """Return the agreement of random orders, and by the number of blocks left out."""
        compared = []
        for count, orders in self._groups.items():
            distances = [self._distance[order].mean for order in orders]
            known = [distance for distance in distances if distance is not None]
            compared.append(
                AnswersCompared(
                    left_out=count,
                    same_class=float(np.mean([self._same[order].mean for order in orders])),
                    all_same_class=self._always[count].mean or 0.0,
                    total_variation=float(np.mean(known)) if len(known) == len(orders) else None,
                    orders=len(orders),
                )
            )
        return Agreement(compared[0], compared[1:])


class TokenMeasures(Measure):
    """Additions of blocks to tokens, in trained and in random orders."""

    def __init__(self, model: TokenModel, plan: AnalysisOrders) -> None:
        self._array_of, self._pool, self._trained = model.array_of, plan.pool, plan.trained
        self._random = plan.random()
        self.orders = {plan.trained, *self._random}
        self._times = starts_of(self._random)
        self._own = [Mean() for _ in plan.trained]
        self._by_slot = [[Mean() for _ in plan.trained] for _ in plan.trained]
        self._cosine = [Mean() for _ in plan.trained]
        self._arrays: list[np.ndarray] = []
        self._added: dict[int, tuple[np.ndarray, Floats]] = {}
        """Additions of each block in trained order to this batch, and their norms."""
        self._pooled: list[list[Floats]] = [[] for _ in range(len(plan.trained) + 1)]

    def begin(self, start: Any, labels: np.ndarray) -> None:  # noqa: ARG002
        """Begin a batch with the tokens of the stem."""
        self._arrays = [self._array_of(start)]
        self._added = {}
        self._keep(0, self._arrays[0])

    def look(self, path: Sequence[int], tokens: Any) -> None:
        """Measure the last block of ``path``."""
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
        """Return the contribution by block and slot."""
        return Contribution(
            trained=[one.mean for one in self._own],
            random=[[one.mean for one in slots] for slots in self._by_slot],
            orders=len(self._random),
        )

    def similarity(self) -> Similarity:
        """Return the similarity of the steps in trained order, and of additions in other orders."""
        steps = [np.concatenate(pooled) for pooled in self._pooled]
        return Similarity(
            steps=["stem", *map(str, self._trained)],
            cka=cka_matrix(steps),
            pool=self._pool,
            cka_images=len(steps[0]),
            cosine=[one.mean for one in self._cosine],
            orders=len(self._random),
        )

    def _keep(self, step: int, tokens: np.ndarray) -> None:
        room = MOST_CKA_IMAGES - sum(map(len, self._pooled[step]))
        some = tokens[:room]
        if len(some):
            self._pooled[step].append(
                some.mean(axis=1, dtype=np.float64) if self._pool == "mean" else some[:, 0].astype(np.float64)
            )


def cka_matrix(steps: Sequence[Floats]) -> list[list[float | None]]:
    """Return the linear centered kernel alignment (arXiv 1905.00414) of each two representations ``[images, D]``.

    With centered kernels ``K = X X'`` and ``L = Y Y'``: ``<K, L> / (|K| |L|)``. None if a kernel is all zeros.
    """
    kernels = []
    for values in steps:
        centered = values - values.mean(axis=0)
        kernel = centered @ centered.T
        size = float(np.linalg.norm(kernel))
        # Equal rows leave only rounding errors.
        alike = size <= 1e-20 * max(float(np.square(values).sum()), 1e-300)
        kernels.append(None if alike or not math.isfinite(size) else kernel / size)
    return [
        [None if one is None or other is None else min(1.0, float(np.vdot(one, other))) for other in kernels]
        for one in kernels
    ]


def _norms(values: np.ndarray) -> Floats:
    found: Floats = np.sqrt(np.einsum("bnd,bnd->bn", values, values, dtype=np.float64))
    return found


MOST_IMAGES = 256
"""Images for the pairs, the first of the sample: a mean over tokens, which more images hardly change."""


class Pairs(msgspec.Struct, frozen=True):
    """Mean of ``|g(f(x)) - f(g(x))| / |g(f(x)) - x|`` over images and tokens, for blocks ``f`` before ``g``."""

    difference: list[list[float | None]]
    """``[earlier][later]``: 0 for a pair that commutes; None for a pair in different bands, and elsewhere."""
    images: int
    inverted: list[list[float]] | None = None
    """``order_costs.inverted`` of a bundle, in nats; None if it was not measured."""

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of differences and costs over the pairs; None without costs or variation."""
        if self.inverted is None:
            return None
        found = [
            (value, cost)
            for values, costs in zip(self.difference, self.inverted, strict=True)
            for value, cost in zip(values, costs, strict=True)
            if value is not None
        ]
        return spearman(*np.array(found).T) if len(found) > 2 else None


class PairsMeasure(Measure):
    """Running means for each pair of a band."""

    def __init__(self, model: TokenModel, plan: AnalysisOrders) -> None:
        self._model, self._trained = model, plan.trained
        self._images = 0
        pairs = (pair for group in plan.bands.groups for pair in itertools.combinations(group, 2))
        self._means = {pair: Mean() for pair in pairs}

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Run the pairs on a batch."""
        count = min(len(labels), MOST_IMAGES - self._images)
        if count <= 0:
            return
        self._images += count
        before = start[:count]
        for one in self._trained:
            after = self._model.block(one, before, one)
            for (first, other), mean in self._means.items():
                if first == one:
                    self._add(mean, before, after, one, other)
            before = after

    def _add(self, mean: Mean, before: Any, after: Any, one: int, other: int) -> None:
        array_of, block = self._model.array_of, self._model.block
        trained = array_of(block(other, after, one + 1)).astype(np.float64)
        swapped = array_of(block(one, block(other, before, one), one + 1))
        added = np.linalg.norm(trained - array_of(before), axis=2)
        apart = np.linalg.norm(trained - swapped, axis=2)
        usable = added > 0
        mean.add(float((apart[usable] / added[usable]).sum()), int(usable.sum()))

    def pairs(self) -> Pairs:
        """Return the mean of each pair."""
        means = {pair: mean.mean for pair, mean in self._means.items()}
        return Pairs([[means.get((one, other)) for other in self._trained] for one in self._trained], self._images)
