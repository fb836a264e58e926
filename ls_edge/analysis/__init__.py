"""Analysis of the blocks of a model: their function, and how much it depends on their slot.

Each kind of analysis is a file in :mod:`ls_edge.analysis.blocks` or, if it needs the weights of a run, in
:mod:`ls_edge.analysis.inside`. To add a kind, write its file and add a field to :class:`Analysis`. All kinds respect
the model's bands and are measured in one pass over the images. Sums are float64. Memory does not grow with the number
of images: it holds the tokens of one batch, two arrays for each block, and the outputs of a limited number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec

from ls_edge.analysis.blocks.agreement import AGREEMENT, Agreement
from ls_edge.analysis.blocks.contribution import CONTRIBUTION, Contribution
from ls_edge.analysis.blocks.importance import IMPORTANCE, Importance
from ls_edge.analysis.blocks.norms import NORMS, AddedNorms
from ls_edge.analysis.blocks.pairs import PAIRS, Pairs
from ls_edge.analysis.blocks.probe import PROBE, Probe
from ls_edge.analysis.blocks.similarity import SIMILARITY, Similarity
from ls_edge.analysis.blocks.slots import SLOTS, SlotAccuracy
from ls_edge.analysis.blocks.umap import UMAP, Map
from ls_edge.analysis.inside.attention import ATTENTION, AttentionStatistics
from ls_edge.analysis.inside.class_attention import CLASS_ATTENTION, ClassAttention
from ls_edge.analysis.inside.excite import EXCITE, Excitation
from ls_edge.analysis.inside.filters import FILTERS, PatchFilters
from ls_edge.analysis.inside.inversion import INVERSION, Inversion
from ls_edge.analysis.inside.layer_scale import LAYER_SCALE, LayerScale
from ls_edge.analysis.inside.mixing import MIXING, TokenMixing
from ls_edge.analysis.inside.parts import PARTS, PartsWorth
from ls_edge.analysis.inside.positions import POSITIONS, PositionEmbeddings
from ls_edge.analysis.inside.rollout import ROLLOUT, Rollout
from ls_edge.analysis.inside.saliency import SALIENCY, Saliency
from ls_edge.analysis.kind import NO_RUN, InspectedKind, MeasuredKind
from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.core.errors import UsageError, lacking, printable
from ls_edge.core.logs import OnProgress, ignore_progress
from ls_edge.evaluation.measure import LabeledImages, Measure, NotMeasurable, TokenModel, measure_orders

if TYPE_CHECKING:
    from ls_edge.training.inspection.inspected import Inspected

FIRST_IMAGES = 256
"""Maximum number of images on which a run is inspected; kinds that follow gradients use fewer."""
NOT_ASKED = "not asked for"
TOO_FEW = "there are too few images, or no band of several blocks"


class Analysis(msgspec.Struct, frozen=True):
    """Document of ``analyze --json``, with a field for each kind; if it is None, ``reasons`` has the reason."""

    images: int
    skipped: int
    importance: Annotated[Importance | None, IMPORTANCE]
    contribution: Annotated[Contribution | None, CONTRIBUTION]
    similarity: Annotated[Similarity | None, SIMILARITY]
    agreement: Annotated[Agreement | None, AGREEMENT]
    slots: Annotated[SlotAccuracy | None, SLOTS]
    norms: Annotated[AddedNorms | None, NORMS]
    probe: Annotated[Probe | None, PROBE]
    umap: Annotated[list[Map] | None, UMAP]
    pairs: Annotated[Pairs | None, PAIRS]
    parts: Annotated[PartsWorth | None, PARTS]
    attention: Annotated[AttentionStatistics | None, ATTENTION]
    rollout: Annotated[Rollout | None, ROLLOUT]
    class_attention: Annotated[ClassAttention | None, CLASS_ATTENTION]
    saliency: Annotated[Saliency | None, SALIENCY]
    positions: Annotated[PositionEmbeddings | None, POSITIONS]
    filters: Annotated[PatchFilters | None, FILTERS]
    layer_scale: Annotated[LayerScale | None, LAYER_SCALE]
    mixing: Annotated[TokenMixing | None, MIXING]
    excite: Annotated[Excitation | None, EXCITE]
    inversion: Annotated[Inversion | None, INVERSION]
    reasons: dict[str, str]
    settings: dict[str, Any]

    def finding(self, name: str) -> str:
        """Return a sentence about the result of a kind, or the reason why there is none."""
        result = getattr(self, name)
        if result is None:
            return f"None: {printable(self.reasons.get(name, 'a value is not finite'))}."
        return KINDS[name].finding(result)

    @property
    def measured(self) -> list[tuple[str, MeasuredKind | InspectedKind, Any]]:
        """Name, description, and result of each kind that has a result."""
        results = ((name, kind, getattr(self, name)) for name, kind in KINDS.items())
        return [found for found in results if found[2] is not None]


KINDS: dict[str, MeasuredKind | InspectedKind] = {
    name: kind
    for name, hint in get_type_hints(Analysis, include_extras=True).items()
    for kind in getattr(hint, "__metadata__", ())
}
"""Kinds by name, which is a value of ``--what`` and a field of :class:`Analysis`."""


def check_kinds(names: Sequence[str] | None) -> tuple[str, ...]:
    """Return the kinds in the order of :data:`KINDS`, by default all; raise :class:`UsageError` for an unknown one."""
    names = tuple(KINDS) if names is None else names
    for name in names:
        if name not in KINDS:
            raise UsageError(f"--what {name!r} is not a kind of analysis; use {', '.join(KINDS)}")
    return tuple(name for name in KINDS if name in names)


def analyze(
    model: TokenModel,
    batches: Iterable[LabeledImages],
    plan: AnalysisPlan,
    *,
    inspected: Inspected | None = None,
    on_batch: Callable[[int], None] = lambda _: None,
    on_kind: OnProgress = ignore_progress,
) -> Analysis:
    """Measure the kinds of a plan; ``inspected`` is required for kinds that need a run.

    ``on_kind`` is called before the result of a kind is computed from the images, which may take longer than the images
    themselves. See :func:`measure_orders` for the other arguments and errors.
    """
    found: dict[str, Any] = dict.fromkeys(KINDS)
    reasons = {name: NOT_ASKED for name in KINDS if name not in plan.kinds}
    measures: dict[Callable[..., Measure], Measure] = {}
    for name in plan.kinds:
        kind = KINDS[name]
        if isinstance(kind, MeasuredKind) and kind.measure not in measures:
            try:
                measures[kind.measure] = kind.measure(model, plan)
            except NotMeasurable as error:
                reasons[name] = str(error)
    first: list[LabeledImages] = []
    images = measure_orders(
        model, batches if inspected is None else _keep(batches, first), list(measures.values()), on_batch=on_batch
    )
    measured = [name for name in plan.kinds if name not in reasons]
    for number, name in enumerate(measured):
        kind = KINDS[name]
        on_kind(number, len(measured), name)
        try:
            if isinstance(kind, MeasuredKind):
                found[name] = kind.result(measures[kind.measure]) or None
            elif inspected is not None:
                found[name] = kind.inspect(inspected, first)
            if found[name] is None:
                reasons[name] = TOO_FEW if isinstance(kind, MeasuredKind) else NO_RUN
        except NotMeasurable as error:
            reasons[name] = str(error)
        except ImportError as error:
            reasons[name] = f"it needs {lacking(error, 'the extra analyze')}"
    return Analysis(images=images, skipped=0, settings={}, reasons=reasons, **found)


def _keep(batches: Iterable[LabeledImages], first: list[LabeledImages]) -> Iterator[LabeledImages]:
    """Yield batches; copy their first images to ``first``."""
    room = FIRST_IMAGES
    for images, labels in batches:
        if room > 0:
            first.append((images[:room].copy(), labels[:room].copy()))
            room -= len(labels)
        yield images, labels
