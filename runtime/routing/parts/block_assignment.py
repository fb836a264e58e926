"""Which blocks of a wave go into which of its tracks: a pure function for the policy ``parallel``.

A wave is given as its blocks in the preferred order and the lengths of its tracks, one for each holder. Assigned in
turn (0, 2, 4 beside 1, 3, 5) every block stays as close to its preferred slot as the lengths allow, and neighbours run
side by side. Where costs were measured (``ls_edge.core.order_costs``), blocks of different tracks are swapped while the
estimate falls. Both respect what each holder has.

Plain Python with a bounded number of steps, for every decision: the search is local and may stop short of the best.
The lengths of tracks and their holders depend on time, not on loss, and are chosen by ``wave_planner``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ls_edge.core.order_costs import OrderCosts
from ls_edge.runtime.routing.limits import Limits

_ROUNDING = 1e-9
"""Nats; a swap that saves less may be undone by the next."""


def assign_blocks(
    blocks: Sequence[int],
    lengths: Sequence[int],
    allowed: Sequence[Collection[int]],
    *,
    before: int,
    costs: OrderCosts | None,
    swaps: int = Limits.swaps,
) -> tuple[tuple[int, ...], ...] | None:
    """Assign ``blocks``, in the preferred order, to tracks of ``lengths`` blocks; each track keeps that order.

    ``allowed`` holds, for each track, the blocks that its holder has; ``before`` counts the blocks of earlier waves.
    ``costs`` without ``beside`` are not used, since they do not cover tracks. Return None if no such assignment exists
    or the lengths do not add up to the blocks. A track of length 0 comes back empty.
    """
    allowed = [some if isinstance(some, (set, frozenset)) else frozenset(some) for some in allowed]
    track_of = _assigned(blocks, lengths, allowed)
    if track_of is None:
        return None
    if costs is not None and costs.beside is not None:
        _improve(track_of, blocks, allowed, before, costs, costs.beside, swaps)
    tracks: list[list[int]] = [[] for _ in lengths]
    for block, track in zip(blocks, track_of, strict=True):
        tracks[track].append(block)
    return tuple(map(tuple, tracks))


def _assigned(blocks: Sequence[int], lengths: Sequence[int], allowed: Sequence[Collection[int]]) -> list[int] | None:
    """Return the track of each block, each in turn given to the shortest track; None if there is no assignment."""
    if sum(lengths) != len(blocks):
        return None
    track_of: list[int] = []
    held = [0] * len(lengths)
    for at, block in enumerate(blocks):
        free = [k for k, length in enumerate(lengths) if held[k] < length and block in allowed[k]]
        if free:
            track = min(free, key=held.__getitem__)
            track_of.append(track)
        else:
            track_of.append(-1)
            found = _make_room(at, track_of, blocks, [h < n for h, n in zip(held, lengths, strict=True)], allowed)
            if found is None:
                return None
            track = found
        held[track] += 1
    return track_of


def _make_room(
    at: int, track_of: list[int], blocks: Sequence[int], room: Sequence[bool], allowed: Sequence[Collection[int]]
) -> int | None:
    """Move blocks along the shortest chain of tracks (an augmenting path) and place block ``at``.

    Returns the track that has one more for it; None where no chain ends in a track with room.
    """
    came: dict[int, int] = {}
    queue = [at]
    for mover in queue:
        for track, has in enumerate(allowed):
            if track in came or blocks[mover] not in has:
                continue
            came[track] = mover
            if room[track]:
                last = track
                while True:
                    mover = came[track]
                    track, track_of[mover] = track_of[mover], track
                    if mover == at:
                        return last
            queue += [other for other in range(at - 1, -1, -1) if track_of[other] == track]
    return None


def _costs_apart(
    track_of: Sequence[int],
    blocks: Sequence[int],
    tracks: int,
    costs: OrderCosts,
    beside: Sequence[Sequence[float]],
) -> tuple[list[list[float]], list[list[float]]]:
    """Return the extra cost of two blocks in different tracks, and that of each block outside each track."""
    apart = [[0.0] * len(blocks) for _ in blocks]
    with_track = [[0.0] * tracks for _ in blocks]
    for j, late in enumerate(blocks):
        for i in range(j):
            early = blocks[i]
            more = beside[early][late] if early < late else beside[late][early] - costs.inverted[late][early]
            apart[i][j] = apart[j][i] = more
            with_track[i][track_of[j]] += more
            with_track[j][track_of[i]] += more
    return apart, with_track


def _improve(
    track_of: list[int],
    blocks: Sequence[int],
    allowed: Sequence[Collection[int]],
    before: int,
    costs: OrderCosts,
    beside: Sequence[Sequence[float]],
    swaps: int,
) -> None:
    """Swap blocks of different tracks while that saves cost, beginning with blocks close in the preferred order."""
    count, slot = len(blocks), costs.slot
    apart, with_track = _costs_apart(track_of, blocks, len(allowed), costs, beside)
    place: list[int] = []
    held = [before] * len(allowed)
    for track in track_of:
        place.append(held[track])
        held[track] += 1
    stale = False
    while not stale:
        stale = True
        for far in range(1, count):
            for i in range(count - far):
                j = i + far
                a, b = track_of[i], track_of[j]
                if a == b or blocks[i] not in allowed[b] or blocks[j] not in allowed[a]:
                    continue
                if not swaps:
                    return
                swaps -= 1
                one, two = with_track[i], with_track[j]
                change = one[a] + two[b] - one[b] - two[a] + 2 * apart[i][j]
                to, fro = place[i], place[j]
                for x in range(i + 1, j):
                    if track_of[x] == a:
                        row = slot[blocks[x]]
                        change += row[place[x] - 1] - row[place[x]]
                        to += 1
                    elif track_of[x] == b:
                        row = slot[blocks[x]]
                        change += row[place[x] + 1] - row[place[x]]
                        fro -= 1
                first, second = slot[blocks[i]], slot[blocks[j]]
                change += first[fro] - first[place[i]] + second[to] - second[place[j]]
                if change >= -_ROUNDING:
                    continue
                stale = False
                for x in range(i + 1, j):
                    if track_of[x] == a:
                        place[x] -= 1
                    elif track_of[x] == b:
                        place[x] += 1
                place[i], place[j] = fro, to
                track_of[i], track_of[j] = b, a
                for x, sums in enumerate(with_track):
                    moved = apart[x][j] - apart[x][i]
                    sums[a] += moved
                    sums[b] -= moved
