"""The estimate that policies compute step by step, as one sum over a finished arrangement."""

from collections.abc import Collection, Sequence

from ls_edge.core.arrangement import Arrangement
from ls_edge.core.order_costs import OrderCosts


def cost(costs: OrderCosts, order: Arrangement | Sequence[int], skipped: Collection[int] | None = None) -> float:
    """Return the estimated loss of ``order`` in nats per image; by default all blocks that it lacks are skipped."""
    arrangement = order if isinstance(order, Arrangement) else Arrangement.plain(order)
    missing = set(range(len(costs.skip))).difference(arrangement.order) if skipped is None else skipped
    total = sum(costs.skip[block] for block in missing)
    total += sum(costs.slot[block][slot] for block, slot in arrangement.steps())
    done: list[int] = []
    for wave in arrangement.waves:
        for place, track in enumerate(wave):
            for at, block in enumerate(track):
                total += sum(costs.inverted[block][before] for before in (*done, *track[:at]) if before > block)
            for pair in ((one, two) for other in wave[place + 1 :] for one in track for two in other):
                assert costs.beside is not None
                total += costs.beside[min(pair)][max(pair)]
        done += (block for track in wave for block in track)
    return total
