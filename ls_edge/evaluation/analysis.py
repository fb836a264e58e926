"""What each block of a model does, and how much that depends on where it runs; numpy only.

Kinds of analysis, all within the model's bands:

- ``importance``: accuracy and loss with each block left out, and with each block moved to the other end of its band;
- ``contribution``: the norm of what a block adds relative to that of its input, ``|f(x) - x| / |x|`` of each token, by
  block and slot (arXiv 2407.04513 looks at how blocks contribute by their position);
- ``similarity``: linear centred kernel alignment (arXiv 1905.00414) of the tokens after each step in trained order, and
  the cosine between what a block adds in trained and in random order;
- ``agreement``: how far answers in random order, and with blocks left out, are those of the trained order;
- ``attention``: distance and entropy of attention by block and head, which :mod:`ls_edge.training.attention` measures.

One pass over the images. Sums are float64; memory does not grow with the images: arrays of tokens of one batch, two for
each block, and pooled tokens of at most :data:`ls_edge.evaluation.analysis_measures.MOST_CKA_IMAGES` images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError, UsageError
from ls_edge.evaluation.analysis_measures import (
    Agreement,
    AgreementMeasure,
    Contribution,
    Importance,
    ImportanceMeasure,
    Order,
    Similarity,
    TokenMeasures,
)
from ls_edge.evaluation.evaluate import BlockModel, walk
from ls_edge.evaluation.orders import DRAWS

KINDS = ("importance", "contribution", "similarity", "agreement", "attention")
NOT_ASKED = "not asked for"


class TokenModel(BlockModel, Protocol):
    """A model whose tokens can be looked at."""

    def array_of(self, tokens: Any, /) -> np.ndarray:
        """Tokens as an array float32 ``[B, N, D]``."""
        ...


class AttentionStatistics(msgspec.Struct, frozen=True):
    """Attention in trained order, by block and head; means over images and queries."""

    distance: list[list[float]]
    """Mean distance between patches that attend to each other, weighted by attention, in patches."""
    entropy: list[list[float]]
    """Of the attention of a token over all tokens, in nats."""
    grid: tuple[int, int]
    """Patches in height and width."""
    prefix_tokens: int
    """Tokens ahead of the patches; they have no place, so distances leave them out."""


class Analysis(msgspec.Struct, frozen=True):
    """The document of ``analyze --json``; a kind that is None has its reason in ``reasons``."""

    schema: int
    images: int
    skipped: int
    """Images that could not be decoded."""
    importance: Importance | None
    contribution: Contribution | None
    similarity: Similarity | None
    agreement: Agreement | None
    attention: AttentionStatistics | None
    reasons: dict[str, str]
    settings: dict[str, Any]
    """What was analysed, and the defaults in force."""


class AnalysisOrders(msgspec.Struct, frozen=True):
    """Which kinds are measured, and in which orders, all drawn from one seed."""

    bands: Bands
    kinds: tuple[str, ...]
    orders: int
    seed: int
    pool: Literal["mean", "first"] = "mean"
    """How the tokens of an image become one vector: their mean, or the first one (the class token, if there is one)."""

    @property
    def trained(self) -> Order:
        """All blocks in trained order."""
        return tuple(range(self.bands.num_blocks))

    def random(self) -> list[Order]:
        """The random orders of all blocks."""
        return self.bands.random_orders(self.orders, self.seed)

    def left_out(self) -> dict[int, list[Order]]:
        """Random orders of random subsets, by the number of blocks that are left out of them."""
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
    """The kinds of a comma-separated list, all where it is None; raises :class:`UsageError` for an unknown one."""
    if text is None:
        return KINDS
    asked = [name.strip() for name in text.split(",")]
    for name in asked:
        if name not in KINDS:
            raise UsageError(f"--what {name!r} is no kind of analysis; there are {', '.join(KINDS)}")
    return tuple(kind for kind in KINDS if kind in asked)


def analyze(
    model: TokenModel,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    plan: AnalysisOrders,
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Analysis:
    """Measure all kinds of the plan but attention.

    ``batches`` gives images float32 ``[B, 3, H, W]`` and labels int ``[B]``; ``on_batch`` is called with the number of
    images that are done. Raises :class:`DataError` if there are none.
    """
    trained, random = plan.trained, plan.random()
    importance = ImportanceMeasure(plan.bands) if "importance" in plan.kinds else None
    agreement = AgreementMeasure(trained, random, plan.left_out()) if "agreement" in plan.kinds else None
    asked = {kind for kind in ("contribution", "similarity") if kind in plan.kinds}
    tokens = TokenMeasures(model.array_of, trained, random, plan.pool) if asked else None
    orders = {order for measure in (importance, agreement, tokens) if measure is not None for order in measure.orders}
    images = 0
    for pixels, labels in batches:
        start = model.stem(pixels)
        if tokens is not None:
            tokens.begin(start)
        first: np.ndarray | None = None
        early: list[tuple[Order, np.ndarray]] = []
        for order, logits in walk(model, start, sorted({trained, *orders}), tokens):
            early.append((order, logits))
            if order == trained:  # only orders that it begins with come before it
                first = logits
            if first is not None:
                for each, output in early:
                    if importance is not None:
                        importance.add(each, output, labels)
                    if agreement is not None:
                        agreement.add(each, output, first)
                early.clear()
        if agreement is not None:
            agreement.end_batch()
        images += len(labels)
        on_batch(images)
    if not images:
        raise DataError("there are no images to analyse; check the data")
    found: dict[str, Any] = {
        "importance": importance and importance.result(),
        "contribution": tokens.contribution() if tokens is not None and "contribution" in asked else None,
        "similarity": tokens.similarity() if tokens is not None and "similarity" in asked else None,
        "agreement": agreement and agreement.result(),
    }
    return Analysis(
        schema=1, images=images, skipped=0, attention=None, settings={}, **found,
        reasons={kind: NOT_ASKED for kind in KINDS if kind not in plan.kinds},
    )  # fmt: skip
