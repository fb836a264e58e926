"""How training treats the order of the blocks, by name.

A method draws the arrangements of each step (``step_plan``), says what the loss is, and in which
arrangements a checkpoint is judged. Of the paper (arXiv 2407.04513): ``sequential``, ``shuffle``, ``position``,
``predict``, ``layerdrop``; its fair baseline ``layerdrop+shuffle``; and a recipe of our own, ``anyorder``
(``ls_edge.training.methods.anyorder``).

A method's settings are a frozen struct, the section ``method_args`` of the configuration. This module imports
without torch, so that the command line can name the methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from ls_edge import validation
from ls_edge.arrangement import Arrangement, apply, random_orders
from ls_edge.errors import UsageError
from ls_edge.training.methods.anyorder import AnyOrderSettings, draw_plan, validation_arrangements
from ls_edge.training.methods.step_plan import Plan, rng_of, thinned

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.models.view import BlockView

    Criterion = Callable[[Tensor, Tensor], Tensor]


class NoSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a method that has none."""


class Method:
    """Base of all methods: trained order, the criterion on the logits."""

    name: ClassVar[str] = "sequential"
    """What ``--method`` calls it."""
    settings_type: ClassVar[type[msgspec.Struct]] = NoSettings
    average: ClassVar[str] = "none"
    """What ``optim.average: auto`` means for it."""

    def __init__(self, settings: msgspec.Struct | None = None) -> None:
        self.settings: Any = self.settings_type() if settings is None else settings

    def attach(self, view: BlockView) -> None:
        """Give the view the modules that this method trains besides the model's own."""

    def begin(self, view: BlockView, *, trained: bool) -> None:
        """Training begins from the view's weights, which are ``trained`` ones or drawn from the seed."""

    @property
    def has_teacher(self) -> bool:
        """Whether a frozen model runs beside."""
        return False

    @property
    def untaught(self) -> bool:
        """Whether it would have had a teacher from a trained start."""
        return False

    def draw(self, blocks: int, seed: int, step: int) -> Plan:  # noqa: ARG002
        """The arrangements of step ``step``, from 0."""
        return Plan.plain(range(blocks))

    def cost(self, blocks: int, *, draws: int = 400) -> float:
        """Expected cost of a step for an image, in forward passes of the model (:meth:`Plan.cost`)."""
        plans = (self.draw(blocks, 0, step) for step in range(draws))
        return sum(plan.cost(blocks, teacher=self.has_teacher) for plan in plans) / draws

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: Plan, criterion: Criterion) -> Tensor:
        """The loss of a batch: images ``[B, 3, H, W]``, targets int64 ``[B]``."""
        return criterion(view(images, plan.arrangement).float(), targets)

    def validation(self, blocks: int, count: int, seed: int) -> list[Arrangement]:  # noqa: ARG002
        """The arrangements whose mean cross-entropy selects the checkpoint; the same in every epoch."""
        return [Arrangement.plain(range(blocks))]


class Shuffle(Method):
    """LayerShuffle: a uniform permutation a batch; judged over ``count`` seeded orders, the trained one left out."""

    name = "shuffle"

    def draw(self, blocks: int, seed: int, step: int) -> Plan:
        """A permutation of all blocks."""
        order = list(range(blocks))
        rng_of(seed, step).shuffle(order)
        return Plan.plain(order)

    def validation(self, blocks: int, count: int, seed: int) -> list[Arrangement]:
        """Seeded orders, apart from those that ``eval`` draws from the same seed."""
        return [Arrangement.plain(order) for order in random_orders(blocks, count, seed ^ 0x5EED)]


class PositionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of ``position``."""

    width: int = 32
    """Dimensions of the slot's embedding."""
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.width < 1 or not 0 <= self.dropout < 1:
            raise ValueError(f"width {self.width} and dropout {self.dropout} have to be 1 or more, and 0 to below 1")


class PositionMethod(Shuffle):
    """LayerShuffle-position: shuffled, and each block is told its slot."""

    name = "position"
    settings_type = PositionSettings

    def attach(self, view: BlockView) -> None:
        """Add the embedding and a projection a block."""
        from ls_edge.training.methods.slots import Position

        spec = view.token_spec
        slots = Position(view.num_blocks, spec.dim, self.settings.width, self.settings.dropout)
        view.slots = slots.to(view.device).train(view.training)


class PredictMethod(Shuffle):
    """LayerShuffle-predict: shuffled, and each block learns to tell its slot from what it puts out."""

    name = "predict"

    def attach(self, view: BlockView) -> None:
        """Add a readout a block."""
        from ls_edge.training.methods.slots import Readout

        view.readout = Readout(view.num_blocks, view.token_spec.dim).to(view.device).train(view.training)

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: Plan, criterion: Criterion) -> Tensor:
        """The criterion, plus the cross-entropy of the slot averaged over the blocks."""
        import torch

        readout = view.readout
        assert readout is not None
        guesses: list[Tensor] = []

        def run(index: int, tokens: Tensor, slot: int) -> Tensor:
            out = view.block(index, tokens, slot)
            guesses.append(-torch.log_softmax(readout(index, out).float(), dim=-1)[:, slot].mean())
            return out

        logits = view.head(apply(plan.arrangement, view.stem(images), run))
        return criterion(logits.float(), targets) + torch.stack(guesses).mean()


class DropSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of ``layerdrop``."""

    p: float = 0.2
    """Probability with which a block is left out of a batch."""

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ValueError(f"p is {self.p}; it has to be 0 to below 1")


class LayerDrop(Method):
    """LayerDrop (arXiv 1909.11556): trained order, each block left out of a batch with probability p."""

    name = "layerdrop"
    settings_type = DropSettings

    def draw(self, blocks: int, seed: int, step: int) -> Plan:
        """A random subset in trained order."""
        return Plan.plain(thinned(range(blocks), self.settings.p, rng_of(seed, step)))


class LayerDropShuffle(Shuffle):
    """Both: a random subset in random order."""

    name = "layerdrop+shuffle"
    settings_type = DropSettings

    def draw(self, blocks: int, seed: int, step: int) -> Plan:
        """A random order of a random subset."""
        rng = rng_of(seed, step)
        order = thinned(range(blocks), self.settings.p, rng)
        rng.shuffle(order)
        return Plan.plain(order)


class AnyOrder(Shuffle):
    """The project's own recipe; every part of it is a setting (:class:`AnyOrderSettings`)."""

    name = "anyorder"
    settings_type = AnyOrderSettings
    average = "ema"

    def __init__(self, settings: msgspec.Struct | None = None) -> None:
        super().__init__(settings)
        self._teacher: BlockView | None = None

    def begin(self, view: BlockView, *, trained: bool) -> None:
        """Freeze a copy of the model as it starts; one that was never trained teaches nothing."""
        wanted = self.settings.teacher.use
        if wanted == "on" and not trained:
            raise UsageError("method anyorder with teacher.use on needs a trained start: give --init or --pretrained")
        if wanted == "off" or not trained:
            return
        from ls_edge.training.methods.distillation import frozen

        self._teacher = frozen(view)

    @property
    def has_teacher(self) -> bool:
        """Whether :meth:`begin` froze one."""
        return self._teacher is not None

    @property
    def untaught(self) -> bool:
        """Whether the settings want a teacher that could not be had."""
        return self._teacher is None and self.settings.teacher.use != "off"

    def draw(self, blocks: int, seed: int, step: int) -> Plan:
        """See ``ls_edge.training.methods.anyorder``."""
        return draw_plan(self.settings, blocks, rng_of(seed, step))

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: Plan, criterion: Criterion) -> Tensor:
        """The mean over the groups, with what the teacher says (``ls_edge.training.methods.distillation``)."""
        from ls_edge.training.methods.distillation import taught_loss

        return taught_loss(self.settings, view, self._teacher, images, targets, plan, criterion)

    def validation(self, blocks: int, count: int, seed: int) -> list[Arrangement]:
        """Random orders, and one in tracks where the recipe trains them."""
        return validation_arrangements(self.settings, blocks, super().validation(blocks, count, seed))


METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (Method, Shuffle, PositionMethod, PredictMethod, LayerDrop, LayerDropShuffle, AnyOrder)
}
"""Every method by name; the one list of them."""


def make_method(name: str, args: dict[str, Any]) -> Method:
    """The method of that name; raises :class:`UsageError` for an unknown one or a setting that it lacks."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; this version has {', '.join(METHODS)}")
    kind = METHODS[name]
    try:
        return kind(msgspec.convert(args, kind.settings_type))
    except msgspec.ValidationError as error:
        text = validation.explain(str(error), args, kind.settings_type).text
        known = ", ".join(kind.settings_type.__struct_fields__) or "none"
        raise UsageError(f"method {name} with settings {args}: {text}; it has {known}") from None
