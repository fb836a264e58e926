"""Policy ``quality``: the block and holder with the least sum of expected loss and weighted time."""

from __future__ import annotations

from collections.abc import Sequence

from ls_edge.core.order_costs import OrderCosts
from ls_edge.core.parts import has_ends
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.policies.policy import Choice, Policy, RunHere, SendTo, Wait, in_turn
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.neighbors import Neighbor


class Quality(Policy):
    """Minimize ``loss + latency_weight * seconds`` over blocks and holders.

    The loss comes from the bundle's measured order costs (``ls_edge.core.order_costs``), ``latency_weight`` from the
    itinerary. The policy waits for a holder's credit if that is worth the time. Without measured costs it follows
    ``nearest``.
    """

    name = "quality"
    needs_order_costs = True
    chains_blocks = False

    def preferred_step(
        self,
        itinerary: Itinerary,
        local: LocalNode,
        candidates: Sequence[Neighbor],
        *,
        patient: bool,
        tie_break: int,
    ) -> Choice | None:
        """Return the step with the least cost; None without costs, at stem and head, or if no holder has a credit."""
        permitted = local.model.bands.permitted(itinerary.remaining)
        costs = local.model.costs
        if costs is None or has_ends(permitted):
            return None
        remaining = frozenset(permitted)
        slot, weight = itinerary.slot, itinerary.latency_weight
        here = local.blocks & remaining
        reachable = here.union(*[c.blocks & remaining for c in candidates])
        share = len(reachable) / len(permitted)
        loss = {block: _estimate(costs, block, permitted, slot, share) for block in reachable}
        seconds = (local.wait_us / max(1, len(here)) + local.block_us) / 1e6
        # Cost, rank among equals, block: the minimum is chosen.
        options: list[tuple[float, int, int, Choice]] = [
            (loss[block] + weight * seconds, -1, block, RunHere(block)) for block in here
        ]
        waiting: list[float] = []
        for rank, c in in_turn(candidates, tie_break):
            there = c.blocks & remaining
            if not there:
                continue
            least = min(loss[block] for block in there)
            seconds = ((c.wait_us + c.link_us) / len(there) + c.block_us) / 1e6
            if c.credits > 0:
                options.append((least + weight * seconds, rank, 0, SendTo(c.name)))
            else:
                waiting.append(least + weight * (seconds + local.limits.credit_wait))
        best = min(options, key=lambda option: option[:3], default=None)
        if patient and waiting and (best is None or min(waiting) < best[0]):
            return Wait()
        return None if best is None else best[3]


def _estimate(costs: OrderCosts, block: int, remaining: Sequence[int], slot: int, share: float) -> float:
    """Return the cost, in nats, of running ``block`` now and the others of its band afterwards.

    ``remaining`` are the blocks of the band, ``share`` is how many of them are in reach: as likely, the others will run
    in trained order, and otherwise in a random one (the cost is then relative to a random order of all). With the
    latter alone, blocks that may run late at little cost are delayed even where all are reachable (a ViT-S in a fixed
    order: top-1 0.89 instead of 0.92). With the former alone, links that come and go cost more.
    """
    others = sorted(other for other in remaining if other != block)
    before = sum(costs.inverted[other][block] for other in others if other < block)
    after = sum(costs.inverted[block][other] for other in others if other > block)
    in_trained_order = before + sum(costs.slot[one][at] for at, one in enumerate((block, *others), slot))
    now, *later = costs.slot[block][slot : slot + 1 + len(others)]
    at_random = now - sum(later) / max(1, len(later)) + (before - after) / 2
    return share * in_trained_order + (1 - share) * at_random
