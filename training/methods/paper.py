"""The methods of the LayerShuffle paper (arXiv 2407.04513), and LayerDrop with and without shuffling as baselines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from ls_edge.core.arrangement import Arrangement, apply
from ls_edge.training.methods.step_plan import StepPlan, drop_blocks, step_rng

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.core.bands import Bands
    from ls_edge.training.methods.step_plan import Criterion
    from ls_edge.training.models.view import BlockView

VALIDATION_SALT = 0x5EED
"""Combined with the seed, so that a checkpoint is selected in other orders than those that ``eval`` draws."""


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a method that has none."""


class Sequential:
    """Trained order, the criterion on the logits; the base of the other methods."""

    name: ClassVar[str] = "sequential"
    settings_type: ClassVar[type[msgspec.Struct]] = NoSettings
    average: ClassVar[str] = "none"

    def __init__(self, settings: msgspec.Struct | None = None) -> None:
        self.settings: Any = self.settings_type() if settings is None else settings

    def reshape(self, view: BlockView, bands: Bands, source: BlockView | None, *, trained: bool) -> Sequence[int]:  # noqa: ARG002
        """Leave each block in its place."""
        return range(view.num_blocks)

    def attach(self, view: BlockView) -> None:
        """Add nothing."""

    def begin(self, view: BlockView, *, trained: bool) -> None:
        """Do nothing."""

    @property
    def has_teacher(self) -> bool:
        """False."""
        return False

    @property
    def lacks_teacher(self) -> bool:
        """False."""
        return False

    def draw(self, bands: Bands, seed: int, step: int) -> StepPlan:  # noqa: ARG002
        """Trained order."""
        return StepPlan.plain(range(bands.num_blocks))

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """The criterion on the logits."""
        return criterion(view(images, plan.arrangement).float(), targets)

    def validation(self, bands: Bands, count: int, seed: int) -> list[Arrangement]:  # noqa: ARG002
        """Trained order."""
        return [Arrangement.plain(range(bands.num_blocks))]


class Shuffle(Sequential):
    """LayerShuffle: a uniform order a batch, within the bands, validated over ``count`` seeded orders."""

    name = "shuffle"

    def draw(self, bands: Bands, seed: int, step: int) -> StepPlan:
        """All blocks in a random order."""
        order = list(range(bands.num_blocks))
        step_rng(seed, step).shuffle(order)
        return StepPlan.plain(bands.sort(order))

    def validation(self, bands: Bands, count: int, seed: int) -> list[Arrangement]:
        """Seeded orders, others than those that ``eval`` draws from the same seed."""
        return [Arrangement.plain(order) for order in bands.random_orders(count, seed ^ VALIDATION_SALT)]


class PositionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``position``."""

    width: int = 32
    """Dimensions of the slot embedding."""
    embedding: Literal["shared", "per_block"] = "shared"
    """``shared``: one embedding of the slot for all blocks, as in the paper's reference code; ``per_block``: each
    block learns its own, as the paper's text can be read."""
    dropout: float = 0.1
    """After the projection; the reference code has none."""

    def __post_init__(self) -> None:
        if self.width < 1 or not 0 <= self.dropout < 1:
            raise ValueError(f"width {self.width} and dropout {self.dropout} have to be 1 or more, and 0 to below 1")


class PositionMethod(Shuffle):
    """LayerShuffle-position: shuffled, and each block gets an embedding of its slot."""

    name = "position"
    settings_type: ClassVar[type[msgspec.Struct]] = PositionSettings

    def attach(self, view: BlockView) -> None:
        """Add the embedding and a projection for each block."""
        from ls_edge.training.methods.slots import SlotEmbedding

        spec = view.token_spec
        slots = SlotEmbedding(
            view.num_blocks, spec.dim, self.settings.width, self.settings.dropout,
            per_block=self.settings.embedding == "per_block",
        )  # fmt: skip
        view.slots = slots.to(view.device).train(view.training)


class PredictMethod(Shuffle):
    """LayerShuffle-predict: shuffled, and each block learns to predict its slot from its output."""

    name = "predict"
    settings_type: ClassVar[type[msgspec.Struct]] = NoSettings

    def attach(self, view: BlockView) -> None:
        """Add a predictor for each block."""
        from ls_edge.training.methods.slots import PositionPredictor

        predictor = PositionPredictor(view.num_blocks, view.token_spec.dim)
        view.predictor = predictor.to(view.device).train(view.training)

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """The criterion, plus the cross-entropy of the slot averaged over the blocks."""
        import torch

        predictor = view.predictor
        assert predictor is not None
        losses: list[Tensor] = []

        def run(index: int, tokens: Tensor, slot: int) -> Tensor:
            out = view.block(index, tokens, slot)
            losses.append(-torch.log_softmax(predictor(index, out).float(), dim=-1)[:, slot].mean())
            return out

        logits = view.head(apply(plan.arrangement, view.stem(images), run))
        return criterion(logits.float(), targets) + torch.stack(losses).mean()


class DropSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``layerdrop`` and ``layerdrop+shuffle``."""

    p: float = 0.2
    """Probability with which a block is dropped from a batch."""

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"p is {self.p}; it has to be 0 to below 1")


class LayerDrop(Sequential):
    """LayerDrop (arXiv 1909.11556): trained order, each block dropped from a batch with probability p."""

    name = "layerdrop"
    settings_type: ClassVar[type[msgspec.Struct]] = DropSettings

    def draw(self, bands: Bands, seed: int, step: int) -> StepPlan:
        """A random subset in trained order."""
        return StepPlan.plain(drop_blocks(range(bands.num_blocks), self.settings.p, step_rng(seed, step)))


class LayerDropShuffle(Shuffle):
    """LayerDrop and LayerShuffle: a random subset in random order."""

    name = "layerdrop+shuffle"
    settings_type: ClassVar[type[msgspec.Struct]] = DropSettings

    def draw(self, bands: Bands, seed: int, step: int) -> StepPlan:
        """A random order of a random subset."""
        rng = step_rng(seed, step)
        order = drop_blocks(range(bands.num_blocks), self.settings.p, rng)
        rng.shuffle(order)
        return StepPlan.plain(bands.sort(order))
