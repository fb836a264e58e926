"""The function of each block of a model, and its dependence on the slot.

Kinds of analysis, all within the model's bands:

- ``importance``: accuracy and loss with each block left out, and with each block moved to the other end of its band;
- ``contribution``: the norm of what a block adds relative to that of its input, ``|f(x) - x| / |x|`` of each token, by
  block and slot (arXiv 2407.04513 compares blocks by their position);
- ``similarity``: linear centered kernel alignment (arXiv 1905.00414) of the tokens after each step in trained order,
  and the cosine between what a block adds in trained and in random order;
- ``agreement``: agreement of answers in random order, and with blocks left out, with those of the trained order;
- ``slots``, ``norms``, ``probe``, ``umap``: outputs of a block by its slot (:mod:`ls_edge.evaluation.analysis.slots`);
- ``pairs``: pairs of blocks that commute (:mod:`ls_edge.evaluation.analysis.measures`);
- :data:`RUN_KINDS`: attention, weights and gradients of a run, from ``ls_edge.training.analysis``; their documents are
  in :mod:`ls_edge.evaluation.analysis.inside`.

One pass over the images. Sums are float64. Memory does not grow with the images: tokens of one batch, two arrays for
each block, and outputs of a bounded number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.errors import UsageError, lacking
from ls_edge.evaluation.analysis.inside import (
    AttentionStatistics,
    ClassAttention,
    Excitation,
    Inversion,
    LayerScale,
    Parts,
    PatchFilters,
    PositionEmbeddings,
    Rollout,
    Saliency,
    TokenMixing,
)
from ls_edge.evaluation.analysis.measures import (
    Agreement,
    AgreementMeasure,
    Contribution,
    Importance,
    ImportanceMeasure,
    Pairs,
    PairsMeasure,
    Similarity,
    TokenMeasures,
)
from ls_edge.evaluation.analysis.slots import AddedNorms, Map, Probe, SlotAccuracy, SlotOutputs
from ls_edge.evaluation.measure import Measure, TokenModel, measure_orders
from ls_edge.evaluation.orders import AnalysisOrders

__all__ = [
    "KINDS",
    "NOT_ASKED",
    "RUN_KINDS",
    "AddedNorms",
    "Agreement",
    "Analysis",
    "AnalysisOrders",
    "Contribution",
    "Importance",
    "Map",
    "Pairs",
    "Probe",
    "Similarity",
    "SlotAccuracy",
    "analyze",
    "parse_kinds",
]

MEASURES: tuple[tuple[tuple[str, ...], Callable[[TokenModel, AnalysisOrders], Measure]], ...] = (
    (("importance",), ImportanceMeasure),
    (("contribution", "similarity"), TokenMeasures),
    (("agreement",), AgreementMeasure),
    (("slots", "norms", "probe", "umap"), SlotOutputs),
    (("pairs",), PairsMeasure),
)
"""Kinds, and the measure that has a method of the name of each, which returns its result."""
RUN_KINDS = (
    "parts",
    "attention",
    "rollout",
    "class_attention",
    "saliency",
    "positions",
    "filters",
    "layer_scale",
    "mixing",
    "excite",
    "inversion",
)
"""Kinds that need the weights of a run."""
KINDS = (*(kind for kinds, _ in MEASURES for kind in kinds), *RUN_KINDS)
NOT_ASKED = "not asked for"
TOO_FEW = "there are too few images, or no band of several blocks"


class Analysis(msgspec.Struct, frozen=True):
    """Document of ``analyze --json``; ``reasons`` has the reason for a kind that is None."""

    schema: int
    images: int
    skipped: int
    importance: Importance | None
    contribution: Contribution | None
    similarity: Similarity | None
    agreement: Agreement | None
    slots: SlotAccuracy | None
    norms: AddedNorms | None
    probe: Probe | None
    umap: list[Map] | None
    pairs: Pairs | None
    parts: Parts | None
    attention: AttentionStatistics | None
    rollout: Rollout | None
    class_attention: ClassAttention | None
    saliency: Saliency | None
    positions: PositionEmbeddings | None
    filters: PatchFilters | None
    layer_scale: LayerScale | None
    mixing: TokenMixing | None
    excite: Excitation | None
    inversion: Inversion | None
    reasons: dict[str, str]
    settings: dict[str, Any]


def parse_kinds(text: str | None) -> tuple[str, ...]:
    """Return the kinds of a comma-separated list, by default all; raise :class:`UsageError` for an unknown one."""
    if text is None:
        return KINDS
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        if name not in KINDS:
            raise UsageError(f"--what {name!r} is not a kind of analysis; use {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in asked)


def analyze(
    model: TokenModel,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    plan: AnalysisOrders,
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Analysis:
    """Measure all kinds of a plan except :data:`RUN_KINDS`.

    Other arguments and errors are those of :func:`measure_orders`.
    """
    asked = [([kind for kind in kinds if kind in plan.kinds], make) for kinds, make in MEASURES]
    measures = [(kinds, make(model, plan)) for kinds, make in asked if kinds]
    images = measure_orders(model, batches, [measure for _, measure in measures], on_batch=on_batch)
    found: dict[str, Any] = dict.fromkeys(KINDS)
    reasons = {kind: NOT_ASKED for kind in KINDS if kind not in plan.kinds}
    for kinds, measure in measures:
        for kind in kinds:
            try:
                found[kind] = getattr(measure, kind)() or None
            except ImportError as error:
                reasons[kind] = f"it needs {lacking(error, 'the extra analyze')}"
            else:
                if found[kind] is None:
                    reasons[kind] = TOO_FEW
    return Analysis(schema=1, images=images, skipped=0, settings={}, reasons=reasons, **found)
