"""The policy ``fastest``: the holder that is expected to finish a next block first."""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.policies.policy import Choice, Policy, RunHere, SendTo, in_turn
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.neighbors import Neighbor


class Fastest(Policy):
    """Least expected time of queue, link and engine, shared over the blocks that could run there in one go.

    At the holder the block closest to the trained order runs. It never waits for the credit of one holder while
    another has some.
    """

    name = "fastest"
    batches_freely = True

    def preferred_step(
        self,
        itinerary: Itinerary,
        local: LocalNode,
        candidates: Sequence[Neighbor],
        *,
        patient: bool,  # noqa: ARG002
        tie_break: int,
    ) -> Choice | None:
        """Return the step with the least expected time a block; None where no holder has a credit."""
        bands, remaining = local.model.bands, itinerary.remaining
        # Expected time, rank among equals (no two are the same): the least of them is chosen.
        options: list[tuple[float, int, Choice]] = []
        here = bands.in_one_go(remaining, local.blocks)
        if here:
            options.append((local.wait_us / len(here) + local.block_us, -1, RunHere(here[0])))
        for rank, c in in_turn(candidates, tie_break):
            there = len(bands.in_one_go(remaining, c.blocks))
            if there and c.credits > 0:
                options.append(((c.wait_us + c.link_us) / there + c.block_us, rank, SendTo(c.name)))
        return min(options)[2] if options else None
