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
from ls_edge.core.parts import has_ends
from ls_edge.core.records import TrackSpan
from ls_edge.runtime.protocol.messages import Accept, Itinerary, Ran, ReturnReason, TrackRef, TransferId
from ls_edge.runtime.routing.claims import blocks_run, returned_track
from ls_edge.runtime.routing.decisions import Decisions
from ls_edge.runtime.routing.policies.wave_planner import plan_wave
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import Arrived
from ls_edge.runtime.routing.state.held_request import HeldRequest, OpenTrack, OpenWave, PlannedTrack, Stage, require
from ls_edge.runtime.routing.state.turn import Turn


class WaveJoiner:
    """The waves that a machine has open. The stage JOINING belongs to this part."""

    def __init__(self, turn: Turn, custody: Custody, decisions: Decisions) -> None:
        self.join: Callable[[Any, Sequence[Any]], Any] = arrangement.join
        """Function that sums the additions of tracks; a simulation, whose tokens are not arrays, sets its own."""
        self._turn = turn
        self._custody = custody
        self._decisions = decisions

    # The beginning.

    def split(self, request: HeldRequest, local: LocalNode) -> bool:
        """Begin a wave of more than one track, if it pays and there is room; return whether one was begun."""
        it, turn = request.itinerary, self._turn
        is_end = has_ends(turn.bands.permitted(it.remaining))
        if it.track is not None or it.via_source or request.upstream is None or is_end:
            return False
        others = self._decisions.reachable(request)
        if request.avoid or it.avoid:
            others = [n for n in others if n.name not in request.avoid and n.name not in it.avoid]
        tracks, unused = plan_wave(it, turn.name, local, others)
        self._record_unused(request, unused)
        pays = 2 <= len(tracks) <= turn.limits.credits + turn.limits.custody - len(self._custody.held)
        if pays:
            self._begin(request, tracks)
        return pays

    def _begin(self, request: HeldRequest, tracks: Sequence[PlannedTrack]) -> None:
        turn, custody = self._turn, self._custody
        wave = OpenWave(turn.rng.getrandbits(64), request)
        request.waves += 1
        before = request.itinerary.slot
        for index, planned in enumerate(tracks):
            transfer = TransferId(request.request, turn.rng.getrandbits(64), request.transfer.hop)
            itinerary = Itinerary(
                turn.name,
                request.itinerary.policy,
                planned.blocks,
                0,
                track=TrackRef(wave.ident, index, before, request.owner),
            )
            part = HeldRequest(transfer, itinerary, request.tokens, request.deadline, None, turn.now)
            part.bundle_id = request.bundle_id
            part.open_track = OpenTrack(wave, planned, part, turn.now)
            wave.tracks.append(part.open_track)
        custody.transition(request, Stage.JOINING, f"{len(wave.tracks)} tracks", wave)
        for track in wave.tracks:
            custody.hold(track.request, "track")
            if track.plan.holder == turn.name:
                self._decisions.run_here(track.request, track.plan.blocks[0])
            else:
                self._decisions.offer(track.request, track.plan.holder, track.request.itinerary)

    def leave_joining(self, request: HeldRequest, _to: Stage) -> None:
        """Close the wave; its open tracks end with it."""
        wave, request.wave = request.wave, None
        assert wave is not None
        for track in wave.tracks:
            track.request.open_track = None
            self._custody.end(track.request, "its wave is closed")
        wave.tracks.clear()  # a cycle of references, which would keep the tokens until a garbage collection

    def _record_unused(self, request: HeldRequest, unused: Sequence[PlannedTrack]) -> None:
        """Record holders without a track in the trace, once for decisions that repeat block by block."""
        if not unused:
            return
        at = round((self._turn.now - request.arrived) * 1e6)
        known = {row.holder for row in request.tracks if not row.blocks and row.wave == request.waves}
        request.tracks += [
            TrackSpan(request.waves, track.holder, (), at, at, track.expected_us, why="no gain")
            for track in unused
            if track.holder not in known
        ]

    # What ends a track.

    def on_returned(self, event: Arrived) -> None:
        """Take returned tokens; accept and drop any that do not fit an open track of ours."""
        run, turn = event.run, self._turn
        turn.send(event.sender, Accept(run.transfer, turn.limits.credits))
        waves = (request.wave for request in self._custody.held.values() if request.wave is not None)
        track = returned_track(waves, run.transfer.request, run.itinerary)
        if track is None:
            return
        ran = blocks_run(run.itinerary)
        if not event.finite:
            ran = ()  # they would spoil the sum of all tracks, and the error would look like ours
        visit = next((v for v in run.itinerary.visits if v.holder == track.plan.holder), None)
        times = (visit.queue_us, visit.engine_us, visit.codec_us) if visit is not None else (0, 0, 0)
        n = turn.neighbors.get(track.plan.holder)
        if n is not None and not ran:
            n.back_off()
        elif n is not None:
            n.reset_back_off()
            n.clear_suspicion()
            n.track_took(turn.now - track.began, times[0] + times[1])
        self._end_track(track, run.returning if event.finite else ReturnReason.NOT_FINITE, event.tokens, ran, times)

    def decide(self, request: HeldRequest, usable: frozenset[int]) -> None:
        """Decide tokens that are, or claim to be, a track of this process."""
        track = request.open_track
        remaining = request.itinerary.remaining
        if track is None:
            self._custody.end(request, "a track of no open wave")
        elif track.plan.holder != self._turn.name:  # it was given to a neighbor, and waits only when that failed
            self._end_track(track, request.failure or "refused")
        elif remaining and remaining[0] in usable:
            self._decisions.run_here(request, remaining[0])
        else:
            self._end_own_track(track)

    def look_at(self, request: HeldRequest) -> None:
        """Show the keeper of the copy before that tracks are waited for."""
        self._decisions.send_progress([request])
        self._custody.watch_wave(request)

    def on_ended(self, request: HeldRequest) -> None:
        """If a request that has ended is a track of ours, end the track without its tokens."""
        self.give_up(request, "refused")

    def give_up(self, request: HeldRequest, why: str = "late") -> None:
        """If a request is a track of ours, end it without its tokens."""
        if request.open_track is not None:
            self._end_track(request.open_track, why)

    def stop_waiting(self, request: HeldRequest) -> None:
        """End the tracks of a request that have not come back, since no time is left."""
        for track in list(request.wave.tracks) if request.wave is not None else ():
            self.give_up(track.request)

    def _end_own_track(self, track: OpenTrack) -> None:
        """End our own track after our engine has run all that it could."""
        own, whole = track.request.engine, track.wave.request.engine
        queue = round((self._turn.now - track.began) * 1e6) - own.engine_us
        ran = tuple((block, self._turn.name) for block in own.ran)
        whole.ran += own.ran
        whole.engine_us += own.engine_us
        self._end_track(track, "done", track.request.tokens, ran, (max(0, queue), own.engine_us, 0))

    def _end_track(
        self,
        track: OpenTrack,
        why: str,
        out: Any = None,
        ran: tuple[Ran, ...] = (),
        times: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """End a track with the tokens that came back, or without them; ``times``: queue, engine and codec there."""
        wave = track.wave
        track.out, track.ran = out, ran
        begin, end = (round((at - wave.request.arrived) * 1e6) for at in (track.began, self._turn.now))
        track.row = TrackSpan(
            wave.request.waves - 1, track.plan.holder, tuple(block for block, _ in ran), begin, end,
            track.plan.expected_us, *times, "" if ran else why,
        )  # fmt: skip
        track.request.open_track = None
        self._custody.end(track.request, why)
        if all(other.row is not None for other in wave.tracks):
            self._sum(wave)

    def _sum(self, wave: OpenWave) -> None:
        """Sum the tracks, which have all ended, and decide the request again."""
        request, turn = wave.request, self._turn
        rows = [track.row for track in wave.tracks if track.row is not None]
        request.tracks += rows
        own = next((row.end_us for row in rows if row.holder == turn.name), 0)
        request.waited_us += max(0, round((turn.now - request.arrived) * 1e6) - own)
        came = [track for track in wave.tracks if track.ran]
        if came:
            request.tokens = self.join(request.tokens, [track.out for track in came])
            request.itinerary = request.itinerary.joined(tuple(track.ran for track in came))
        left, it = tuple(b for track in wave.tracks for b in track.plan.blocks[len(track.ran) :]), request.itinerary
        if left and it.on_straggler == "skip" and len(it.skipped) + len(left) <= it.max_skips:
            request.itinerary = it.skip(left)
        self._custody.decide_again(request, "all tracks have ended")

    def check(self) -> None:
        """Check the open waves; see ``Machine.validate``."""
        held = self._custody.held.values()
        for request in held:
            require((request.wave is not None) == (request.stage is Stage.JOINING), "joining or not", request)
        parts = {id(request.open_track) for request in held if request.open_track is not None}
        waves = [request.wave for request in held if request.wave is not None]
        tracks = [track for wave in waves for track in wave.tracks]
        require(parts == {id(track) for track in tracks if track.row is None}, "open tracks and held tokens differ")
        for wave in waves:
            is_open = wave.request.wave is wave and not all(track.row is not None for track in wave.tracks)
            require(is_open, "a wave should be closed", wave.request)
