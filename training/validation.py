"""Accuracy of models on the validation images: of a training, of its start, and of a teacher."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.evaluation.classes import ClassCounts
from ls_edge.training.data import Batches
from ls_edge.training.distributed import DistributedContext
from ls_edge.training.models.view import BlockView
from ls_edge.training.precision import autocast

MOST_CONFUSED = 2000
"""Number of classes up to which answers are counted by class; more would take over 32 MB."""
FEW_IMAGES = 5
"""Images per class below which the most frequent answer of a class says nothing."""
Answer = Callable[[Tensor], Iterable[Tensor]]
"""Function from pixels uint8 ``[B, 3, H, W]`` to logits ``[B, C]`` in each arrangement."""


class Validation(msgspec.Struct, frozen=True):
    """Mean results over the arrangements that select the checkpoint."""

    loss: float
    """Mean cross-entropy in nats."""
    counts: ClassCounts
    in_order: float
    """Top-1 in trained order."""

    @property
    def top1(self) -> float:
        """Mean accuracy."""
        return self.counts.top1

    @property
    def is_guess(self) -> bool:
        """Whether the model is no better than a constant answer."""
        return self.counts.is_guess(self.loss)


def answers_of(
    view: BlockView, arrangements: Sequence[Arrangement], normalize: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> Answer:
    """Return the function that runs a view in each arrangement."""

    def answer(pixels: Tensor) -> Iterable[Tensor]:
        view.eval()
        with autocast(view.device, dtype):
            tokens = view.stem(normalize(pixels))
        for arrangement in arrangements:
            with autocast(view.device, dtype):
                yield view.head(apply(arrangement, tokens, view.block))

    return answer


def validate(
    view: BlockView,
    arrangements: Sequence[Arrangement],
    batches: Batches,
    normalize: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
    context: DistributedContext,
) -> Validation:
    """Measure the arrangements, and the trained order."""
    trained = Arrangement.plain(range(view.num_blocks))
    every = [*arrangements, *([] if trained in arrangements else [trained])]
    results = measure(answers_of(view, every, normalize, dtype), len(every), view.num_classes, batches, context)
    chosen = results[: len(arrangements)]
    counts = ClassCounts(
        chosen[0][1].images,
        tuple(np.mean([one.right for _, one in chosen], axis=0).tolist()),
        tuple(np.mean([one.answers for _, one in chosen], axis=0).tolist()),
    )
    return Validation(float(np.mean([loss for loss, _ in chosen])), counts, results[every.index(trained)][1].top1)


def measure(
    answer: Answer,
    arrangements: int,
    classes: int,
    batches: Batches,
    context: DistributedContext,
    confusion: Tensor | None = None,
) -> list[tuple[float, ClassCounts]]:
    """Return the mean cross-entropy and the counts by class of each arrangement; raise :class:`DataError`.

    ``confusion [C, C]``, float64, counts the images by their class and answer.
    """
    sums = torch.zeros(arrangements, 1 + 3 * classes, dtype=torch.float64)
    for batch in batches.fixed():
        labels = batch.labels
        with torch.inference_mode():
            for row, logits in zip(sums, answer(batch.pixels), strict=True):
                values = logits.float().cpu()
                named = values.argmax(1)
                row[0] += functional.cross_entropy(values, labels, reduction="sum")
                counted = (labels, labels[named == labels], named)
                row[1:] += torch.cat([torch.bincount(numbers, minlength=classes) for numbers in counted])
                if confusion is not None:
                    confusion.index_put_((labels, named), torch.ones((), dtype=torch.float64), accumulate=True)
    found = []
    for loss, *counts in context.sum(sums).tolist():
        images, right, answers = (tuple(counts[at : at + classes]) for at in range(0, 3 * classes, classes))
        if not any(images):
            raise batches.all_unreadable()
        found.append((loss / sum(images), ClassCounts(tuple(map(int, images)), right, answers)))
    return found


class Judgment(msgspec.Struct, frozen=True):
    """Accuracy of a model that a training relies on, and its problem."""

    top1: float
    problem: str = ""
    """Reason not to rely on its answers, or an empty string."""


def judge(who: str, answer: Answer, classes: int, data: str, batches: Batches, context: DistributedContext) -> Judgment:
    """Measure a start or a teacher, which is at chance if its classes are others or numbered in another order."""
    confusion = torch.zeros(classes, classes, dtype=torch.float64) if classes <= MOST_CONFUSED else None
    [(loss, counts)] = measure(answer, 1, classes, batches, context, confusion)
    images, top1 = sum(counts.images), counts.top1
    otherwise = (  # no order of the classes has more
        0.0
        if confusion is None
        else min(float((table := context.sum(confusion)).amax(0).sum()), float(table.amax(1).sum())) / images
    )
    # Another order has to explain more answers than it leaves wrong, or a weak start would seem to be mixed by chance.
    is_mixed = images >= FEW_IMAGES * classes and (
        (loss >= counts.chance_loss and top1 < otherwise / 2) or otherwise - top1 > max(0.1, 1 - otherwise)
    )
    if not (is_mixed or counts.is_guess(loss)):
        return Judgment(top1)
    reordered = f", {otherwise:.3f} if its classes are in another order" if is_mixed else ""
    return Judgment(
        top1,
        f"{who} has a top-1 of {top1:.3f} on the validation images of {data} (guessing has {counts.chance:.3f}"
        f"{reordered}), so {'they seem to be' if is_mixed else 'it guesses, as if it was trained on other classes or'} "
        "in another order",
    )
