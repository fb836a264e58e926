"""``shared``: the movable blocks have one set of weights, and each slot its own norms and gates.

Then a block is a step, and which block runs a step makes no difference: every order of them gives the same answer, and
every process that has the one block can run any step. The model is made from a trained one. Its tokens after each
step and its answers are the targets (progressive distillation into few blocks: arXiv 2512.19941).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from ls_edge.core.errors import UsageError
from ls_edge.training.methods.paper import Sequential

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ls_edge.core.bands import Bands
    from ls_edge.training.methods.step_plan import Criterion, StepPlan
    from ls_edge.training.models.view import BlockView


class SharedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``shared``."""

    start: Literal["middle", "mean"] = "mean"
    """The weights that the shared block starts from: those of the middle block, or the mean of all that it replaces."""
    tokens: float = 1.0
    """Weight of the squared error of the tokens after each step, over their own mean square."""
    logits: float = 0.5
    """Weight of the teacher's soft targets, 0 to 1; the labels have the rest."""
    temperature: float = 2.0
    conditioning_lr: float = 3.0
    """Learning rate of what belongs to the slots (norms, gates, adapters) over the model's; it has no weight decay."""
    adapter_rank: int = 8
    """Rank of the low-rank adapters that each slot has for the linear layers of the shared block; 0: no adapters."""

    def __post_init__(self) -> None:
        if not (0 <= self.logits <= 1 and 0 <= self.tokens < float("inf") and self.temperature > 0):
            raise ValueError("logits is 0 to 1, tokens 0 or more, temperature above 0")
        if self.adapter_rank < 0:
            raise ValueError(f"adapter_rank is {self.adapter_rank}; it has to be 0 (no adapters) or more")
        if not 0 < self.conditioning_lr < float("inf"):
            raise ValueError(f"conditioning_lr is {self.conditioning_lr}; it has to be above 0")


class SharedTrunk(Sequential):
    """One set of weights for the blocks of the largest band, taught by the model that training starts from.

    Where training starts from a model that shares its weights already, the labels alone teach.
    """

    name = "shared"
    settings_type: ClassVar[type[msgspec.Struct]] = SharedSettings
    average = "ema"

    def __init__(self, settings: msgspec.Struct | None = None) -> None:
        super().__init__(settings)
        self._teacher: BlockView | None = None

    @property
    def has_teacher(self) -> bool:
        """Whether training starts from a model whose blocks have weights of their own."""
        return self._teacher is not None

    def reshape(self, view: BlockView, bands: Bands, source: BlockView | None, *, trained: bool) -> Sequence[int]:
        """Freeze the teacher and put one block into all places of the largest band."""
        from ls_edge.training.methods.distillation import frozen_copy

        if view.shares_weights:
            return range(view.num_blocks)
        if not trained:
            raise UsageError("method shared needs a trained start, which is its teacher: give --init or --pretrained")
        group = max(bands.groups, key=len)
        if len(group) < 2:
            raise UsageError(f"method shared needs a band of two blocks or more; the bands are {bands}")
        self._teacher = frozen_copy(view if source is None else source).to(view.device)
        middle = group[len(group) // 2]
        if self.settings.start == "mean":
            _average([view.blocks[index] for index in group], view.blocks[middle])
        places = [middle if index in group else index for index in range(view.num_blocks)]
        view.keep_blocks(places)
        return places

    def attach(self, view: BlockView) -> None:
        """Add norms, gates and adapters of the slots to the blocks that share their weights.

        The adapters start as what the shared block lacks most of the teacher's block at their slot.
        """
        from ls_edge.training.methods.slots import SlotAdapters, SlotNorms

        s, blocks = self.settings, list(view.blocks)
        only = [index for index, owner in enumerate(view.owners) if view.owners.count(owner) > 1]
        slots = SlotNorms(blocks, view.branches, view.token_spec.dim, s.conditioning_lr, only, s.adapter_rank)
        slots.to(view.device).train(view.training)
        if self._teacher is not None:
            wanted = list(self._teacher.blocks)
            for adapters in slots.adapters:
                assert isinstance(adapters, SlotAdapters)
                for index in only:
                    adapters.approximate(index, blocks[index], wanted[index])
        view.slots = slots

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """The criterion on the logits, the teacher's soft targets, and the error of the tokens after each step."""
        import torch

        from ls_edge.training.methods.distillation import soft_cross_entropy

        if self._teacher is None:
            return super().loss(view, images, targets, plan, criterion)
        s, teacher = self.settings, self._teacher
        with torch.no_grad():
            wanted = teacher.stem(images)
        tokens = view.stem(images)
        errors: list[Tensor] = []
        for slot, index in enumerate(plan.order):
            with torch.no_grad():
                wanted = teacher.block(index, wanted, slot)
            tokens = view.block(index, tokens, slot)
            target = wanted.float()
            errors.append((tokens.float() - target).square().mean() / target.square().mean())
        with torch.no_grad():
            soft_targets = teacher.head(wanted)
        logits = view.head(tokens).float()
        soft = soft_cross_entropy(logits, soft_targets, s.temperature)
        labels = criterion(logits, targets)
        total: Tensor = (1 - s.logits) * labels + s.logits * soft + s.tokens * torch.stack(errors).mean()
        return total


def _average(blocks: Sequence[nn.Module], into: nn.Module) -> None:
    """Give a block the mean of the weights of several."""
    import torch

    states = [block.state_dict() for block in blocks]
    with torch.no_grad():
        for name, value in into.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.stack([state[name] for state in states]).mean(0))
