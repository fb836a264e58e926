"""Policy ``parallel``: waves of tracks that run in parallel."""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.policies.fastest import Fastest
from ls_edge.runtime.routing.policies.policy import Choice, SendTo
from ls_edge.runtime.routing.policies.wave_planner import best_joiner
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.neighbors import Neighbor


class Parallel(Fastest):
    """Hand the tokens to the best joiner of a wave; if splitting does not pay off, follow ``fastest``.

    A holder with a block that may run now splits the request itself (``peer/waves.py``).
    """

    name = "parallel"
    runs_in_waves = True
    batches_freely = False

    def preferred_step(
        self,
        itinerary: Itinerary,
        local: LocalNode,
        candidates: Sequence[Neighbor],
        *,
        patient: bool,
        tie_break: int,
    ) -> Choice | None:
        """Return the joiner with the earliest expected finish, or the step of ``fastest``."""
        if local.blocks.isdisjoint(local.model.bands.permitted(itinerary.remaining)):
            joiner = best_joiner(itinerary, local, candidates, tie_break)
            if joiner is not None:
                return SendTo(joiner.name)
        return super().preferred_step(itinerary, local, candidates, patient=patient, tie_break=tie_break)
