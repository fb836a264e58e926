"""Means over the additions of blocks to tokens, for the kinds ``contribution`` and ``similarity``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.evaluation.measure import Floats, Mean, Measure, TokenModel, starts_of

MOST_CKA_IMAGES = 1000
"""Maximum number of images to compare, since memory holds a kernel matrix for each step."""


class TokenAdditions(Measure):
    """Means over the additions of blocks to tokens, in trained and in random orders."""

    def __init__(self, model: TokenModel, plan: AnalysisPlan) -> None:
        self._array_of, self._trained = model.array_of, plan.trained
        self.pool, self.random = plan.settings.pool, plan.random()
        self.orders = {plan.trained, *self.random}
        self._times = starts_of(self.random)
        self.trained_ratios = [Mean() for _ in plan.trained]
        self.random_ratios = [[Mean() for _ in plan.trained] for _ in plan.trained]
        self.cosines = [Mean() for _ in plan.trained]
        self._arrays: list[np.ndarray] = []
        self._added: dict[int, tuple[np.ndarray, Floats]] = {}
        """Additions of each block in trained order to this batch, and their norms."""
        self.pooled: list[list[Floats]] = [[] for _ in range(len(plan.trained) + 1)]
        """Pooled tokens of the first images after each step in trained order."""

    def begin(self, start: Any, labels: np.ndarray) -> None:  # noqa: ARG002
        """Begin a batch with the tokens of the stem."""
        self._arrays = [self._array_of(start)]
        self._added = {}
        self._keep(0, self._arrays[0])

    def look(self, path: Sequence[int], tokens: Any) -> None:
        """Measure the last block of ``path``."""
        here = tuple(path)
        in_place = here == self._trained[: len(here)]
        times = self._times[here]
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
        if in_place:  # always visited before the paths that leave the trained order
            self.trained_ratios[block].add(ratio, count)
            self._added[block] = added, norms
            self._keep(slot + 1, after)
        self.random_ratios[block][slot].add(times * ratio, times * count)
        if times:
            usual, usual_norms = self._added[block]
            usable = (norms > 0) & (usual_norms > 0)
            products = np.einsum("bnd,bnd->bn", added, usual, dtype=np.float64)[usable]
            cosines = products / (norms[usable] * usual_norms[usable])
            self.cosines[block].add(times * float(cosines.sum()), times * int(usable.sum()))

    def _keep(self, step: int, tokens: np.ndarray) -> None:
        room = MOST_CKA_IMAGES - sum(map(len, self.pooled[step]))
        some = tokens[:room]
        if len(some):
            self.pooled[step].append(
                some.mean(axis=1, dtype=np.float64) if self.pool == "mean" else some[:, 0].astype(np.float64)
            )


def _norms(values: np.ndarray) -> Floats:
    return np.asarray(np.sqrt(np.einsum("bnd,bnd->bn", values, values, dtype=np.float64)))
