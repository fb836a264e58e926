"""Outputs of blocks in any slot: accuracy, size, and how far they tell the slot (arXiv 2407.04513, Figure 4).

Every image runs in an order of its own, so a block has each slot of its band. scikit-learn and umap-learn (extra
``analyze``) fit the probe and the maps.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.evaluation.measure import Mean, Measure, TokenModel
from ls_edge.evaluation.orders import AnalysisOrders

MOST_IMAGES = 1000
"""Images whose outputs are kept, as in the paper."""
MOST_VALUES = 2**26
"""Values of the outputs that are kept for a map: 256 MiB. Large models have fewer images on it."""
BINS = 24
NEIGHBORS = 10
FEWEST = 5
"""Images of each slot that a probe or a map needs."""


class SlotAccuracy(msgspec.Struct, frozen=True):
    """Accuracy over the images whose order had a block in a slot, by block and slot; None without such an image."""

    accuracy: list[list[float | None]]
    images: list[list[int]]


class AddedNorms(msgspec.Struct, frozen=True):
    """Norm of what a block adds to the pooled token, relative to the largest norm of the block, by block and slot."""

    mean: list[list[float | None]]
    shares: list[list[list[float]]]
    """Fraction of the images in each of equal bins from 0 to 1; empty for a slot without images."""
    pool: str
    images: int


class Probe(msgspec.Struct, frozen=True):
    """Accuracy, by block, of a linear classifier of the slot from the pooled output, on images left out of its fit."""

    accuracy: list[float | None]
    """None for a block with a single slot, or with too few images."""
    shuffled: list[float | None]
    """The same after the slots were exchanged at random among the images."""
    chance: list[float]
    images: int


class Map(msgspec.Struct, frozen=True):
    """UMAP of outputs, a point for each image."""

    of: str
    points: list[tuple[float, float]]
    blocks: list[int]
    slots: list[int]
    neighbors: float
    """Fraction of the points whose slot is the most frequent one of their :data:`NEIGHBORS` nearest points."""
    chance: float


class SlotOutputs(Measure):
    """Outputs of every block in the slot that it had in the order of an image."""

    def __init__(self, model: TokenModel, plan: AnalysisOrders) -> None:
        self._model, self._plan = model, plan
        self._images = 0
        depth = plan.bands.num_blocks
        self._right = [[Mean() for _ in range(depth)] for _ in range(depth)]
        self._steps: list[list[tuple[int, np.ndarray, np.ndarray]]] = [[] for _ in range(depth)]
        """Slot, pooled output and pooled addition, by block and image."""
        self._mapped: dict[str, list[tuple[int, int, np.ndarray]]] = {
            f"tokens after block {plan.mapped}": [],
            f"logits after block {plan.mapped}": [],
            "tokens after any block": [],
        }
        """Block, slot and vector, by map and image."""

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Run each image of a batch in its order."""
        for place, label in enumerate(labels):
            order = self._plan.bands.random_order(self._plan.seed, self._images)
            right = self._run(order, start[place : place + 1]).argmax() == label
            for slot, block in enumerate(order):
                self._right[block][slot].add(float(right), 1)
            self._images += 1

    def _run(self, order: Sequence[int], tokens: Any) -> np.ndarray:
        """Return the logits of one image; keep the outputs of its blocks, if there is room for them."""
        drawn = order[self._images % len(order)]
        before = self._pooled(self._model.array_of(tokens)[0])
        for slot, block in enumerate(order):
            tokens = self._model.block(block, tokens, slot)
            if self._images < MOST_IMAGES:
                after = self._model.array_of(tokens)[0]
                pooled = self._pooled(after)
                self._steps[block].append((slot, pooled, pooled - before))
                before = pooled
                if "umap" in self._plan.kinds and (self._images + 1) * after.size <= MOST_VALUES:
                    self._map(block, slot, after, tokens, block == drawn)
        return self._model.head(tokens)

    def _map(self, block: int, slot: int, after: np.ndarray, tokens: Any, is_drawn: bool) -> None:
        own, logits, drawn = self._mapped.values()
        if block == self._plan.mapped:
            own.append((block, slot, after.ravel()))
            logits.append((block, slot, self._model.head(tokens)[0]))
        if is_drawn:
            drawn.append((block, slot, after.ravel()))

    def _pooled(self, tokens: np.ndarray) -> np.ndarray:
        found: np.ndarray = tokens.mean(axis=0) if self._plan.pool == "mean" else tokens[0]
        return found

    def slots(self) -> SlotAccuracy:
        """Return the accuracy by block and slot."""
        return SlotAccuracy(
            [[one.mean for one in slots] for slots in self._right],
            [[one.count for one in slots] for slots in self._right],
        )

    def norms(self) -> AddedNorms:
        """Return the norms of additions by block and slot."""
        mean: list[list[float | None]] = []
        shares = []
        for steps in self._steps:
            slots = np.array([slot for slot, _, _ in steps])
            norms = np.array([np.linalg.norm(added) for _, _, added in steps], dtype=np.float64)
            norms /= max(norms.max(), np.finfo(np.float64).tiny)
            parts = [norms[slots == slot] for slot in range(len(self._steps))]
            mean.append([float(part.mean()) if len(part) else None for part in parts])
            counts = [np.histogram(part, BINS, (0.0, 1.0))[0] / max(1, len(part)) for part in parts]
            shares.append([count.tolist() if len(part) else [] for part, count in zip(parts, counts, strict=True)])
        return AddedNorms(mean, shares, self._plan.pool, min(self._images, MOST_IMAGES))

    def probe(self) -> Probe | None:
        """Fit a probe for each block with several slots and enough images; needs scikit-learn."""
        rng = np.random.default_rng(self._plan.seed)
        chance = _chances(self._plan.bands)
        accuracy: list[float | None] = []
        shuffled: list[float | None] = []
        for steps, share in zip(self._steps, chance, strict=True):
            slots = np.array([slot for slot, _, _ in steps])
            outputs = np.stack([output for _, output, _ in steps])
            usable = share < 1 and np.bincount(slots)[np.unique(slots)].min() >= FEWEST
            accuracy.append(_probed(outputs, slots) if usable else None)
            shuffled.append(_probed(outputs, rng.permutation(slots)) if usable else None)
        if all(one is None for one in accuracy):
            return None
        return Probe(accuracy, shuffled, chance, min(self._images, MOST_IMAGES))

    def umap(self) -> list[Map]:
        """Fit the maps, if there are enough images for neighbors; needs umap-learn."""
        chance = _chances(self._plan.bands)[self._plan.mapped]
        found = []
        for of, steps in self._mapped.items():
            if len(steps) > 2 * NEIGHBORS:
                blocks, slots, vectors = (list(each) for each in zip(*steps, strict=True))
                points = _embedded(np.stack(vectors), self._plan.seed)
                near = _neighbors(points, np.array(slots))
                shown = [(round(float(x), 3), round(float(y), 3)) for x, y in points]
                found.append(Map(of, shown, blocks, slots, near, chance))
        return found


def _chances(bands: Bands) -> list[float]:
    return [1 / len(bands.groups[bands.band_of(block)]) for block in range(bands.num_blocks)]


def _probed(outputs: np.ndarray, slots: np.ndarray) -> float:
    """Return the accuracy of logistic regression over five parts, each left out once."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that has not converged after 200 steps reads no less
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200))
        return float(cross_val_score(model, outputs, slots, cv=FEWEST).mean())


def _embedded(vectors: np.ndarray, seed: int) -> np.ndarray:
    """Return points ``[images, 2]``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has no tensorflow, which nothing here needs, and runs on one thread
        from umap import UMAP

        points: np.ndarray = UMAP(n_components=2, random_state=seed, n_jobs=1).fit_transform(vectors)
    return points


def _neighbors(points: np.ndarray, slots: np.ndarray) -> float:
    """Return the fraction of points whose slot is that of most of their nearest points."""
    from sklearn.neighbors import NearestNeighbors

    nearest = slots[NearestNeighbors(n_neighbors=NEIGHBORS).fit(points).kneighbors(return_distance=False)]
    return float(np.mean([np.bincount(row).argmax() == slot for row, slot in zip(nearest, slots, strict=True)]))
