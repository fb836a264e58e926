"""``anyorder``, the project's recipe for models that run in any arrangement.

The plain method spends each step on one order of one batch. Here a batch is split into groups with an arrangement
each (less variance between steps for the same cost), some of them in tracks or in trained order, and the weights are
averaged. Parts that are off by default are there to be compared, such as distillation from a frozen copy of the
initial model in trained order; docs/training.md has the results. The losses are in ``distillation``.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.errors import UsageError
from ls_edge.training.methods.paper import Shuffle
from ls_edge.training.methods.step_plan import StepPlan, drop_blocks, step_rng

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.core.bands import Bands
    from ls_edge.training.methods.step_plan import Criterion
    from ls_edge.training.models.view import BlockView


class TeacherSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Distillation from the initial model, frozen and run in trained order."""

    use: Literal["auto", "on", "off"] = "off"
    """``auto``: if training starts from trained weights (``--init``, ``--pretrained``); ``on``: only from such."""
    logits: float = 0.5
    """Weight of the teacher's soft targets, 0 to 1; the labels have the rest."""
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.logits <= 1 or not self.temperature > 0:
            raise ValueError("teacher: logits is 0 to 1, temperature above 0")


class AnyOrderSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of ``anyorder``; costs are counted by :meth:`ls_edge.training.methods.step_plan.StepPlan.cost`."""

    groups: int = 4
    """Parts of a batch that have an arrangement each."""
    tracks: float = 0.25
    """Probability of an arrangement in waves of tracks; plain orders are the rest."""
    trained: float = 0.1
    """Probability of the trained order."""
    subset: float = 0.25
    """Probability of a random subset of the blocks, at least a quarter of them."""
    drop: float = 0.2
    """LayerDrop's probability for each block, on top."""
    teacher: TeacherSettings = TeacherSettings()

    def __post_init__(self) -> None:
        parts = (self.tracks, self.trained, self.subset)
        if self.groups < 1 or not all(0 <= part <= 1 for part in parts) or not 0 <= self.drop < 1:
            raise ValueError("groups is 1 or more; tracks, trained and subset are 0 to 1; drop is 0 to below 1")


class AnyOrder(Shuffle):
    """The recipe; every part of it is a setting (:class:`AnyOrderSettings`)."""

    name = "anyorder"
    settings_type: ClassVar[type[msgspec.Struct]] = AnyOrderSettings
    average = "ema"

    def __init__(self, settings: msgspec.Struct | None = None) -> None:
        super().__init__(settings)
        self._teacher: BlockView | None = None

    def begin(self, view: BlockView, *, trained: bool) -> None:
        """Freeze a copy of the initial model as teacher, if the settings ask for one and it is trained."""
        use = self.settings.teacher.use
        if use == "on" and not trained:
            raise UsageError("method anyorder with teacher.use on needs a trained start: give --init or --pretrained")
        if use == "off" or not trained:
            return
        from ls_edge.training.methods.distillation import frozen_copy

        self._teacher = frozen_copy(view)

    @property
    def has_teacher(self) -> bool:
        """Whether :meth:`begin` froze one."""
        return self._teacher is not None

    @property
    def lacks_teacher(self) -> bool:
        """Whether the settings ask for a teacher and there is none."""
        return self._teacher is None and self.settings.teacher.use != "off"

    def draw(self, bands: Bands, seed: int, step: int) -> StepPlan:
        """An arrangement for each group."""
        rng, s = step_rng(seed, step), self.settings
        return StepPlan(tuple(_draw_arrangement(s, bands, rng) for _ in range(s.groups)))

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """The mean over the groups, with soft targets if there is a teacher."""
        from ls_edge.training.methods.distillation import distillation_loss

        teacher = self.settings.teacher
        return distillation_loss(
            view,
            self._teacher,
            images,
            targets,
            plan,
            criterion,
            weight=teacher.logits,
            temperature=teacher.temperature,
        )

    def validation(self, bands: Bands, count: int, seed: int) -> list[Arrangement]:
        """Random orders and, if tracks are trained, the first of them in two tracks of a quarter of the blocks."""
        orders = super().validation(bands, count, seed)
        in_tracks = bands.equal_waves(orders[0].order, 2, max(1, bands.num_blocks // 4))
        return orders if not self.settings.tracks or in_tracks.is_plain else [*orders, in_tracks]


def _draw_arrangement(s: AnyOrderSettings, bands: Bands, rng: random.Random) -> Arrangement:
    """A random arrangement of all blocks or fewer."""
    num_blocks = bands.num_blocks
    order = list(range(num_blocks))
    if rng.random() < s.trained:
        return Arrangement.plain(order)
    if rng.random() < s.subset:
        order = sorted(rng.sample(order, rng.randint(max(1, num_blocks // 4), num_blocks)))
    if s.drop:
        order = drop_blocks(order, s.drop, rng)
    rng.shuffle(order)
    return bands.random_waves(order, rng) if rng.random() < s.tracks else Arrangement.plain(bands.sort(order))
