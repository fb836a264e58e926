"""The interface of training methods, and the table of all methods by name.

A method draws the plan of each step (``step_plan``), computes the loss, and chooses the arrangements in which a
checkpoint is validated. Its settings are a frozen struct, the section ``method_args`` of the configuration. A new
method is a class in a module of its own and an entry in :data:`METHODS`. This module imports without torch, so that
the command line can list the methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from ls_edge.core import validation
from ls_edge.core.arrangement import Arrangement
from ls_edge.core.bands import Bands
from ls_edge.core.errors import UsageError
from ls_edge.training.methods import anyorder, paper, shared
from ls_edge.training.methods.step_plan import StepPlan, WorkProfile

if TYPE_CHECKING:
    from torch import Tensor

    from ls_edge.training.methods.step_plan import Criterion
    from ls_edge.training.models.view import BlockView


class Method(Protocol):
    """A training method; :class:`ls_edge.training.methods.paper.Sequential` has defaults for everything."""

    name: ClassVar[str]
    """Its name for ``--method``."""
    settings_type: ClassVar[type[msgspec.Struct]]
    average: ClassVar[str]
    """What ``optim.average: auto`` means for this method."""
    settings: Any

    def __init__(self, settings: msgspec.Struct | None = None) -> None: ...

    def reshape(self, view: BlockView, bands: Bands, source: BlockView | None, *, trained: bool) -> Sequence[int]:
        """Change which block of the initial model stands in which place, and return that, before :meth:`attach`.

        ``source`` is the model that training starts from as it was trained, with the modules of its own method; None
        where that was changed. ``trained`` as in :meth:`begin`.
        """
        ...

    def attach(self, view: BlockView) -> None:
        """Give the view the modules that this method trains besides the model's own."""
        ...

    def begin(self, view: BlockView, *, trained: bool) -> None:
        """Called once before the first step; ``trained`` is False if the view's weights were drawn from the seed."""
        ...

    @property
    def has_teacher(self) -> bool:
        """Whether each step also runs a frozen model forwards."""
        ...

    @property
    def lacks_teacher(self) -> bool:
        """Whether the settings ask for a teacher, but the initial weights are not trained."""
        ...

    def draw(self, bands: Bands, seed: int, step: int) -> StepPlan:
        """Draw the plan of step ``step``, counted from 0: blocks change places within the model's bands alone."""
        ...

    def loss(self, view: BlockView, images: Tensor, targets: Tensor, plan: StepPlan, criterion: Criterion) -> Tensor:
        """Compute the loss of a batch: images ``[B, 3, H, W]``, targets int64 ``[B]``."""
        ...

    def validation(self, bands: Bands, count: int, seed: int) -> list[Arrangement]:
        """The arrangements whose mean cross-entropy selects the checkpoint; the same in every epoch."""
        ...


METHODS: dict[str, type[Method]] = {
    "sequential": paper.Sequential,
    "shuffle": paper.Shuffle,
    "position": paper.PositionMethod,
    "predict": paper.PredictMethod,
    "layerdrop": paper.LayerDrop,
    "layerdrop+shuffle": paper.LayerDropShuffle,
    "anyorder": anyorder.AnyOrder,
    "shared": shared.SharedTrunk,
}


_OFF = (False, None, "none", "off")
_REMOVED: dict[str, tuple[tuple[object, ...] | None, str]] = {
    "conditioning": (
        _OFF,
        "the weights have norms and gates for each slot that no block of this version has; use the version that wrote "
        "the run, or train again without it or with the method shared",
    ),
    "conditioning_lr": (None, ""),
    "balanced": (
        _OFF,
        "only training used it, the weights are like any others; remove it from method_args to load them",
    ),
}
"""Settings that methods had once: values with which they changed nothing (None: all), and what to do about others."""


def make_method(name: str, args: dict[str, Any]) -> Method:
    """Make the method of that name; raises :class:`UsageError` for an unknown name or setting."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; this version has {', '.join(METHODS)}")
    kind = METHODS[name]
    args = _without_removed(name, args)
    try:
        return kind(msgspec.convert(args, kind.settings_type))
    except msgspec.ValidationError as error:
        text = validation.explain(str(error), args, kind.settings_type).text
        known = ", ".join(kind.settings_type.__struct_fields__) or "none"
        raise UsageError(f"method {name} with settings {args}: {text}; it has {known}") from None


def _without_removed(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that an earlier version had, where they are set to what this one does anyway."""
    known = METHODS[name].settings_type.__struct_fields__
    kept = dict(args)
    for key in [key for key in args if key in _REMOVED and key not in known]:
        value, (idle, advice) = kept.pop(key), _REMOVED[key]
        if idle is not None and value not in idle:
            shown = validation.shorten(value)
            raise UsageError(f"method {name} has no setting {key!r} any more, and {key} is {shown} here: {advice}")
    return kept


def expected_cost(method: Method, work: WorkProfile, *, draws: int = 400) -> float:
    """Mean cost of a step for one image over ``draws`` plans, in forward passes (:meth:`StepPlan.cost`)."""
    plans = (method.draw(Bands(work.num_blocks), 0, step) for step in range(draws))
    return sum(plan.cost(work, teacher=method.has_teacher) for plan in plans) / draws
