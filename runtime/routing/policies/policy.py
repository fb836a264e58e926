"""Base class of the policies, which choose the next block of a request and its holder.

A policy is a pure function of the itinerary, of the model's bands and of what can be reached. It chooses among the
remaining blocks of the first band that has any (``Bands.permitted``). Where a block cannot be reached it prefers
another holder of it, then to run it later in its band (running out of order beats skipping: arXiv 2407.09298). A
policy never skips: the source does, when nothing else remains and :attr:`Policy.may_skip` allows it.
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
    """Run the block on the engine of this process."""

    block: int


class SendTo(NamedTuple):
    """Hand the tokens to ``holder``; ``relay`` where it only passes them on."""

    holder: str
    relay: bool = False


class Wait(NamedTuple):
    """A holder can be reached, but has no credit at the moment."""

    holders: tuple[str, ...] = ()
    """Whose credit would end the wait; empty where that of any holder of a block that may run now would."""


Choice = RunHere | SendTo | Wait | ReturnReason
"""A step; the reason if a request cannot continue from here."""


class Policy:
    """Choice of the next step of a request; ``POLICIES`` has one instance of each subclass.

    The base class is complete: the first remaining block that can be reached, at the holder with the least wait.
    """

    name: ClassVar[str]
    needs_order_costs: ClassVar[bool] = False
    """A source refuses a bundle without measured order costs."""
    may_skip: ClassVar[bool] = True
    """An answer may leave blocks out."""
    may_reorder: ClassVar[bool] = True
    """Blocks may run in another order than requested."""
    runs_in_waves: ClassVar[bool] = False
    """A holder may run tracks of blocks side by side."""
    batches_freely: ClassVar[bool] = False
    """A queued request may join an engine call for any of its remaining blocks."""
    waits_for_next: ClassVar[bool] = False
    """The next block runs here if it can, and otherwise waits only for a credit of its own holders.

    Then a step here depends on no other process, and no other change than a credit ends a wait."""
    chains_blocks: ClassVar[bool] = True
    """One engine call may run consecutive blocks without a new decision between them."""

    def wanted_order(self, bands: Bands, seed: int, request: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the preferred order of a request, its first block first; by default the trained order.

        Blocks of an earlier band stand before those of a later one.
        """
        return tuple(range(bands.num_blocks))

    def step_here(self, itinerary: Itinerary, local: LocalNode) -> RunHere | None:
        """Return the block that runs here whatever other processes there are; None where it depends on them."""
        if itinerary.track is None and not self.waits_for_next:
            return None
        wanted = self._wanted(itinerary, local)
        return RunHere(wanted[0]) if wanted[0] in local.blocks else None

    def _wanted(self, itinerary: Itinerary, local: LocalNode) -> tuple[int, ...]:
        """Return the blocks that may run next, the preferred one first."""
        return local.model.bands.permitted(itinerary.remaining) if self.may_reorder else itinerary.remaining[:1]

    def next_step(
        self,
        itinerary: Itinerary,
        local: LocalNode,
        candidates: Sequence[Neighbor],
        *,
        patient: bool,
        tie_break: int = 0,
    ) -> Choice:
        """Decide the next step of a request that has blocks remaining.

        ``patient``: whether waiting for credit is still better than another order. ``tie_break`` (any number, the same
        for a request) chooses between equal holders, so that they share the work.
        """
        wanted = self._wanted(itinerary, local)
        if itinerary.track is not None:  # the holder of a track runs it, or returns what it has
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
        """Return what this policy prefers to the first reachable block; None for that block."""
        return None


def in_turn(candidates: Sequence[Neighbor], tie_break: int) -> list[tuple[int, Neighbor]]:
    """Return the candidates with a rank each that ``tie_break`` rotates: the least rank wins between equals."""
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
    """Choose the first preferred block that runs here or has a holder with a credit, else a relay."""
    saturated = False
    for block in wanted:
        if block in local.blocks:
            return RunHere(block)
        holders = [c for c in candidates if block in c.blocks]
        free = [c for c in holders if c.credits > 0]
        if free:
            return SendTo(_least_wait(free, itinerary, tie_break).name)
        if holders:
            saturated = True
            if patient:
                return Wait(tuple(c.name for c in holders))
    if saturated:
        return ReturnReason.CREDIT
    relays = [] if itinerary.via_source else [c for c in candidates if c.name not in itinerary.relays]
    behind = [(c, (c.reach_blocks, *c.far_blocks)) for c in relays]
    for distance in range(max((len(blocks) for _, blocks in behind), default=0)):  # the nearest, of whatever block
        for block in wanted:
            ways = [c for c, blocks in behind if distance < len(blocks) and block in blocks[distance]]
            free = [c for c in ways if c.credits > 0]
            if free:
                return SendTo(min(free, key=lambda c: (c.wait_us, c.name)).name, relay=True)
            if ways:
                saturated = True
                if patient:
                    return Wait(tuple(c.name for c in ways))
    if saturated:
        return ReturnReason.CREDIT
    return ReturnReason.UNREACHABLE


def _least_wait(candidates: Sequence[Neighbor], itinerary: Itinerary, tie_break: int) -> Neighbor:
    """Return the candidate with the least wait, then the longest run of next blocks, then by ``tie_break``."""
    ranked = in_turn(candidates, tie_break)
    return min(ranked, key=lambda one: (one[1].wait_us, -_run_length(one[1].blocks, itinerary.remaining), one[0]))[1]


def _run_length(blocks: frozenset[int], remaining: Sequence[int]) -> int:
    from_first = itertools.dropwhile(lambda block: block not in blocks, remaining)
    return sum(1 for _ in itertools.takewhile(blocks.__contains__, from_first))
