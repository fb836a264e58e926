"""The course of a chaos run: which fault comes when, to which process, for how long."""

from __future__ import annotations

import random

import msgspec

from ls_edge.runtime.chaos.kinds import COURSE_LIES, KINDS
from ls_edge.runtime.chaos.lies import LIES

LIAR, THIEF, LAPTOP = "mallory", "thief", "laptop"
"""Names of the peer and the source that may be liars, and of the honest source."""
_PAUSE_S = 15.0
"""Length of a pause."""
_PAUSE_PART = 0.6
"""Longest part of a course that one pause takes."""
_LIES_S = (2.0, 5.0)
"""Shortest and longest time for which a liar runs."""


class Fault(msgspec.Struct, frozen=True):
    """One fault: what, to whom, when (seconds since the first request), for how long."""

    kind: str
    peer: str
    at_s: float
    lasts_s: float
    lie: str = ""
    """What a liar does, by its name in :data:`~.liar.LIES`."""


def plan(
    seed: int,
    count: int,
    seconds: float,
    peers: tuple[str, ...],
    kinds: tuple[str, ...] = tuple(KINDS),
    lies: tuple[str, ...] = COURSE_LIES,
) -> list[Fault]:
    """Draw ``count`` faults: gaps are exponential, kinds in turn in shuffled rounds so that none is missing.

    So are the lies of liars.
    """
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(count + 1)]
    scale = seconds / sum(gaps)
    order, told = _in_rounds(rng, kinds, count), iter(_in_rounds(rng, lies, count))
    faults, at = [], 0.0
    for kind, gap in zip(order, gaps, strict=False):
        at += gap * scale
        peer, lasts, lie = rng.choice(peers), rng.uniform(0.2, 1.0), ""
        if kind == "pause":
            lasts = min(_PAUSE_S, _PAUSE_PART * seconds)
        elif kind == "liar":
            lasts, lie = rng.uniform(*_LIES_S), next(told)
            peer = LIAR if LIES[lie].role == "peer" else THIEF
        faults.append(Fault(kind, peer, round(at, 3), round(lasts, 3), lie))
    return faults


def _in_rounds(rng: random.Random, what: tuple[str, ...], count: int) -> list[str]:
    order: list[str] = []
    while len(order) < count and what:
        turn = list(what)
        rng.shuffle(turn)
        order += turn
    return order[:count]
