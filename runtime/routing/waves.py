"""Waves of tracks: how a process that holds tokens has them run side by side and joins what comes back.

A wave (``docs/architecture.md``, "Tracks") is a request within a request. Its joiner keeps the item, in the stage
``JOINING``, and makes an item of each track: the same tokens, the track's blocks, and itself as the source to whom they
return. So custody, hop deadlines, credits and RETURN serve tracks as they serve requests. The joiner's own track
goes to its own engine.

A track ends with the tokens that come back, or without them: its holder is lost, refuses, or shows no progress by its
hop's deadline. When all have ended, the additions are summed in track order (``ls_edge.arrangement.join``) and the
request goes on. Blocks that a track did not run remain to be run, in a later wave or by whoever comes next; where the
itinerary says ``skip``, and as long as skips are left, they are left out. If the joiner dies, whoever kept the
copy before it runs the wave again; the holders of tracks drop them as work whose source went away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ls_edge import arrangement
from ls_edge.records import TrackSpan
from ls_edge.runtime.protocol.messages import Accept, Itinerary, Progress, Ran, TrackRef, TransferId
from ls_edge.runtime.routing.candidates import LocalNode
from ls_edge.runtime.routing.custody import Item, Machine, Stage
from ls_edge.runtime.routing.events import Arrived, Received, Send
from ls_edge.runtime.routing.policies import policy_of
from ls_edge.runtime.routing.policies.base import RunHere
from ls_edge.runtime.routing.wave_planner import PlannedTrack, WavePlan, plan_wave


@dataclass(eq=False)
class OpenTrack:
    """A track from its start until its end."""

    plan: PlannedTrack
    item: Item
    began: float
    out: Any = field(default=None, repr=False)
    ran: tuple[Ran, ...] = ()
    row: TrackSpan | None = None
    """Set when it has ended."""


@dataclass(eq=False)
class Wave:
    """What an item in the stage ``JOINING`` waits for."""

    ident: int
    number: int
    """Which wave of this visit."""
    item: Item
    tracks: list[OpenTrack] = field(default_factory=list)


class Joiner(Machine):
    """A machine that can run waves; its subclass has the engine."""

    join: Callable[[Any, Sequence[Any]], Any] = staticmethod(arrangement.join)
    """Sums the additions of tracks; a simulation, whose tokens are no arrays, has its own."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.waves: dict[int, Wave] = {}

    def _split(self, item: Item, own: LocalNode) -> bool:
        """Begin a wave of more than one track, if it pays and there is room; return whether one was begun."""
        it = item.itinerary
        if not policy_of(it.policy).runs_in_waves or it.track is not None or it.via_source or item.upstream is None:
            return False
        avoid = item.avoid.keys() | set(it.avoid)
        plan = plan_wave(it, self.name, own, [c for c in self._reachable() if c.name not in avoid])
        if plan is None:
            return False
        room = self.limits.credits + self.limits.custody - len(self.items)
        if len(plan.tracks) < 2 or len(plan.tracks) > room:
            self._note_unused(item, plan)
            return False
        self._begin(item, plan)
        return True

    def _begin(self, item: Item, plan: WavePlan) -> None:
        wave = Wave(self._rng.getrandbits(64), item.waves, item)
        item.waves += 1
        self._note_unused(item, plan, wave.number)
        self.waves[wave.ident] = wave
        item.stage, item.waiting_since = Stage.JOINING, None
        self._look_again(item)
        before = item.itinerary.blocks_done
        for index, planned in enumerate(plan.tracks):
            transfer = TransferId(item.request, self._rng.getrandbits(64), item.transfer.hop)
            itinerary = Itinerary(
                self.name,
                item.itinerary.policy,
                planned.blocks,
                0,
                track=TrackRef(wave.ident, index, before, item.owner),
            )
            part = Item(transfer, itinerary, item.tokens, item.deadline, None, self._now)
            wave.tracks.append(OpenTrack(planned, part, self._now))
            self.items[transfer] = part
        for track in wave.tracks:
            if track.plan.holder == self.name:
                self._take(track.item, RunHere(track.plan.blocks[0]))
            else:
                self._offer(track.item, track.plan.holder, track.item.itinerary)

    def _note_unused(self, item: Item, plan: WavePlan, number: int | None = None) -> None:
        """Keep in the trace who was given nothing; once where the same is decided again block by block."""
        at = round((self._now - item.arrived) * 1e6)
        number = item.waves if number is None else number
        known = {(row.wave, row.holder) for row in item.tracks if not row.blocks}
        item.tracks += [
            TrackSpan(number, lane.holder, (), at, at, lane.expected_us, why="no gain")
            for lane in plan.unused
            if (number, lane.holder) not in known
        ]

    def _track_of(self, item: Item) -> tuple[Wave, OpenTrack] | None:
        """The wave that an item is a track of, if it is joined here and both are still open."""
        mark = item.itinerary.track
        wave = self.waves.get(mark.wave) if mark is not None and item.itinerary.source == self.name else None
        if wave is None or mark is None or mark.index >= len(wave.tracks):
            return None
        track = wave.tracks[mark.index]
        return (wave, track) if track.row is None else None

    # What ends a track.

    def _on_track(self, event: Arrived) -> None:
        """Tokens came back; whatever does not fit an open track of ours is accepted and dropped."""
        run = event.run
        self._out.append(Send(event.sender, Accept(run.transfer, self.limits.credits)))
        mark = run.itinerary.track
        wave = self.waves.get(mark.wave) if mark is not None else None
        if mark is None or wave is None or mark.index >= len(wave.tracks) or wave.item.request != run.transfer.request:
            return
        track = wave.tracks[mark.index]
        ran = tuple(step for one in run.itinerary.waves for line in one for step in line)
        blocks = [block for block, _ in ran]
        if track.row is not None or tuple(blocks) != track.plan.blocks[: len(blocks)]:
            return
        if any(holder != track.plan.holder for _, holder in ran):
            return  # a track is never handed on, so nobody else can have run it
        if not event.finite:
            ran = ()  # they would spoil the sum of all tracks, and we would be thought to have computed them
        visit = next((v for v in run.itinerary.visits if v.holder == track.plan.holder), None)
        times = (visit.queue_us, visit.engine_us, visit.codec_us) if visit is not None else (0, 0, 0)
        n = self.neighbours.get(track.plan.holder)
        if n is not None and not ran:
            n.turn_down(self._now, self.limits)
        elif n is not None:
            n.got_on()
            self.neighbours.advanced(n.name)
            n.track_took(self._now - track.began, times[0] + times[1], self._now)
        self._end_track(wave, track, event.tokens, ran, times, run.returning if event.finite else "not finite")

    def _own_track_done(self, item: Item) -> None:
        """Our engine has run what it could of a track of ours."""
        found = self._track_of(item)
        if found is None:
            self._drop(item)
            return
        wave, track = found
        queue = round((self._now - track.began) * 1e6) - item.engine_us
        ran = tuple((block, self.name) for block in item.ran)
        wave.item.ran += item.ran
        wave.item.engine_us += item.engine_us
        self._end_track(wave, track, item.tokens, ran, (max(0, queue), item.engine_us, 0), "done")

    def _end_track(
        self,
        wave: Wave,
        track: OpenTrack,
        out: Any,
        ran: tuple[Ran, ...],
        times: tuple[int, int, int],
        why: str,
    ) -> None:
        track.out, track.ran = out, ran
        begin, end = (round((at - wave.item.arrived) * 1e6) for at in (track.began, self._now))
        track.row = TrackSpan(
            wave.number, track.plan.holder, tuple(block for block, _ in ran), begin, end, track.plan.expected_us,
            *times, "" if ran else why,
        )  # fmt: skip
        super()._drop(track.item)
        if all(other.row is not None for other in wave.tracks):
            self._close(wave)

    def _close(self, wave: Wave) -> None:
        """All tracks have ended: sum, and decide the request again."""
        del self.waves[wave.ident]
        item = wave.item
        item.tracks += [track.row for track in wave.tracks if track.row is not None]
        own = next((t.row.end_us for t in wave.tracks if t.row and t.plan.holder == self.name), 0)
        item.wait_us += max(0, round((self._now - item.arrived) * 1e6) - own)
        came = [track for track in wave.tracks if track.ran]
        if came:
            item.tokens = self.join(item.tokens, [track.out for track in came])
            item.itinerary = item.itinerary.joined(tuple(track.ran for track in came))
        self._leave_out(item, [b for track in wave.tracks for b in track.plan.blocks[len(track.ran) :]])
        self._wait(item, None)
        self._ready.append(item)

    def _leave_out(self, item: Item, blocks: list[int]) -> None:
        it = item.itinerary
        if blocks and it.on_straggler == "skip" and len(it.skipped) + len(blocks) <= it.max_skips:
            remaining = tuple(block for block in it.remaining if block not in blocks)
            item.itinerary = msgspec.structs.replace(it, remaining=remaining, skipped=(*it.skipped, *blocks))

    def _stop_waiting(self, item: Item) -> None:
        """No time is left for what has not come back."""
        wave = next((wave for wave in self.waves.values() if wave.item is item), None)
        for track in [] if wave is None else list(wave.tracks):
            if wave is not None and track.row is None:
                self._end_track(wave, track, None, (), (0, 0, 0), "late")

    def _give_up(self, item: Item) -> None:
        """If an item is a track of ours, end it without its tokens."""
        found = self._track_of(item)
        if found is not None:
            self._end_track(*found, None, (), (0, 0, 0), "late")

    # What happens to tracks on their way; see Machine.

    def _released(self, item: Item, holder: str) -> None:  # noqa: ARG002
        if self._track_of(item) is None:
            self._drop(item)
        else:  # it is on its way back to us by another way than it went
            item.stage, item.check_at = Stage.AWAY, self._now + self.limits.away_floor

    def _decide(self, item: Item) -> None:
        mark = item.itinerary.track
        if mark is None or item.itinerary.source != self.name or item.returning:
            super()._decide(item)
            return
        found = self._track_of(item)
        if found is None:
            self._drop(item)
        elif found[1].plan.holder == self.name:
            usable = self._own(item).blocks
            if item.itinerary.remaining and item.itinerary.remaining[0] in usable:
                self._take(item, RunHere(item.itinerary.remaining[0]))
            else:
                self._own_track_done(item)
        else:  # it was given to a neighbour, and comes back to be decided only when that failed
            self._end_track(*found, None, (), (0, 0, 0), item.trouble or "refused")

    def _route_again(self, item: Item, why: str) -> None:
        item.trouble = "late" if item.next in self.neighbours.by_name else "lost"
        super()._route_again(item, why)

    def _on_message(self, event: Received) -> None:
        super()._on_message(event)
        if isinstance(event.message, Progress):
            part = self._sent.get(event.message.transfer)
            found = self._track_of(part) if part is not None else None
            if found is not None:
                self._send_progress([found[0].item])

    def _drop(self, item: Item) -> None:
        super()._drop(item)
        if item.stage is Stage.JOINING:
            for wave in [wave for wave in self.waves.values() if wave.item is item]:
                del self.waves[wave.ident]
                for track in wave.tracks:
                    super()._drop(track.item)
            return
        found = self._track_of(item)
        if found is not None:
            self._end_track(*found, None, (), (0, 0, 0), "refused")

    def _late(self, item: Item) -> None:
        if item.stage is Stage.JOINING:
            self._send_progress([item])
            self._look_again(item)
        elif item.stage is Stage.AWAY:
            self._give_up(item)
        else:
            super()._late(item)

    def _look_again(self, item: Item) -> None:
        item.check_at = min(self._now + self.limits.look_again, self._end(item))
