"""A node of the network: links, greetings and the routing machine, for peers and sources alike.

Frames from the links are checked, turned into events and given to the machine; its instructions are executed. A
process is introduced by HELLO or WELCOME, which must name the same model (guarantee R7), come from a process
of ``peers.yaml`` and, on a CURVE link, carry the name that the key belongs to. What is malformed or not allowed is
counted, dropped and answered with a COMPLAINT (guarantee R5); it never raises.

A greeting terminates: HELLO is sent by the side that dialled, when the link is up, again after a delay while no WELCOME
came, and when its content changes. It is answered by one WELCOME or COMPLAINT, which are not answered.

One thread runs :meth:`Node.step` in a loop. Other threads may call :meth:`Node.wake`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec
import zmq

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import LinkError, UsageError, WireError
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
    NoteKind,
    Received,
    Send,
    Submit,
    Tick,
    Unsendable,
)
from ls_edge.runtime.transport.admission import GUESTS, Admission, may_be_called
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.linked_processes import LinkedProcesses
from ls_edge.runtime.transport.links import Curve, Incoming, Link, LinkDown, Links, LinkUp
from ls_edge.runtime.transport.outbox import Outbox
from ls_edge.runtime.transport.problems import PeerProblems, one_line
from ls_edge.runtime.transport.zap import is_worth_logging

log = logging.getLogger("ls_edge.runtime")

GUEST_STATE_EVERY = 0.1
"""Seconds between two STATE to an observer or pusher, which the routing machine does not know."""
MAX_WAIT_S = 1.0
"""Longest wait of a turn in which nothing happens, in seconds."""
COMPLAINTS_A_SECOND = 10
"""Most COMPLAINTs that are sent on a link in a second; what is beyond is counted only."""
NOTES_A_MINUTE = 20
"""Most lines that are logged in a minute of one thing that happens with one process; what is beyond is counted."""
MAX_SHOWN_EXPLANATION = 500
"""Longest explanation that is sent or logged, in characters."""
_TOGETHER = frozenset((Arrived, Received, NeighbourState, Computed, Submit, Abandon, Unsendable))
"""Events of one turn that the machine is given together; it is given all others one by one."""
_ROUTED = frozenset((Run, State, Accept, Refuse, Progress, Release, Moved, Cancel))
"""Messages between processes that take part in routing."""
_MAX_NOTE_KINDS = 4096
"""Kinds of notes, each by process, that are counted at once; beyond them counting starts anew."""
_MAX_REASON = 200
"""Longest reason of a BYE, in characters."""
_DROPPED = {
    "malformed": "dropped a message",
    "before hello": "dropped a message",
    "complaints": "a neighbour complains",
    "hello refused": "refused a process",
}


class TakesBundles(Protocol):
    """What a node hands the messages of pushers to."""

    def greeted(self, pusher: str) -> None:
        """A pusher was let in, on one more link."""

    def lost(self, name: str) -> None:
        """The last link to a pusher has ended."""

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Do what a pusher says."""


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
        """``execute`` is called with the instructions that are not about links (Compute, Complete, Fail).

        ``installer`` takes bundles that are pushed. ``inspect`` is called with the name of an observer or pusher that
        wants the machine checked. ``closed`` is why no peer and no source is let in, or dialled.
        """
        self.name = name
        self.role = role
        self.counts: Counter[str] = Counter()
        """What was dropped or refused, by reason."""
        self.mismatched: dict[str, str] = {}
        """Peers that serve another model: name to the message with both ids."""
        self.on_note: Callable[[Note], None] | None = None
        self.neighbour_events = 0
        """Times that a neighbour came, went or sent its STATE."""
        self._peers = peers
        self._manifest = manifest
        self._admission = Admission(
            name, role, peers, manifest, strict_bundle=strict_bundle, has_store=installer is not None, closed=closed
        )
        self._installer, self._inspect = installer, inspect
        self._machine = machine
        self._execute_other = execute
        self._hello = hello
        self._state = state
        self._linked = LinkedProcesses(name, peers)
        self._complained: dict[Link, tuple[float, int]] = {}
        self._problems = PeerProblems(self._linked.listed - {name})
        self._noted: dict[tuple[str, str], tuple[int, int]] = {}
        self._guest_state_at = 0.0
        self._events: deque[Event] = deque()
        self._executing = False
        self._in_turn = False
        self._handled = False
        """Whether the machine was given anything in this turn."""
        tokens_frame = codecs.wire_bytes("raw", manifest.tokens.count, manifest.tokens.dim)
        own = next((p for p in peers.peers if p.name == name), None)
        self._asleep = self._woken = False
        """Whether :meth:`step` waits and has to be woken; whether it was meanwhile."""
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._wakes = zmq.Poller()
        self._wakes.register(self._wake_in.fileno(), zmq.POLLIN)
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
            self._wake_in.close()
            self._wake_out.close()
            raise
        self._links.register(self._wake_in.fileno())
        self._outbox = Outbox(name, manifest.tokens, self._links, self._linked.links_of)

    @property
    def problems(self) -> Mapping[str, str]:
        """Why peers of ``peers.yaml`` cannot be used, or complained: name of the peer to the latest reason.

        A snapshot that any thread may take; a peer that is well is not in it. Reasons are one line, printable.
        """
        return self._problems.reasons

    def wake(self) -> None:
        """Make :meth:`step` return soon; any thread may call it."""
        self._woken = True  # read by step() after it has set _asleep, so one of the two is seen
        if self._asleep:
            self._asleep = False
            with contextlib.suppress(OSError):  # closed
                self._wake_out.send(b"x")

    def send_to(self, name: str, message: Message) -> bool:
        """Send a message that routing has no part in; False where there is no link that takes it."""
        return any(self._links.send(link, [wire.encode(message)]) for link in self._linked.links_of.get(name, ()))

    def watch(self, descriptor: int) -> None:
        """Make :meth:`step` return also when this file descriptor can be read."""
        self._links.register(descriptor)

    def can_read(self, descriptor: int) -> bool:
        """Whether the latest :meth:`step` found that a watched file descriptor can be read, or is at its end."""
        return self._links.can_read(descriptor)

    def step(
        self, at_most: float = MAX_WAIT_S, more: Callable[[], None] = lambda: None, *, unread_for: float = 0.0
    ) -> None:
        """Wait for events, at most ``at_most`` seconds, and handle all of them: one *turn*.

        ``more`` is called when all messages have been read; events that it feeds are handled together with them. What
        the turn sends to one process goes as one message where that process reads it so. Messages may stay unread for
        ``unread_for`` seconds, unless :meth:`wake` is called: fewer turns read more each.
        """
        now = time.monotonic()
        due = self._machine.next_check()
        wait_until = min(now + at_most, self._outbox.held_until, self._linked.next_greeting)
        if due is not None:
            wait_until = min(wait_until, due)
        if self._linked.guests:
            wait_until = min(wait_until, self._guest_state_at)
        wait = max(0.0, wait_until - now)
        self._asleep = True
        if unread_for and not self._woken:
            unread_for = min(unread_for, wait)
            self._wakes.poll(round(unread_for * 1e3))
            wait -= unread_for
        events = self._links.poll(0.0 if self._woken else wait)
        self._asleep = self._woken = False
        if self._links.can_read(self._wake_in.fileno()):
            self._clear_wakes()
        self._in_turn, self._handled = True, False
        try:
            for event in events:
                if isinstance(event, Incoming):
                    self._incoming(event)
                elif isinstance(event, LinkUp):
                    self._link_up(event.link)
                elif isinstance(event, LinkDown):
                    self._link_down(event)
                elif event.name not in self._linked.links_of:  # else it has dialled us
                    self._problems.note(event.name, "link", event.why)
            more()
            self._handle_events()
            self._end_turn(due)
        finally:
            self._in_turn = False

    def _end_turn(self, due: float | None) -> None:
        """Do what is due by the clock, and send."""
        now = time.monotonic()
        for link in self._linked.due_greetings(now):
            self._send_link(link, self._hello())
        if not self._handled and due is not None and due <= now:  # what became due meanwhile ends the next wait
            self.feed(Tick())
        if self._linked.guests and now >= self._guest_state_at:
            self._guest_state_at = now + GUEST_STATE_EVERY
            for name in self._linked.guests:
                self._outbox.put_optional(name, self._state(name))
        self._problems.forget_old(now)
        if now >= self._outbox.held_until:
            self._outbox.let_go()
        self._send_outbox()
        if self._links.refused:
            self.counts["connections refused"] = self._links.refused

    def feed(self, event: Event) -> None:
        """Give the machine an event and execute its instructions in the order in which it returns them.

        What cannot be sent is the machine's next event. In a turn, what can be handled together waits for its end.
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
            self._note(instruction)
        else:
            if isinstance(instruction, Compute):  # what it waits for goes first, see execution_order
                self._send_outbox()
            self._execute_other(instruction)

    def repeat_greeting(self) -> None:
        """Send HELLO again to all linked processes, because its content has changed (engines are warm now)."""
        for links in list(self._linked.links_of.values()):
            self._send_link(links[0], self._hello())

    def leave(self, reason: str) -> None:
        """Send BYE to all linked processes and close the links."""
        self._outbox.let_go()
        self._send_outbox()
        for links in list(self._linked.links_of.values()):
            self._send_link(links[0], Bye(reason))
        time.sleep(0.02)  # lets libzmq's thread write the goodbyes; a lost one costs the others a monitor event
        self.close()

    def close(self) -> None:
        """Close the links at once."""
        self._links.close()
        self._wake_in.close()
        self._wake_out.close()

    # Incoming.

    def _clear_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._wake_in.recv(4096)) == 4096:
                pass

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
            self._act_beside(event, message)
        elif isinstance(message, Run):
            assert tokens is not None
            self.feed(self._arrived(name, message, tokens))
        elif isinstance(message, State):
            self._admission.check_state(message, name)
            self.neighbour_events += 1
            self.feed(NeighbourState(name, message))
        else:
            self.feed(Received(name, message))

    def _act_beside(self, event: Incoming, message: Message) -> None:
        """Act on a message that routing has no part in, or refuse it."""
        link = event.link
        if isinstance(message, (Hello, Welcome)):
            self._on_greeting(event, message)
            return
        name = self._linked.name_of.get(link)
        if name is not None and self._linked.user_of[link] != event.user:  # another connection took its routing id
            name = None
        if isinstance(message, Complaint):
            what = one_line(message.what, MAX_SHOWN_EXPLANATION)
            self._count("complaints", name or event.user, what)
            if self._linked.awaits_welcome(link):
                self._problems.note(link.dialled, "greeting", f"it refused us: {what}")
                if message.model_id not in ("", self._manifest.model_id):
                    self.mismatched[link.dialled] = what
            else:
                self._problems.note(name or event.user, "complaint", f"it dropped a message of ours: {what}")
            return
        if name is None:
            self._drop(event, "before hello", f"{type(message).__name__.lower()} before hello; dropped")
            return
        if isinstance(message, Bye):
            reason = one_line(message.reason, MAX_SHOWN_EXPLANATION)
            self._forget_process(name, f"left ({reason})" if reason else "left")
        elif isinstance(message, (Offer, Chunk, Install)):
            if self._linked.guests.get(name) != "pusher" or self._installer is None:
                raise WireError(f"{type(message).__name__.lower()} from {name}, which is no pusher; dropped")
            self._installer.receive(name, message)
        elif isinstance(message, (Want, Stored, Findings)):
            raise WireError(f"{type(message).__name__.lower()}, which only observers and pushers get; dropped")
        elif isinstance(message, Inspect):
            if name not in self._linked.guests or self._inspect is None:
                raise WireError(f"inspect from {name}, which is no observer; dropped")
            self._inspect(name)
        else:
            raise WireError(
                f"{type(message).__name__.lower()} from the {self._linked.guests[name]} {name}, which takes no part in "
                "routing; dropped"
            )

    def _arrived(self, name: str, run: Run, frame: zmq.Frame) -> Arrived:
        self._admission.check_run(run, name)
        started = time.perf_counter_ns()
        tokens = codecs.decode(run.codec, frame.buffer, run.count, run.dim)
        finite = codecs.is_finite(tokens)
        return Arrived(name, run, tokens, (time.perf_counter_ns() - started) // 1000, finite)

    def _on_greeting(self, event: Incoming, greeting: Hello | Welcome) -> None:
        """Admit the process that a HELLO or WELCOME describes, or refuse it."""
        link, name = event.link, greeting.name
        if isinstance(greeting, Welcome):
            self._linked.answered(link)
        reason = self._linked.reason_to_refuse(link, greeting, event.user) or self._admission.reason_to_refuse(
            greeting, event.user
        )
        if reason:
            self._refuse(event, greeting, reason)
            return
        self.mismatched.pop(name, None)
        self._problems.clear(name)
        first = self._linked.add(link, name, event.user)
        if isinstance(greeting, Hello):  # before what the machine has for it
            self._send_link(link, Welcome(*msgspec.structs.astuple(self._hello())))
        self._outbox.greeted(name, greeting.codec, reads_several=greeting.minor >= wire.MINOR_OF_SEVERAL)
        hello = Hello(*msgspec.structs.astuple(greeting))
        known = self._machine.neighbours.get(name)
        if greeting.role in GUESTS:
            self._linked.guests[name] = greeting.role
        elif known is None or known.hello != hello:
            self.neighbour_events += 1
            self.feed(NeighbourUp(hello))
        if first and isinstance(greeting, Hello) and self.role == "peer":
            self._send_link(link, self._state(name))
        if greeting.role == "pusher" and self._installer is not None:
            self._installer.greeted(name)

    def _refuse(self, event: Incoming, greeting: Hello | Welcome, reason: str) -> None:
        reason = one_line(reason, MAX_SHOWN_EXPLANATION)
        link, name = event.link, greeting.name
        whose = link.dialled or (name if event.user in ("", name) else "")
        self._problems.note(whose, "greeting", reason)
        if greeting.model_id != self._manifest.model_id and name == whose and name in self._linked.listed:
            self.mismatched[name] = reason
        if isinstance(greeting, Hello):
            ours = self._manifest.model_id
            self._drop(event, "hello refused", reason, name, "" if greeting.model_id == ours else ours)
        else:
            self._count("hello refused", name, reason)
            self._send_link(link, Bye(reason[:_MAX_REASON]))  # it has let us in, and would send us work

    def _drop(self, event: Incoming, what: str, why: str, name: str = "", model_id: str = "") -> None:
        """Count a dropped message and send a COMPLAINT, unless the link had :data:`COMPLAINTS_A_SECOND` already."""
        self._count(what, name or self._linked.name_of.get(event.link, event.user), why)
        now = time.monotonic()
        since, sent = self._complained.get(event.link, (now, 0))
        if now - since >= 1.0:
            since, sent = now, 0
        if sent < COMPLAINTS_A_SECOND:
            self._complained[event.link] = (since, sent + 1)
            self._send_link(event.link, Complaint(one_line(why, MAX_SHOWN_EXPLANATION), model_id))

    def _count(self, what: str, peer: str, why: str) -> None:
        """Count a dropped message and log the 1st, 2nd, 4th, 8th and so on, so that the log stays small."""
        self.counts[what] += 1
        if is_worth_logging(self.counts[what]):
            extra = {"peer": peer or "?", "why": one_line(why, MAX_SHOWN_EXPLANATION), "count": self.counts[what]}
            log.warning(_DROPPED[what], extra=extra)

    def _link_up(self, link: Link) -> None:
        self._problems.clear(link.dialled, "link")
        self._send_link(link, self._hello())
        if self.role == "peer":
            self._send_link(link, self._state(link.dialled))
        self._linked.greeted(link, time.monotonic())

    def _link_down(self, event: LinkDown) -> None:
        link = event.link
        self._complained.pop(link, None)
        name = self._linked.link_ended(link)
        if name is None:
            self._problems.note(link.dialled, "link", event.why)
        elif not self._linked.links_of.get(name):
            self._forget_process(name, event.why)

    def _forget_process(self, name: str, why: str) -> None:
        if self._linked.guests.get(name) == "pusher" and self._installer is not None:
            self._installer.lost(name)
        self._linked.forget(name, time.monotonic())
        self._outbox.forget(name)
        self._problems.note(name, "link", why)
        self.neighbour_events += 1
        self.feed(NeighbourDown(name, why))

    # Outgoing.

    def _send_outbox(self) -> None:
        """Send what is to be sent; what cannot be is the machine's next event."""
        while not self._outbox.is_empty:
            failed = self._outbox.send()
            if failed:
                self.counts["unsendable"] += len(failed)
                self._events.extend(map(Unsendable, failed))
            self._handle_events()

    def _send_link(self, link: Link, message: Message) -> None:
        self._links.send(link, [wire.encode(message)])

    def _note(self, note: Note) -> None:
        if self.on_note is not None:
            self.on_note(note)
        minute = int(time.monotonic() // 60)
        since, count = self._noted.get((note.what, note.peer), (minute, 0))
        if since != minute:
            count = 0
        if len(self._noted) > _MAX_NOTE_KINDS:
            self._noted.clear()
        self._noted[note.what, note.peer] = minute, count + 1
        if count >= NOTES_A_MINUTE:
            return
        level = logging.INFO if note.what in (NoteKind.REROUTED, NoteKind.ENGINE_BACK) else logging.WARNING
        why = note.why + ("; no more of these in this minute are logged" if count == NOTES_A_MINUTE - 1 else "")
        extra = {"peer": note.peer, "why": why}
        log.log(level, note.what.value, extra=extra | ({"request": note.request.hex()[:8]} if note.request else {}))


def new_incarnation() -> int:
    """A random number that distinguishes this process from an earlier one of its name."""
    return secrets.randbits(63)


def curve_of(peers: PeersFile, name: str, keys: KeyPair | None) -> Curve | None:
    """What the links of the process ``name`` need for CURVE, or None where the file has no keys.

    Raises :class:`UsageError` without a key pair, :class:`LinkError` where it is another process's.
    """
    if not peers.uses_keys:
        return None
    if keys is None:
        raise UsageError(
            f"{peers.path} has keys, so {name} needs its own: give --secret-key {name}.key_secret "
            f"(made by 'ls-edge keys new {name}')"
        )
    peer_keys = {p.name: p.public_key.encode() for p in peers.peers if p.public_key}
    names = {key: peer for peer, key in peer_keys.items()}
    names |= {s.public_key.encode(): s.name for s in peers.sources if s.public_key}
    owner = names.get(keys.public)
    if owner is None or not may_be_called(owner, name):
        belongs = f"belongs to {owner!r}" if owner else "does not stand in the file"
        raise LinkError(
            f"the secret key is not that of {name!r}: its public key {belongs}; check --secret-key and {peers.path}"
        )
    return Curve(keys, peer_keys, names)
