"""The course of a chaos run: which fault comes when, to which process, for how long."""

from __future__ import annotations

import random

import msgspec

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
    "other_bundle": "a peer comes back with another model",
    "all_gone": "all peers are killed together, and restarted",
}
"""All kinds of faults."""
LAPTOP = "laptop"
"""Name of the source."""
_PAUSE_S = 15.0
"""Length of a pause."""
_PAUSE_PART = 0.6
"""Maximum length of a pause, as a fraction of the course."""


class Fault(msgspec.Struct, frozen=True):
    """One fault: its kind, peer, time (in seconds since the first request) and duration."""

    kind: str
    peer: str
    at_s: float
    lasts_s: float


def plan(seed: int, seconds: float, peers: tuple[str, ...], kinds: tuple[str, ...] = tuple(KINDS)) -> list[Fault]:
    """Draw a fault of each kind, in shuffled order and with exponential gaps."""
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(len(kinds) + 1)]
    faults, at = [], 0.0
    for kind, gap in zip(rng.sample(kinds, len(kinds)), gaps, strict=False):
        at += gap * seconds / sum(gaps)
        lasts = min(_PAUSE_S, _PAUSE_PART * seconds) if kind == "pause" else rng.uniform(0.2, 1.0)
        faults.append(Fault(kind, rng.choice(peers), round(at, 3), round(lasts, 3)))
    return faults
