"""``shared``: the movable blocks share one set of weights, and each slot has its own norms and gates.

The blocks are steps of a loop and therefore interchangeable: all orders give the same answer, and any process with the
shared block can run any step. The method starts from a trained model; the tokens of this model after each step and its
answers are the targets (progressive distillation into few blocks: arXiv 2512.19941).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
import torch
from msgspec import Meta
from torch import Tensor, nn

from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.config import AtLeastZero, Positive, Share
from ls_edge.training.methods.base import Criterion, Method, soft_cross_entropy
from ls_edge.training.methods.step_plan import StepPlan, step_rng
from ls_edge.training.models.slots import SlotNorms
from ls_edge.training.models.view import BlockView

PREPARE_BATCH = 64
"""Batch size in :meth:`SharedTrunk.prepare`, which limits its memory."""


class SharedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``shared``."""

    start: Literal["middle", "mean"] = "mean"
    """Initial weights of the shared block: those of the middle one of the replaced blocks, or the mean of all."""
    tokens: AtLeastZero = 1.0
    """Weight of the squared error of an image's tokens after each step, relative to their mean square."""
    logits: Share = 0.5
    """Weight of the teacher's soft targets; the labels have the rest."""
    temperature: Positive = 2.0
    conditioning_lr: Positive = 1.0
    """Learning rate of norms, gates, and adapters relative to the model's; they have no weight decay."""
    exits: Share = 0.25
    """Probability that a step stops early, after three quarters of the slots or more (docs/choose.md)."""
    adapter_rank: Annotated[int, Meta(ge=0)] | None = None
    """Rank of the low-rank adapters of each slot for the linear layers; 0 for none, None for a quarter of the tokens'
    width, with which a ViT-S keeps an accuracy of 0.87 of 0.90 before training (rank 64: 0.82, rank 40: 0.69)."""


class SharedTrunk(Method):
    """One set of weights for the blocks of the largest band, with the initial model as the teacher.

    If the initial model already shares its weights, there is no teacher, and training only uses the labels.
    """

    settings_type: ClassVar[type[msgspec.Struct]] = SharedSettings
    average = "ema"
    timm_rate = 4e-5
    """Low, because the weights are fitted before the first step and higher rates destroy the fit: with rank 96, a ViT-S
    has an accuracy of 0.892 after an epoch; at 1.5e-4 and ``conditioning_lr`` 3, it has 0.839, less than the 0.87
    before training."""

    def reshape(self, view: BlockView, bands: Bands, source: BlockView | None, *, trained: bool) -> Sequence[int]:
        """Freeze the teacher, and put one block in all places of the largest band."""
        if view.shares_weights:
            return range(view.num_blocks)
        if not trained:
            raise UsageError("method shared needs a trained start, which is its teacher: give --init or --pretrained")
        group = max(bands.groups, key=len)
        if len(group) < 2:
            raise UsageError(f"method shared needs a band of two blocks or more; the bands are {bands}")
        teacher = copy.deepcopy(view if source is None else source)
        self.teacher = teacher.eval().requires_grad_(False).to(view.device)
        middle = group[len(group) // 2]
        if self.settings.start == "mean":
            _average([view.blocks[index] for index in group], view.blocks[middle])
        places = [middle if index in group else index for index in range(view.num_blocks)]
        view.keep_blocks(places)
        return places

    def attach(self, view: BlockView) -> None:
        """Add norms, gates, and adapters for each slot of the shared block."""
        s, blocks, dim = self.settings, list(view.blocks), view.token_spec.dim
        rank = dim // 4 if s.adapter_rank is None else s.adapter_rank
        slots = SlotNorms(blocks, view.branches, dim, s.conditioning_lr, _repeated(view), rank)
        view.slots = slots.to(view.device).train(view.training)

    def prepare(self, view: BlockView, images: Tensor) -> None:
        """Make the shared block approximate the teacher's block at each slot."""
        teacher, slots = self.teacher, view.slots
        if teacher is None:
            return
        assert isinstance(slots, SlotNorms)
        repeated = _repeated(view)

        def run() -> None:
            for start in range(0, len(images), PREPARE_BATCH):
                teacher(images[start : start + PREPARE_BATCH].to(teacher.device))

        slots.imitate(repeated[0], {slot: teacher.blocks[slot] for slot in repeated}, run)

    def ignore_answers(self) -> None:
        """Imitate the tokens of the initial model, and learn the answers from the labels alone."""
        self.settings = msgspec.structs.replace(self.settings, logits=0.0)

    def draw(self, bands: Bands, seed: int, step: int, progress: float = 1.0) -> StepPlan:  # noqa: ARG002
        """Return the trained order or its beginning, since the last slots have no block if peers drop out."""
        rng, num_blocks = step_rng(seed, step), bands.num_blocks
        early = rng.random() < self.settings.exits
        fewest = min(-(-3 * num_blocks // 4), num_blocks - 1)
        return StepPlan.plain(range(rng.randint(fewest, num_blocks - 1) if early else num_blocks))

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """Return the weighted sum of the criterion, the teacher's soft targets, and the token error after each step."""
        teacher = self.teacher
        if teacher is None:
            return super().loss(view, images, targets, plan, criterion)
        s: SharedSettings = self.settings
        tokens = view.stem(images)
        errors: list[Tensor] = []
        with torch.no_grad():
            wanted = teacher.stem(images)
        order = plan.groups[0].order
        for slot in range(view.num_blocks):
            with torch.no_grad():
                wanted = teacher.block(slot, wanted, slot)
            if slot < len(order):
                tokens, target = view.block(order[slot], tokens, slot), wanted.float()
                error, size = (value.square().mean((1, 2)) for value in (tokens.float() - target, target))
                errors.append((error / size).mean())  # a mean over images, so that parts of a batch add up
        with torch.no_grad():
            soft_targets = teacher.head(wanted)
        logits = view.head(tokens).float()
        soft = soft_cross_entropy(logits, soft_targets, s.temperature)
        labels = criterion(logits, targets)
        return (1 - s.logits) * labels + s.logits * soft + s.tokens * torch.stack(errors).mean()


def _repeated(view: BlockView) -> list[int]:
    """Return the places of blocks that occur in several places."""
    return [index for index, owner in enumerate(view.owners) if view.owners.count(owner) > 1]


def _average(blocks: Sequence[nn.Module], into: nn.Module) -> None:
    states = [block.state_dict() for block in blocks]
    with torch.no_grad():
        for name, value in into.state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.stack([state[name] for state in states]).mean(0))
