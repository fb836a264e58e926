"""The function of each block of a model, and its dependence on the slot; numpy only.

Kinds of analysis, all within the model's bands:

- ``importance``: accuracy and loss with each block left out, and with each block moved to the other end of its band;
- ``contribution``: the norm of what a block adds relative to that of its input, ``|f(x) - x| / |x|`` of each token, by
  block and slot (arXiv 2407.04513 compares blocks by their position);
- ``similarity``: linear centered kernel alignment (arXiv 1905.00414) of the tokens after each step in trained order,
  and the cosine between what a block adds in trained and in random order;
- ``agreement``: agreement of answers in random order, and with blocks left out, with those of the trained order;
- ``attention``: distance and entropy of attention by block and head, from :mod:`ls_edge.training.models.attention`.

One pass over the images. Sums are float64. Memory does not grow with the images: tokens of one batch, two arrays for
each block, and pooled tokens of at most :data:`ls_edge.evaluation.analysis_measures.MOST_CKA_IMAGES` images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.evaluation.analysis_measures import (
    Agreement,
    AgreementMeasure,
    Contribution,
    Importance,
    ImportanceMeasure,
    Similarity,
    TokenMeasures,
)
from ls_edge.evaluation.measure import BlockModel, Measure, Order, measure_orders
from ls_edge.evaluation.orders import DRAWS

KINDS = ("importance", "contribution", "similarity", "agreement", "attention")
NOT_ASKED = "not asked for"


class TokenModel(BlockModel, Protocol):
    """A model with readable tokens."""

    def array_of(self, tokens: Any, /) -> np.ndarray:
        """Return tokens as an array float32 ``[B, N, D]``."""
        ...


class AttentionStatistics(msgspec.Struct, frozen=True):
    """Attention in trained order by block and head; means over images and queries."""

    distance: list[list[float]]
    """Mean distance between patches that attend to each other, weighted by attention, in patches."""
    entropy: list[list[float]]
    """Entropy of the attention of a token over all tokens, in nats."""
    grid: tuple[int, int]
    prefix_tokens: int
    """Tokens before the patches, which distances leave out."""


class Analysis(msgspec.Struct, frozen=True):
    """Document of ``analyze --json``; ``reasons`` has the reason for a kind that is None."""

    schema: int
    images: int
    skipped: int
    importance: Importance | None
    contribution: Contribution | None
    similarity: Similarity | None
    agreement: Agreement | None
    attention: AttentionStatistics | None
    reasons: dict[str, str]
    settings: dict[str, Any]


class AnalysisOrders(msgspec.Struct, frozen=True):
    """Kinds to measure, and the orders for it, all drawn from one seed."""

    bands: Bands
    kinds: tuple[str, ...]
    orders: int
    seed: int
    pool: Literal["mean", "first"] = "mean"
    """Vector of an image: the mean of its tokens, or the first one (the class token, if there is one)."""

    @property
    def trained(self) -> Order:
        """The trained order of all blocks."""
        return tuple(range(self.bands.num_blocks))

    def random(self) -> list[Order]:
        """Return the random orders of all blocks."""
        return self.bands.random_orders(self.orders, self.seed)

    def left_out(self) -> dict[int, list[Order]]:
        """Return random orders of random subsets, by the number of blocks left out."""
        num_blocks = self.bands.num_blocks
        counts = sorted({1, *(round(num_blocks * part / 4) for part in (1, 2, 3))} & set(range(1, num_blocks)))
        return {
            count: [
                self.bands.random_subset_order(num_blocks - count, self.seed, draw, shuffled=True)
                for draw in range(DRAWS)
            ]
            for count in counts
        }


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
    """Measure all kinds of a plan except attention; other arguments and errors are those of :func:`measure_orders`."""
    trained, random = plan.trained, plan.random()
    importance = ImportanceMeasure(plan.bands) if "importance" in plan.kinds else None
    agreement = AgreementMeasure(trained, random, plan.left_out()) if "agreement" in plan.kinds else None
    asked = {"contribution", "similarity"} & set(plan.kinds)
    tokens = TokenMeasures(model.array_of, trained, random, plan.pool) if asked else None
    measures: list[Measure] = [one for one in (importance, agreement, tokens) if one is not None]
    images = measure_orders(model, batches, measures, on_batch=on_batch)
    return Analysis(
        schema=1,
        images=images,
        skipped=0,
        attention=None,
        settings={},
        importance=None if importance is None else importance.result(),
        contribution=tokens.contribution() if tokens is not None and "contribution" in asked else None,
        similarity=tokens.similarity() if tokens is not None and "similarity" in asked else None,
        agreement=None if agreement is None else agreement.result(),
        reasons={kind: NOT_ASKED for kind in KINDS if kind not in plan.kinds},
    )
