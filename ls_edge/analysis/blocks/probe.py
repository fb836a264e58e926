"""Accuracy of a linear probe that reads a block's slot from its output; needs scikit-learn (extra ``analyze``)."""

from __future__ import annotations

import warnings
from statistics import NormalDist

import msgspec
import numpy as np

from ls_edge.analysis.blocks.slot_outputs import SlotOutputs
from ls_edge.analysis.kind import MeasuredKind, number_text
from ls_edge.core.text import counted, name_blocks, show_percent
from ls_edge.evaluation.run_summary import wilson
from ls_edge.evaluation.spread import LEVEL, holm
from ls_edge.report.theme import Chart

FOLDS = 5
"""Number of folds of the images, and minimum number of images of a slot."""


class Probe(msgspec.Struct, frozen=True):
    """Cross-validated accuracy, by block, of a linear classifier that predicts the slot from the pooled output."""

    accuracy: list[float | None]
    """Accuracy; None for a block with a single slot or with too few images."""
    shuffled: list[float | None]
    """Accuracy after the slots were shuffled among the images."""
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
    """Test, corrected for all blocks, if a probe is better than guessing and than with shuffled slots."""
    known = {
        block: (value, max(control, found.chance[block]))
        for block, (value, control) in enumerate(zip(found.accuracy, found.shuffled, strict=True))
        if value is not None and control is not None
    }
    errors = {block: (2 * guess * (1 - guess) / found.images) ** 0.5 for block, (_, guess) in known.items()}
    normal = NormalDist()
    ps = holm([1 - normal.cdf((value - guess) / errors[block]) for block, (value, guess) in known.items()])
    proven = [block for block, p in zip(known, ps, strict=True) if p < LEVEL]
    if not proven:
        guess = float(np.mean([guess for _, guess in known.values()]))
        return (
            f"Cannot tell with {counted(found.images, 'image')} whether the outputs reveal their slot: a linear probe "
            f"reads at most {show_percent(max(value for value, _ in known.values()))}, a guess is right in "
            f"{show_percent(guess)}. Use more images."
        )
    best = max(proven, key=lambda block: known[block][0])
    low, high = wilson(round(known[best][0] * found.images), found.images) or (0.0, 1.0)
    return (
        f"A linear probe reads the slot of {show_percent(known[best][0])} of the outputs of block {best} (95 % CI "
        f"{show_percent(low)} to {show_percent(high)}); with shuffled slots, of "
        f"{show_percent(found.shuffled[best])}. Beyond chance for {name_blocks(proven)} of "
        f"{counted(len(known), 'block')}."
    )


def _charts(found: Probe) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import PERCENT, bars_chart, chart_of, row_of, tooltip_of
    from ls_edge.report.theme import color

    names = ["outputs", "shuffled slots"]
    rows = [
        row_of(block=block, what=name, value=value, guess=found.chance[block])
        for block, values in enumerate(zip(found.accuracy, found.shuffled, strict=True))
        for name, value in zip(names, values, strict=True)
        if value is not None
    ]
    tips = [tooltip_of("value", "accuracy"), tooltip_of("guess", "guess")]
    share = {"scale": alt.Scale(domain=[0, 1]), "axis": PERCENT}
    bars = bars_chart(rows, names, None, tips, **share)
    guess = chart_of(rows).mark_tick(color=color("ink"), thickness=1.5).encode(x="block:O", y="guess:Q")
    return [alt.layer(bars, guess).properties(width="container", height=220, description=bars.description)]


def _columns(found: Probe) -> dict[str, list[str]]:
    return {"slot read": [number_text(value) for value in found.accuracy]}


PROBE = MeasuredKind(
    summary="accuracy of reading the slot from a block's output",
    text="Accuracy of a linear classifier that predicts the slot from the pooled output of a block, on images that it "
    "was not fitted to. The line on a bar is a guess.",
    measure=SlotOutputs,
    result=_result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
)
