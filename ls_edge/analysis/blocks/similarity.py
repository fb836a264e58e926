"""Similarity of the tokens after each step in trained order, and of a block's additions in trained and random order.

Tokens are compared by linear centered kernel alignment (arXiv 1905.00414), additions by their cosine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ls_edge.analysis.blocks.token_additions import TokenAdditions
from ls_edge.analysis.kind import MeasuredKind, block_names, number_text
from ls_edge.evaluation.measure import Floats
from ls_edge.report.theme import Chart


class Similarity(msgspec.Struct, frozen=True):
    """Similarity of the tokens after each step, and of a block's additions in trained and in random orders."""

    steps: list[str]
    cka: list[list[float | None]]
    """Linear centered kernel alignment of pooled tokens, for each pair of steps; None if all images are equal."""
    pool: str
    cka_images: int
    cosine: list[float | None]
    """Cosine between a block's additions to a token in trained and in random orders; None if it adds nothing."""
    orders: int


def cka_matrix(steps: Sequence[Floats]) -> list[list[float | None]]:
    """Return the linear centered kernel alignment (arXiv 1905.00414) of each pair of representations ``[images, D]``.

    With centered kernels ``K = X X'`` and ``L = Y Y'``, it is ``<K, L> / (|K| |L|)``, or None if a kernel is all zeros.
    """
    kernels = []
    for values in steps:
        centered = values - values.mean(axis=0)
        kernel = centered @ centered.T
        size = float(np.linalg.norm(kernel))
        # If all rows are equal, only rounding errors remain.
        alike = size <= 1e-20 * max(float(np.square(values).sum()), 1e-300)
        kernels.append(None if alike or not math.isfinite(size) else kernel / size)
    return [
        [None if one is None or other is None else min(1.0, float(np.vdot(one, other))) for other in kernels]
        for one in kernels
    ]


def _result(measure: TokenAdditions) -> Similarity:
    steps = [np.concatenate(pooled) for pooled in measure.pooled]
    return Similarity(
        steps=["stem", *block_names(measure.cosines)],
        cka=cka_matrix(steps),
        pool=measure.pool,
        cka_images=len(steps[0]),
        cosine=[one.mean for one in measure.cosines],
        orders=len(measure.random),
    )


def _finding(found: Similarity) -> str:
    steps = [(row[at], at) for at, row in enumerate(found.cka[1:]) if row[at] is not None]
    cosines = [value for value in found.cosine if value is not None]
    text = ""
    if steps:
        text = "Block {1} changes the tokens most: CKA {0:.2f} to the tokens before it. ".format(*min(steps))
    if cosines:
        text += (
            f"A block's addition in random order has a cosine of {min(cosines):.2f} to {max(cosines):.2f} with its "
            f"addition in trained order: {'nearly the same' if min(cosines) > 0.6 else 'different'} directions."
        )
    return text.strip()


def _charts(found: Similarity) -> list[Chart]:
    from ls_edge.report.charts.specification import square_of

    return [square_of(found.cka, found.steps, ("after step", "after step"), "linear CKA")]


def _columns(found: Similarity) -> dict[str, list[str]]:
    return {
        "CKA to before": [number_text(row[step]) for step, row in enumerate(found.cka[1:])],
        "cosine": [number_text(value) for value in found.cosine],
    }


SIMILARITY = MeasuredKind(
    summary="similarity of tokens after each step (CKA), and of additions",
    text="Linear centered kernel alignment of the pooled tokens after any two steps in trained order: 1 means equal "
    "except for rotation and scale. A cell is empty if all images have the same tokens.",
    measure=TokenAdditions,
    result=_result,
    finding=_finding,
    charts=_charts,
    columns=_columns,
    in_terminal=False,
)
