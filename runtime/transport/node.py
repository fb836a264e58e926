"""A node of the network: links, handshake and the routing machine, for peers and sources alike.

Frames from the links are checked, turned into events and given to the machine; its instructions are executed. Messages
that are malformed or not allowed are counted, dropped and answered with a COMPLAINT (guarantee R5); they never raise.

One thread runs :meth:`Node.step` in a loop. Other threads may call :meth:`Node.wake`.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import zmq

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import WireError
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.protocol import codecs
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Accept,
    Bye,
    Cancel,
    Chunk,
    Complaint,
    Findings,
    Hello,
    Inspect,
    Install,
    Message,
    Moved,
    Offer,
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
from ls_edge.runtime.routing.custody import CustodyMachine
from ls_edge.runtime.routing.events import (
    Abandon,
    Arrived,
    Compute,
    Computed,
    Event,
    Forward,
    Instruction,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    Received,
    Send,
    Submit,
    Tick,
    Unsendable,
)
from ls_edge.runtime.transport.admission import GUESTS, Admission
from ls_edge.runtime.transport.connections import Incoming, Link, LinkDown, LinkEvent, LinkUp
from ls_edge.runtime.transport.handshake import Handshake, LinkedProcesses
from ls_edge.runtime.transport.keys import KeyPair, curve_of
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.outbox import Outbox
from ls_edge.runtime.transport.poller import Waker
from ls_edge.runtime.transport.problems import NoteLog
from ls_edge.runtime.transport.refused_messages import RefusedMessages

GUEST_STATE_EVERY = 0.1
"""Seconds between two STATE to an observer or pusher, which the routing machine does not know."""
MAX_WAIT_S = 1.0
"""Longest wait of a turn in which nothing happens, in seconds."""
_TOGETHER = frozenset((Arrived, Received, NeighbourState, Computed, Submit, Abandon, Unsendable))
"""Events of one turn that the machine receives together; it receives all others one by one."""
_ROUTED = frozenset((Run, State, Accept, Refuse, Progress, Release, Moved, Cancel))
"""Messages between processes that take part in routing."""


class TakesBundles(Protocol):
    """Receiver of the messages of pushers."""

    def greeted(self, pusher: str) -> None:
        """Take note of a pusher that was admitted, on one more link."""

    def lost(self, name: str) -> None:
        """Take note that the last link to a pusher has ended."""

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Act on a message of a pusher."""


class Node:
    """A process among the others; ``Peer`` and ``Source`` each have one."""

    def __init__(
        self,
        *,
        name: str,
        role: str,
        peers: PeersFile,
        manifest: Manifest,
        machine: CustodyMachine,
        execute: Callable[[Instruction], None],
        hello: Callable[[], Hello],
        state: Callable[[str], State],
        keys: KeyPair | None,
        strict_bundle: bool = False,
        installer: TakesBundles | None = None,
        inspect: Callable[[str], None] | None = None,
        closed: str = "",
    ) -> None:
        """Listen and dial; ``execute`` receives the instructions that do not concern links (Compute, Complete, Fail).

        ``installer`` receives bundles that are pushed. ``inspect`` is called with the name of an observer or pusher
        that wants the machine checked. ``closed`` is the reason why no peer and no source is admitted, or dialled.
        """
        self.name = name
        self.on_note: Callable[[Note], None] | None = None
        self.neighbour_events = 0
        """Number of times that a neighbour came, went or sent its STATE."""
        self._role = role
        self._installer, self._inspect = installer, inspect
        self._machine = machine
        self._execute_other = execute
        self._state = state
        self._linked = LinkedProcesses(name, peers)
        self._notes = NoteLog()
        self._guest_state_at = 0.0
        self._events: deque[Event] = deque()
        self._executing = self._in_turn = False
        self._handled = False
        """Whether the machine has received an event in this turn."""
        self._waker = Waker()
        tokens_frame = codecs.wire_bytes("raw", manifest.tokens.count, manifest.tokens.dim)
        own = next((p for p in peers.peers if p.name == name), None)
        try:
            self._links = Links(
                {} if closed else {p.name: p.address for p in peers.peers if p.name != name},
                bind=own.bind if own is not None and role == "peer" else None,
                heartbeat=peers.heartbeat,
                max_frame=max(wire.MAX_HEADER, tokens_frame),
                tokens_frame=tokens_frame,
                curve=curve_of(peers, name, keys),
            )
        except BaseException:
            self._waker.close()
            raise
        self._links.register(self._waker.descriptor)
        self._outbox = Outbox(name, manifest.tokens, self._links, self._linked.links_of)
        self._admission = Admission(
            name, role, peers, manifest, strict_bundle=strict_bundle, has_store=installer is not None, closed=closed
        )
        self._refused = RefusedMessages(self._links)
        self._handshake = Handshake(
            self._linked,
            self._links,
            self._admission,
            self._refused,
            hello=hello,
            on_admitted=self._on_admitted,
            on_forgotten=self._on_forgotten,
        )

    @property
    def counts(self) -> Counter[str]:
        """Number of messages and connections that were dropped or refused, by reason."""
        return self._refused.counts

    @property
    def mismatched(self) -> dict[str, str]:
        """Peers that serve another model: name to the message with both ids."""
        return self._handshake.mismatched

    @property
    def problems(self) -> Mapping[str, str]:
        """The latest reason, one printable line, why each peer of ``peers.yaml`` cannot be used, or has complained.

        A snapshot that any thread may take; peers without a problem are not in it.
        """
        return self._handshake.problems.reasons

    def wake(self) -> None:
        """Make :meth:`step` return soon; any thread may call it."""
        self._waker.wake()

    def send_to(self, name: str, message: Message) -> bool:
        """Send a message outside of routing; return False if no link takes it."""
        return any(self._links.send(link, [wire.encode(message)]) for link in self._linked.links_of.get(name, ()))

    def watch(self, descriptor: int) -> None:
        """Make :meth:`step` return also when this file descriptor can be read."""
        self._links.register(descriptor)

    def can_read(self, descriptor: int) -> bool:
        """Return whether the latest :meth:`step` found that a watched descriptor can be read, or is at its end."""
        return self._links.can_read(descriptor)

    def step(
        self, at_most: float = MAX_WAIT_S, more: Callable[[], None] = lambda: None, *, unread_for: float = 0.0
    ) -> None:
        """Wait for events, at most ``at_most`` seconds, and handle all of them: one *turn*.

        ``more`` is called when all messages have been read; events that it feeds are handled together with them. The
        messages of a turn to one process are sent as one, if that process reads several together. Messages may stay
        unread for ``unread_for`` seconds, unless :meth:`wake` is called: fewer turns then read more each.
        """
        due = self._machine.next_check()
        events = self._wait(at_most, due, unread_for)
        self._in_turn, self._handled = True, False
        try:
            for event in events:
                self._on_link_event(event)
            more()
            self._handle_events()
            self._end_turn(due)
        finally:
            self._in_turn = False

    def _wait(self, at_most: float, due: float | None, unread_for: float) -> list[LinkEvent]:
        now, waker = time.monotonic(), self._waker
        until = min(now + at_most, self._outbox.held_until, self._linked.next_due)
        if due is not None:
            until = min(until, due)
        if self._linked.guests:
            until = min(until, self._guest_state_at)
        wait = max(0.0, until - now)
        waker.asleep = True
        if unread_for and not waker.woken:
            unread_for = min(unread_for, wait)
            waker.wait(unread_for)
            wait -= unread_for
        events = self._links.poll(0.0 if waker.woken else wait)
        waker.asleep = waker.woken = False
        if self._links.can_read(waker.descriptor):
            waker.drain()
        return events

    def _on_link_event(self, event: LinkEvent) -> None:
        if isinstance(event, Incoming):
            self._incoming(event)
        elif isinstance(event, LinkUp):
            self._handshake.link_up(event.link, time.monotonic())
            if self._role == "peer":
                self._send_link(event.link, self._state(event.link.dialled))
        elif isinstance(event, LinkDown):
            self._refused.forget(event.link)
            self._handshake.link_down(event, time.monotonic())
        else:
            self._handshake.no_link(event.name, event.why)

    def _end_turn(self, due: float | None) -> None:
        """Do what is due by the clock, and send."""
        now = time.monotonic()
        if now >= self._linked.next_due:
            self._handshake.do_due(now)
        if not self._handled and due is not None and due <= now:  # what became due meanwhile ends the next wait
            self.feed(Tick())
        if self._linked.guests and now >= self._guest_state_at:
            self._guest_state_at = now + GUEST_STATE_EVERY
            for name in self._linked.guests:
                self.send_to(name, self._state(name))
        self._handshake.problems.forget_old(now)
        if now >= self._outbox.held_until:
            self._outbox.let_go()
        self._send_outbox()
        if self._links.refused:
            self.counts["connections refused"] = self._links.refused

    def feed(self, event: Event) -> None:
        """Give the machine an event and execute its instructions in the order in which it returns them.

        A message that cannot be sent becomes the machine's next event. In a turn, events that can be handled together
        wait for its end.
        """
        self._events.append(event)
        if self._in_turn and type(event) in _TOGETHER:
            return
        self._handle_events()
        if not self._in_turn:
            self._send_outbox()

    def _handle_events(self) -> None:
        if self._executing:
            return
        self._executing = True
        try:
            while self._events:
                events = [self._events.popleft()]
                if type(events[0]) in _TOGETHER:
                    while self._events and type(self._events[0]) in _TOGETHER:
                        events.append(self._events.popleft())
                self._handled = True
                for instruction in self._machine.handle_all(events, time.monotonic()):
                    self._execute(instruction)
        finally:
            self._executing = False

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            self._outbox.put(instruction)
        elif isinstance(instruction, Forward):
            self._outbox.put_tokens(instruction)
        elif isinstance(instruction, Note):
            if self.on_note is not None:
                self.on_note(instruction)
            self._notes.write(instruction)
        else:
            if isinstance(instruction, Compute):  # messages that precede it go first, see execution_order
                self._send_outbox()
            self._execute_other(instruction)

    def repeat_greeting(self) -> None:
        """Send HELLO again to all linked processes, because its content has changed."""
        self._handshake.repeat_all()

    def leave(self, reason: str) -> None:
        """Send BYE to all linked processes and close the links."""
        self._outbox.let_go()
        self._send_outbox()
        self._handshake.leave(reason)
        time.sleep(0.02)  # lets libzmq's thread write the goodbyes; a lost one costs the others a monitor event
        self.close()

    def close(self) -> None:
        """Close the links now."""
        self._links.close()
        self._waker.close()

    # Incoming messages.

    def _incoming(self, event: Incoming) -> None:
        frames = event.frames
        try:
            if not 1 <= len(frames) <= 1 + wire.MAX_TOGETHER:
                raise WireError(f"message of {len(frames)} frames; dropped")
            messages = wire.decode_all(frames[0].buffer)
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
        if (
            name is None
            or name in self._linked.guests
            or type(message) not in _ROUTED
            or self._linked.user_of[event.link] != event.user
        ):
            self._act_outside_routing(event, message)
        elif isinstance(message, Run):
            assert tokens is not None
            self.feed(self._arrived(name, message, tokens))
        elif isinstance(message, State):
            self._admission.check_state(message, name)
            self.neighbour_events += 1
            self.feed(NeighbourState(name, message))
        else:
            self.feed(Received(name, message))

    def _act_outside_routing(self, event: Incoming, message: Message) -> None:
        """Act on a message that does not concern routing, or refuse it."""
        link = event.link
        if isinstance(message, (Hello, Welcome)):
            self._handshake.on_greeting(event, message)
            return
        name = self._linked.name_of.get(link)
        if name is not None and self._linked.user_of[link] != event.user:  # another connection took its routing id
            name = None
        kind = type(message).__name__.lower()
        if isinstance(message, Complaint):
            self._handshake.on_complaint(link, name or event.user, message)
        elif name is None:
            self._drop(event, "before hello", f"{kind} before hello; dropped")
        elif isinstance(message, Bye):
            self._handshake.on_bye(name, message.reason, time.monotonic())
        elif isinstance(message, (Offer, Chunk, Install)):
            if self._linked.guests.get(name) != "pusher" or self._installer is None:
                raise WireError(f"{kind} from {name}, which is not a pusher; dropped")
            self._installer.receive(name, message)
        elif isinstance(message, (Want, Stored, Findings)):
            raise WireError(f"{kind}, which only observers and pushers receive; dropped")
        elif isinstance(message, Inspect):
            if name not in self._linked.guests or self._inspect is None:
                raise WireError(f"inspect from {name}, which is not an observer; dropped")
            self._inspect(name)
        else:
            raise WireError(f"{kind} from the {self._linked.guests[name]} {name}, which may not route; dropped")

    def _arrived(self, name: str, run: Run, frame: zmq.Frame) -> Arrived:
        self._admission.check_run(run, name)
        started = time.perf_counter_ns()
        tokens = codecs.decode(run.codec, frame.buffer, run.count, run.dim)
        finite = codecs.is_finite(tokens)
        return Arrived(name, run, tokens, (time.perf_counter_ns() - started) // 1000, finite)

    def _drop(self, event: Incoming, what: str, why: str) -> None:
        self._refused.drop(event, what, why, self._linked.name_of.get(event.link, event.user))

    # Processes that come and go.

    def _on_admitted(self, link: Link, greeting: Hello | Welcome, first: bool) -> None:
        name = greeting.name
        self._outbox.greeted(name, greeting.codec, reads_several=greeting.minor >= wire.MINOR_OF_SEVERAL)
        hello = Hello(*msgspec.structs.astuple(greeting))
        known = self._machine.neighbours.get(name)
        if greeting.role not in GUESTS and (known is None or known.hello != hello):
            self.neighbour_events += 1
            self.feed(NeighbourUp(hello))
        if first and isinstance(greeting, Hello) and self._role == "peer":
            self._send_link(link, self._state(name))
        if greeting.role == "pusher" and self._installer is not None:
            self._installer.greeted(name)

    def _on_forgotten(self, name: str, why: str, was_pusher: bool) -> None:
        if was_pusher and self._installer is not None:
            self._installer.lost(name)
        self._outbox.forget(name)
        self.neighbour_events += 1
        self.feed(NeighbourDown(name, why))

    # Outgoing messages.

    def _send_outbox(self) -> None:
        """Send the messages of the turn; a message that cannot be sent becomes the machine's next event."""
        while not self._outbox.is_empty:
            failed = self._outbox.send()
            if failed:
                self.counts["unsendable"] += len(failed)
                self._events.extend(map(Unsendable, failed))
            self._handle_events()

    def _send_link(self, link: Link, message: Message) -> None:
        self._links.send(link, [wire.encode(message)])


def new_incarnation() -> int:
    """Return a random number that distinguishes this process from an earlier one with its name."""
    return secrets.randbits(63)
