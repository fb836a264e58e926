"""Distance and entropy of attention by block and head in trained order.

As in arXiv 2010.11929, the attention distance is the distance between a patch and the patches that it attends to,
weighted by attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ls_edge.analysis.kind import NO_RUN, MeasuredKind, number_text
from ls_edge.analysis.plan import AnalysisPlan
from ls_edge.evaluation.measure import Measure, NotMeasurable, TokenModel
from ls_edge.report.theme import Chart

if TYPE_CHECKING:
    from torch import Tensor


class AttentionStatistics(msgspec.Struct, frozen=True):
    """Attention in trained order by block and head, averaged over images and queries."""

    distance: list[list[float]]
    """Mean distance between patches that attend to each other, weighted by attention, in patches."""
    entropy: list[list[float]]
    """Entropy of the attention of a token over all tokens, in nats."""
    grid: tuple[int, int]
    prefix_tokens: int
    """Number of tokens before the patches, which distances exclude."""


class AttentionMeasure(Measure):
    """Sums over images of means over queries, float64; raises :class:`NotMeasurable` without plain attention."""

    def __init__(self, model: TokenModel, _: AnalysisPlan) -> None:
        if not hasattr(model, "view"):
            raise NotMeasurable(NO_RUN)
        from ls_edge.training.inspection.attention_weights import distances, plain_attention
        from ls_edge.training.models.torch_blocks import TorchBlocks

        assert isinstance(model, TorchBlocks)
        self._model = model
        self._attention, self._grid, self._prefix = plain_attention(model)
        self._apart = distances(*self._grid).to(model.view.device)
        self._distance: list[Any] = [0.0] * model.num_blocks
        self._entropy: list[Any] = [0.0] * model.num_blocks
        self._images = 0

    def begin(self, start: Any, labels: np.ndarray) -> None:
        """Run a batch in trained order."""
        import torch

        from ls_edge.training.inspection.attention_weights import visible_weights

        captured: list[Tensor] = []
        tokens = start
        with torch.inference_mode(), visible_weights(self._attention, captured):
            for index in range(self._model.num_blocks):
                tokens = self._model.block(index, tokens, index)
                weights = captured.pop().double()
                self._entropy[index] += torch.special.entr(weights).sum(dim=-1).mean(dim=-1).sum(dim=0)
                patches = weights[:, :, self._prefix :, self._prefix :]
                shares = patches / patches.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
                self._distance[index] += (shares * self._apart).sum(dim=-1).mean(dim=-1).sum(dim=0)
        self._images += len(labels)

    def result(self) -> AttentionStatistics:
        """Return the means over all images."""
        distance, entropy = (
            [(one / self._images).tolist() for one in sums] for sums in (self._distance, self._entropy)
        )
        return AttentionStatistics(distance, entropy, self._grid, self._prefix)


def _finding(found: AttentionStatistics) -> str:
    means = [float(np.mean(heads)) for heads in found.distance]
    every = [value for heads in found.distance for value in heads]
    return (
        f"Heads attend {min(every):.2f} to {max(every):.2f} patches away, {means[0]:.2f} on average in block 0 and "
        f"{means[-1]:.2f} in the last block."
    )


def _charts(found: AttentionStatistics) -> list[Chart]:
    import altair as alt

    from ls_edge.report.charts.specification import chart_of, row_of, tooltip_of
    from ls_edge.report.theme import color

    rows = [
        row_of(block=block, head=head, distance=distance, entropy=found.entropy[block][head])
        for block, heads in enumerate(found.distance)
        for head, distance in enumerate(heads)
    ]
    described = "; ".join(f"block {row['block']} head {row['head']}: {row['distance']:.2f}" for row in rows)
    return [
        chart_of(rows)
        .mark_circle(size=60, opacity=0.8, color=color("accent"))
        .encode(
            x=alt.X("block:O", title="block", axis=alt.Axis(labelAngle=0)),
            y=alt.Y("distance:Q", title="patches", axis=alt.Axis(grid=True)),
            tooltip=[
                alt.Tooltip("block:O"),
                alt.Tooltip("head:O"),
                tooltip_of("distance", "distance in patches"),
                tooltip_of("entropy", "entropy, nats"),
            ],
        )
        .properties(width="container", height=220, description=f"{described}.")
    ]


def _columns(found: AttentionStatistics) -> dict[str, list[str]]:
    return {
        "attention distance": [number_text(float(np.mean(heads))) for heads in found.distance],
        "entropy": [number_text(float(np.mean(heads))) for heads in found.entropy],
    }


ATTENTION = MeasuredKind(
    summary="distance and entropy of attention, by head",
    text="Mean distance, in patches, between patches that attend to each other, for each head in trained order.",
    measure=AttentionMeasure,
    result=AttentionMeasure.result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
    needs_run=True,
    in_terminal=False,
)
