"""Measurement of order costs with a fixed number of forward passes, and the fit of ``ls_edge.core.order_costs``.

Calibration images run through the PyTorch view in arrangements of several kinds, within its bands. Plain orders are
uniform orders, the trained order with a few blocks moved (as if a device was missing), and both with up to a quarter of
the blocks left out. Such orders are also split into waves of two or three tracks, as several devices would run them.
Ridge regression fits the loss of each arrangement minus that of the trained order; the loss is the negative
log-likelihood of the labels or, without labels, of the answer in trained order. Costs of pairs and of skips shrink to
their means, costs of slots to zero. A fifth is held out of a first fit, to
measure how well the estimates rank plain orders and tracks; the final tables are fitted to all arrangements.

By default, each arrangement runs on :data:`IMAGES` images, drawn from all calibration images, so the tables cover more
images than a single order. Plain orders with the same beginning share its passes.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bands import Bands
from ls_edge.core.order_costs import VERSION, Fit, Measured, OrderCosts, Table
from ls_edge.core.text import counted
from ls_edge.evaluation.measure import log_softmax, logits_of
from ls_edge.evaluation.orders import spearman
from ls_edge.export.calibration import Samples
from ls_edge.export.targets import PartsView
from ls_edge.training.models.torch_blocks import TorchBlocks

IMAGES = 64
FEWEST_HELD_OUT = 8
"""Minimum number of held-out orders for a meaningful rank correlation."""
SIGNIFICANT = 1.64
"""Standard deviations, ``1 / sqrt(n - 1)``, above zero that a rank correlation must reach; by chance, one in 20 does. A
higher limit would warn about more good calibrations with few orders."""
_BATCH = 32
_HELD_OUT = 5
"""Every fifth arrangement is held out."""
_KINDS = (
    "uniform", "near", "near tracks", "fewer", "near fewer", "near tracks",
    "near", "uniform", "near fewer tracks", "near fewer", "fewer", "tracks",
)  # fmt: skip
"""Kinds of arrangements in turn: as many uniform orders as orders near the trained one; most tracks are near it."""
TRACKS = (2, 2, 3)
"""Numbers of tracks of a wave to draw from: two is most common in practice, three is drawn half as often."""
_STRENGTHS = np.logspace(-3, 3, 25)


def measure_order_costs(
    view: PartsView,
    samples: Samples,
    source: str,
    *,
    orders: int,
    images: int = IMAGES,
) -> OrderCosts:
    """Run ``orders`` arrangements on up to ``images`` images each, on the GPU if there is one, and fit the costs."""
    draws = draw_orders(view.bands, orders)
    drawn = list(dict.fromkeys(item for item, _ in draws))
    trained = Arrangement.plain(range(view.num_blocks))
    losses, right = _run(view, samples, trained, drawn, images)
    loss = {item: float(np.nanmean(values)) for item, values in losses.items()}
    rises = np.array([float(np.nanmean(losses[item] - losses[trained])) for item in drawn])
    features = np.stack([features_of(item, view.num_blocks) for item in drawn])
    tracks = np.array([not item.is_plain for item in drawn])
    held = np.arange(len(drawn)) % _HELD_OUT == _HELD_OUT - 1
    guess = features @ coefficients(features[~held], rises[~held], view.num_blocks)

    def fit(which: np.ndarray) -> Fit:
        if not which.any():
            return Fit(0, 0.0, 0.0)
        return Fit(
            orders=int(which.sum()),
            spearman=round(spearman(guess[which], rises[which]) or 0.0, 4),
            rmse=float(np.sqrt(np.mean((guess[which] - rises[which]) ** 2))),
        )

    def measured(which: Sequence[Arrangement]) -> Measured:
        top1 = None if samples.labels is None else float(np.mean([np.nanmean(right[item]) for item in which]))
        return Measured(float(np.mean([loss[item] for item in which])), top1)

    slot, inverted, beside, skip = _tables(coefficients(features, rises, view.num_blocks), view.num_blocks)
    return OrderCosts(
        version=VERSION,
        source=source,
        images=len(samples),
        orders=len(loss),
        trained=measured([trained]),
        random=measured([item for item, kind in draws if kind == "uniform"]),
        slot=slot,
        inverted=inverted,
        skip=skip,
        fit=fit(held & ~tracks),
        beside=beside if tracks.any() else None,
        fit_tracks=fit(held & tracks) if (held & tracks).any() else None,
        arrangements=sum(not item.is_plain for item in loss),
    )


def ranking_warnings(costs: OrderCosts) -> list[str]:
    """Return warnings if the estimates rank held-out plain orders, or tracks, no better than chance."""
    plain = (costs.fit, "order", "orders", "quality")
    tracks = (costs.fit_tracks, "arrangement with tracks", "arrangements with tracks", "parallel")
    found = []
    for fit, one, several, policy in (plain, tracks):
        if fit is None:
            continue
        if fit.orders < FEWEST_HELD_OUT:
            held_out = counted(fit.orders, f"{one} was", f"{several} were")
            found.append(
                f"order costs: only {held_out} held out, too few to judge how well the estimates rank {several}; "
                "measure more with --cost-orders"
            )
        elif fit.spearman * math.sqrt(fit.orders - 1) < SIGNIFICANT:
            found.append(
                f"order costs: the estimates rank {fit.orders} held-out {several} by {fit.spearman:.2f} (1 is perfect, "
                f"0 is chance), so the policy {policy} chooses no better than without them; calibrate with more "
                "images, or leave them out with --cost-orders 0"
            )
    return found


def draw_orders(bands: Bands, count: int) -> list[tuple[Arrangement, str]]:
    """Return ``count`` arrangements within ``bands`` and their kinds, always the same ones."""
    generator, blocks = random.Random(0), bands.num_blocks
    found = []
    for number in range(count):
        kind = _KINDS[number % len(_KINDS)]
        order = list(range(blocks))
        in_tracks = kind.endswith("tracks") and blocks > 1
        if "near" not in kind:
            generator.shuffle(order)
        else:
            for _ in range(generator.randint(0 if in_tracks else 1, 3)):
                order.insert(generator.randrange(blocks), order.pop(generator.randrange(blocks)))
        if "fewer" in kind:
            gone = generator.sample(range(blocks), generator.randint(1, max(1, blocks // 4)))
            order = [block for block in order if block not in gone]
        plain = Arrangement.plain(bands.sort(order))
        item = bands.random_waves(order, generator, TRACKS, interleaved=True) if in_tracks else plain
        found.append((item, kind))
    return found


def features_of(order: Arrangement | Sequence[int], blocks: int) -> np.ndarray:
    """Return 1 for each table entry that an order uses, float64 ``[3 blocks^2 + blocks]``, with ``skip`` last."""
    arrangement = order if isinstance(order, Arrangement) else Arrangement.plain(order)
    slot, inverted, beside = (np.zeros((blocks, blocks)) for _ in range(3))
    skip = np.ones(blocks)
    for block, place in arrangement.steps():
        skip[block] = 0
        slot[block, place] = float(place != block)
    done: list[int] = []
    for wave in arrangement.waves:
        here: list[int] = []
        for track in wave:
            for place, block in enumerate(track):
                for before in (*done, *track[:place]):
                    inverted[block, before] = float(block < before)
                for other in here:
                    beside[min(block, other), max(block, other)] = 1
            here += track
        done += here
    return np.concatenate([slot.ravel(), inverted.ravel(), beside.ravel(), skip])


def coefficients(features: np.ndarray, values: np.ndarray, blocks: int) -> np.ndarray:
    """Return the coefficient of each feature, where those of pairs and of skips shrink to the mean of their table.

    A pretrained model with 12 blocks has 200 coefficients. Shrunk to zero, many of them were noise and below zero, and
    the estimate of another order was below that of the trained order.
    """
    tables = blocks**2 * np.arange(1, 4)  # all but the slots: a block in another slot may have the same neighbors
    found = ridge(np.hstack([features, np.add.reduceat(features, tables, axis=1)]), values)
    means = np.repeat(found[-3:], np.diff([*tables, features.shape[1]]))
    shrunk: np.ndarray = found[:-3] + np.concatenate([np.zeros(blocks**2), means]) * features.any(axis=0)
    return shrunk


def ridge(features: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the coefficients of a linear fit through zero, with the shrinkage that minimizes the leave-one-out error.

    The leave-one-out error is exact (PRESS, Allen 1974). Generalized cross-validation is cheaper, but unreliable if
    there are about as many values as coefficients, as here.
    """
    size, vectors = np.linalg.eigh(features @ features.T)
    projected = vectors.T @ values

    def left_out(strength: float) -> float:
        shrunk = 1 / (np.maximum(size, 0.0) + strength)
        return float(np.mean((vectors @ (shrunk * projected) / (vectors**2 @ shrunk)) ** 2))

    best = min(_STRENGTHS, key=left_out)
    coefficients: np.ndarray = features.T @ (vectors @ (projected / (np.maximum(size, 0.0) + best)))
    return coefficients


def _tables(found: np.ndarray, blocks: int) -> tuple[Table, Table, Table, tuple[float, ...]]:
    rounded = np.round(found, 5)
    squares = [part.reshape(blocks, blocks).tolist() for part in np.split(rounded[: 3 * blocks**2], 3)]
    slot, inverted, beside = (tuple(map(tuple, square)) for square in squares)
    return slot, inverted, beside, tuple(rounded[3 * blocks**2 :].tolist())


def _logits_of(
    model: TorchBlocks, images: np.ndarray, arrangements: Sequence[Arrangement]
) -> Iterator[tuple[Arrangement, np.ndarray]]:
    plain = {item.order: item for item in arrangements if item.is_plain}
    for order, logits in logits_of(model, images, list(plain)):
        yield plain[order], logits
    dealt = [item for item in arrangements if not item.is_plain]
    if dealt:
        tokens = model.stem(images)
        yield from ((item, model.head(apply(item, tokens, model.block))) for item in dealt)


def _run(
    view: PartsView,
    samples: Samples,
    trained: Arrangement,
    arrangements: Sequence[Arrangement],
    images: int,
) -> tuple[dict[Arrangement, np.ndarray], dict[Arrangement, np.ndarray]]:
    """Return loss and correctness of each arrangement by sample, float64, NaN for samples that it did not run on.

    ``trained`` runs on all samples.
    """
    on_gpu = torch.cuda.is_available()
    model = TorchBlocks(view.of(copy.deepcopy(view.view).to("cuda")) if on_gpu else view)
    batches = np.array_split(np.arange(len(samples)), -(-len(samples) // _BATCH))
    each, generator = min(len(batches), max(1, images // _BATCH)), random.Random(1)
    of_batch: list[dict[Arrangement, None]] = [{trained: None} for _ in batches]
    for item in arrangements:
        for at in generator.sample(range(len(batches)), each):
            of_batch[at][item] = None
    loss, right = ({item: np.full(len(samples), np.nan) for item in (trained, *arrangements)} for _ in range(2))
    for rows, items in zip(batches, of_batch, strict=True):
        pixels = samples.images[rows]
        if samples.labels is None:
            target = next(logits.argmax(axis=1) for _, logits in _logits_of(model, pixels, [trained]))
        else:
            target = samples.labels[rows]
        for item, logits in _logits_of(model, pixels, list(items)):
            logs = log_softmax(logits)
            limit = 2 * np.log(max(logits.shape[1], 2))
            loss[item][rows] = np.minimum(-logs[np.arange(len(target)), target], limit)
            right[item][rows] = logits.argmax(axis=1) == target
    return loss, right
