"""Accuracy in trained order, in any order, and with blocks missing; numpy only.

One evaluation for everything that has a stem, blocks and a head: a torch model (``ls_edge.training.torch_blocks``) and
a bundle's engines (``ls_edge.engines.pipeline``), each with tokens of its own kind that are only passed on here.

All orders of a batch of images are walked as one tree: the stem runs once, and a start that several orders have in
common is computed once. Memory: one set of tokens for each block on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from ls_edge.core.arrangement import apply
from ls_edge.core.bands import Bands
from ls_edge.core.errors import DataError
from ls_edge.evaluation.orders import EvaluationOrders, kendall_tau


class BlockModel(Protocol):
    """Stem, blocks and head of some model; tokens are whatever its parts hand to one another."""

    @property
    def num_blocks(self) -> int:
        """How many blocks."""
        ...

    def stem(self, images: np.ndarray, /) -> Any:
        """Images float32 ``[B, 3, H, W]`` to tokens."""
        ...

    def block(self, index: int, tokens: Any, slot: int, /) -> Any:
        """Tokens after block ``index``, ``slot`` blocks having run before it."""
        ...

    def head(self, tokens: Any, /) -> np.ndarray:
        """Tokens to logits ``[B, C]``."""
        ...


class StepObserver(Protocol):
    """Looks on as orders are walked."""

    def look(self, path: Sequence[int], tokens: Any, /) -> None:
        """Take in the tokens after the last block of ``path``, the blocks that ran up to here."""
        ...


class SequentialAccuracy(msgspec.Struct, frozen=True):
    """All blocks in trained order."""

    top1: float


class Arbitrary(msgspec.Struct, frozen=True):
    """All blocks in random orders: one accuracy an order, and these figures over the orders."""

    top1_mean: float
    top1_std: float
    """Of the orders evaluated (not an estimate for all of them)."""
    top1_p5: float
    """5th percentile."""
    top1_worst: float
    orders: int


class Kept(msgspec.Struct, frozen=True):
    """A part of the blocks, means over :data:`ls_edge.evaluation.orders.DRAWS` random subsets."""

    sequential: float
    """The subset in trained order."""
    arbitrary: float
    """The subset in random order."""


class TrackAccuracy(msgspec.Struct, frozen=True):
    """All blocks in waves of tracks, means over ``orders.DRAWS`` draws where the order is random."""

    tracks: int
    """Side by side in a wave."""
    blocks: int
    """One after the other in a track."""
    trained: float
    """Blocks dealt in trained order."""
    arbitrary: float
    """Blocks dealt in random order."""
    arbitrary_std: float


class Distance(msgspec.Struct, frozen=True):
    """Orders at about the same distance from the trained one."""

    tau: float
    """Mean Kendall tau of the orders: 1 the trained order, 0 a random one, -1 the trained one backwards."""
    top1: float
    orders: int


class Freedom(msgspec.Struct, frozen=True):
    """All blocks in random orders within some bands."""

    bands: list[list[int]]
    allowed: float
    """How many orders the bands allow; of many blocks more than 64 bits hold."""
    orders: int
    """How many of them were evaluated."""
    top1_mean: float
    top1_std: float
    """Of the orders evaluated."""
    top1_worst: float
    own: bool
    """Whether they are the model's own bands."""


class Models(msgspec.Struct, frozen=True):
    """Where several runs are evaluated as one: the spread between them."""

    count: int
    sequential_std: float
    """Of the models' accuracies in trained order."""
    arbitrary_std: float
    """Of the models' mean accuracies in random order."""
    runs: list[str]


class Evaluation(msgspec.Struct, frozen=True):
    """The document of ``eval --json``."""

    sequential: SequentialAccuracy
    arbitrary: Arbitrary
    kept: dict[str, Kept]
    """By the number of blocks kept."""
    position_accuracy: float | None
    """How often a block names its own slot; None where the method does not predict it."""
    images: int
    arrangements: list[TrackAccuracy] | None = None
    """By shape of the waves, where asked for."""
    kendall: list[Distance] | None = None
    """By distance from the trained order, nearest last, where asked for."""
    models: Models | None = None
    """Where it is the mean over several runs."""
    freedom: list[Freedom] | None = None
    """From a fixed order to full freedom, where asked for."""
    skipped: int = 0
    """Images that could not be decoded."""
    settings: dict[str, Any] = {}
    """What was evaluated, and the defaults in force."""
    name: str = ""
    """Its name among the evaluations of one command: as much of the path as differs."""


def evaluate(
    model: BlockModel,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    plan: EvaluationOrders,
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Count correct answers in every order of the plan.

    ``batches`` gives images float32 ``[B, 3, H, W]`` and labels int ``[B]``; ``on_batch`` is called with the number of
    images that are done. Orders that differ only in blocks that share their weights (``model.owners``) run once. Raises
    :class:`DataError` if there are none.
    """
    orders = plan.all_orders()
    uniform = plan.uniform()
    shaped = [plan.in_tracks(*shape) for shape in plan.shapes]
    arrangements = [item for trained, drawn in shaped for item in (trained, *drawn)]
    correct: dict[Any, int] = dict.fromkeys([*orders, *arrangements], 0)
    slots = _Slots(model, uniform)
    owners: Sequence[int] = getattr(model, "owners", range(plan.num_blocks))
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for order in orders:
        alike.setdefault(tuple(owners[block] for block in order), []).append(order)
    images = 0
    for pixels, labels in batches:
        start = model.stem(pixels)
        for path, logits in walk(model, start, list(alike), slots):
            right = int((logits.argmax(axis=1) == labels).sum())
            for order in alike[path]:
                correct[order] += right
        for arrangement in dict.fromkeys(arrangements):
            logits = model.head(apply(arrangement, start, model.block))
            correct[arrangement] += int((logits.argmax(axis=1) == labels).sum())
        images += len(labels)
        on_batch(images)
    if not images:
        raise DataError("there are no images to evaluate on; check the data")
    top1 = {order: count / images for order, count in correct.items()}
    random = np.array([top1[order] for order in uniform])
    return Evaluation(
        sequential=SequentialAccuracy(top1[tuple(range(plan.num_blocks))]),
        arbitrary=Arbitrary(
            top1_mean=float(random.mean()), top1_std=float(random.std()), top1_p5=float(np.percentile(random, 5)),
            top1_worst=float(random.min()), orders=plan.orders,
        ),
        kept={
            str(keep): Kept(
                sequential=float(np.mean([top1[order] for order in plan.subsets(keep, shuffled=False)])),
                arbitrary=float(np.mean([top1[order] for order in plan.subsets(keep, shuffled=True)])),
            )
            for keep in plan.keep
        },
        position_accuracy=slots.accuracy(),
        images=images,
        arrangements=[
            TrackAccuracy(
                tracks=shape[0], blocks=shape[1], trained=top1[trained],
                arbitrary=float(np.mean([top1[item] for item in drawn])),
                arbitrary_std=float(np.std([top1[item] for item in drawn])),
            )
            for shape, (trained, drawn) in zip(plan.shapes, shaped, strict=True)
        ] if plan.shapes else None,
        kendall=_by_distance(plan, top1) if plan.distances else None,
        freedom=[_within(plan, bands, top1) for bands in plan.freedom] or None,
    )  # fmt: skip


def aggregate(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Several runs of one plan as one: means over the models; the deviation is that over models and orders."""
    first = evaluations[0]
    tops = np.array([item.sequential.top1 for item in evaluations])
    means = np.array([item.arbitrary.top1_mean for item in evaluations])
    within = np.array([item.arbitrary.top1_std for item in evaluations])
    guessed = [item.position_accuracy for item in evaluations if item.position_accuracy is not None]

    def mean(values: Iterable[float]) -> float:
        return float(np.mean(list(values)))

    return msgspec.structs.replace(
        first,
        sequential=SequentialAccuracy(mean(tops)),
        arbitrary=Arbitrary(
            top1_mean=mean(means), top1_std=float(np.sqrt((within**2).mean() + means.var())),
            top1_p5=mean(item.arbitrary.top1_p5 for item in evaluations),
            top1_worst=min(item.arbitrary.top1_worst for item in evaluations), orders=first.arbitrary.orders,
        ),
        kept={
            keep: Kept(
                mean(item.kept[keep].sequential for item in evaluations),
                mean(item.kept[keep].arbitrary for item in evaluations),
            )
            for keep in first.kept
        },
        position_accuracy=mean(guessed) if guessed else None,
        arrangements=[
            msgspec.structs.replace(
                shapes[0], trained=mean(item.trained for item in shapes),
                arbitrary=mean(item.arbitrary for item in shapes),
                arbitrary_std=float(np.sqrt(np.mean([i.arbitrary_std**2 for i in shapes])
                                            + np.var([i.arbitrary for i in shapes]))),
            )
            for shapes in zip(*(item.arrangements for item in evaluations if item.arrangements), strict=True)
        ] or None,
        kendall=[
            msgspec.structs.replace(bins[0], top1=mean(item.top1 for item in bins))
            for bins in zip(*(item.kendall for item in evaluations if item.kendall), strict=True)
        ] or None,
        freedom=[
            msgspec.structs.replace(
                steps[0], top1_mean=mean(item.top1_mean for item in steps),
                top1_std=float(np.sqrt(np.mean([i.top1_std**2 for i in steps]) + np.var([i.top1_mean for i in steps]))),
                top1_worst=min(item.top1_worst for item in steps),
            )
            for steps in zip(*(item.freedom for item in evaluations if item.freedom), strict=True)
        ] or None,
        models=Models(
            count=len(evaluations), sequential_std=float(tops.std()), arbitrary_std=float(means.std()),
            runs=[str(item.settings.get("of", "")) for item in evaluations],
        ),
    )  # fmt: skip


def _within(plan: EvaluationOrders, bands: Bands, top1: dict[Any, float]) -> Freedom:
    values = np.array([top1[order] for order in plan.within(bands)])
    return Freedom(
        bands=bands.to_json(), allowed=float(bands.num_orders), orders=len(values), top1_mean=float(values.mean()),
        top1_std=float(values.std()), top1_worst=float(values.min()), own=bands == plan.own_bands,
    )  # fmt: skip


def _by_distance(plan: EvaluationOrders, top1: dict[Any, float]) -> list[Distance]:
    bins: dict[int, list[tuple[float, float]]] = {}
    for order in [*plan.graded(), *plan.uniform()]:
        tau = kendall_tau(order)
        bins.setdefault(min(4, max(-4, round(4 * tau))), []).append((tau, top1[order]))
    return [
        Distance(tau=float(np.mean([tau for tau, _ in pairs])), top1=float(np.mean([value for _, value in pairs])),
                 orders=len(pairs))
        for _, pairs in sorted(bins.items())
    ]  # fmt: skip


class _Slots:
    """Counts how often blocks name their own slot, over the uniform random orders."""

    def __init__(self, model: BlockModel, orders: Sequence[tuple[int, ...]]) -> None:
        self._guess: Callable[[int, Any], np.ndarray | None] | None = getattr(model, "slots_of", None)
        self._times: dict[tuple[int, ...], int] = {}
        for order in orders:
            for end in range(1, len(order) + 1):
                self._times[order[:end]] = self._times.get(order[:end], 0) + 1
        self._right = self._asked = 0

    def look(self, path: Sequence[int], tokens: Any, /) -> None:
        """Take in the tokens after the last block of ``path``, if the model guesses slots at all."""
        times = self._times.get(tuple(path), 0) if self._guess is not None else 0
        named = self._guess(path[-1], tokens) if self._guess is not None and times else None
        if named is not None:
            self._right += times * int((named == len(path) - 1).sum())
            self._asked += times * len(named)

    def accuracy(self) -> float | None:
        """Over all images, orders and blocks; None where nothing guesses."""
        return self._right / self._asked if self._asked else None


def logits_of(
    model: BlockModel, images: np.ndarray, orders: Sequence[tuple[int, ...]]
) -> Iterable[tuple[tuple[int, ...], np.ndarray]]:
    """Yield each order with its logits ``[B, C]``; sorted orders share most of their starts."""
    yield from walk(model, model.stem(images), orders, None)


def walk(
    model: BlockModel, start: Any, orders: Sequence[tuple[int, ...]], observer: StepObserver | None
) -> Iterable[tuple[tuple[int, ...], np.ndarray]]:
    """Yield each order with its logits ``[B, C]``, in ascending sequence; ``start`` are the tokens of the stem.

    Each start that orders have in common runs once, and ``observer`` sees each step once.
    """
    path: list[int] = []
    tokens: list[Any] = [start]
    for order in sorted(orders):
        common = 0
        while common < min(len(path), len(order)) and path[common] == order[common]:
            common += 1
        del path[common:], tokens[common + 1 :]
        for slot in range(common, len(order)):
            tokens.append(model.block(order[slot], tokens[-1], slot))
            path.append(order[slot])
            if observer is not None:
                observer.look(path, tokens[-1])
        yield order, model.head(tokens[-1])


def blocks_to_run(orders: Sequence[tuple[int, ...]]) -> int:
    """The number of blocks that :func:`logits_of` runs, an estimate of its time."""
    return len({order[: end + 1] for order in orders for end in range(len(order))})
