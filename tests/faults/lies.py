"""The lies: reactions of a :class:`~.liar.Liar` to transfers, and messages that it sends on its own.

:data:`~.course.LIE_TEXTS` describes each in a line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from ls_edge.core.records import MICROSECONDS
from ls_edge.runtime.protocol.codecs.image import EncodedImage
from ls_edge.runtime.protocol.messages import (
    MAX_BUDGET_US,
    Accept,
    Cancel,
    Itinerary,
    Message,
    Moved,
    Progress,
    Refuse,
    Release,
    State,
    TrackRef,
    TransferId,
)
from ls_edge.runtime.routing.state.events import Arrived, Forward, Send
from ls_edge.runtime.transport.admission import new_alias
from tests.faults.liar import Liar, Lie, Sends

_FLOOD = 8
"""Messages to each process per turn."""
_FORMER = 1
"""Requests about which a former holder lies per turn. Changed tokens are the lie ``poisons``."""
_ALIASES = 24
"""Number of sources that one process of a liar pretends to be."""


# Reactions to a transfer.


def _accept(_liar: Liar, event: Arrived) -> Sends:
    yield Send(event.sender, Accept(event.run.transfer, 16))


def _nothing(_liar: Liar, _event: Arrived) -> Sends:
    return ()


def _refuse(reason: str, room: int = 16) -> Callable[[Liar, Arrived], Sends]:
    def lie(_liar: Liar, event: Arrived) -> Sends:
        yield Send(event.sender, Refuse(event.run.transfer, reason, room))

    return lie


def _home(event: Arrived, why: str, tokens: Any = None, **changes: Any) -> Forward:
    itinerary = msgspec.structs.replace(event.run.itinerary, **changes)
    return _onward(event, itinerary.source, itinerary, event.tokens if tokens is None else tokens, why)


def _onward(event: Arrived, to: str, itinerary: Itinerary, tokens: Any, returning: str) -> Forward:
    run = event.run
    transfer = run.transfer._replace(hop=run.transfer.hop + 1)
    return Forward(to, transfer, run.budget_us, itinerary, tokens, returning)


def _return(why: str, **changes: Any) -> Callable[[Liar, Arrived], Sends]:
    def lie(liar: Liar, event: Arrived) -> Sends:
        yield from _accept(liar, event)
        yield _home(event, why, **changes)

    return lie


def _skip(liar: Liar, event: Arrived) -> Sends:
    it = event.run.itinerary
    yield from _accept(liar, event)
    yield _home(event, "done", remaining=(), skipped=(*it.skipped, *it.remaining), max_skips=len(liar.all_blocks))


def _side_by_side(liar: Liar, event: Arrived) -> Sends:
    """Claim that all blocks ran in parallel, a track each, although the source did not ask for waves."""
    left = event.run.itinerary.remaining
    yield from _accept(liar, event)
    waves = (*event.run.itinerary.waves, tuple(((block, liar.name),) for block in left))
    yield _home(event, "done", remaining=(), waves=waves)


def _as_track(liar: Liar, event: Arrived) -> Sends:
    yield from _accept(liar, event)
    yield _home(event, "done", remaining=(), track=TrackRef(1, 0, 0, event.run.itinerary.owner))


def _out_of_bands(liar: Liar, event: Arrived) -> Sends:
    """Claim that its last block ran first: to each peer with the others remaining, to the owner with all done."""
    it = event.run.itinerary
    yield from _accept(liar, event)
    if it.track is not None and not it.remaining:  # a finished track, which it keeps
        return
    if it.track is not None:
        stray = next(
            block for block in liar.all_blocks if liar.bands.band_of(block) != liar.bands.band_of(it.remaining[0])
        )
        yield _home(
            event, "done", remaining=(), waves=((((stray, liar.name), *((b, liar.name) for b in it.remaining)),),)
        )
        return
    ran = [step for wave in it.waves for track in wave for step in track]
    first, *others = [*((block, liar.name) for block in reversed(it.remaining)), *reversed(ran)]
    early = msgspec.structs.replace(
        it, waves=(((first,),),), remaining=liar.bands.sort(sorted(block for block, _ in others))
    )
    for name in liar.others("peer"):
        yield _onward(event, name, early, event.tokens, "")
    yield _home(event, "done", remaining=(), waves=(((first, *others),),))


def _bounce(liar: Liar, event: Arrived) -> Sends:
    """Pass tokens to others as if the liar had never had them."""
    run = event.run
    yield from _accept(liar, event)
    for name in liar.others("peer"):
        yield _onward(event, name, run.itinerary, event.tokens, run.returning)


def _hand_on(liar: Liar, event: Arrived) -> Sends:
    """Relay a transfer, so that later messages about it come from a former holder."""
    run = event.run
    others = [name for name in liar.others("peer") if name not in (event.sender, *run.itinerary.relays)]
    yield from _accept(liar, event)
    if not others:
        yield _home(event, "unreachable")
        return
    to = others[liar.counts.received % len(others)]
    onward = msgspec.structs.replace(run.itinerary, relays=(*run.itinerary.relays, liar.name))
    yield _onward(event, to, onward, event.tokens, run.returning)
    yield Send(event.sender, Release(run.transfer, to))


def _ran_all(liar: Liar, event: Arrived, tokens: Any, by: str = "") -> Sends:
    yield from _accept(liar, event)
    it = event.run.itinerary
    waves = it.ran(it.remaining, by or liar.name).waves if it.remaining else it.waves
    yield _home(event, "done", tokens, remaining=(), waves=waves)


def _other(event: Arrived) -> Any:
    """Return tokens other than the received ones; a layer norm would remove an added constant."""
    if isinstance(event.tokens, EncodedImage):
        return EncodedImage(b"another image")
    return np.ascontiguousarray(event.tokens[..., ::-1])


def _results(liar: Liar, event: Arrived) -> Any:
    """Return wrong results of the remaining parts: logits if peers run the head."""
    return liar.logits.copy() if event.run.itinerary.has_stem else _other(event)


def _not_finite(liar: Liar, event: Arrived) -> Sends:
    results = _results(liar, event)
    results.flat[0] = np.nan
    return _ran_all(liar, event, results)


def _wrong(liar: Liar, event: Arrived) -> Sends:
    return _ran_all(liar, event, _results(liar, event))


def _wrong_by_others(liar: Liar, event: Arrived) -> Sends:
    return _ran_all(liar, event, _results(liar, event), liar.others("peer")[0])


def _unchanged_but_wrong(liar: Liar, event: Arrived) -> Sends:
    yield from _accept(liar, event)
    yield _home(event, "unreachable", _other(event))


# Messages that a liar sends on its own.


def _progress(growth: int) -> Callable[[Liar], Sends]:
    def lie(liar: Liar) -> Sends:
        for event in liar.given:
            done = event.run.itinerary.blocks_done + min(growth, liar.turns)
            yield Send(event.sender, Progress(event.run.transfer, done))

    return lie


def _releases(liar: Liar) -> Sends:
    before = [*liar.others("peer"), liar.name]
    for event in liar.given:
        yield Send(event.sender, Release(event.run.transfer, liar.rng.choice(before)))
        yield Send(event.run.itinerary.owner, Moved(event.run.transfer, liar.rng.choice(before)))


def _as_former_holder(liar: Liar) -> Sends:
    """Send messages about tokens that it has handed on: RETURN, old RUNs, and answers to transfers of others."""
    rng, others = liar.rng, liar.others("peer")
    for event in rng.sample(liar.given, min(len(liar.given), _FORMER)):
        run, onward = event.run, event.run.transfer._replace(hop=event.run.transfer.hop + 1)
        done = run.itinerary.blocks_done + 1
        for why in ("unreachable", "credit", "budget"):
            yield _home(event, why)
        for name in {event.sender, run.itinerary.owner, *others}:
            for one in (run.transfer, onward):
                for message in (Accept(one, 16), Progress(one, done), Refuse(one, "busy", 16), Release(one, liar.name)):
                    yield Send(name, message)
        for name in others:
            yield Send(run.itinerary.owner, Moved(onward, name))
            for copy in (onward, onward._replace(branch=rng.getrandbits(64))):
                yield Forward(name, copy, run.budget_us, run.itinerary, event.tokens, run.returning)


def _random_transfer(liar: Liar) -> TransferId:
    return TransferId(liar.rng.randbytes(16), liar.rng.getrandbits(64), liar.rng.randrange(9))


def _forge(liar: Liar) -> Sends:
    """Send messages about requests that it was not given, and about requests that it has refused."""
    peers = liar.others("peer")
    by = peers[0] if peers else liar.name
    done = ((tuple((block, by) for block in liar.all_blocks),),)
    for source in liar.others("source"):
        it = Itinerary(source, "nearest", (), 0, waves=done)
        for _ in range(_FLOOD):
            yield Forward(source, _random_transfer(liar), 10**7, it, liar.tokens, "done")
            yield Send(source, Moved(_random_transfer(liar), by))
    known = [event.run.transfer for event in liar.given] + [_random_transfer(liar) for _ in range(_FLOOD)]
    for name in peers:
        yield Send(name, Cancel(tuple(transfer.request for transfer in known), MAX_BUDGET_US))
    for one in known:
        for name in (*peers, *liar.others("source")):
            for message in (Accept(one, 9), Refuse(one, "canceled", 9), Progress(one, 1), Release(one, by)):
                yield Send(name, message)
    for event in liar.given:
        yield Send(event.run.itinerary.owner, Moved(event.run.transfer, liar.rng.choice(peers or [by])))


def _flood(liar: Liar) -> Sends:
    """Send work for sources that do not exist, with the longest allowed budget."""
    for name in liar.others("peer"):
        for number in range(_FLOOD):
            ghost = f"ghost-{liar.turns}-{number}.{liar.rng.getrandbits(32):08x}"
            it = Itinerary(ghost, "nearest", liar.all_blocks, 0)
            yield Forward(name, _random_transfer(liar), MAX_BUDGET_US, it, liar.tokens)


def _hellos(liar: Liar) -> Sends:
    """Greet under its own name as ever new processes, and under the names of others."""
    for name in liar.neighbors.by_name:
        for one in (liar.name, liar.name, *liar.others("peer"), new_alias("stranger")):
            role = "source" if one.startswith("stranger") else "peer"
            blocks = () if role == "source" else liar.all_blocks
            said = liar.hello(one, role, blocks)
            yield Send(name, msgspec.structs.replace(said, incarnation=liar.rng.getrandbits(63)))


def _changing(liar: Liar) -> Sends:
    """Send a different STATE each time, with the largest allowed numbers."""
    rng, most = liar.rng, MICROSECONDS - 1
    reaches = tuple(f"n-{rng.getrandbits(32):08x}" for _ in range(1000))
    for name in liar.neighbors.by_name:
        for _ in range(2):
            flags = (rng.random() < 0.8, rng.random() < 0.2, rng.random() < 0.2)
            numbers = (rng.choice((0, 1, 65535)), rng.choice((0, 65535)), rng.getrandbits(64))
            times = (rng.choice((0, 1, most)), rng.choice((0, most)))
            yield Send(name, State(*flags, *numbers, *times, reaches, liar.all_blocks))


def _malformed(liar: Liar) -> Sends:
    """Send messages with invalid fields, after a valid greeting."""
    good, rng = _random_transfer(liar), liar.rng
    waves = ((((liar.all_blocks[0], liar.name), (liar.all_blocks[0], liar.name)),),)
    bad: list[Message] = [
        State(True, False, False, 2**40, 2**40, 2**63, 2**40, 2**40, ("x" * 300, "\x1b[2J"), (2**20,)),
        Accept(TransferId(b"short", 0, 0), 1),
        Refuse(good, "\x1b]0;owned\x07", 1),
        Progress(TransferId(good.request, 0, 2**20), 1),
        Release(good, "../../etc"),
        Cancel(tuple(rng.randbytes(16) for _ in range(2000)), 2**60),
        liar.hello("\x1b[31m", "peer", ()),
    ]
    for name in liar.neighbors.by_name:
        for message in bad:
            yield Send(name, message)
        for it in (
            Itinerary(name, "nearest", (), 0, waves=waves),
            Itinerary(name, "nearest", liar.all_blocks[1:], 2**20),
            Itinerary(name, "nearest", liar.all_blocks, 0, track=TrackRef(2**63, 2**40, 0, name)),
        ):
            yield Forward(name, good, 2**50, it, liar.tokens, "done")


def _greed(liar: Liar) -> Sends:
    """Send as much work as possible, with the longest budget, and accept no results."""
    it = Itinerary(liar.name, "nearest", liar.all_blocks, 0)
    for name in liar.others("peer"):
        for _ in range(_FLOOD):
            yield Forward(name, _random_transfer(liar), MAX_BUDGET_US, it, liar.tokens)
        yield Send(name, Cancel(tuple(liar.rng.randbytes(16) for _ in range(64)), MAX_BUDGET_US))


LIES: dict[str, Lie] = {
    "busy": Lie(_refuse("busy")),
    "canceled": Lie(_refuse("canceled")),
    "refuses_not_finite": Lie(_refuse("not finite")),
    "mute": Lie(_nothing),
    "silent": Lie(_accept),
    "slow": Lie(
        _accept, state={"block_us": MICROSECONDS - 1}
    ),
    "progress": Lie(_accept, _progress(0)),
    "growth": Lie(_accept, _progress(9)),
    "releases": Lie(_accept, _releases),
    "unreachable": Lie(_return("unreachable")),
    "budget": Lie(_return("budget")),
    "credit": Lie(_return("credit")),
    "returns_not_finite": Lie(_return("not finite")),
    "poisons": Lie(_unchanged_but_wrong),
    "skips": Lie(_skip),
    "waves": Lie(_side_by_side),
    "tracks": Lie(_as_track),
    "bands": Lie(_out_of_bands, needs_bands=True),
    "bounces": Lie(_bounce),
    "nan": Lie(_not_finite),
    "wrong": Lie(_wrong, spoils=True),
    "blames": Lie(_wrong_by_others, spoils=True),
    "forges": Lie(
        _refuse("busy", 0), _forge
    ),
    "former": Lie(_hand_on, _as_former_holder),
    "floods": Lie(_refuse("busy"), _flood),
    "hellos": Lie(_accept, _hellos, tempts=False),
    "changes": Lie(_accept, _changing, tempts=False),
    "malformed": Lie(_refuse("busy"), _malformed),
    "greed": Lie(_nothing, _greed, role="source"),
    "aliases": Lie(
        _nothing, _greed, role="source", processes=_ALIASES, tempts=False
    ),
}  # fmt: skip
"""All lies by name."""
