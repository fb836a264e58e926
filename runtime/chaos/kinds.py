"""Names of faults and lies, and what they are in a few words: for help texts, which load no engine."""

from __future__ import annotations

KINDS = {
    "kill": "a peer is killed, and started again",
    "stop": "a peer is stopped (SIGSTOP) for up to a second",
    "pause": "a peer is stopped in an engine call, for 15 s, or 0.6 of a course of less than 25 s",
    "hang": "a peer's engine does not return",
    "slow": "a peer's engine takes 30 times as long, and stalls",
    "half_open": "connections to a peer stay open and nothing passes",
    "corrupt": "a stranger sends a peer messages that cannot be read",
    "garbage": "connections to all peers with broken, cut and half-open streams of every version of ZMTP",
    "clock": "a peer's wall clock jumps back a day",
    "other_bundle": "a peer comes back with another model (needs --other-bundle)",
    "all_gone": "all peers are killed at once, and started again",
    "liar": "a member that holds every block, or a source, lies; see --lies",
}
"""All kinds of faults."""
LIE_TEXTS = {
    "busy": "refuses everything as busy, and announces credits",
    "cancelled": "refuses everything as cancelled",
    "refuses_not_finite": "refuses everything as not finite",
    "mute": "answers nothing",
    "silent": "accepts everything and is silent",
    "slow": "accepts, is silent, and announces engine calls of 2^32-1 us",
    "progress": "accepts, and makes PROGRESS for ever",
    "growth": "accepts, and makes PROGRESS block by block, for ever",
    "releases": "accepts, and sends RELEASE and MOVED for ever",
    "unreachable": "returns everything as it was, as unreachable",
    "budget": "returns everything as it was, for lack of time",
    "credit": "returns everything as it was, for lack of credit",
    "returns_not_finite": "returns everything as not finite",
    "poisons": "returns everything as unreachable, with other tokens",
    "skips": "leaves all blocks out",
    "waves": "claims that blocks ran side by side",
    "tracks": "makes a track of a request",
    "bands": "claims that blocks ran before those of earlier bands (of a model with bands)",
    "bounces": "hands everything to everybody",
    "nan": "sends NaN as what its blocks made",
    "wrong": "sends wrong tokens as what its blocks made",
    "blames": "sends wrong tokens as what another made",
    "forges": "forges answers, MOVED, CANCEL and more, for requests that it was not given",
    "former": "hands everything on, then sends RETURN, PROGRESS, RELEASE and copies of it",
    "floods": "floods peers with work for sources that do not exist",
    "hellos": "sends HELLO all the time, under many names",
    "changes": "announces other properties all the time",
    "malformed": "sends what cannot be read",
    "greed": "a source that takes all credits and accepts nothing back",
    "aliases": "a source under many names",
}
"""All lies of :mod:`~ls_edge.runtime.chaos.liar`."""
COURSE_LIES = tuple(name for name in LIE_TEXTS if name not in ("blames", "poisons"))
"""Lies of a course: the record of a wrong answer names the liar, if there are any. Of the other two only an audit shows
that the liar had the request in hand."""
