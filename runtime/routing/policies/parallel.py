"""The policy ``parallel``: waves of tracks that run side by side."""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.candidates import Candidate, LocalNode
from ls_edge.runtime.routing.parts.wave_planner import best_joiner
from ls_edge.runtime.routing.policies.fastest import least_time_step
from ls_edge.runtime.routing.policies.policy import Choice, Policy, SendTo


class Parallel(Policy):
    """Hand the tokens to the best joiner of a wave; where splitting does not pay, as ``fastest``.

    A holder that has a block that may run now splits the request itself (``ls_edge.runtime.routing.waves``).
    """

    name = "parallel"
    runs_in_waves = True

    def preferred_step(
        self,
        itinerary: Itinerary,
        local: LocalNode,
        candidates: Sequence[Candidate],
        *,
        patient: bool,  # noqa: ARG002
        tie_break: int,
    ) -> Choice | None:
        """Return the joiner that is expected to be done first, or the step of ``fastest``."""
        if local.blocks.isdisjoint(local.bands.permitted(itinerary.remaining)):
            joiner = best_joiner(itinerary, local, candidates, tie_break)
            if joiner is not None:
                return SendTo(joiner.name)
        return least_time_step(itinerary, local, candidates, tie_break)
