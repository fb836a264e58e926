"""``anyorder``, a recipe for models that run in any arrangement: its settings and its draws.

The plain method spends each step on one order of one batch. Here a batch is split into groups with an arrangement
each (less variance between steps for the same cost), some of them in tracks or in trained order, and the weights are
averaged. Parts that are off by default are there to be compared, a frozen copy of the model as it starts for one,
which shows in trained order what to answer in every other: docs/training.md says what was found.

No torch here; the losses are in ``ls_edge.training.methods.distillation``.
"""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from ls_edge.arrangement import Arrangement
from ls_edge.evaluation.orders import in_equal_tracks
from ls_edge.training.methods.step_plan import Plan, in_waves, thinned


class TeacherSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The frozen copy of the model as it starts, run in trained order."""

    use: Literal["auto", "on", "off"] = "off"
    """``auto``: where training starts from trained weights (``--init``, ``--pretrained``); ``on``: only from such."""
    logits: float = 0.5
    """Weight of its soft answers, 0 to 1; the labels have the rest."""
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.logits <= 1 or not self.temperature > 0:
            raise ValueError("teacher: logits is 0 to 1, temperature above 0")


class AnyOrderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every part of the recipe; costs are counted by :meth:`ls_edge.training.methods.step_plan.Plan.cost`."""

    groups: int = 4
    """Parts of a batch that have an arrangement each."""
    tracks: float = 0.25
    """Probability of an arrangement in waves of tracks; plain orders are the rest."""
    trained: float = 0.1
    """Probability of the trained order."""
    subset: float = 0.25
    """Probability of leaving blocks out: a random number of them up to three quarters."""
    drop: float = 0.2
    """LayerDrop's probability for each block, on top."""
    teacher: TeacherSettings = TeacherSettings()

    def __post_init__(self) -> None:
        parts = (self.tracks, self.trained, self.subset)
        if self.groups < 1 or not all(0 <= part <= 1 for part in parts) or not 0 <= self.drop < 1:
            raise ValueError("groups is 1 or more; tracks, trained and subset are 0 to 1; drop is 0 to below 1")


def draw_plan(settings: AnyOrderSettings, blocks: int, rng: random.Random) -> Plan:
    """An arrangement for each group of a step."""
    return Plan(tuple(_draw(settings, blocks, rng) for _ in range(settings.groups)))


def _draw(s: AnyOrderSettings, blocks: int, rng: random.Random) -> Arrangement:
    order = list(range(blocks))
    if rng.random() < s.trained:
        return Arrangement.plain(order)
    if rng.random() < s.subset:
        order = sorted(rng.sample(order, rng.randint(max(1, blocks // 4), blocks)))
    if s.drop:
        order = thinned(order, s.drop, rng)
    rng.shuffle(order)
    return in_waves(order, rng) if rng.random() < s.tracks else Arrangement.plain(order)


def validation_arrangements(settings: AnyOrderSettings, blocks: int, orders: list[Arrangement]) -> list[Arrangement]:
    """``orders``, and the first of them in two tracks of half of the blocks where tracks are trained."""
    if not settings.tracks or blocks < 2:
        return orders
    return [*orders, in_equal_tracks(orders[0].order, 2, max(1, blocks // 4))]
