"""Incoming messages of a node, checked and dispatched; guests (observers and pushers) take no part in routing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import zmq

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import WireError
from ls_edge.core.text import one_line
from ls_edge.runtime.protocol import codecs, framing
from ls_edge.runtime.protocol.messages import (
    MAX_CHUNK,
    Accept,
    Bye,
    Cancel,
    Chunk,
    Complaint,
    Findings,
    Hello,
    Inspect,
    Message,
    Moved,
    Progress,
    PushMessage,
    Refuse,
    Release,
    Run,
    State,
    Stored,
    Want,
    Welcome,
)
from ls_edge.runtime.protocol.payload import EncodedImage, read_payload
from ls_edge.runtime.routing.state.events import Arrived, Event, NeighborState, Received
from ls_edge.runtime.transport.admission import Admission
from ls_edge.runtime.transport.connections import Incoming
from ls_edge.runtime.transport.handshake import Handshake, LinkedProcesses
from ls_edge.runtime.transport.outbox import NO_CODEC, LinkCounts
from ls_edge.runtime.transport.problems import RefusedMessages

_ROUTED = frozenset((Run, State, Accept, Refuse, Progress, Release, Moved, Cancel))
"""Messages between processes that take part in routing."""
GUEST_STATE_EVERY = 0.1
"""Seconds between two STATE messages to a guest."""


class HoldsFiles(Protocol):
    """Holder of announced files."""

    def content(self, digest: bytes) -> bytes:
        """Return the content of an announced ``peers.yaml``; empty for any other digest."""


class TakesBundles(Protocol):
    """Receiver of pushed bundles."""

    def greeted(self, pusher: str) -> None:
        """Record a pusher that was admitted on a link."""

    def lost(self, name: str) -> None:
        """Record that the last link to a pusher has ended."""

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Handle a message of a pusher."""

    @property
    def files(self) -> HoldsFiles:
        """Files that this process announces."""


class Guests:
    """Service for guests: STATE, the manifest, checks of the machine, and pushes."""

    def __init__(
        self,
        linked: LinkedProcesses,
        manifest: Manifest,
        *,
        send: Callable[[str, Message], object],
        state: Callable[[str], State],
        installer: TakesBundles | None,
        inspect: Callable[[str, Inspect], None] | None,
    ) -> None:
        """Pass pushed bundles to ``installer``, and requests to check the machine to ``inspect``.

        ``inspect`` gets the name of the guest, and its message.
        """
        self.installer = installer
        self._linked, self._manifest = linked, manifest
        self._send, self._state, self._inspect = send, state, inspect
        self._state_at = 0.0

    @property
    def state_due(self) -> float:
        """Time of the next :meth:`send_states`, or infinity."""
        return self._state_at if self._linked.guests else float("inf")

    def send_states(self, now: float) -> None:
        """Send STATE to every guest."""
        self._state_at = now + GUEST_STATE_EVERY
        for name in self._linked.guests:
            self._send(name, self._state(name))

    def receive(self, name: str, message: Message) -> None:
        """Handle a message outside of routing; raise :class:`WireError` if ``name`` may not send it."""
        kind, role = type(message).__name__.lower(), self._linked.guests.get(name)
        if isinstance(message, PushMessage):
            if role != "pusher" or self.installer is None:
                raise WireError(f"{kind} from {name}, which is not a pusher; dropped")
            self.installer.receive(name, message)
        elif isinstance(message, Want) and role is not None:
            self._send_manifest(name, message)
        elif isinstance(message, (Want, Stored, Findings)):
            raise WireError(f"{kind}, which only observers and pushers receive; dropped")
        elif isinstance(message, Inspect):
            if role is None or self._inspect is None:
                raise WireError(f"inspect from {name}, which is not an observer; dropped")
            self._inspect(name, message)
        else:
            raise WireError(f"{kind} from the {role} {name}, which may not route; dropped")

    def _send_manifest(self, name: str, want: Want) -> None:
        """Send a piece of an applied file or of the manifest, whose last piece is shorter than requested."""
        raw = b"" if self.installer is None else self.installer.files.content(want.digest)
        if not raw and want.digest.hex() == self._manifest.bundle_id:
            raw = msgspec.json.encode(self._manifest)
            raw += b" " * (len(raw) % MAX_CHUNK == 0)
        if data := raw[want.offset : want.offset + want.size]:
            self._send(name, Chunk(want.digest, want.offset, data))


class Inbox:
    """Receiver of messages: malformed and forbidden ones are counted, dropped and answered (guarantee R5)."""

    def __init__(
        self,
        linked: LinkedProcesses,
        handshake: Handshake,
        admission: Admission,
        refused: RefusedMessages,
        counts: LinkCounts,
        guests: Guests,
        feed: Callable[[Event], None],
    ) -> None:
        """Call ``feed`` with events for the routing machine."""
        self._linked, self._handshake, self._admission, self._refused = linked, handshake, admission, refused
        self._guests, self._feed = guests, feed
        self._received = counts.received

    def receive(self, event: Incoming) -> None:
        """Decode and dispatch a ZeroMQ message, or drop it."""
        frames = event.frames
        self._received[NO_CODEC] += len(frames[0]) if frames else 0
        try:
            if not 1 <= len(frames) <= 1 + framing.MAX_TOGETHER:
                raise WireError(f"message of {len(frames)} frames; dropped")
            messages = framing.decode(frames[0].buffer)
            runs = [type(message) for message in messages].count(Run)
            if len(frames) != 1 + runs:
                what = type(messages[0]).__name__.lower() if len(messages) == 1 else f"{len(messages)} messages"
                raise WireError(f"{what} in {len(frames)} frames, {1 + runs} are needed; dropped")
        except WireError as error:
            self._drop(event, "malformed", str(error))
            return
        tokens = iter(frames[1:])
        for message in messages:
            try:
                self._act(event, message, next(tokens) if type(message) is Run else None)
            except WireError as error:
                self._drop(event, "malformed", str(error))

    def _act(self, event: Incoming, message: Message, tokens: zmq.Frame | None) -> None:
        name = self._linked.name_of.get(event.link)
        if name is not None and self._linked.user_of[event.link] != event.user:
            name = None  # another connection has its routing id now
        if name is None or name in self._linked.guests or type(message) not in _ROUTED:
            self._act_outside_routing(event, message, name)
        elif isinstance(message, Run):
            assert tokens is not None
            self._feed(self._arrived(name, message, tokens))
        elif isinstance(message, State):
            self._admission.check_state(message, name)
            self._feed(NeighborState(name, message))
        else:
            self._feed(Received(name, message))

    def _act_outside_routing(self, event: Incoming, message: Message, name: str | None) -> None:
        if isinstance(message, (Hello, Welcome)):
            self._handshake.on_greeting(event, message)
        elif isinstance(message, Complaint):
            self._handshake.on_complaint(event.link, name or event.user, message)
        elif name is None:
            self._drop(event, "before hello", f"{type(message).__name__.lower()} before hello; dropped")
        elif isinstance(message, Bye):
            why = f"left ({one_line(message.reason)})" if message.reason else "left"
            self._handshake.left(event.link, why, time.monotonic())
        else:
            is_push = isinstance(message, PushMessage) and self._linked.guests.get(name) == "pusher"
            if is_push and (why := self._admission.reason_to_refuse_pusher(event.user)):
                raise WireError(why)  # the file has changed since its HELLO
            self._guests.receive(name, message)

    def _arrived(self, name: str, run: Run, frame: zmq.Frame) -> Arrived:
        self._admission.check_run(run, name)
        started = time.perf_counter_ns()
        tokens = read_payload(run, frame.buffer)
        self._received[run.codec] += len(frame)
        finite = isinstance(tokens, EncodedImage) or codecs.is_finite(tokens)
        return Arrived(name, run, tokens, (time.perf_counter_ns() - started) // 1000, finite)

    def _drop(self, event: Incoming, what: str, why: str) -> None:
        self._refused.drop(event, what, why, self._linked.name_of.get(event.link, event.user))
