"""Analyses that need the weights, the attention or the gradients of a run (``RUN_KINDS`` of the evaluation package)."""

from __future__ import annotations

from ls_edge.evaluation.analysis import RUN_KINDS
from ls_edge.training.analysis.attention import AttentionMeasure, ClassAttentionMeasure, RolloutMeasure
from ls_edge.training.analysis.gradients import ExcitationMeasure, InversionMeasure, SaliencyMeasure
from ls_edge.training.analysis.inspected import Inspected, Look
from ls_edge.training.analysis.parts import PartsMeasure
from ls_edge.training.analysis.weights import FilterWeights, LayerScaleWeights, MixingWeights, PositionWeights

__all__ = ["Inspected", "Look", "looks_of"]

LOOKS: dict[str, type[Look]] = {
    "parts": PartsMeasure,
    "attention": AttentionMeasure,
    "rollout": RolloutMeasure,
    "class_attention": ClassAttentionMeasure,
    "saliency": SaliencyMeasure,
    "positions": PositionWeights,
    "filters": FilterWeights,
    "layer_scale": LayerScaleWeights,
    "mixing": MixingWeights,
    "excite": ExcitationMeasure,
    "inversion": InversionMeasure,
}
assert LOOKS.keys() == set(RUN_KINDS)


def looks_of(inspected: Inspected, kinds: tuple[str, ...]) -> dict[str, Look]:
    """Return the measures of those ``kinds`` that read a run."""
    return {kind: look(inspected) for kind, look in LOOKS.items() if kind in kinds}
