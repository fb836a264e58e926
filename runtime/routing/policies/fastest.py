"""Policy ``fastest``: the holder with the earliest expected finish of a block."""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.policies.policy import Choice, Policy, RunHere, SendTo, in_turn
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.neighbors import Neighbor


class Fastest(Policy):
    """Choose the least expected time of queue, link and engine, per block that could run there in sequence.

    The holder runs the block closest to the trained order. The policy never waits for the credit of one holder while
    another has one.
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
        """Return the step with the least expected time per block; None if no holder has a credit."""
        bands, remaining = local.model.bands, itinerary.remaining
        # Expected time and a unique rank among equals: the minimum is chosen.
        options: list[tuple[float, int, Choice]] = []
        here = bands.in_one_go(remaining, local.blocks)
        if here:
            options.append((local.wait_us / len(here) + local.block_us, -1, RunHere(here[0])))
        for rank, c in in_turn(candidates, tie_break):
            there = len(bands.in_one_go(remaining, c.blocks))
            if there and c.credits > 0:
                options.append(((c.wait_us + c.link_us) / there + c.block_us, rank, SendTo(c.name)))
        return min(options)[2] if options else None
