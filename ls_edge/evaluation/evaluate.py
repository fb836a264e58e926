"""Accuracy in trained order, in random orders, and with blocks missing.

The same code evaluates torch models (``ls_edge.training.models.torch_blocks``) and engines
(``ls_edge.engines.pipeline``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.bands import Bands
from ls_edge.evaluation.measure import BlockModel, LabeledImages, Measure, Order, Scores, measure_orders, starts_of
from ls_edge.evaluation.orders import EvaluationOrders
from ls_edge.evaluation.spread import deviation, pooled


class SequentialAccuracy(msgspec.Struct, frozen=True):
    """Accuracy of all blocks in trained order."""

    top1: float


class Arbitrary(msgspec.Struct, frozen=True):
    """Statistics of the accuracies of random orders of all blocks."""

    top1_mean: float
    top1_std: float | None
    """Sample deviation over the orders; None for a single order."""
    top1_p5: float
    top1_worst: float
    orders: int


class Kept(msgspec.Struct, frozen=True):
    """Mean accuracy and deviation over :data:`ls_edge.evaluation.orders.DRAWS` random subsets of the blocks.

    If all blocks are kept, these are the accuracies of the trained order and of the random orders.
    """

    sequential: float
    arbitrary: float
    sequential_std: float | None = None
    arbitrary_std: float | None = None


class Freedom(msgspec.Struct, frozen=True):
    """Accuracy of random orders within some bands."""

    bands: list[list[int]]
    allowed: float
    """Number of orders that the bands allow; a float, since it can exceed 64 bits."""
    orders: int
    top1_mean: float
    top1_std: float | None
    top1_worst: float
    own: bool


class Models(msgspec.Struct, frozen=True):
    """Sample deviations over several runs that are evaluated together."""

    count: int
    sequential_std: float | None
    arbitrary_std: float | None
    runs: list[str]


class Evaluation(msgspec.Struct, frozen=True):
    """The document of ``eval --json``."""

    sequential: SequentialAccuracy
    arbitrary: Arbitrary
    kept: dict[str, Kept]
    position_accuracy: float | None
    """Accuracy of the slots that blocks predict; None if the method does not predict slots."""
    images: int
    chance: float = 0.0
    """Accuracy of the best constant answer."""
    balanced_top1: float = 0.0
    """Mean of the accuracies of the classes, in trained order."""
    top1_by_class: dict[str, float] = {}
    """Accuracy of each class that has images, in trained order."""
    arbitrary_by_class: dict[str, float] = {}
    """The same as means over the random orders."""
    models: Models | None = None
    freedom: list[Freedom] | None = None
    skipped: int = 0
    settings: dict[str, Any] = {}
    name: str = ""
    """Distinct part of the path among the evaluations of a command."""


class Evaluations(msgspec.Struct, frozen=True):
    """Document of ``eval --json`` for several models."""

    evaluations: Sequence[Evaluation]


def evaluate(
    model: BlockModel,
    batches: Iterable[LabeledImages],
    plan: EvaluationOrders,
    classes: Sequence[str] = (),
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Measure the accuracy of all orders of a plan; see :func:`measure_orders` for the other arguments and errors."""
    uniform = plan.uniform()
    owners: Sequence[int] = getattr(model, "owners", range(plan.num_blocks))
    scores, slots = Scores(plan.all_orders()), _Slots(model, [tuple(owners[i] for i in order) for order in uniform])
    images = measure_orders(model, batches, [scores, slots], owners=owners, on_batch=on_batch)
    top1: dict[Order, float] = {order: scores.top1(order) for order in scores.orders}
    random = np.array([top1[order] for order in uniform])
    counts = [scores.counts(orders) for orders in ([tuple(range(plan.num_blocks))], uniform)]
    return Evaluation(
        sequential=SequentialAccuracy(top1[tuple(range(plan.num_blocks))]),
        arbitrary=Arbitrary(
            top1_mean=float(random.mean()),
            top1_std=deviation(random),
            top1_p5=float(np.percentile(random, 5)),
            top1_worst=float(random.min()),
            orders=plan.settings.orders,
        ),
        chance=counts[0].chance,
        balanced_top1=counts[0].balanced,
        top1_by_class=counts[0].by_class(classes),
        arbitrary_by_class=counts[1].by_class(classes),
        kept={
            str(keep): _kept(*([top1[order] for order in plan.subsets(keep, shuffled=how)] for how in (False, True)))
            for keep in plan.keep
        },
        position_accuracy=slots.accuracy(),
        images=images,
        freedom=[_within(plan, bands, top1) for bands in plan.freedom] or None,
    )


class _Slots(Measure):
    """Accuracy of the slots that blocks predict, over random orders of blocks or of those with the same weights."""

    def __init__(self, model: BlockModel, orders: Sequence[Order]) -> None:
        self._guess: Callable[[int, Any], np.ndarray | None] = getattr(model, "slots_of", lambda _block, _tokens: None)
        self._times = starts_of(orders)
        self._right = self._asked = 0

    def look(self, path: Sequence[int], tokens: Any) -> None:
        """Compare the slot that the last block of ``path`` predicts with its actual slot."""
        times = self._times[tuple(path)]
        named = self._guess(path[-1], tokens) if times else None
        if named is not None:
            self._right += times * int((named == len(path) - 1).sum())
            self._asked += times * len(named)

    def accuracy(self) -> float | None:
        """Return the accuracy over all images, orders and blocks, or None without predictions."""
        return self._right / self._asked if self._asked else None


def _kept(in_order: Sequence[float], shuffled: Sequence[float]) -> Kept:
    return Kept(float(np.mean(in_order)), float(np.mean(shuffled)), deviation(in_order), deviation(shuffled))


def aggregate(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Combine evaluations of the same plan: means over the models, sample deviations over models and orders."""
    first = evaluations[0]
    tops = np.array([item.sequential.top1 for item in evaluations])
    means = np.array([item.arbitrary.top1_mean for item in evaluations])
    kept = {keep: [item.kept[keep] for item in evaluations] for keep in first.kept}
    guessed = [item.position_accuracy for item in evaluations if item.position_accuracy is not None]

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    def by_class(shares: Sequence[dict[str, float]]) -> dict[str, float]:
        return {name: mean(one[name] for one in shares) for name in shares[0]}

    return msgspec.structs.replace(
        first,
        sequential=SequentialAccuracy(mean(tops)),
        balanced_top1=mean(item.balanced_top1 for item in evaluations),
        top1_by_class=by_class([item.top1_by_class for item in evaluations]),
        arbitrary_by_class=by_class([item.arbitrary_by_class for item in evaluations]),
        arbitrary=Arbitrary(
            top1_mean=mean(means),
            top1_std=pooled((a.orders, a.top1_mean, a.top1_std) for a in (item.arbitrary for item in evaluations)),
            top1_p5=mean(item.arbitrary.top1_p5 for item in evaluations),
            top1_worst=min(item.arbitrary.top1_worst for item in evaluations),
            orders=first.arbitrary.orders,
        ),
        kept={
            keep: _kept([one.sequential for one in each], [one.arbitrary for one in each])
            for keep, each in kept.items()
        },
        position_accuracy=mean(guessed) if guessed else None,
        freedom=[
            msgspec.structs.replace(
                steps[0],
                top1_mean=mean(item.top1_mean for item in steps),
                top1_std=pooled((item.orders, item.top1_mean, item.top1_std) for item in steps),
                top1_worst=min(item.top1_worst for item in steps),
            )
            for steps in zip(*(item.freedom for item in evaluations if item.freedom), strict=True)
        ]
        or None,
        models=Models(
            count=len(evaluations),
            sequential_std=deviation(tops),
            arbitrary_std=deviation(means),
            runs=[str(item.settings.get("of", "")) for item in evaluations],
        ),
    )


def _within(plan: EvaluationOrders, bands: Bands, top1: dict[Order, float]) -> Freedom:
    values = np.array([top1[order] for order in plan.within(bands)])
    return Freedom(
        bands=bands.to_json(),
        allowed=float(bands.num_orders),
        orders=len(values),
        top1_mean=float(values.mean()),
        top1_std=deviation(values),
        top1_worst=float(values.min()),
        own=bands == plan.own,
    )
