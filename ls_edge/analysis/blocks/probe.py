"""Accuracy of a linear probe that reads a block's slot from its output; needs scikit-learn (extra ``analyze``)."""

from __future__ import annotations

import warnings

import msgspec
import numpy as np

from ls_edge.analysis.blocks.slot_outputs import SlotOutputs
from ls_edge.analysis.kind import MeasuredKind, number_text
from ls_edge.core.text import show_percent
from ls_edge.report.theme import Chart

FOLDS = 5
"""Number of folds of the images, and the fewest images of a slot."""


class Probe(msgspec.Struct, frozen=True):
    """Accuracy, by block, of a linear classifier of the slot from the pooled output, on images left out of its fit."""

    accuracy: list[float | None]
    """None for a block with a single slot, or with too few images."""
    shuffled: list[float | None]
    """The same with the slots shuffled among the images."""
    chance: list[float]
    images: int


def _result(measure: SlotOutputs) -> Probe | None:
    """Fit a probe for each block with several slots and enough images."""
    rng = np.random.default_rng(measure.plan.settings.seed)
    accuracy: list[float | None] = []
    shuffled: list[float | None] = []
    for steps, share in zip(measure.steps, measure.chances, strict=True):
        slots = np.array([slot for slot, _, _ in steps])
        outputs = np.stack([output for _, output, _ in steps])
        usable = share < 1 and np.bincount(slots)[np.unique(slots)].min() >= FOLDS
        accuracy.append(_probed(outputs, slots) if usable else None)
        shuffled.append(_probed(outputs, rng.permutation(slots)) if usable else None)
    if all(one is None for one in accuracy):
        return None
    return Probe(accuracy, shuffled, measure.chances, measure.kept)


def _probed(outputs: np.ndarray, slots: np.ndarray) -> float:
    """Return the accuracy of logistic regression, cross-validated over :data:`FOLDS`."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that has not converged after 200 steps is as accurate
        model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=200))
        return float(cross_val_score(model, outputs, slots, cv=FOLDS).mean())


def _finding(found: Probe) -> str:
    known = [(value, block) for block, value in enumerate(found.accuracy) if value is not None]
    control = [value for value in found.shuffled if value is not None]
    (low, least), (high, most) = min(known), max(known)
    return (
        f"A linear probe reads the slot of {show_percent(low)} (block {least}) to {show_percent(high)} (block {most}) "
        f"of the outputs; with slots exchanged at random {show_percent(float(np.mean(control)))}."
    )


def _charts(found: Probe) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import bars_chart, chart_of, percent_axis, row_of, tooltip_of
    from ls_edge.report.theme import color

    names = ["outputs", "slots exchanged at random"]
    rows = [
        row_of(block=block, what=name, value=value, guess=found.chance[block])
        for block, values in enumerate(zip(found.accuracy, found.shuffled, strict=True))
        for name, value in zip(names, values, strict=True)
        if value is not None
    ]
    tips = [tooltip_of("value", "accuracy"), tooltip_of("guess", "guess")]
    share = {"scale": alt.Scale(domain=[0, 1]), "axis": percent_axis()}
    bars = bars_chart(rows, names, None, tips, **share)
    guess = chart_of(rows).mark_tick(color=color("ink"), thickness=1.5).encode(x="block:O", y="guess:Q")
    return [alt.layer(bars, guess).properties(width="container", height=220, description=bars.description)]


def _columns(found: Probe) -> dict[str, list[str]]:
    return {"slot read": [number_text(value) for value in found.accuracy]}


PROBE = MeasuredKind(
    summary="accuracy of reading the slot from a block's output",
    text="Accuracy of a linear classifier of the slot from the pooled output of a block, on images left out of its "
    "fit. The line on a bar is a guess.",
    measure=SlotOutputs,
    result=_result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
)
