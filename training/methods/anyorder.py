"""``anyorder``: this project's recipe for models that run in any arrangement.

Plain shuffling uses a single order in each step. Here, a batch is split into groups with one arrangement each, which
reduces the variance between steps at the same cost; some groups run in tracks or in trained order, and the weights are
averaged. docs/train.md compares the settings.
"""

from __future__ import annotations

import random
from typing import ClassVar

import msgspec
import torch
from torch import Tensor

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bands import Bands
from ls_edge.evaluation.settings import BatchSize
from ls_edge.training.config import BelowOne, Share
from ls_edge.training.methods.base import Criterion
from ls_edge.training.methods.paper import Shuffle
from ls_edge.training.methods.step_plan import StepPlan, drop_blocks, step_rng
from ls_edge.training.models.view import BlockView


class AnyOrderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``anyorder``."""

    groups: BatchSize = 4
    """Number of parts of a batch, each with its own arrangement."""
    tracks: Share = 0.25
    """Probability of an arrangement in waves of tracks."""
    trained: Share = 0.1
    """Probability of the trained order."""
    subset: Share = 0.25
    """Probability of a random subset of the blocks, at least a quarter of them."""
    drop: BelowOne = 0.2
    """Additional probability of dropping each block (LayerDrop)."""
    widen: Share = 0.5
    """Fraction of training during which blocks move further and further from their place in trained order. Not yet
    compared with 0 at equal cost."""


class AnyOrder(Shuffle):
    """The recipe of this project, with a setting for each of its components."""

    settings_type: ClassVar[type[msgspec.Struct]] = AnyOrderSettings
    average = "ema"

    def default_bands(self, view: BlockView) -> Bands:
        """Keep the first and the last block in place if a single linear layer embeds the patches.

        In such models, these blocks cause most of the accuracy loss in free orders (docs/choose.md).
        """
        last = view.num_blocks - 1
        plain = view.has_plain_patches and not view.shares_weights
        return Bands(view.num_blocks, (1, last) if plain and last >= 3 else ())

    def draw(self, bands: Bands, seed: int, step: int, progress: float = 1.0) -> StepPlan:
        """Return one arrangement per group."""
        rng, s = step_rng(seed, step), self.settings
        reach = bands.num_blocks * progress / s.widen if progress < s.widen else None
        return StepPlan(tuple(_draw_arrangement(s, bands, reach, rng) for _ in range(s.groups)))

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """Return the mean loss of the images, each in the arrangement of its group; the stem runs once."""
        tokens = view.stem(images)
        losses: list[Tensor] = []
        for arrangement, rows in plan.parts(len(images)):
            logits = view.head(apply(arrangement, tokens[rows], view.block)).float()
            losses.append(criterion(logits, targets[rows]) * len(logits) / len(images))
        return torch.stack(losses).sum()


def _draw_arrangement(s: AnyOrderSettings, bands: Bands, reach: float | None, rng: random.Random) -> Arrangement:
    """Draw an arrangement in which blocks move by up to ``reach`` places, or freely if it is None."""
    num_blocks = bands.num_blocks
    order = list(range(num_blocks))
    if rng.random() < s.trained:
        return Arrangement.plain(order)
    if rng.random() < s.subset:
        order = sorted(rng.sample(order, rng.randint(max(1, num_blocks // 4), num_blocks)))
    if s.drop:
        order = drop_blocks(order, s.drop, rng)
    if reach is None:
        rng.shuffle(order)
    else:
        order.sort(key=lambda block: block + reach * rng.random())
    return bands.random_waves(order, rng) if rng.random() < s.tracks else Arrangement.plain(bands.sort(order))
