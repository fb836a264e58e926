"""Which block runs next, and who runs it: a pure function of the itinerary and of what can be reached.

Preference when a block cannot be reached (docs: "Policies"): another holder of it; then later, the block goes to the
end (running out of order beats skipping: arXiv 2407.09298); a skip is never chosen here but by the source, when nothing
else remains.

- ``sequential``: the trained order, or nothing.
- ``nearest``: the reachable block that is closest to the trained order.
- ``random``: as ``nearest``, closest to a permutation that the source drew.
- ``fastest``: whoever is expected to have run a next block first, counting queue, engine and link, shared over the
  blocks that it could run in one go; there the block closest to the trained order. It never waits for the credit of
  one holder while another has some.
- ``quality``: the block and holder with the least expected loss (``ls_edge.order_costs``, measured at export), plus its
  expected time at the itinerary's latency weight. It waits for a holder's credit where that is worth more than
  the wait. A process without measured costs goes by ``nearest``.
- ``parallel``: in waves of tracks that run side by side (``planner``, ``waves``); where that does not pay, as
  ``fastest``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.candidates import Candidate, OrderCostTables, Own
from ls_edge.runtime.routing.wave_planner import best_joiner

POLICIES = ("nearest", "sequential", "random", "fastest", "quality", "parallel")


@dataclass(frozen=True)
class RunHere:
    """Run the block on the engine of this process."""

    block: int


@dataclass(frozen=True)
class SendTo:
    """Hand the tokens to ``holder``; ``relay`` where it only passes them on."""

    holder: str
    relay: bool = False


@dataclass(frozen=True)
class Wait:
    """A holder can be reached, but has no credit at the moment."""


@dataclass(frozen=True)
class ReturnToSource:
    """Nothing can go on from here: ``unreachable`` or ``credit``."""

    reason: str


Choice = RunHere | SendTo | Wait | ReturnToSource


def choose(
    itinerary: Itinerary, own: Own, candidates: Sequence[Candidate], *, patient: bool, tie_break: int = 0
) -> Choice:
    """Decide the next step of a request that has blocks remaining.

    ``patient`` says that waiting for credit is still better than another order; ``tie_break`` (any number, the same
    for a request) decides between equals, so that equal holders share the work.
    """
    wanted = itinerary.remaining[:1] if itinerary.policy == "sequential" else itinerary.remaining
    if itinerary.track is not None:  # who was given a track runs it, or gives back what there is
        return RunHere(wanted[0]) if wanted[0] in own.blocks else ReturnToSource("unreachable")
    if itinerary.policy == "parallel" and own.blocks.isdisjoint(itinerary.remaining):
        joiner = best_joiner(itinerary, candidates, tie_break)
        if joiner is not None:
            return SendTo(joiner.name)
    if itinerary.policy in ("fastest", "parallel"):
        choice = _fastest(itinerary, own, candidates, tie_break)
        if choice is not None:
            return choice
    if itinerary.policy == "quality" and own.costs is not None:
        choice = _quality(itinerary, own, own.costs, candidates, patient=patient, tie_break=tie_break)
        if choice is not None:
            return choice
    saturated = False
    for block in wanted:
        if block in own.blocks:
            return RunHere(block)
        holders = [c for c in candidates if block in c.blocks]
        free = [c for c in holders if c.credits > 0]
        if free:
            return SendTo(_best(free, itinerary, tie_break).name)
        if holders:
            saturated = True
            if patient:
                return Wait()
    if saturated:
        return ReturnToSource("credit")
    if not itinerary.via_source:
        for block in wanted:
            relays = [
                c for c in candidates if block in c.reach_blocks and c.credits > 0 and c.name not in itinerary.relays
            ]
            if relays:
                return SendTo(min(relays, key=lambda c: (c.wait_us, c.name)).name, relay=True)
    return ReturnToSource("unreachable")


def _fastest(itinerary: Itinerary, own: Own, candidates: Sequence[Candidate], tie_break: int) -> Choice | None:
    """The least expected time for each block that could run there; None where nobody has a credit."""
    remaining = frozenset(itinerary.remaining)
    best: tuple[float, int] | None = None
    choice: Choice | None = None
    here = own.blocks & remaining
    if here:
        best = (own.wait_us / len(here) + own.block_us, -1)
        choice = RunHere(next(block for block in itinerary.remaining if block in here))
    for index, c in enumerate(sorted(candidates, key=lambda c: c.name)):
        there = len(c.blocks & remaining)
        if not there or c.credits <= 0:
            continue
        expected = ((c.wait_us + c.link_us) / there + c.block_us, (index + tie_break) % len(candidates))
        if best is None or expected < best:
            best, choice = expected, SendTo(c.name)
    return choice


def _quality(
    itinerary: Itinerary,
    own: Own,
    costs: OrderCostTables,
    candidates: Sequence[Candidate],
    *,
    patient: bool,
    tie_break: int,
) -> Choice | None:
    """The least loss and time together; None where nothing that remains can be run by anybody with a credit."""
    remaining = frozenset(itinerary.remaining)
    slot = itinerary.blocks_done
    loss = {block: _regret(costs, block, itinerary.remaining, slot) for block in itinerary.remaining}
    options: list[tuple[float, int, Choice]] = []
    here = own.blocks & remaining
    seconds = (own.wait_us / max(1, len(here)) + own.block_us) / 1e6
    options += [(loss[block] + itinerary.latency_weight * seconds, -1, RunHere(block)) for block in here]
    waiting: list[float] = []
    for index, c in enumerate(sorted(candidates, key=lambda c: c.name)):
        there = c.blocks & remaining
        if not there:
            continue
        least = min(loss[block] for block in there)
        seconds = ((c.wait_us + c.link_us) / len(there) + c.block_us) / 1e6
        if c.credits > 0:
            options.append(
                (least + itinerary.latency_weight * seconds, (index + tie_break) % len(candidates), SendTo(c.name))
            )
        else:
            waiting.append(least + itinerary.latency_weight * (seconds + own.credit_wait))
    best = min(options, key=lambda option: (option[0], option[1], getattr(option[2], "block", 0)), default=None)
    if patient and waiting and (best is None or min(waiting) < best[0]):
        return Wait()
    return None if best is None else best[2]


def _regret(costs: OrderCostTables, block: int, remaining: Sequence[int], slot: int) -> float:
    """Nats that running ``block`` now costs, beyond what it would cost at a later time drawn at random.

    Only the difference tells blocks apart: each of them has to run at some time.
    """
    row = costs.slot[block]
    later = range(slot + 1, slot + len(remaining))
    regret = row[slot] - (sum(row[s] for s in later) / len(later) if later else 0.0)
    before = sum(costs.inverted[other][block] for other in remaining if other < block)
    after = sum(costs.inverted[block][other] for other in remaining if other > block)
    return regret + (before - after) / 2


def _best(candidates: Sequence[Candidate], itinerary: Itinerary, tie_break: int) -> Candidate:
    """Least wait; among equals the longest run of next blocks (fewest hops), then by ``tie_break``."""
    ordered = sorted(candidates, key=lambda c: c.name)
    turn = {c.name: (index + tie_break) % len(ordered) for index, c in enumerate(ordered)}
    return min(ordered, key=lambda c: (c.wait_us, -_run_length(c.blocks, itinerary.remaining), turn[c.name]))


def _run_length(blocks: frozenset[int], remaining: Sequence[int]) -> int:
    length = 0
    for block in remaining:
        if block in blocks:
            length += 1
        elif length:
            break
    return length
