"""Outputs of blocks in any slot (arXiv 2407.04513, Figure 4), for the kinds ``slots``, ``norms``, ``probe``, ``umap``.

Every image runs in its own order, so a block appears in each slot of its band.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.evaluation.measure import Mean, Measure, TokenModel

MOST_IMAGES = 1000
"""Maximum number of images whose outputs are kept, as in the paper."""
MOST_VALUES = 2**26
"""Maximum number of values that are kept for a map (256 MiB); maps of large models have fewer images."""


class SlotOutputs(Measure):
    """Outputs of each block by its slot in the order of an image."""

    def __init__(self, model: TokenModel, plan: AnalysisPlan) -> None:
        self._model, self.plan = model, plan
        self.images = 0
        depth = plan.bands.num_blocks
        self.right = [[Mean() for _ in range(depth)] for _ in range(depth)]
        """Fraction of correct answers, by block and slot."""
        self.steps: list[list[tuple[int, np.ndarray, np.ndarray]]] = [[] for _ in range(depth)]
        """Slot, pooled output and pooled addition, by block and image."""
        self.mapped: dict[str, list[tuple[int, int, np.ndarray]]] = {
            f"tokens after block {plan.mapped}": [],
            f"logits after block {plan.mapped}": [],
            "tokens after any block": [],
        }
        """Block, slot and vector, by map and image."""

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Run each image of a batch in its order."""
        for place, label in enumerate(labels):
            order = self.plan.bands.random_order(self.plan.settings.seed, self.images)
            right = self._run(order, start[place : place + 1]).argmax() == label
            for slot, block in enumerate(order):
                self.right[block][slot].add(float(right), 1)
            self.images += 1

    def _run(self, order: Sequence[int], tokens: Any) -> np.ndarray:
        """Return the logits of one image; keep the outputs of its blocks while the limits allow it."""
        drawn = order[self.images % len(order)]
        before = self._pooled(self._model.array_of(tokens)[0])
        for slot, block in enumerate(order):
            tokens = self._model.block(block, tokens, slot)
            if self.images < MOST_IMAGES:
                after = self._model.array_of(tokens)[0]
                pooled = self._pooled(after)
                self.steps[block].append((slot, pooled, pooled - before))
                before = pooled
                if "umap" in self.plan.kinds and (self.images + 1) * after.size <= MOST_VALUES:
                    self._map(block, slot, after, tokens, block == drawn)
        return self._model.head(tokens)

    def _map(self, block: int, slot: int, after: np.ndarray, tokens: Any, is_drawn: bool) -> None:
        own, logits, drawn = self.mapped.values()
        if block == self.plan.mapped:
            own.append((block, slot, after.ravel()))
            logits.append((block, slot, self._model.head(tokens)[0]))
        if is_drawn:
            drawn.append((block, slot, after.ravel()))

    def _pooled(self, tokens: np.ndarray) -> np.ndarray:
        return np.asarray(tokens.mean(axis=0) if self.plan.settings.pool == "mean" else tokens[0])

    @property
    def kept(self) -> int:
        """Number of images whose outputs are kept."""
        return min(self.images, MOST_IMAGES)

    @property
    def chances(self) -> list[float]:
        """Probability of guessing the slot of each block among the slots of its band."""
        bands = self.plan.bands
        return [1 / len(bands.groups[bands.band_of(block)]) for block in range(bands.num_blocks)]
