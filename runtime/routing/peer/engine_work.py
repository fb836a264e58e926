"""Engine work of a peer: images are decoded; calls start, end, fail or hang."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from ls_edge.core.parts import part_name
from ls_edge.core.peer_reports import MAX_TEXT
from ls_edge.runtime.protocol.messages import ReturnReason, TransferId
from ls_edge.runtime.routing.peer.engine_queue import EngineQueue
from ls_edge.runtime.routing.peer.state_announcer import StateAnnouncer
from ls_edge.runtime.routing.peer.waves import WaveJoiner
from ls_edge.runtime.routing.state.custody import Custody
from ls_edge.runtime.routing.state.events import Compute, Computed, ComputeFailed, Decoded, NoteKind
from ls_edge.runtime.routing.state.events import Decode as DecodeImage
from ls_edge.runtime.routing.state.held_request import QUEUED, RUNNING, WAITING, HeldRequest
from ls_edge.runtime.routing.state.limits import LOOK_AGAIN
from ls_edge.runtime.routing.state.turn import Turn


class Decode(NamedTuple):
    """Step of a decision: decode the image of a request."""


class EngineWork:
    """Owner of the stages ``QUEUED`` and ``RUNNING``: moves requests to the engine and back."""

    def __init__(
        self,
        turn: Turn,
        custody: Custody,
        queue: EngineQueue,
        joins: WaveJoiner,
        announcer: StateAnnouncer,
        return_home: Callable[[HeldRequest, str], None],
    ) -> None:
        self.queue = queue
        self._turn = turn
        self._custody = custody
        self._joins = joins
        self._announcer = announcer
        self._return_home = return_home

    def decode(self, request: HeldRequest, _step: Decode) -> None:
        """Wait for another thread to decode an image."""
        turn = self._turn
        if request.is_decoded is None:
            request.is_decoded = False
            turn.instructions.append(DecodeImage(request.transfer, request.tokens))
        self._turn.send_progress([request])
        self._custody.wait_for(request, (), turn.now + LOOK_AGAIN)

    def decoded(self, event: Decoded) -> None:
        """Continue with a decoded image, or send a request home whose image cannot be decoded."""
        request = self._custody.held.get(event.transfer)
        if request is None or request.returning:
            return
        if request.stage is not WAITING:  # handed on meanwhile
            request.is_decoded = None
            return
        request.tokens, request.is_decoded, request.waiting_since = event.tokens, True, None
        request.codec_us += event.us
        if event.why:
            self._return_home(request, event.why[:MAX_TEXT])
        else:
            self._custody.waiting.ready.append(request)

    def start(self, usable: frozenset[int]) -> None:
        """Give the engine as many calls as it may have, for blocks that are ``usable`` now."""
        queue, turn = self.queue, self._turn
        while (started := queue.next_batch(turn.now, usable)) is not None:
            batch, blocks = started
            until = turn.now + queue.most_s()
            why = f"blocks {', '.join(map(str, blocks))}"
            for request in batch:
                self._custody.transition(request, RUNNING, why, until)
            turn.instructions.append(
                Compute(
                    blocks,
                    tuple([request.transfer for request in batch]),
                    tuple([request.tokens for request in batch]),
                    tuple([request.itinerary.slot for request in batch]),
                )
            )

    def end_call(self, done: Computed | None) -> dict[TransferId, HeldRequest]:
        """End the running call, continue requests with outputs, and return its requests that have not ended."""
        turn, queue = self._turn, self.queue
        if done is not None:
            queue.measure(done)
            self._custody.own_us = queue.block_us
        batch = queue.end_call(turn.now)
        if queue.stuck:
            queue.stuck = False
            turn.note(NoteKind.ENGINE_BACK, turn.name)
            self._announcer.urgent()
        running = {request.transfer: request for request in batch if request.stage is RUNNING}
        if done is not None:
            self._take_outputs(done, running)
        return running

    def _take_outputs(self, event: Computed, running: Mapping[TransferId, HeldRequest]) -> None:
        """Continue the requests whose blocks have run, unless they have ended."""
        progress, name = self._turn.send_progress, self._turn.name
        for transfer, tokens in zip(event.transfers, event.outputs, strict=True):
            request = running.get(transfer)
            if request is None:
                continue
            request.tokens = tokens
            request.itinerary = request.itinerary.ran(event.blocks, name)
            request.engine.ran += event.blocks
            request.engine.engine_us += event.engine_us
            self._custody.decide_again(request, "ran")
            progress([request if request.open_track is None else request.open_track.wave.request])
        progress((*self.queue.given, *self.queue.queued))

    def failed(self, event: ComputeFailed) -> None:
        """Decide the requests of a failed call again; a block that keeps failing is not run here any more."""
        turn, custody = self._turn, self._custody
        running = self.end_call(event.rest)
        failed = self.queue.count_failure(event)
        why = f"{part_name(event.block)}: {event.why}"
        if failed:
            turn.note(NoteKind.ENGINE_FAILED, turn.name, why=why)
            self._announcer.urgent()
        elif event.not_finite:
            turn.note(NoteKind.NOT_FINITE, turn.name, why=why)
        for request in [running[transfer] for transfer in event.transfers if transfer in running]:
            if event.not_finite and request.open_track is not None:
                self._joins.give_up(request)
            elif event.not_finite:  # the source tries another holder
                custody.wait(request, why)
                self._return_home(request, ReturnReason.NOT_FINITE)
            else:
                custody.decide_again(request, why)
        if failed:
            self.requeue("a block failed")

    def requeue(self, why: str) -> None:
        """Decide the requests again that the engine has not started."""
        for request in (*self.queue.queued, *self.queue.take_back()):
            if request.stage in (QUEUED, RUNNING):
                self._custody.decide_again(request, why)

    def look_at(self, request: HeldRequest) -> None:
        """Check a long call; if it hangs, decide the requests again that wait for it."""
        turn, queue = self._turn, self.queue
        if turn.now < request.engine.until:
            if queue.is_in_time(turn.now):
                self._turn.send_progress((*queue.given, *queue.queued))
            self._custody.watch_call(request)
            return
        self._custody.timers.set(request, request.deadline)
        if queue.stuck:
            return
        queue.stuck = True
        why = f"{part_name(request.engine.block)} has been running for longer than its deadline"
        turn.note(NoteKind.ENGINE_STUCK, turn.name, request.request, why)
        self._announcer.urgent()
        self.requeue("the engine is stuck")
        for running in queue.running:
            self._joins.give_up(running)
