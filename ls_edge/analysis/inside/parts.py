"""Contribution of the parts of a block: norms, residual branches, and the residual path."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from ls_edge.analysis.kind import InspectedKind, Score, block_names
from ls_edge.core.errors import ModelError
from ls_edge.evaluation.measure import LabeledImages, Mean, NotMeasurable, log_softmax
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.inspection.inspected import Inspected

NAMES = {
    "attn": "attention",
    "mlp_tokens": "token mixing",
    "linear_tokens": "token mixing",
    "mlp": "MLP",
    "mlp_channels": "MLP",
}
"""Names of residual branches by timm's name of their layer."""


class WithoutPart(msgspec.Struct, frozen=True):
    """Scores without a part of a block."""

    name: str
    blocks: list[Score]
    """Scores without the part in one block, by block."""
    everywhere: Score
    """Score without the part in all blocks."""

    def costs(self, trained: Score) -> list[float]:
        """Return the loss of accuracy without the part, in points, by block."""
        return [100 * (trained.top1 - one.top1) for one in self.blocks]


class PartsWorth(msgspec.Struct, frozen=True):
    """Accuracy and loss in trained order, with all parts of the blocks and without each part."""

    trained: Score
    parts: list[WithoutPart]
    images: int


def inspect(inspected: Inspected, batches: Sequence[LabeledImages]) -> PartsWorth:
    """Return accuracy and loss in trained order without each part, in one block and in all blocks."""
    model, trained = inspected.model, inspected.trained
    changes = _changes(inspected)
    sums: dict[tuple[str, int | None], tuple[Mean, Mean]] = {}

    def score(name: str, block: int | None, tokens: Tensor, labels: np.ndarray) -> None:
        logits = model.head(tokens)
        right, loss = sums.setdefault((name, block), (Mean(), Mean()))
        right.add(float((logits.argmax(axis=1) == labels).sum()), len(labels))
        loss.add(-float(log_softmax(logits)[np.arange(len(labels)), labels].sum()), len(labels))

    for images, labels in batches:
        before = [model.stem(images)]
        for index in trained:
            before.append(model.block(index, before[-1], index))
        score("", None, before[-1], labels)
        for name, run_without in changes.items():
            everywhere = before[0]
            for index in trained:
                everywhere = run_without(index, everywhere)
                tokens = run_without(index, before[index])
                for later in trained[index + 1 :]:
                    tokens = model.block(later, tokens, later)
                score(name, index, tokens, labels)
            score(name, None, everywhere, labels)
    scores = {key: Score(right.mean or 0.0, loss.mean) for key, (right, loss) in sums.items()}
    found = [WithoutPart(name, [scores[name, index] for index in trained], scores[name, None]) for name in changes]
    return PartsWorth(scores["", None], found, sum(len(labels) for _, labels in batches))


def _changes(inspected: Inspected) -> dict[str, Callable[[int, Tensor], Tensor]]:
    """Return a function for each part that runs a block without the part, given index and tokens."""
    import torch

    from ls_edge.training.inspection.inspected import class_of

    model = inspected.model
    try:
        branches = model.view.branches
    except ModelError:
        raise NotMeasurable(
            f"the blocks of {class_of(inspected.model)} do not have a norm before each residual branch"
        ) from None

    def without(names: Sequence[str], replace: Callable[..., Tensor]) -> Callable[[int, Tensor], Tensor]:
        def run(index: int, tokens: Tensor) -> Tensor:
            block = model.view.blocks[index]
            with contextlib.ExitStack() as stack:
                for name in names:
                    stack.enter_context(block.get_submodule(name).register_forward_hook(replace))
                return model.block(index, tokens, index)

        return run

    return {
        "norm": without([branch.norm for branch in branches], lambda _, inputs, __: inputs[0]),
        **{
            NAMES[branch.layer]: without([branch.layer], lambda _, __, output: torch.zeros_like(output))
            for branch in branches
        },
        "residual": lambda index, tokens: model.block(index, tokens, index) - tokens,
    }


def _finding(found: PartsWorth) -> str:
    said = []
    for part in found.parts:
        lost = part.costs(found.trained)
        said.append(f"{part.name} {np.mean(lost):.1f} points (block {int(np.argmax(lost))}: {max(lost):.1f})")
    most = max(found.parts, key=lambda part: (float(np.mean(part.costs(found.trained))), part.name))
    return f"The {most.name} matters most. Without it in one block, accuracy falls on average by: {', '.join(said)}."


def _charts(found: PartsWorth) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import PERCENT, chart_of, lines_chart, row_of, tooltip_of
    from ls_edge.report.theme import color

    where = [*block_names(found.parts[0].blocks), "all"]
    series = {
        part.name: dict(zip(where, [one.top1 for one in (*part.blocks, part.everywhere)], strict=True))
        for part in found.parts
    }
    points = lines_chart(series, "block without the part", "accuracy", order=where, axis=PERCENT, joined=False)
    rule = chart_of([row_of(value=found.trained.top1)]).mark_rule(color=color("ink"), strokeDash=[4, 3])
    layers = alt.layer(rule.encode(y="value:Q", tooltip=[tooltip_of("value", "accuracy with all parts")]), points)
    return [layers.properties(width="container", height=220, description=points.description)]


PARTS = InspectedKind(
    summary="accuracy without norms, attention, MLP, or residual path",
    text="Accuracy in trained order without a part in one block and in all blocks: norms become the identity, the "
    "layer of a residual branch returns zero, or the block returns only what it adds (residual). The dashed line is "
    "the accuracy with all parts.",
    inspect=inspect,
    finding=_finding,
    charts=_charts,
)
