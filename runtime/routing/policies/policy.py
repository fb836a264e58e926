"""Base class of policies, which choose the next block of a request and its holder.

A policy is a pure function of the itinerary, the model's bands and the reachable processes. It chooses among the
remaining blocks of the first band that has any (``Bands.permitted``). If a holder of a block is out of reach, it
prefers another holder, then to run the block later in its band ("running a layer out of order beats skipping it", arXiv
2407.09298). Only the source skips blocks, if no other step remains and :attr:`Policy.may_skip` allows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from ls_edge.core.bands import Bands
from ls_edge.runtime.protocol.messages import Itinerary, ReturnReason
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.neighbors import Neighbor


class RunHere(NamedTuple):
    """Run the block on this process's engine."""

    block: int


class SendTo(NamedTuple):
    """Hand the tokens to ``holder``, or with ``relay`` to a process that only passes them on."""

    holder: str
    relay: bool = False


class Wait(NamedTuple):
    """Wait for the credit of a reachable holder."""

    holders: tuple[str, ...] = ()
    """Holders whose credit ends the wait; empty for all holders of a block that may run now."""


Choice = RunHere | SendTo | Wait | ReturnReason
"""Step of a request, or the reason why it cannot continue from here."""


class Policy:
    """Choice of the next step of a request; ``POLICIES`` has one instance of each subclass.

    The base class chooses the first remaining block that can be reached, at the holder with the shortest wait.
    """

    name: ClassVar[str]
    may_skip: ClassVar[bool] = True
    """Whether an answer may skip blocks."""
    may_reorder: ClassVar[bool] = True
    """Whether blocks may run in another order than requested."""
    runs_in_waves: ClassVar[bool] = False
    """Whether a holder may run tracks in parallel."""
    batches_freely: ClassVar[bool] = False
    """Whether a queued request may join an engine call for any of its remaining blocks."""
    waits_for_next: ClassVar[bool] = False
    """Whether the next block runs here if possible, and otherwise waits only for a credit of its holders.

    A step here then depends on no other process, and only a credit ends a wait."""

    def wanted_order(self, bands: Bands, seed: int, request: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the preferred order of a request, by default the trained order; bands keep their sequence."""
        return tuple(range(bands.num_blocks))

    def step_here(self, itinerary: Itinerary, local: LocalNode) -> RunHere | None:
        """Return the block to run here if that does not depend on other processes, else None."""
        if itinerary.track is None and not self.waits_for_next:
            return None
        wanted = self.wanted(itinerary, local.model.bands)
        return RunHere(wanted[0]) if wanted[0] in local.blocks else None

    def wanted(self, itinerary: Itinerary, bands: Bands) -> tuple[int, ...]:
        """Return the blocks that may run next, in the preferred order."""
        return bands.permitted(itinerary.remaining) if self.may_reorder else itinerary.remaining[:1]

    def next_step(
        self,
        itinerary: Itinerary,
        local: LocalNode,
        candidates: Sequence[Neighbor],
        *,
        patient: bool,
        tie_break: int = 0,
    ) -> Choice:
        """Return the next step of a request with remaining blocks.

        With ``patient``, waiting for a credit is still better than another order. ``tie_break``, any number that is
        constant for a request, chooses between equal holders, so that they share the work.
        """
        wanted = self.wanted(itinerary, local.model.bands)
        if itinerary.track is not None:  # the holder of a track runs it, or returns it
            return RunHere(wanted[0]) if wanted[0] in local.blocks else ReturnReason.UNREACHABLE
        choice = self.preferred_step(itinerary, local, candidates, patient=patient, tie_break=tie_break)
        if choice is not None:
            return choice
        choice = _first_reachable(itinerary, wanted, local, candidates, patient=patient, tie_break=tie_break)
        return choice if self.waits_for_next or not isinstance(choice, Wait) else Wait()

    def preferred_step(
        self,
        itinerary: Itinerary,  # noqa: ARG002
        local: LocalNode,  # noqa: ARG002
        candidates: Sequence[Neighbor],  # noqa: ARG002
        *,
        patient: bool,  # noqa: ARG002
        tie_break: int,  # noqa: ARG002
    ) -> Choice | None:
        """Return the step that this policy prefers to the first reachable block, if any."""
        return None


def in_turn(candidates: Sequence[Neighbor], tie_break: int) -> list[tuple[int, Neighbor]]:
    """Return the candidates, each with a rank that ``tie_break`` rotates; the lowest rank wins between equals."""
    ordered = sorted(candidates, key=lambda c: c.name)
    return [((index + tie_break) % len(ordered), c) for index, c in enumerate(ordered)]


def _first_reachable(
    itinerary: Itinerary,
    wanted: Sequence[int],
    local: LocalNode,
    candidates: Sequence[Neighbor],
    *,
    patient: bool,
    tie_break: int,
) -> Choice:
    """Choose the first block in the preferred order that runs here or has a holder with a credit, else a relay."""
    saturated = False
    for block in wanted:
        if block in local.blocks:
            return RunHere(block)
        holders = [c for c in candidates if block in c.blocks]
        free = [c for c in holders if c.credits > 0]
        if free:
            return SendTo((free[0] if len(free) == 1 else _least_wait(free, itinerary, tie_break)).name)
        if holders:
            saturated = True
            if patient:
                return Wait(tuple(c.name for c in holders))
    if saturated:
        return ReturnReason.CREDIT
    # One process may pass the tokens on between two blocks.
    relays = [] if itinerary.relays else candidates
    for block in wanted:
        ways = [c for c in relays if block in c.reach_blocks]
        free = [c for c in ways if c.credits > 0]
        if free:
            return SendTo(min(free, key=lambda c: (c.wait_us, c.name)).name, relay=True)
        if ways:
            saturated = True
            if patient:
                return Wait(tuple(c.name for c in ways))
    return ReturnReason.CREDIT if saturated else ReturnReason.UNREACHABLE


def _least_wait(candidates: Sequence[Neighbor], itinerary: Itinerary, tie_break: int) -> Neighbor:
    """Return the candidate with the shortest wait, then the longest run of next blocks, then by ``tie_break``."""
    ranked = in_turn(candidates, tie_break)
    waits = [one.wait_us for _, one in ranked]
    least = min(waits)
    equal = [one for one, wait in zip(ranked, waits, strict=True) if wait == least]
    lengths = {blocks: _run_length(blocks, itinerary.remaining) for blocks in {one.blocks for _, one in equal}}
    return max(equal, key=lambda one: (lengths[one[1].blocks], -one[0]))[1]


def _run_length(blocks: frozenset[int], remaining: Sequence[int]) -> int:
    from_first = itertools.dropwhile(lambda block: block not in blocks, remaining)
    return sum(1 for _ in itertools.takewhile(blocks.__contains__, from_first))
