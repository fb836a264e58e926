"""Analyses that need the weights, the attention or the gradients of a run (``RUN_KINDS`` of the evaluation package)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ls_edge.evaluation.analysis import RUN_KINDS
from ls_edge.training.analysis.attention import AttentionMeasure, class_attention, rollout
from ls_edge.training.analysis.gradients import excite, inversion, saliency
from ls_edge.training.analysis.inspected import Inspected, LabeledImages, LackingError
from ls_edge.training.analysis.parts import parts
from ls_edge.training.analysis.weights import filters, layer_scale, mixing, positions

__all__ = ["Inspected", "RunAnalysis"]

FIRST_IMAGES = 256
"""First images of the sample, for all kinds but ``attention``; the kinds that follow gradients take fewer."""
OF_WEIGHTS: dict[str, Callable[[Inspected], Any]] = {
    "positions": positions,
    "filters": filters,
    "layer_scale": layer_scale,
    "mixing": mixing,
}
OF_FIRST_IMAGES: dict[str, Callable[[Inspected, Sequence[LabeledImages]], Any]] = {
    "parts": parts,
    "rollout": rollout,
    "class_attention": class_attention,
    "saliency": saliency,
    "excite": excite,
    "inversion": inversion,
}
assert OF_WEIGHTS.keys() | OF_FIRST_IMAGES.keys() | {"attention"} == set(RUN_KINDS)


class RunAnalysis:
    """Analysis of a run by ``kinds``: takes batches of images first, then computes the results."""

    def __init__(self, inspected: Inspected, kinds: Sequence[str]) -> None:
        self._inspected, self._kinds = inspected, kinds
        self._first: list[LabeledImages] = []
        self._attention: AttentionMeasure | None = None
        self._reasons: dict[str, str] = {}
        if "attention" in kinds:
            try:
                self._attention = AttentionMeasure(inspected)
            except LackingError as lacking:
                self._reasons["attention"] = str(lacking)

    def add(self, images: np.ndarray, labels: np.ndarray) -> None:
        """Add images float32 ``[B, 3, H, W]`` and labels int ``[B]``."""
        room = FIRST_IMAGES - sum(len(some) for some, _ in self._first)
        if room > 0:
            self._first.append((images[:room].copy(), labels[:room].copy()))
        if self._attention is not None:
            self._attention.add(images)

    def results(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the result of each kind, and the reason for each kind that the model lacks."""
        found: dict[str, Any] = {}
        for kind in self._kinds:
            try:
                if kind in OF_WEIGHTS:
                    found[kind] = OF_WEIGHTS[kind](self._inspected)
                elif kind in OF_FIRST_IMAGES:
                    found[kind] = OF_FIRST_IMAGES[kind](self._inspected, self._first)
                elif self._attention is not None:
                    found[kind] = self._attention.result()
            except LackingError as lacking:
                self._reasons[kind] = str(lacking)
        return found, self._reasons
