"""Methods of the LayerShuffle paper (arXiv 2407.04513), and LayerDrop with and without shuffling as baselines."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec
import torch
from torch import Tensor

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.core.bands import Bands
from ls_edge.training.config import AtLeastOne, BelowOne
from ls_edge.training.methods.base import Criterion, Method
from ls_edge.training.methods.step_plan import StepPlan, drop_blocks, step_rng
from ls_edge.training.models.slots import PositionPredictor, SlotEmbedding
from ls_edge.training.models.view import BlockView

VALIDATION_SALT = 0x5EED
"""Number combined with the seed, so that validation orders differ from the orders that ``eval`` draws."""


class Shuffle(Method):
    """LayerShuffle: a uniform order per batch, within the bands."""

    def draw(self, bands: Bands, seed: int, step: int, progress: float = 1.0) -> StepPlan:  # noqa: ARG002
        """Return all blocks in random order."""
        order = list(range(bands.num_blocks))
        step_rng(seed, step).shuffle(order)
        return StepPlan.plain(bands.sort(order))

    def validation(self, bands: Bands, count: int, seed: int) -> list[Arrangement]:
        """Return ``count`` seeded orders."""
        return [Arrangement.plain(order) for order in bands.random_orders(count, seed ^ VALIDATION_SALT)]


class PositionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``position``."""

    width: AtLeastOne = 32
    """Width of the slot embedding."""
    embedding: Literal["shared", "per_block"] = "shared"
    """``shared``: one embedding for all blocks, as in the paper's reference code; ``per_block``: one for each block, a
    possible reading of the paper's text."""
    dropout: BelowOne = 0.1
    """Dropout after the projection, which the reference code does not have."""


class PositionMethod(Shuffle):
    """LayerShuffle-position: shuffled orders, with an embedding of the slot for each block."""

    settings_type: ClassVar[type[msgspec.Struct]] = PositionSettings

    def attach(self, view: BlockView) -> None:
        """Add the embedding, and a projection for each block."""
        s = self.settings
        slots = SlotEmbedding(
            view.num_blocks, view.token_spec.dim, s.width, s.dropout, per_block=s.embedding == "per_block"
        )
        view.slots = slots.to(view.device).train(view.training)


class PredictMethod(Shuffle):
    """LayerShuffle-predict: shuffled orders, and each block learns to predict its slot from its output."""

    def attach(self, view: BlockView) -> None:
        """Add a predictor for each block."""
        predictor = PositionPredictor(view.num_blocks, view.token_spec.dim)
        view.predictor = predictor.to(view.device).train(view.training)

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """Return the criterion plus the cross-entropy of the slots, averaged over the blocks."""
        predictor = view.predictor
        assert predictor is not None
        losses: list[Tensor] = []

        def run(index: int, tokens: Tensor, slot: int) -> Tensor:
            out = view.block(index, tokens, slot)
            losses.append(-torch.log_softmax(predictor(view.owners[index], out).float(), dim=-1)[:, slot].mean())
            return out

        logits = view.head(apply(plan.groups[0], view.stem(images), run))
        return criterion(logits.float(), targets) + torch.stack(losses).mean()


class DropSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``layerdrop`` and ``layerdrop+shuffle``."""

    p: BelowOne = 0.2
    """Probability of dropping a block from a batch."""


class LayerDrop(Method):
    """LayerDrop (arXiv 1909.11556): trained order, with each block dropped from a batch with probability ``p``."""

    settings_type: ClassVar[type[msgspec.Struct]] = DropSettings

    def draw(self, bands: Bands, seed: int, step: int, progress: float = 1.0) -> StepPlan:  # noqa: ARG002
        """Return a random subset in trained order."""
        return StepPlan.plain(drop_blocks(range(bands.num_blocks), self.settings.p, step_rng(seed, step)))


class LayerDropShuffle(Shuffle):
    """LayerDrop and LayerShuffle combined."""

    settings_type: ClassVar[type[msgspec.Struct]] = DropSettings

    def draw(self, bands: Bands, seed: int, step: int, progress: float = 1.0) -> StepPlan:  # noqa: ARG002
        """Return a random subset in random order."""
        rng = step_rng(seed, step)
        order = drop_blocks(range(bands.num_blocks), self.settings.p, rng)
        rng.shuffle(order)
        return StepPlan.plain(bands.sort(order))
