"""Check that the internal state of a routing machine is consistent."""

from __future__ import annotations

from collections import Counter

from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.peer.peer_rules import PeerRules
from ls_edge.runtime.routing.state.credits import Credits
from ls_edge.runtime.routing.state.custody import TRANSITIONS, Custody
from ls_edge.runtime.routing.state.held_request import INFINITY, HeldRequest, Stage
from ls_edge.runtime.routing.state.neighbors import Neighbors
from ls_edge.runtime.routing.state.timers import Timers
from ls_edge.runtime.routing.state.waiting_requests import WaitingRequests


class InvalidState(Exception):
    """Internal state is inconsistent."""


def validate(machine: Machine) -> None:
    """Raise :class:`InvalidState` if the state of a machine is inconsistent after a turn."""
    rules, custody = machine.rules, machine.custody
    _check_requests(custody, machine.neighbors)
    _check_transfers(custody)
    _check_waiting(custody.waiting, custody.held.values())
    if isinstance(rules, PeerRules):
        _check_waves(custody)
        _check_engine(rules, custody)
    else:
        copies = {request.copy.transfer: request.copy for request in rules.requests.values()}
        _require(copies == custody.held, "requests and held copies differ")


def _require(holds: bool, what: str, request: HeldRequest | None = None) -> None:
    if not holds:
        raise InvalidState(f"{what}\n{request.history()}" if request else what)


def _check_requests(custody: Custody, neighbors: Neighbors) -> None:
    _require(not custody.waiting.ready, "requests are left to be decided")
    counts, offers = Credits(custody.credits.limits), Counter[str]()
    for transfer, request in custody.held.items():
        stage = request.stage
        on_its_way = stage in (Stage.OFFERED, Stage.CUSTODY)
        counts.count(request, int(request.is_copy), 1)
        may_be_copy = on_its_way or request.returning or stage is Stage.WAITING
        _require(on_its_way <= request.is_copy <= bool(may_be_copy), "counted as a copy or not", request)
        offers[request.downstream] += stage is Stage.OFFERED
        _require(request.transfer == transfer, "held under another transfer", request)
        _require((stage, Stage.ENDED) in TRANSITIONS, "in a stage without an end", request)
        _require(on_its_way == (custody.sent.get(request.sent or transfer) is request), "sent or not", request)
        _require(not on_its_way or request.downstream in neighbors.by_name, "no holder has it", request)
        _require(stage is not Stage.WAITING or not request.downstream, "waits downstream", request)
        has_time = request.check_at < INFINITY and _has_entry(custody.timers, request)
        _require(has_time, "its time never comes", request)
    _require(counts == custody.credits, f"counts are {custody.credits}")
    for n in neighbors:
        _require(n.offers == offers[n.name], f"{n.offers} offers to {n.name}, {offers[n.name]} are on their way")


def _has_entry(timers: Timers, request: HeldRequest) -> bool:
    return any(at == request.timer_at <= request.check_at and one is request for at, _, one in timers._heap)


def _check_transfers(custody: Custody) -> None:
    for sent, request in custody.sent.items():
        is_held = custody.held.get(request.transfer) is request
        _require(request.sent == sent and is_held, "sent under another transfer, or not held", request)


def _check_waiting(waiting: WaitingRequests, held: list[HeldRequest]) -> None:
    """Check that the index lists exactly the waiting requests."""
    known = {request.number for request in held}
    for request in held:
        waits = {name for name, those in waiting._for_credit.items() if request.number in those}
        _require(waits == set(request.waits_for), "listed as waiting for others", request)
        is_listed = bool(waits) or request.number in waiting._for_change
        _require(is_listed == (request.stage is Stage.WAITING), "waiting or not", request)
    for name, those in waiting._for_credit.items():
        _require(bool(those) and those.keys() <= known, f"waiting for {name}, but not held")
    _require(waiting._for_change.keys() <= known, "waiting for a change, but not held")


def _check_waves(custody: Custody) -> None:
    held = custody.held.values()
    for request in held:
        _require((request.wave is not None) == (request.stage is Stage.JOINING), "joining or not", request)
    parts = {id(request.open_track) for request in held if request.open_track is not None}
    waves = [request.wave for request in held if request.wave is not None]
    tracks = [track for wave in waves for track in wave.tracks]
    _require(parts == {id(track) for track in tracks if track.row is None}, "open tracks and held tokens differ")
    for wave in waves:
        is_open = wave.request.wave is wave and not all(track.row is not None for track in wave.tracks)
        _require(is_open, "a wave should be closed", wave.request)


def _check_engine(rules: PeerRules, custody: Custody) -> None:
    held, engine = custody.held.values(), rules.engine
    queued = sorted(id(request) for request in held if request.stage is Stage.QUEUED)
    _require(sorted(map(id, engine.queued)) == queued, "the engine's queue differs")
    for request in held:
        given = any(one is request for one in engine.given)
        _require(given == (request.stage is Stage.RUNNING), "on the engine or not", request)
