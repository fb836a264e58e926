"""Waves of tracks: a process runs blocks on several holders in parallel and joins the results.

A wave is a request within a request (``docs/develop.md``, "Waves of tracks"). Its joiner keeps the request in the
stage ``JOINING`` and holds a further request for each track: the same tokens, the blocks of the track, and itself as
the source. Custody, deadlines, credits and the way home therefore work for tracks as for requests. The joiner's own
track goes to its own engine.

A track ends with the tokens that come back, or without them: its holder is lost, refuses, or misses the deadline of the
hop. When all tracks have ended, their additions are summed in track order (``ls_edge.core.arrangement.join``), and the
request continues. Blocks that a track did not run remain for a later wave or the next holder. If the joiner dies, the
keeper of the previous copy runs the wave again, and the holders drop their tracks, since their source is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ls_edge.core import arrangement
from ls_edge.core.parts import has_ends
from ls_edge.core.peer_reports import TrackSpan
from ls_edge.runtime.protocol.messages import Accept, Itinerary, Ran, RequestId, ReturnReason, TrackRef, TransferId
from ls_edge.runtime.routing.decisions import Case, Decisions
from ls_edge.runtime.routing.policies.wave_planner import plan_wave
from ls_edge.runtime.routing.state.candidates import LocalNode
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import Arrived
from ls_edge.runtime.routing.state.held_request import JOINING, HeldRequest, OpenTrack, OpenWave, PlannedTrack, Stage
from ls_edge.runtime.routing.state.pause import PauseReason
from ls_edge.runtime.routing.state.turn import Turn


class Split(NamedTuple):
    """Step of a decision: run these tracks in parallel."""

    tracks: Sequence[PlannedTrack]


class OwnTrack(NamedTuple):
    """Step of a decision: run or end a track of a wave of this process."""

    usable: frozenset[int]
    """Blocks that can run here."""


def own_track(case: Case) -> OwnTrack | None:
    """Decide a track of this process, which is not handed on."""
    is_own = case.itinerary.track is not None and case.itinerary.source == case.turn.name
    return OwnTrack(case.local.blocks) if is_own else None


def plan_split(case: Case, local: LocalNode) -> Split | None:
    """Plan a wave of several tracks if it pays off and there is room."""
    request, it, turn = case.request, case.itinerary, case.turn
    if not local.blocks or it.track is not None or has_ends(turn.bands.permitted(it.remaining)):
        return None
    others = case.linked
    if request.avoid or it.avoid:
        others = [n for n in others if n.name not in request.avoid and n.name not in it.avoid]
    tracks = plan_wave(it, turn.name, local, others)
    return Split(tracks) if 2 <= len(tracks) <= case.room else None


class WaveJoiner:
    """Owner of the stage ``JOINING``: the open waves of a process."""

    def __init__(self, turn: Turn, custody: Custody, decisions: Decisions) -> None:
        self.join: Callable[[Any, Sequence[Any]], Any] = arrangement.join
        """Function that sums the additions of tracks. Simulations replace it, since their tokens are not arrays."""
        self._turn = turn
        self._custody = custody
        self._decisions = decisions

    # Start of a wave.

    def split(self, request: HeldRequest, step: Split) -> None:
        """Start a wave."""
        turn, custody = self._turn, self._custody
        wave = OpenWave(turn.rng.getrandbits(64), request)
        request.waves += 1
        before = request.itinerary.slot
        for index, planned in enumerate(step.tracks):
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
        custody.transition(request, JOINING, f"{len(wave.tracks)} tracks", wave)
        for track in wave.tracks:
            custody.hold(track.request, "track")
            if track.plan.holder == turn.name:
                self._decisions.run_here(track.request, track.plan.blocks[0])
            else:
                self._decisions.offer(track.request, track.plan.holder, track.request.itinerary)

    def leave_joining(self, request: HeldRequest, _to: Stage) -> None:
        """Close the wave and end its open tracks."""
        wave, request.wave = request.wave, None
        assert wave is not None
        for track in wave.tracks:
            track.request.open_track = None
            self._custody.end(track.request, "its wave is closed")
        wave.tracks.clear()  # a reference cycle would keep the tokens until garbage collection

    # End of a track.

    def on_returned(self, event: Arrived) -> None:
        """Accept returned tokens, and end the open track that they belong to, if any."""
        run, turn = event.run, self._turn
        turn.send(event.sender, Accept(run.transfer, turn.limits.credits))
        waves = (request.wave for request in self._custody.held.values() if request.wave is not None)
        track = returned_track(waves, run.transfer.request, run.itinerary)
        if track is None:
            return
        ran = blocks_run(run.itinerary)
        if not event.finite:
            ran = ()  # they would spoil the sum, and the error would seem to be this process's
        visit = next((v for v in run.itinerary.visits if v.holder == track.plan.holder), None)
        times = (visit.queue_us, visit.engine_us, visit.codec_us) if visit is not None else (0, 0, 0)
        n = turn.neighbors.get(track.plan.holder)
        if n is not None and not ran:
            n.hold_off(PauseReason.UNWILLING)
        elif n is not None:
            n.has_worked()
            n.track_took(turn.now - track.began, times[0] + times[1])
        self._end_track(track, run.returning if event.finite else ReturnReason.NOT_FINITE, event.tokens, ran, times)

    def decide(self, request: HeldRequest, step: OwnTrack) -> None:
        """Decide a request that is, or claims to be, a track of this process."""
        track = request.open_track
        remaining = request.itinerary.remaining
        if track is None:
            self._custody.end(request, "its wave is not open")
        elif track.plan.holder != self._turn.name:  # given to a neighbor that failed
            self._end_track(track, request.failure or "refused")
        elif remaining and remaining[0] in step.usable:
            self._decisions.run_here(request, remaining[0])
        else:
            self._end_own_track(track)

    def look_at(self, request: HeldRequest) -> None:
        """Send PROGRESS while tracks run."""
        self._turn.send_progress([request])
        self._custody.watch_wave(request)

    def give_up(self, request: HeldRequest, why: str = "late") -> None:
        """If a request is an open track, end the track without tokens."""
        if request.open_track is not None:
            self._end_track(request.open_track, why)

    def stop_waiting(self, request: HeldRequest) -> None:
        """End all open tracks of a request, at the end of its budget."""
        for track in list(request.wave.tracks) if request.wave is not None else ():
            self.give_up(track.request)

    def _end_own_track(self, track: OpenTrack) -> None:
        """End this process's own track after the engine has run as many of its blocks as it could."""
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
        """End a track with or without returned tokens; ``times`` are spent in queue, engine and codec."""
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
        """Sum the tracks after all have ended, and decide the request again."""
        request, turn = wave.request, self._turn
        rows = [track.row for track in wave.tracks if track.row is not None]
        request.tracks += rows
        own = next((row.end_us for row in rows if row.holder == turn.name), 0)
        request.waited_us += max(0, round((turn.now - request.arrived) * 1e6) - own)
        came = [track for track in wave.tracks if track.ran]
        if came:
            request.tokens = self.join(request.tokens, [track.out for track in came])
            request.itinerary = request.itinerary.joined(tuple(track.ran for track in came))
        self._custody.decide_again(request, "all tracks have ended")


def returned_track(waves: Iterable[OpenWave], request: RequestId, reported: Itinerary) -> OpenTrack | None:
    """Return the open track that returned tokens belong to, or None if its wave is closed."""
    ref = reported.track
    wave = None if ref is None else next((wave for wave in waves if wave.ident == ref.wave), None)
    if ref is None or wave is None or ref.index >= len(wave.tracks) or wave.request.request != request:
        return None
    track = wave.tracks[ref.index]
    return track if track.row is None else None


def blocks_run(itinerary: Itinerary) -> tuple[Ran, ...]:
    """Return the blocks that ran, with their holders, in order."""
    return tuple(step for wave in itinerary.waves for track in wave for step in track)
