"""Norm of a block's addition to a token relative to the norm of the token, ``|f(x) - x| / |x|``, by block and slot.

For the comparison of blocks by position, see arXiv 2407.04513.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ls_edge.analysis.blocks.token_additions import TokenAdditions
from ls_edge.analysis.kind import MeasuredKind, block_names, number_text
from ls_edge.core.text import NOTHING
from ls_edge.report.theme import Chart


class Contribution(msgspec.Struct, frozen=True):
    """Mean of ``|f(x) - x| / |x|`` of a block ``f`` over images and tokens."""

    trained: list[float | None]
    random: list[list[float | None]]
    """Means by block and slot over the random orders with the block in this slot; None without such an order."""


def _result(measure: TokenAdditions) -> Contribution:
    return Contribution(
        trained=[one.mean for one in measure.trained_ratios],
        random=[[one.mean for one in slots] for slots in measure.random_ratios],
    )


def _finding(found: Contribution) -> str:
    table = found.random
    by_slot = [[value for row in table if (value := row[slot]) is not None] for slot in range(len(table))]
    means = [float(np.mean(values)) for values in by_slot if values]
    return (
        f"In random order a block adds {means[0]:.2f} of the norm of a token in the first slot and {means[-1]:.2f} in "
        "the last one, on average over the blocks."
    )


def _charts(found: Contribution) -> list[Chart]:
    from ls_edge.report.charts.specification import square_of

    return [square_of(found.random, block_names(found.random), ("block", "slot"), "added over input", exponent=0.5)]


def _columns(found: Contribution) -> dict[str, list[str]]:
    ranges = [[value for value in slots if value is not None] for slots in found.random]
    return {
        "adds": [number_text(value) for value in found.trained],
        "adds, by slot": [f"{min(r):.2f} to {max(r):.2f}" if r else NOTHING for r in ranges],
    }


CONTRIBUTION = MeasuredKind(
    summary="norm of what a block adds, relative to its input, by slot",
    text="Norm of what a block adds to a token over the norm of the token, by the slot of the block: means over "
    "images, tokens and random orders. A cell is empty if no random order ran the block in that slot.",
    measure=TokenAdditions,
    result=_result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
    in_terminal=False,
)
