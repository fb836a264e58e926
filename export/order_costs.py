"""Measure what orders cost a model, with a fixed number of forward passes, and fit ``ls_edge.costs`` to it.

Calibration images run through the PyTorch view in orders of four kinds: uniformly drawn; the trained one with a few
blocks moved, which is what a missing device makes of it; both again with up to a quarter of the blocks left out. The
loss of each order (negative log-likelihood of the labels, or of the trained order's own answer where there are none)
over that of the trained one is fitted by ridge regression, its strength by generalised cross-validation (Golub, Heath
and Wahba 1979). A fifth of the orders is kept out of a first fit to tell how good the estimate is; the tables are then
fitted to all.

Passes: :data:`ORDERS` orders on :data:`IMAGES` images unless told otherwise; a start that orders share runs once.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ls_edge.accuracy import logits_of
from ls_edge.costs import VERSION, Fit, Measured, OrderCosts
from ls_edge.export.calibration import Samples
from ls_edge.export.split import PartsView

ORDERS = 256
IMAGES = 64
_BATCH = 32
_HELD_OUT = 5
"""Every fifth order is held out."""
_STRENGTHS = np.logspace(-3, 3, 25)


def measure_order_costs(
    view: PartsView,
    samples: Samples,
    source: str,
    *,
    orders: int = ORDERS,
    images: int = IMAGES,
    on_batch: Callable[[int], None] = lambda _: None,
) -> OrderCosts:
    """Run ``orders`` orders on up to ``images`` images, on the GPU where there is one, and fit the costs.

    ``on_batch`` is told the images that are done.
    """
    drawn = draw_orders(view.parts, orders)
    trained = tuple(range(view.parts))
    taken = Samples(samples.images[:images], None if samples.labels is None else samples.labels[:images])
    loss, right = _run(view, taken, sorted({trained, *(order for order, _ in drawn)}), trained, on_batch)
    rises = np.array([loss[order] - loss[trained] for order, _ in drawn])
    features = np.stack([features_of(order, view.parts) for order, _ in drawn])
    held = np.arange(len(drawn)) % _HELD_OUT == _HELD_OUT - 1
    guess = features[held] @ ridge(features[~held], rises[~held])
    fit = Fit(
        orders=int(held.sum()),
        spearman=round(spearman(guess, rises[held]), 4),
        rmse=float(np.sqrt(np.mean((guess - rises[held]) ** 2))),
    )
    slot, inverted, skip = _tables(ridge(features, rises), view.parts)
    uniform = [order for order, kind in drawn if kind == "uniform"]
    labelled = taken.labels is not None

    def measured(which: Sequence[tuple[int, ...]]) -> Measured:
        top1 = float(np.mean([right[order] for order in which])) if labelled else None
        return Measured(float(np.mean([loss[order] for order in which])), top1)

    return OrderCosts(
        version=VERSION, source=source, images=len(taken), orders=len(loss), trained=measured([trained]),
        random=measured(uniform), slot=slot, inverted=inverted, skip=skip, fit=fit,
    )  # fmt: skip


def draw_orders(blocks: int, count: int) -> list[tuple[tuple[int, ...], str]]:
    """``count`` orders and the kind of each, ``uniform`` or another; the same every time."""
    generator = random.Random(0)
    found = []
    for number in range(count):
        near, skips = number % 2 == 1, number % 4 >= 2
        order = list(range(blocks))
        if near:
            for _ in range(generator.randint(1, 3)):
                order.insert(generator.randrange(blocks), order.pop(generator.randrange(blocks)))
        else:
            generator.shuffle(order)
        if skips:
            gone = generator.sample(range(blocks), generator.randint(1, max(1, blocks // 4)))
            order = [block for block in order if block not in gone]
        found.append((tuple(order), "near" if near else "fewer" if skips else "uniform"))
    return found


def features_of(order: Sequence[int], blocks: int) -> np.ndarray:
    """Which entries of the three tables an order takes: float64 ``[blocks^2 + blocks^2 + blocks]``."""
    slot, inverted, skip = np.zeros((blocks, blocks)), np.zeros((blocks, blocks)), np.ones(blocks)
    for place, block in enumerate(order):
        skip[block] = 0
        slot[block, place] = float(place != block)
        for later in order[place + 1 :]:
            inverted[later, block] = float(later < block)
    return np.concatenate([slot.ravel(), inverted.ravel(), skip])


def ridge(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Coefficients of a linear fit through zero, shrunk by the strength that cross-validation finds best."""
    left, singular, right = np.linalg.svd(features, full_matrices=False)
    projected = left.T @ values
    outside = float(values @ values - projected @ projected)

    def error(strength: float) -> float:
        shrink = singular**2 / (singular**2 + strength)
        residual = float(((1 - shrink) ** 2 * projected**2).sum()) + max(outside, 0.0)
        return residual / (len(values) - float(shrink.sum())) ** 2

    best = min(_STRENGTHS, key=error)
    found: np.ndarray = right.T @ (singular / (singular**2 + best) * projected)
    return found


def spearman(one: np.ndarray, two: np.ndarray) -> float:
    """Rank correlation; 0 where one of them is constant."""
    ranks = [np.array([np.mean(np.flatnonzero(np.sort(v) == x)) for x in v]) for v in (one, two)]
    if min(r.std() for r in ranks) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _tables(
    found: np.ndarray, blocks: int
) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...], tuple[float, ...]]:
    rounded = np.round(found, 5)
    slot, inverted = (part.reshape(blocks, blocks).tolist() for part in np.split(rounded[: 2 * blocks**2], 2))
    return tuple(map(tuple, slot)), tuple(map(tuple, inverted)), tuple(rounded[2 * blocks**2 :].tolist())


@dataclass(frozen=True)
class _Parts:
    """What :func:`ls_edge.accuracy.logits_of` runs."""

    view: PartsView
    device: torch.device

    @property
    def blocks(self) -> int:
        return self.view.parts

    @torch.inference_mode()
    def stem(self, images: np.ndarray, /) -> Tensor:
        return self.view.stem(torch.from_numpy(images).to(self.device))

    @torch.inference_mode()
    def block(self, index: int, tokens: Tensor, slot: int, /) -> Tensor:
        return self.view.block(index, tokens, slot)

    @torch.inference_mode()
    def head(self, tokens: Tensor, /) -> np.ndarray:
        logits: np.ndarray = self.view.head(tokens).float().cpu().numpy()
        return logits


def _run(
    view: PartsView,
    samples: Samples,
    orders: Sequence[tuple[int, ...]],
    trained: tuple[int, ...],
    on_batch: Callable[[int], None],
) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """Mean loss and accuracy of each order."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = _Parts(
        PartsView(copy.deepcopy(view.view).to(device).eval(), view.per_part) if device.type == "cuda" else view, device
    )
    loss, right = dict.fromkeys(orders, 0.0), dict.fromkeys(orders, 0.0)
    done = 0
    for images, labels in samples.batches(_BATCH):
        target = labels
        if target is None:
            target = next(logits.argmax(axis=1) for _, logits in logits_of(model, images, [trained]))
        for order, logits in logits_of(model, images, orders):
            logs = logits - logits.max(axis=1, keepdims=True)
            logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
            limit = 2 * np.log(max(logits.shape[1], 2))
            loss[order] += float(np.minimum(-logs[np.arange(len(target)), target], limit).sum())
            right[order] += float((logits.argmax(axis=1) == target).sum())
        done += len(images)
        on_batch(done)
    return {o: v / done for o, v in loss.items()}, {o: v / done for o, v in right.items()}
