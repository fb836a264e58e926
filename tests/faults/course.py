"""The course of a chaos run: which fault comes when, to which process, for how long."""

from __future__ import annotations

import random

import msgspec

from tests.faults.lies import LIES

KINDS = {
    "kill": "a peer is killed, and restarted",
    "stop": "a peer is stopped (SIGSTOP) for up to a second",
    "pause": "a peer is stopped in an engine call, for 15 s, or 0.6 of a course of less than 25 s",
    "hang": "a peer's engine does not return",
    "slow": "a peer's engine takes 30 times as long, and stalls",
    "half_open": "connections to a peer stay open, but nothing passes",
    "corrupt": "a stranger sends a peer malformed messages",
    "garbage": "connections to all peers with broken, cut and half-open streams of every version of ZMTP",
    "clock": "a peer's wall clock jumps back a day",
    "other_bundle": "a peer comes back with another model (needs --other-bundle)",
    "all_gone": "all peers are killed together, and restarted",
    "liar": "a member that holds every block, or a source, lies; see --lies",
}
"""All kinds of faults."""
LIE_TEXTS = {
    "busy": "refuses everything as busy, and announces credits",
    "canceled": "refuses everything as canceled",
    "refuses_not_finite": "refuses everything as not finite",
    "mute": "answers nothing",
    "silent": "accepts everything and is silent",
    "slow": "accepts, is silent, and announces engine calls of 2^32-1 us",
    "progress": "accepts, and reports PROGRESS forever",
    "growth": "accepts, and reports PROGRESS block by block, forever",
    "releases": "accepts, and sends RELEASE and MOVED forever",
    "unreachable": "returns everything as it was, as unreachable",
    "budget": "returns everything as it was, for lack of time",
    "credit": "returns everything as it was, for lack of credit",
    "returns_not_finite": "returns everything as not finite",
    "poisons": "returns everything as unreachable, with other tokens",
    "skips": "leaves all blocks out",
    "waves": "claims that blocks ran in parallel",
    "tracks": "makes a track of a request",
    "bands": "claims that blocks ran before those of earlier bands (of a model with bands)",
    "bounces": "hands everything to all others",
    "nan": "sends NaN as the output of its blocks",
    "wrong": "sends wrong tokens as the output of its blocks",
    "blames": "sends wrong tokens as the output of another peer",
    "forges": "forges answers, MOVED, CANCEL and more, for requests that it was not given",
    "former": "hands everything on, then sends RETURN, PROGRESS, RELEASE and copies of it",
    "floods": "floods peers with work for sources that do not exist",
    "hellos": "sends HELLO all the time, under many names",
    "changes": "announces other properties all the time",
    "malformed": "sends malformed messages",
    "greed": "a source that takes all credits and accepts nothing back",
    "aliases": "a source under many names",
}
"""All lies of :mod:`~tests.faults.liar`."""
COURSE_LIES = tuple(name for name in LIE_TEXTS if name not in ("blames", "poisons"))
"""Lies of a course: the record of a wrong answer names the liar. For the other two only an audit shows that the liar
had the request."""
LIAR, THIEF, LAPTOP = "mallory", "thief", "laptop"
"""Names of the peer and the source that may be liars, and of the honest source."""
_PAUSE_S = 15.0
"""Length of a pause."""
_PAUSE_PART = 0.6
"""Maximum length of a pause, as a fraction of the course."""
_LIES_S = (2.0, 5.0)
"""Shortest and longest time for which a liar runs."""


class Fault(msgspec.Struct, frozen=True):
    """One fault: its kind, peer, time (in seconds since the first request) and duration."""

    kind: str
    peer: str
    at_s: float
    lasts_s: float
    lie: str = ""
    """Name of the lie of a liar in :data:`~.lies.LIES`."""


def plan(
    seed: int,
    count: int,
    seconds: float,
    peers: tuple[str, ...],
    kinds: tuple[str, ...] = tuple(KINDS),
    lies: tuple[str, ...] = COURSE_LIES,
) -> list[Fault]:
    """Draw ``count`` faults with exponential gaps; kinds and lies come in shuffled rounds, so that none is missing."""
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
