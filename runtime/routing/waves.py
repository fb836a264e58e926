"""Waves of tracks: a process runs blocks side by side on several holders and joins their results.

A wave (``docs/architecture.md``, "Tracks") is a request within a request. Its joiner keeps the request, in the stage
``JOINING``, and holds one more for each track: the same tokens, the track's blocks, and itself as the source to which
they return. So custody, hop deadlines, credits and RETURN serve tracks as they serve requests. The joiner's own track
goes to its own engine.

A track ends with the tokens that come back, or without them: its holder is lost, refuses, or shows no progress by its
hop's deadline. When all have ended, the additions are summed in track order (``ls_edge.core.arrangement.join``) and the
request goes on. Blocks that a track did not run remain to be run, in a later wave or by the next holder; where the
itinerary has ``skip``, and as long as skips are left, they are left out. If the joiner dies, the process that
kept the copy before it runs the wave again; the holders of tracks drop them, since their source is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ls_edge.core import arrangement
from ls_edge.core.records import TrackSpan
from ls_edge.runtime.protocol.messages import Accept, Itinerary, Ran, ReturnReason, TrackRef, TransferId
from ls_edge.runtime.routing.candidates import LocalNode
from ls_edge.runtime.routing.custody import CustodyMachine
from ls_edge.runtime.routing.events import Arrived, Send
from ls_edge.runtime.routing.held_request import HeldRequest, OpenTrack, OpenWave, Stage
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.wave_planner import WavePlan, plan_wave

_NO_TIMES = (0, 0, 0)


class WaveJoiner:
    """The waves that a machine has open; a part of ``PeerMachine``."""

    def __init__(self, machine: CustodyMachine, run_here: Callable[[HeldRequest, int], None]) -> None:
        """``run_here`` queues a request for the engine."""
        self.open: dict[int, OpenWave] = {}
        self.join: Callable[[Any, Sequence[Any]], Any] = arrangement.join
        """Function that sums the additions of tracks; a simulation, whose tokens are not arrays, sets its own."""
        self._machine = machine
        self._run_here = run_here

    # The beginning.

    def split(self, request: HeldRequest, local: LocalNode) -> bool:
        """Begin a wave of more than one track, if it pays and there is room; return whether one was begun."""
        it, machine = request.itinerary, self._machine
        if not policy_of(it.policy).runs_in_waves or it.track is not None or it.via_source or request.upstream is None:
            return False
        avoid = request.avoid.keys() | set(it.avoid)
        plan = plan_wave(it, machine.name, local, [c for c in machine.reachable(request) if c.name not in avoid])
        if plan is None:
            return False
        room = machine.limits.credits + machine.limits.custody - len(machine.held)
        if len(plan.tracks) < 2 or len(plan.tracks) > room:
            self._record_unused(request, plan, request.joins.waves)
            return False
        self._begin(request, plan)
        return True

    def _begin(self, request: HeldRequest, plan: WavePlan) -> None:
        machine = self._machine
        wave = OpenWave(machine.rng.getrandbits(64), request.joins.waves, request)
        self._record_unused(request, plan, wave.number)
        request.joins.waves += 1
        before = request.itinerary.blocks_done
        for index, planned in enumerate(plan.tracks):
            transfer = TransferId(request.request, machine.rng.getrandbits(64), request.transfer.hop)
            itinerary = Itinerary(
                machine.name,
                request.itinerary.policy,
                planned.blocks,
                0,
                track=TrackRef(wave.ident, index, before, request.owner),
            )
            part = HeldRequest(transfer, itinerary, request.tokens, request.deadline, None, machine.now)
            part.bundle_id = request.bundle_id
            part.open_track = OpenTrack(wave, planned, part, machine.now)
            wave.tracks.append(part.open_track)
        machine.transition(request, Stage.JOINING, f"{len(wave.tracks)} tracks", wave)
        for track in wave.tracks:
            machine.hold(track.request, "track")
        for track in wave.tracks:
            if track.plan.holder == machine.name:
                self._run_here(track.request, track.plan.blocks[0])
            else:
                machine.offer(track.request, track.plan.holder, track.request.itinerary)

    def enter_joining(self, request: HeldRequest, wave: OpenWave) -> None:
        """Handle the transition from WAITING."""
        request.wave, request.waiting_since = wave, None
        self.open[wave.ident] = wave

    def leave_joining(self, request: HeldRequest) -> None:
        """Handle the transition to WAITING or ENDED: the wave is closed; its open tracks end with it."""
        wave, request.wave = request.wave, None
        assert wave is not None
        del self.open[wave.ident]
        for track in wave.tracks:
            track.request.open_track = None
            self._machine.end(track.request, "its wave is closed")
        wave.tracks.clear()  # a cycle of references, which would keep the tokens until a garbage collection

    def _record_unused(self, request: HeldRequest, plan: WavePlan, number: int) -> None:
        """Record holders without a track in the trace, once for decisions that repeat block by block."""
        at = round((self._machine.now - request.arrived) * 1e6)
        known = {(row.wave, row.holder) for row in request.joins.rows if not row.blocks}
        request.joins.rows += [
            TrackSpan(number, track.holder, (), at, at, track.expected_us, why="no gain")
            for track in plan.unused
            if (number, track.holder) not in known
        ]

    # What ends a track.

    def on_returned(self, event: Arrived) -> None:
        """Take returned tokens; accept and drop any that do not fit an open track of ours."""
        run, machine = event.run, self._machine
        machine.instructions.append(Send(event.sender, Accept(run.transfer, machine.limits.credits)))
        ref = run.itinerary.track
        wave = self.open.get(ref.wave) if ref is not None else None
        if ref is None or wave is None or ref.index >= len(wave.tracks) or wave.request.request != run.transfer.request:
            return
        track = wave.tracks[ref.index]
        ran = tuple(step for one in run.itinerary.waves for line in one for step in line)
        blocks = [block for block, _ in ran]
        if track.row is not None or tuple(blocks) != track.plan.blocks[: len(blocks)]:
            return
        if any(holder != track.plan.holder for _, holder in ran):
            return  # a track is never handed on, so no other process can have run it
        if not event.finite:
            ran = ()  # they would spoil the sum of all tracks, and the error would look like ours
        visit = next((v for v in run.itinerary.visits if v.holder == track.plan.holder), None)
        times = (visit.queue_us, visit.engine_us, visit.codec_us) if visit is not None else _NO_TIMES
        n = machine.neighbours.get(track.plan.holder)
        if n is not None and not ran:
            n.back_off(machine.now, machine.limits)
        elif n is not None:
            n.reset_back_off()
            machine.neighbours.clear_suspicion(n.name)
            n.track_took(machine.now - track.began, times[0] + times[1], machine.now)
        self._end_track(track, event.tokens, ran, times, run.returning if event.finite else ReturnReason.NOT_FINITE)

    def decide(self, request: HeldRequest, local: LocalNode) -> None:
        """Decide tokens that are, or claim to be, a track of this process."""
        track = request.open_track
        remaining = request.itinerary.remaining
        if track is None:
            self._machine.end(request, "a track of no open wave")
        elif track.plan.holder != self._machine.name:  # it was given to a neighbour, and waits only when that failed
            self._end_track(track, None, (), _NO_TIMES, request.failure or "refused")
        elif remaining and remaining[0] in local.blocks:
            self._run_here(request, remaining[0])
        else:
            self._end_own_track(track)

    def give_up(self, request: HeldRequest) -> None:
        """If a request is a track of ours, end it without its tokens."""
        if request.open_track is not None:
            self._end_track(request.open_track, None, (), _NO_TIMES, "late")

    def stop_waiting(self, request: HeldRequest) -> None:
        """End the tracks of a request that have not come back, since no time is left."""
        for track in list(request.wave.tracks) if request.wave is not None else ():
            if track.row is None:
                self._end_track(track, None, (), _NO_TIMES, "late")

    def on_track_forgotten(self, request: HeldRequest) -> None:
        """End a track whose tokens are not held any more for another reason."""
        if request.open_track is not None:
            self._end_track(request.open_track, None, (), _NO_TIMES, "refused")

    def _end_own_track(self, track: OpenTrack) -> None:
        """End our own track after our engine has run all that it could."""
        own, whole = track.request.engine, track.wave.request.engine
        queue = round((self._machine.now - track.began) * 1e6) - own.engine_us
        ran = tuple((block, self._machine.name) for block in own.ran)
        whole.ran += own.ran
        whole.engine_us += own.engine_us
        self._end_track(track, track.request.tokens, ran, (max(0, queue), own.engine_us, 0), "done")

    def _end_track(
        self, track: OpenTrack, out: Any, ran: tuple[Ran, ...], times: tuple[int, int, int], why: str
    ) -> None:
        wave, machine = track.wave, self._machine
        track.out, track.ran = out, ran
        begin, end = (round((at - wave.request.arrived) * 1e6) for at in (track.began, machine.now))
        track.row = TrackSpan(
            wave.number, track.plan.holder, tuple(block for block, _ in ran), begin, end, track.plan.expected_us,
            *times, "" if ran else why,
        )  # fmt: skip
        track.request.open_track = None
        machine.end(track.request, why)
        if all(other.row is not None for other in wave.tracks):
            self._sum(wave)

    def _sum(self, wave: OpenWave) -> None:
        """Sum the tracks, which have all ended, and decide the request again."""
        request, machine = wave.request, self._machine
        rows = [track.row for track in wave.tracks if track.row is not None]
        request.joins.rows += rows
        own = next((row.end_us for row in rows if row.holder == machine.name), 0)
        request.joins.wait_us += max(0, round((machine.now - request.arrived) * 1e6) - own)
        came = [track for track in wave.tracks if track.ran]
        if came:
            request.tokens = self.join(request.tokens, [track.out for track in came])
            request.itinerary = request.itinerary.joined(tuple(track.ran for track in came))
        _leave_out(request, [b for track in wave.tracks for b in track.plan.blocks[len(track.ran) :]])
        machine.wait(request, None, "all tracks have ended")
        machine.decide_soon(request)

    def faults(self) -> list[str]:
        """Return inconsistencies in the state of the waves; see ``CustodyMachine.validate``."""
        held = self._machine.held
        joining = {id(request.wave) for request in held.values() if request.stage is Stage.JOINING}
        wrong = [] if joining == {id(wave) for wave in self.open.values()} else ["waves and joining requests differ"]
        parts = {id(r.open_track) for r in held.values() if r.open_track is not None}
        tracks = [track for wave in self.open.values() for track in wave.tracks]
        if parts != {id(track) for track in tracks if track.row is None}:
            wrong.append("open tracks and held tokens differ")
        for wave in self.open.values():
            if wave.request.wave is not wave or all(track.row is not None for track in wave.tracks):
                wrong.append(f"wave {wave.number} should be closed")
        return wrong


def _leave_out(request: HeldRequest, blocks: list[int]) -> None:
    it = request.itinerary
    if blocks and it.on_straggler == "skip" and len(it.skipped) + len(blocks) <= it.max_skips:
        request.itinerary = it.skip(tuple(blocks))
