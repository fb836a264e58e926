"""Method ``both-ways``: the trained order, and every few steps its reverse."""

from typing import Annotated

import msgspec

from ls_edge.core.arrangement import Arrangement
from ls_edge.training.methods.base import Method
from ls_edge.training.methods.step_plan import StepPlan


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of the method, under ``method_args``."""

    every: Annotated[int, msgspec.Meta(ge=2)] = 2
    """Steps from one reversed order to the next."""


class BothWays(Method):
    """Run the blocks of each band from the first to the last, or from the last to the first."""

    settings_type = Settings

    def draw(self, bands, seed, step, progress=1.0):
        """Return the order of a step."""
        return StepPlan.plain(self._order(bands, is_reversed=(step + seed) % self.settings.every == 0))

    def validation(self, bands, count, seed):
        """Select the checkpoint by both orders."""
        return [Arrangement.plain(self._order(bands, is_reversed=reverse)) for reverse in (False, True)]

    def _order(self, bands, *, is_reversed):
        blocks = range(bands.num_blocks)
        return bands.sort(reversed(blocks) if is_reversed else blocks)
