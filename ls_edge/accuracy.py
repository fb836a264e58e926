"""Accuracy in trained order, in any order, and with blocks missing; numpy only.

One evaluation for everything that has a stem, blocks and a head: a torch model (``ls_edge.training.evaluate``) and
a bundle's engines (``ls_edge.runtime.chain``), each with tokens of its own kind that are only passed on here.

All orders of a batch of images are walked as one tree: the stem runs once, and a start that several orders have in
common is computed once. Memory: one set of tokens for each block on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from ls_edge.arrangement import random_orders, random_subset_order
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


class Evaluation(msgspec.Struct, frozen=True):
    """The document of ``eval --json``."""

    sequential: Sequential
    arbitrary: Arbitrary
    kept: dict[str, Kept]
    """By the number of blocks kept."""
    position_accuracy: float | None
    """How often a block names its own slot; None where the method does not predict it."""
    images: int
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

    @classmethod
    def make(cls, blocks: int, orders: int = 64, keep: Sequence[int] | None = None, seed: int = 0) -> Plan:
        """``keep`` None is a quarter, a half and three quarters of the blocks; raises :class:`UsageError`."""
        if orders < 1:
            raise UsageError(f"orders is {orders}; evaluate at least 1")
        chosen = default_keep(blocks) if keep is None else sorted(set(keep))
        bad = next((count for count in chosen if not 1 <= count <= blocks), None)
        if bad is not None:
            raise UsageError(f"keep {bad} is not possible: the model has {blocks} blocks; say 1 to {blocks}")
        return cls(blocks, orders, tuple(chosen), seed)

    def all_orders(self) -> list[tuple[int, ...]]:
        """Every order to run, each once."""
        found = {tuple(range(self.blocks)), *random_orders(self.blocks, self.orders, self.seed)}
        for keep in self.keep:
            found.update(self.subsets(keep, shuffled=False), self.subsets(keep, shuffled=True))
        return sorted(found)

    def subsets(self, keep: int, *, shuffled: bool) -> list[tuple[int, ...]]:
        """The random subsets of ``keep`` blocks, in trained order or as drawn."""
        return [random_subset_order(self.blocks, keep, self.seed, i, shuffled=shuffled) for i in range(DRAWS)]


def default_keep(blocks: int) -> list[int]:
    """Quarters of the depth."""
    return sorted({round(blocks * part / 4) for part in (1, 2, 3)} - {0, blocks})


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
    correct = dict.fromkeys(orders, 0)
    images = 0
    for pixels, labels in batches:
        for order, logits in logits_of(model, pixels, orders):
            correct[order] += int((logits.argmax(axis=1) == labels).sum())
        images += len(labels)
        on_batch(images)
    if not images:
        raise DataError("there are no images to evaluate on; check the data")
    top1 = {order: count / images for order, count in correct.items()}
    random = np.array([top1[order] for order in random_orders(plan.blocks, plan.orders, plan.seed)])
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
        position_accuracy=None,
        images=images,
    )  # fmt: skip


def logits_of(
    model: BlockModel, images: np.ndarray, orders: Sequence[tuple[int, ...]]
) -> Iterable[tuple[tuple[int, ...], np.ndarray]]:
    """Yield each order with its logits ``[B, C]``; sorted orders share most of their starts."""
    path: list[int] = []
    tokens: list[Any] = [model.stem(images)]
    for order in sorted(orders):
        common = 0
        while common < min(len(path), len(order)) and path[common] == order[common]:
            common += 1
        del path[common:], tokens[common + 1 :]
        for slot in range(common, len(order)):
            tokens.append(model.block(order[slot], tokens[-1], slot))
            path.append(order[slot])
        yield order, model.head(tokens[-1])


def blocks_to_run(orders: Sequence[tuple[int, ...]]) -> int:
    """How many blocks :func:`logits_of` runs, to tell how long it will take."""
    return len({order[: end + 1] for order in orders for end in range(len(order))})
