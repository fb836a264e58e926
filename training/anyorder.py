"""``anyorder``, a recipe for models that run in any arrangement: its settings and its draws.

The plain method spends each step on one order of one batch. Here a batch is split into groups with an arrangement
each (less variance between steps for the same cost), some of them in tracks or in trained order, and the weights are
averaged. Parts that are off by default are there to be compared, a frozen copy of the model as it starts for one,
which shows in trained order what to answer in every other: docs/training.md says what was found.

No torch here; the losses are in ``ls_edge.training.distill``.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from ls_edge.arrangement import Arrangement
from ls_edge.evalplan import dealt
from ls_edge.training.plans import Pass, Plan, displaced, in_waves


class TeacherSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen copy of the model as it starts, run in trained order."""

    use: Literal["auto", "on", "off"] = "off"
    """``auto``: where training starts from trained weights (``--init``, ``--pretrained``); ``on``: only from such."""
    logits: float = 0.5
    """Weight of its soft answers, 0 to 1; the labels have the rest."""
    features: float = 0.0
    """Weight of the distance from its tokens ahead of the head, both normalised."""
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.logits <= 1 or self.features < 0 or not self.temperature > 0:
            raise ValueError("teacher: logits is 0 to 1, features 0 or more, temperature above 0")


class AnyOrderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every part of the recipe; costs are counted by :meth:`ls_edge.training.plans.Plan.cost`."""

    groups: int = 4
    """Parts of a batch that have an arrangement each."""
    tracks: float = 0.25
    """Probability of an arrangement in waves of tracks; plain orders are the rest."""
    trained: float = 0.1
    """Probability of the trained order."""
    subset: float = 0.25
    """Probability of leaving blocks out: a random number of them up to three quarters."""
    drop: float = 0.0
    """LayerDrop's probability for each block, on top."""
    curriculum: float = 0.0
    """Part of training over which blocks move further and further from their places; 0 is uniform at once."""
    sandwich: bool = False
    """Each step: trained order, an order, an order of a subset; the first teaches the others (arXiv 1903.05134)."""
    mutual: float = 0.0
    """Weight with which two orders of the same images teach each other (as in arXiv 1706.00384)."""
    scale: bool = False
    """A scale for each block and slot, zero to begin with; the exported blocks then need their slot."""
    teacher: TeacherSettings = TeacherSettings()

    def __post_init__(self) -> None:
        parts = (self.tracks, self.trained, self.subset, self.curriculum)
        if self.groups < 1 or not all(0 <= part <= 1 for part in parts) or not 0 <= self.drop < 1 or self.mutual < 0:
            raise ValueError(
                "groups is 1 or more; tracks, trained, subset and curriculum are 0 to 1; drop is 0 to below 1; mutual "
                "is 0 or more"
            )
        if self.sandwich and (self.mutual or self.groups > 1):
            raise ValueError("sandwich has passes of its own: set mutual to 0 and groups to 1")
        if self.mutual and self.groups > 1:
            raise ValueError("mutual has two passes of the whole batch: set groups to 1")


def draw_plan(settings: AnyOrderSettings, blocks: int, rng: random.Random, progress: float) -> Plan:
    """The passes of a step, ``progress`` (0 to 1) through the training."""
    s = settings
    strength = 1.0 if s.curriculum <= progress else progress / s.curriculum
    if s.sandwich:
        trained = Pass(Arrangement.plain(range(blocks)))
        fewer = Pass(_arrange(s, _some(list(range(blocks)), rng), strength, rng))
        return Plan((trained, Pass(_arrange(s, range(blocks), strength, rng)), fewer))
    if s.mutual:
        return Plan(tuple(Pass(_draw(s, blocks, strength, rng)) for _ in range(2)))
    return Plan(tuple(Pass(_draw(s, blocks, strength, rng), 1 / s.groups) for _ in range(s.groups)))


def _draw(s: AnyOrderSettings, blocks: int, strength: float, rng: random.Random) -> Arrangement:
    if rng.random() < s.trained:
        return Arrangement.plain(range(blocks))
    chosen = list(range(blocks))
    if rng.random() < s.subset:
        chosen = _some(chosen, rng)
    if s.drop:
        chosen = [block for block in chosen if rng.random() >= s.drop] or chosen[:1]
    return _arrange(s, chosen, strength, rng)


def _arrange(s: AnyOrderSettings, chosen: list[int] | range, strength: float, rng: random.Random) -> Arrangement:
    order = displaced(chosen, strength, rng)
    return in_waves(order, rng) if rng.random() < s.tracks else Arrangement.plain(order)


def _some(blocks: list[int], rng: random.Random) -> list[int]:
    least = max(1, len(blocks) // 4)
    return sorted(rng.sample(blocks, rng.randint(least, len(blocks))))


def validation_arrangements(settings: AnyOrderSettings, blocks: int, orders: list[Arrangement]) -> list[Arrangement]:
    """``orders``, and the first of them in two tracks of half of the blocks where tracks are trained."""
    if not settings.tracks or blocks < 2:
        return orders
    return [*orders, dealt(orders[0].order, 2, max(1, blocks // 4))]
