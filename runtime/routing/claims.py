"""Checks of claims of other processes, which may lie. ``docs/threat-model.md`` names the check against each attack.

``transport/admission.py`` checks form, ranges and blocks of messages before routing sees them. The checks here compare
a claim with what this process knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from ls_edge.core.bands import Bands
from ls_edge.core.text import counted, name_blocks
from ls_edge.runtime.protocol.messages import (
    MAX_AVOID,
    Cancel,
    Itinerary,
    Progress,
    Ran,
    Refuse,
    RefuseReason,
    RequestId,
    State,
)
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.state.held_request import AWAY, HeldRequest, OpenTrack, OpenWave

MOST_BLOCK_US = 60_000_000
"""Limit on the announced time of an engine call: a minute."""
MOST_WAIT_US = 600_000_000
"""Limit on the announced queue: the longest budget."""


# STATE: a process claims to be idle or fast, or slow or busy without bound.


def believable(state: State) -> State:
    """Return a STATE with its announced times limited."""
    if state.block_us <= MOST_BLOCK_US and state.wait_us <= MOST_WAIT_US:
        return state
    block_us, wait_us = min(state.block_us, MOST_BLOCK_US), min(state.wait_us, MOST_WAIT_US)
    return msgspec.structs.replace(state, block_us=block_us, wait_us=wait_us)


# Replies to a transfer: from another process than its receiver, endless progress, refusals of everything.


def is_from_next_holder(request: HeldRequest | None, sender: str) -> bool:
    """Return whether a message about a transfer comes from its receiver."""
    return request is not None and request.downstream == sender


def shows_further_block(request: HeldRequest, message: Progress) -> bool:
    """Return whether a PROGRESS reports more blocks than before, and no more than exist."""
    most = request.itinerary.blocks_done + len(request.itinerary.remaining)
    return request.most_done < message.blocks_done <= most


def is_unwilling(message: Refuse) -> bool:
    """Return whether the sender of a REFUSE does not want this request, so that offers have to pause.

    It is normal to be busy without a credit, and temporary to be draining or cold.
    """
    if message.reason == RefuseReason.BUSY:
        return message.credits > 0
    return message.reason not in (RefuseReason.DRAINING, RefuseReason.COLD)


def avoid_also(
    avoid: tuple[str, ...], name: str, remaining: Collection[int], known: dict[str, frozenset[int]]
) -> tuple[str, ...]:
    """Return the processes to avoid after adding one, but never all known holders of a remaining block.

    ``known`` maps holders to their blocks. If no holder of a block would be left, the others get another chance: a
    process that fails on purpose must not cause honest processes to be avoided.
    """
    both = (*avoid, name)[-MAX_AVOID:]
    if not _leaves_no_holder(both, remaining, known):
        return both
    return () if _leaves_no_holder((name,), remaining, known) else (name,)


def _leaves_no_holder(avoid: Collection[str], remaining: Iterable[int], known: dict[str, frozenset[int]]) -> bool:
    everywhere = {block for blocks in known.values() for block in blocks}
    left = {block for name, blocks in known.items() if name not in avoid for block in blocks}
    return not everywhere.intersection(remaining) <= left


# CANCEL: of requests of another source.


def own_requests(sender: str, message: Cancel) -> set[tuple[str, RequestId]]:
    """Return the requests that a CANCEL may end, which are its sender's own."""
    return {(sender, request) for request in message.requests}


# Tokens that come home: with skips, waves, tracks or orders that the request does not allow.


def implausible_return(asked: Itinerary, reported: Itinerary, left_out: Collection[int], bands: Bands) -> str:
    """Return why a returned itinerary cannot belong to the request, or an empty string.

    ``left_out`` are the blocks that the source has skipped, perhaps after it sent this copy. Admission has checked that
    the itinerary has each block once, in an order that the bands allow.
    """
    if reported.track is not None:
        return "it returned a track of a wave, which belongs to a peer"
    policy = policy_of(asked.policy)
    skipped = tuple(block for block in reported.skipped if block not in left_out)
    if skipped and (asked.on_straggler != "skip" or not policy.runs_in_waves):
        return f"it skipped {name_blocks(skipped)}, which only the source may do"
    if len(reported.skipped) > asked.max_skips:
        return f"it skipped {counted(len(reported.skipped), 'block')}; at most {asked.max_skips} are allowed"
    if not policy.runs_in_waves and any(len(wave) != 1 for wave in reported.waves):
        return f"it ran blocks in parallel, which policy {asked.policy} does not"
    ran = tuple(block for wave in reported.waves for track in wave for block, _ in track)
    if not policy.may_reorder and ran != asked.remaining[: len(ran)]:
        return f"it ran blocks in the order {', '.join(map(str, ran))}; policy {asked.policy} does not reorder"
    return (
        ""
        if bands.is_one and not asked.has_stem
        else bands.fault(reported.arrangement, as_asked(asked, reported).remaining)
    )


def is_former_holder(request: HeldRequest, sender: str, *, needs_relay: bool) -> bool:
    """Return whether a process has nothing to return: it has passed the request on, and so has the next holder.

    With ``needs_relay`` it may return tokens of a process that has no link to the source.
    """
    trail = request.trail
    return trail is not None and sender in trail.passed_on and request.stage is AWAY and not needs_relay


def as_asked(asked: Itinerary, reported: Itinerary, avoid: tuple[str, ...] = ()) -> Itinerary:
    """Return the requested itinerary with the reported history: no holder may change the request itself."""
    ran = {block for wave in reported.waves for track in wave for block, _ in track}
    gone = ran.union(reported.skipped)
    return msgspec.structs.replace(
        asked,
        waves=reported.waves,
        skipped=reported.skipped,
        remaining=tuple(block for block in asked.remaining if block not in gone),
        visits=reported.visits,
        relays=(),
        avoid=avoid,
    )


# A track that comes back: of an unknown wave, with other blocks, or run by another process.


def returned_track(waves: Iterable[OpenWave], request: RequestId, reported: Itinerary) -> OpenTrack | None:
    """Return the open track that returned tokens belong to, or None."""
    ref = reported.track
    wave = None if ref is None else next((wave for wave in waves if wave.ident == ref.wave), None)
    if ref is None or wave is None or ref.index >= len(wave.tracks) or wave.request.request != request:
        return None
    track = wave.tracks[ref.index]
    ran = blocks_run(reported)
    if track.row is not None or tuple(block for block, _ in ran) != track.plan.blocks[: len(ran)]:
        return None
    # Tracks are not handed on, so no other process can have run it.
    return track if all(holder == track.plan.holder for _, holder in ran) else None


def blocks_run(itinerary: Itinerary) -> tuple[Ran, ...]:
    """Return the blocks that ran, with their holders, in order."""
    return tuple(step for wave in itinerary.waves for track in wave for step in track)
