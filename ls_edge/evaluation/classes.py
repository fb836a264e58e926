"""Accuracy by class, and whether a model is better than one that always gives the same answer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ls_edge.core.text import counted

ABOVE_CHANCE = 3.0
"""Standard deviations above chance that a model needs to count as trained; more would flag short runs."""


class ClassCounts(msgspec.Struct, frozen=True):
    """Numbers of images, of correct answers, and of answers, by class; fractions are means over orders."""

    images: tuple[int, ...]
    right: tuple[float, ...]
    answers: tuple[float, ...]

    @classmethod
    def of(cls, labels: np.ndarray, answers: np.ndarray, classes: int) -> ClassCounts:
        """Count images by label ``[N]`` and answer ``[N]``."""
        images, right, given = (
            np.bincount(numbers, minlength=classes) for numbers in (labels, labels[labels == answers], answers)
        )
        return cls(tuple(images.tolist()), tuple(right.tolist()), tuple(given.tolist()))

    @property
    def top1(self) -> float:
        """Accuracy; 0 without images."""
        return sum(self.right) / max(1, sum(self.images))

    @property
    def balanced(self) -> float:
        """Mean of the accuracies of the classes."""
        return float(np.mean([right / count for right, count in zip(self.right, self.images, strict=True) if count]))

    @property
    def chance(self) -> float:
        """Accuracy of the best constant answer."""
        return max(self.images) / max(1, sum(self.images))

    @property
    def chance_loss(self) -> float:
        """Cross-entropy of the best constant answer, in nats."""
        shares = np.array([count for count in self.images if count]) / max(1, sum(self.images))
        return float(-(shares * np.log(shares)).sum())

    def is_guess(self, loss: float) -> bool:
        """Return whether a model with this cross-entropy is no better than a constant answer.

        Images of one class do not show it.
        """
        several = sum(count > 0 for count in self.images) > 1
        if several and sum(count > 0 for count in self.answers) == 1:
            return True
        spread = math.sqrt(self.chance * (1 - self.chance) / max(1, sum(self.images)))
        return several and loss >= self.chance_loss and self.top1 <= self.chance + ABOVE_CHANCE * spread

    def by_class(self, classes: Sequence[str]) -> dict[str, float]:
        """Return the accuracy of each class that has images."""
        return {name: self.right[i] / self.images[i] for i, name in enumerate(classes) if self.images[i]}

    def missed(self, classes: Sequence[str]) -> str:
        """Return a line with the classes without a correct answer, or an empty string."""
        return missed_line([name for name, share in self.by_class(classes).items() if not share], sum(self.images))


def missed_line(names: Sequence[str], images: int) -> str:
    """Return a line with classes without a correct answer, or an empty string."""
    if not names:
        return ""
    listed = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"no correct answer for {counted(len(names), 'class', 'classes')} ({listed}) in {counted(images, 'image')}"
