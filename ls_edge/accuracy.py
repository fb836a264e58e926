"""Accuracy in trained order, in any order, and with blocks missing; numpy only.

One evaluation for everything that has a stem, blocks and a head: a torch model (``ls_edge.training.evaluate``) and
a bundle's engines (``ls_edge.runtime.chain``), each with tokens of its own kind that are only passed on here.

All orders of a batch of images are walked as one tree: the stem runs once, and a start that several orders have in
common is computed once. Memory: one set of tokens for each block on the way.
"""

from __future__ import annotations

import itertools
import random as _random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from ls_edge.arrangement import Arrangement, apply, random_orders, random_subset_order
from ls_edge.errors import DataError, UsageError

DRAWS = 8
"""Random subsets over which the accuracy of a pruned model is averaged."""


class BlockModel(Protocol):
    """Stem, blocks and head of some model; tokens are whatever its parts hand to one another."""

    @property
    def blocks(self) -> int:
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


class Sequential(msgspec.Struct, frozen=True):
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
    """A part of the blocks, means over :data:`DRAWS` random subsets."""

    sequential: float
    """The subset in trained order."""
    arbitrary: float
    """The subset in random order."""


class Tracks(msgspec.Struct, frozen=True):
    """All blocks in waves of tracks, means over :data:`DRAWS` draws where the order is random."""

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


class Evaluation(msgspec.Struct, frozen=True):
    """The document of ``eval --json``."""

    sequential: Sequential
    arbitrary: Arbitrary
    kept: dict[str, Kept]
    """By the number of blocks kept."""
    position_accuracy: float | None
    """How often a block names its own slot; None where the method does not predict it."""
    images: int
    arrangements: list[Tracks] | None = None
    """By shape of the waves, where asked for."""
    kendall: list[Distance] | None = None
    """By distance from the trained order, nearest last, where asked for."""
    skipped: int = 0
    """Images that could not be decoded."""
    settings: dict[str, Any] = {}
    """What was evaluated, and the defaults in force."""


class Plan(msgspec.Struct, frozen=True):
    """Which orders are evaluated."""

    blocks: int
    orders: int
    keep: tuple[int, ...]
    seed: int
    shapes: tuple[tuple[int, int], ...] = ()
    """Tracks a wave and blocks a track."""
    distances: int = 0
    """Orders at graded distances from the trained one."""

    @classmethod
    def make(
        cls,
        blocks: int,
        orders: int = 64,
        keep: Sequence[int] | None = None,
        seed: int = 0,
        *,
        arrangements: bool = False,
        kendall: bool = False,
    ) -> Plan:
        """``keep`` None is a quarter, a half and three quarters of the blocks; raises :class:`UsageError`.

        ``arrangements`` adds :func:`default_shapes`, ``kendall`` as many orders again at graded distances.
        """
        if orders < 1:
            raise UsageError(f"orders is {orders}; evaluate at least 1")
        chosen = default_keep(blocks) if keep is None else sorted(set(keep))
        bad = next((count for count in chosen if not 1 <= count <= blocks), None)
        if bad is not None:
            raise UsageError(f"keep {bad} is not possible: the model has {blocks} blocks; say 1 to {blocks}")
        shapes = tuple(default_shapes(blocks)) if arrangements else ()
        return cls(blocks, orders, tuple(chosen), seed, shapes, orders if kendall else 0)

    def all_orders(self) -> list[tuple[int, ...]]:
        """Every order to run, each once."""
        found = {tuple(range(self.blocks)), *random_orders(self.blocks, self.orders, self.seed)}
        for keep in self.keep:
            found.update(self.subsets(keep, shuffled=False), self.subsets(keep, shuffled=True))
        found.update(self.graded())
        return sorted(found)

    def graded(self) -> list[tuple[int, ...]]:
        """The orders at graded distances."""
        return graded_orders(self.blocks, self.distances, self.seed)

    def in_tracks(self, tracks: int, length: int) -> tuple[Arrangement, list[Arrangement]]:
        """A shape filled in trained order, and in the random orders of :data:`DRAWS` draws."""
        orders = random_orders(self.blocks, DRAWS, self.seed)
        return dealt(range(self.blocks), tracks, length), [dealt(order, tracks, length) for order in orders]

    def subsets(self, keep: int, *, shuffled: bool) -> list[tuple[int, ...]]:
        """The random subsets of ``keep`` blocks, in trained order or as drawn."""
        return [random_subset_order(self.blocks, keep, self.seed, i, shuffled=shuffled) for i in range(DRAWS)]


def default_keep(blocks: int) -> list[int]:
    """Quarters of the depth."""
    return sorted({round(blocks * part / 4) for part in (1, 2, 3)} - {0, blocks})


def default_shapes(blocks: int) -> list[tuple[int, int]]:
    """Two, four and all blocks at a time, and two tracks of two blocks or of half of all."""
    found = [(2, 1), (4, 1), (blocks, 1), (2, 2), (2, blocks // 2)]
    return sorted({(tracks, length) for tracks, length in found if length >= 1 and 2 <= tracks <= blocks // length})


def dealt(order: Sequence[int], tracks: int, length: int) -> Arrangement:
    """``order`` dealt into waves of ``tracks`` tracks of ``length`` blocks; the last wave may be smaller."""
    pieces = [tuple(order[at : at + length]) for at in range(0, len(order), length)]
    return Arrangement(tuple(tuple(pieces[at : at + tracks]) for at in range(0, len(pieces), tracks)))


def kendall_tau(order: Sequence[int]) -> float:
    """Rank correlation of ``order`` with the trained order: pairs in place less pairs inverted, over all pairs."""
    pairs = list(itertools.combinations(order, 2))
    return sum(1 if one < other else -1 for one, other in pairs) / len(pairs) if pairs else 1.0


def graded_orders(blocks: int, count: int, seed: int) -> list[tuple[int, ...]]:
    """Orders whose Kendall tau spreads from 1 to -1, which uniform permutations crowd around 0.

    Each block moves by a share of a random key, the share growing from order to order; every other is backwards.
    """
    found = []
    for index in range(count):
        rng = _random.Random((seed << 33) ^ (index << 1) ^ 1)
        share = (index + 0.5) / count
        keys = [(1 - share) * block / max(1, blocks) + share * rng.random() for block in range(blocks)]
        order = tuple(sorted(range(blocks), key=keys.__getitem__))
        found.append(order[::-1] if index % 2 else order)
    return found


def evaluate(
    model: BlockModel,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    plan: Plan,
    *,
    on_batch: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """Count correct answers in every order of the plan.

    ``batches`` gives images float32 ``[B, 3, H, W]`` and labels int ``[B]``; ``on_batch`` is told the images that
    are done. Raises :class:`DataError` where there are none.
    """
    orders = plan.all_orders()
    uniform = random_orders(plan.blocks, plan.orders, plan.seed)
    shaped = [plan.in_tracks(*shape) for shape in plan.shapes]
    arrangements = [item for trained, drawn in shaped for item in (trained, *drawn)]
    correct: dict[Any, int] = dict.fromkeys([*orders, *arrangements], 0)
    slots = _Slots(uniform)
    images = 0
    for pixels, labels in batches:
        start = model.stem(pixels)
        for order, logits in _walk(model, start, orders, slots):
            correct[order] += int((logits.argmax(axis=1) == labels).sum())
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
        sequential=Sequential(top1[tuple(range(plan.blocks))]),
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
            Tracks(
                tracks=shape[0], blocks=shape[1], trained=top1[trained],
                arbitrary=float(np.mean([top1[item] for item in drawn])),
                arbitrary_std=float(np.std([top1[item] for item in drawn])),
            )
            for shape, (trained, drawn) in zip(plan.shapes, shaped, strict=True)
        ] if plan.shapes else None,
        kendall=_by_distance(plan, top1) if plan.distances else None,
    )  # fmt: skip


def _by_distance(plan: Plan, top1: dict[Any, float]) -> list[Distance]:
    bins: dict[int, list[tuple[float, float]]] = {}
    for order in [*plan.graded(), *random_orders(plan.blocks, plan.orders, plan.seed)]:
        tau = kendall_tau(order)
        bins.setdefault(min(4, max(-4, round(4 * tau))), []).append((tau, top1[order]))
    return [
        Distance(tau=float(np.mean([tau for tau, _ in pairs])), top1=float(np.mean([value for _, value in pairs])),
                 orders=len(pairs))
        for _, pairs in sorted(bins.items())
    ]  # fmt: skip


class _Slots:
    """Counts how often blocks name their own slot, over the uniform random orders."""

    def __init__(self, orders: Sequence[tuple[int, ...]]) -> None:
        self._times: dict[tuple[int, ...], int] = {}
        for order in orders:
            for end in range(1, len(order) + 1):
                self._times[order[:end]] = self._times.get(order[:end], 0) + 1
        self._right = self._asked = 0

    def look(self, model: BlockModel, path: Sequence[int], tokens: Any) -> None:
        """Take in the tokens after the last block of ``path``, if the model guesses slots at all."""
        guess: Callable[[int, Any], np.ndarray | None] | None = getattr(model, "slots_of", None)
        times = self._times.get(tuple(path), 0) if guess is not None else 0
        named = guess(path[-1], tokens) if guess is not None and times else None
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
    yield from _walk(model, model.stem(images), orders, None)


def _walk(
    model: BlockModel, start: Any, orders: Sequence[tuple[int, ...]], slots: _Slots | None
) -> Iterable[tuple[tuple[int, ...], np.ndarray]]:
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
            if slots is not None:
                slots.look(model, path, tokens[-1])
        yield order, model.head(tokens[-1])


def blocks_to_run(orders: Sequence[tuple[int, ...]]) -> int:
    """How many blocks :func:`logits_of` runs, to tell how long it will take."""
    return len({order[: end + 1] for order in orders for end in range(len(order))})
