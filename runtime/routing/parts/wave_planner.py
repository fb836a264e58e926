"""Plan of the blocks that run side by side, and of their holders: a pure function of measured times.

The holder of the tokens runs one track itself and gives others to neighbours. Each block goes to the holder that would
finish it first, counting its queue, the transfer there and back, and the blocks given to it before. So a slower device
gets a shorter track, and a device that is not worth its transfer gets none. The blocks of each track follow from the
preferred order, or from the measured order costs if there are any (``block_assignment.py``). A
wave has blocks of one band, and each band is cut into ``waves_wanted`` waves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ls_edge.core.bands import Bands
from ls_edge.runtime.protocol.messages import Itinerary
from ls_edge.runtime.routing.candidates import Candidate, LocalNode, fixed
from ls_edge.runtime.routing.parts.block_assignment import assign_blocks


@dataclass(frozen=True)
class PlannedTrack:
    """Blocks for one holder."""

    holder: str
    blocks: tuple[int, ...]
    expected_us: int
    """Time from the start of the wave until its tokens are back; without blocks, the time of a single one."""


@dataclass(frozen=True)
class WavePlan:
    """The next wave: the joiner's own track first."""

    tracks: tuple[PlannedTrack, ...]
    unused: tuple[PlannedTrack, ...] = ()
    """Neighbours with suitable blocks that get no track."""


@dataclass
class _DraftTrack:
    """A track while it is planned."""

    holder: str
    allowed: frozenset[int]
    block_us: int
    end_us: int
    """Expected time at which its tokens are back; before its first block, the time to reach it."""
    first_us: int = 0
    blocks: list[int] = field(default_factory=list)


def plan_wave(itinerary: Itinerary, name: str, local: LocalNode, candidates: Sequence[Candidate]) -> WavePlan | None:
    """Return the next wave of a request whose tokens ``name`` holds; None where it can run nothing itself.

    A plan of one track means that splitting does not pay.
    """
    remaining = local.bands.permitted(itinerary.remaining)
    drafts = _drafts(itinerary, remaining, name, local, sorted(candidates, key=lambda c: c.name))
    used = [draft for draft in drafts if draft.blocks]
    if not used:
        return None
    _assign(used, remaining, itinerary.slot, local)
    return WavePlan(
        tuple(PlannedTrack(draft.holder, tuple(draft.blocks), draft.end_us) for draft in drafts if draft.blocks),
        tuple(PlannedTrack(draft.holder, (), draft.first_us) for draft in drafts if not draft.blocks),
    )


def _drafts(
    itinerary: Itinerary, remaining: tuple[int, ...], name: str, local: LocalNode, candidates: Sequence[Candidate]
) -> list[_DraftTrack]:
    """Return the tracks of the next wave, that of ``name`` first; none where it can run nothing itself.

    Their lengths and ends are settled, which of the blocks is in which track is not. ``candidates`` are in the order of
    their names.
    """
    own = _DraftTrack(name, local.blocks.intersection(remaining), local.beside_us or local.block_us, local.wait_us)
    if not own.allowed:
        return []
    drafts = [own]
    for c in candidates:
        allowed = c.blocks.intersection(remaining)
        if allowed and c.credits > 0 and c.name != name:
            drafts.append(_DraftTrack(c.name, allowed, c.block_us, c.wait_us + c.trip_us))
    holders = dict.fromkeys(remaining, 0)
    for draft in drafts:
        draft.first_us = draft.end_us + draft.block_us
        for block in draft.allowed:
            holders[block] += 1
    # Blocks with few holders first, so that who holds little gets what it can run.
    left = sorted(remaining, key=holders.__getitem__)
    given: list[tuple[_DraftTrack, int]] = []
    ends = [0]  # end of a wave of the first n blocks
    while left:
        best: _DraftTrack | None = None
        end_us = 0
        for draft in drafts:
            next_us = draft.end_us + draft.block_us
            if (best is None or next_us < end_us) and not draft.allowed.isdisjoint(left):
                best, end_us = draft, next_us
        if best is None:
            break
        block = next(block for block in left if block in best.allowed)
        left.remove(block)
        best.end_us = end_us
        given.append((best, block))
        ends.append(max(ends[-1], end_us))
    size = _size(ends, itinerary.waves_wanted - _begun(itinerary, local.bands), len(drafts))
    for draft, block in given[:size]:
        draft.blocks.append(block)
    for draft, _ in given[size:]:
        draft.end_us -= draft.block_us
    alone = local.wait_us + size * local.block_us if len(own.allowed) >= size else math.inf
    if not own.blocks or max(draft.end_us for draft in drafts if draft.blocks) > local.limits.wave_gain * alone:
        own.blocks = [block for block in remaining if block in own.allowed][:size]
        own.end_us = local.wait_us + len(own.blocks) * local.block_us
        for draft in drafts[1:]:
            draft.blocks = []
    return drafts


def _begun(itinerary: Itinerary, bands: Bands) -> int:
    """Return the number of waves of the present band so far."""
    present = bands.band_of(itinerary.remaining[0])
    return sum(any(bands.band_of(block) == present for t in wave for block, _ in t) for wave in itinerary.waves)


def _size(ends: Sequence[int], waves: int, drafts: int) -> int:
    """Return the number of blocks to run now: about an equal share for each of ``waves``, rounded to the earlier end.

    There are fewer waves where there would not be a block for every track.
    """
    blocks = len(ends) - 1
    others = max(0, min(waves, math.ceil(blocks / drafts)) - 1)
    if not others:
        return blocks

    def until_all(now: int) -> tuple[int, int, int]:
        each, more = divmod(blocks - now, others)
        rest = more * ends[min(each + 1, blocks)] + (others - more) * ends[each]
        return ends[now] + rest, abs(now * (others + 1) - blocks), -now

    even = blocks / (others + 1)
    return min(range(max(1, math.floor(even) - 1), min(blocks - others, math.ceil(even) + 1) + 1), key=until_all)


def _assign(drafts: list[_DraftTrack], remaining: Sequence[int], before: int, local: LocalNode) -> None:
    """Assign the blocks of the wave to tracks whose lengths are settled."""
    wave = {block for draft in drafts for block in draft.blocks}
    blocks = [block for block in remaining if block in wave]
    tracks = assign_blocks(
        blocks,
        [len(draft.blocks) for draft in drafts],
        [draft.allowed for draft in drafts],
        before=before,
        costs=local.costs,
        swaps=local.limits.swaps,
    )
    assert tracks is not None  # the drafts themselves are such an assignment
    for draft, track in zip(drafts, tracks, strict=True):
        draft.blocks = list(track)


def best_joiner(
    itinerary: Itinerary, local: LocalNode, candidates: Sequence[Candidate], tie_break: int
) -> Candidate | None:
    """Return the joiner with the earliest expected finish, for tokens that this process cannot run."""
    best: tuple[float, int] | None = None
    chosen: Candidate | None = None
    # A plan for each of them looks at all of them.
    candidates = [fixed(c) for c in sorted(candidates, key=lambda c: c.name)]
    remaining = local.bands.permitted(itinerary.remaining)
    for index, c in enumerate(candidates):
        if c.credits <= 0:
            continue
        joiner = LocalNode(c.blocks, c.wait_us, c.block_us, limits=local.limits, bands=local.bands)
        drafts = [draft for draft in _drafts(itinerary, remaining, c.name, joiner, candidates) if draft.blocks]
        if not drafts:
            continue
        end_us, blocks = max(draft.end_us for draft in drafts), sum(len(draft.blocks) for draft in drafts)
        expected = c.link_us + end_us * len(itinerary.remaining) / blocks
        rank = (expected, (index + tie_break) % len(candidates))
        if best is None or rank < best:
            best, chosen = rank, c
    return chosen
