"""Node of a fleet, a peer or a source: links, handshake and the routing machine.

Frames are checked, turned into events and given to the machine, whose instructions are executed. Malformed and
forbidden messages are counted, dropped and answered with COMPLAINT (guarantee R5); they never raise an error.

One thread runs :meth:`Node.step` in a loop. Other threads may call :attr:`Node.wake`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ls_edge.core.bundle import Manifest
from ls_edge.core.parts import STEM
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.protocol import framing
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.protocol.messages import (
    Bye,
    Hello,
    Inspect,
    Message,
    State,
    Welcome,
)
from ls_edge.runtime.protocol.payload import MAX_IMAGE
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.routing.recent_events import text_of
from ls_edge.runtime.routing.state.events import (
    Abandon,
    Arrived,
    Compute,
    Computed,
    Decoded,
    Event,
    Forward,
    Instruction,
    NeighborDown,
    NeighborState,
    NeighborUp,
    Note,
    NoteKind,
    Received,
    Removed,
    Send,
    Submit,
    Tick,
    Unsendable,
)
from ls_edge.runtime.transport.admission import GUESTS, Admission
from ls_edge.runtime.transport.connections import Incoming, Link, LinkDown, LinkEvent, LinkUp
from ls_edge.runtime.transport.handshake import Handshake, LinkedProcesses
from ls_edge.runtime.transport.inbox import Guests, Inbox, TakesBundles
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import Links
from ls_edge.runtime.transport.outbox import NO_CODEC, LinkCounts, Outbox
from ls_edge.runtime.transport.poller import Waker
from ls_edge.runtime.transport.problems import NoteCounts, RefusedMessages, log_note
from ls_edge.runtime.transport.zap import curve_of

log = logging.getLogger("ls_edge.runtime")
MAX_WAIT_S = 1.0
"""Maximum wait of a turn, in seconds."""
_OF_NEIGHBORS = frozenset((NeighborUp, NeighborDown, NeighborState))
_TOGETHER = frozenset((Arrived, Received, NeighborState, Computed, Decoded, Submit, Abandon, Unsendable))
"""Events that the machine handles together if they belong to one turn; it handles others one by one."""


@dataclass(frozen=True)
class NodeSettings:
    """Identity, files and settings of a process, for its links."""

    name: str
    role: str
    peers: PeersFile
    manifest: Manifest
    keys: KeyPair | None
    strict_bundle: bool = False
    closed: str = ""
    """Reason for neither admitting nor dialing peers and sources, or empty."""

    @property
    def dialed(self) -> dict[str, str]:
        """Address to dial, by name of the peer."""
        return {} if self.closed else {p.name: p.address for p in self.peers.peers if p.name != self.name}

    def links(self) -> Links:
        """Listen, dial, and return the links."""
        tokens, peers = self.manifest.tokens, self.peers
        tokens_frame = codec_of("raw").wire_bytes(tokens.count, tokens.dim)
        own = next((p for p in peers.peers if p.name == self.name), None)
        takes_images = any(STEM in peer.blocks for peer in peers.peers)
        return Links(
            self.dialed,
            bind=own.bind if own is not None and self.role == "peer" else None,
            heartbeat=peers.heartbeat,
            max_frame=max(framing.MAX_HEADER, tokens_frame, MAX_IMAGE if takes_images else 0),
            tokens_frame=tokens_frame,
            curve=curve_of(peers, self.name, self.keys),
        )


class MachineDriver:
    """Driver of the routing machine: gives it events and executes its instructions."""

    def __init__(
        self,
        machine: Machine[Any],
        outbox: Outbox,
        execute: Callable[[Instruction], None],
        counts: Counter[str],
        suspicions: dict[str, int],
    ) -> None:
        """Call ``execute`` for instructions that do not concern links.

        ``counts`` gets the number of unsendable messages, ``suspicions`` the number of suspicions by peer.
        """
        self.machine = machine
        self.on_note: Callable[[Note], None] = lambda _note: None
        """Called with each note of the machine."""
        self.neighbor_events = 0
        """Number of times that a neighbor came, left or sent STATE."""
        self.in_turn = False
        self.has_handled = False
        """Whether the machine has handled an event in this turn."""
        self._outbox, self._execute_other = outbox, execute
        self._counts, self._suspicions = counts, suspicions
        self._logged: NoteCounts = {}
        self._events: deque[Event] = deque()
        self._executing = False

    def feed(self, event: Event) -> None:
        """Give the machine an event and execute its instructions in order.

        A message that cannot be sent becomes the next event. During a turn, events that can be handled together wait
        for its end.
        """
        self.neighbor_events += type(event) in _OF_NEIGHBORS
        self._events.append(event)
        if self.in_turn and type(event) in _TOGETHER:
            return
        self.handle_events()
        if not self.in_turn:
            self.send_outbox()

    def handle_events(self) -> None:
        """Give the machine all waiting events."""
        if self._executing:
            return
        self._executing = True
        try:
            while self._events:
                events = [self._events.popleft()]
                if type(events[0]) in _TOGETHER:
                    while self._events and type(self._events[0]) in _TOGETHER:
                        events.append(self._events.popleft())
                self.has_handled = True
                for instruction in self.machine.handle_all(events, time.monotonic()):
                    self._execute(instruction)
        except Exception:
            _write_out(self.machine)
            raise
        finally:
            self._executing = False

    def _execute(self, instruction: Instruction) -> None:
        if isinstance(instruction, Send):
            self._outbox.put(instruction)
        elif isinstance(instruction, Forward):
            self._outbox.put_tokens(instruction)
        elif isinstance(instruction, Note):
            if instruction.what is NoteKind.SUSPECT and instruction.peer in self._suspicions:
                self._suspicions[instruction.peer] += 1
            self.on_note(instruction)
            log_note(instruction, self._logged)
        else:
            if isinstance(instruction, Compute):  # send the messages before it first, see in_order
                self.send_outbox()
            self._execute_other(instruction)

    def send_outbox(self) -> None:
        """Send the messages of the turn; a message that cannot be sent becomes the next event."""
        while not self._outbox.is_empty:
            failed = self._outbox.send()
            if failed:
                self._counts["unsendable"] += len(failed)
                self._events.extend(map(Unsendable, failed))
            self.handle_events()


def _write_out(machine: Machine[Any]) -> None:
    """Write the latest events of a machine to a file, from which an internal error can be explained.

    A process that is restarted again and again replaces the file.
    """
    try:
        path = Path(tempfile.gettempdir()) / f"ls-edge-events-{machine.turn.name}.txt"
        path.write_text(text_of(machine.recent), encoding="utf-8")
    except OSError as error:
        log.warning("cannot write the latest events: %s", error)
    else:
        log.error("internal error; the latest events are in %s", path)


class Watchdog:
    """Sender of signs of life for systemd, which restarts a unit with ``WatchdogSec`` when they stop.

    The first one ends the start of the unit, in which engines may be built for minutes. Outside a unit of
    ``Type=notify``, nothing is sent.
    """

    def __init__(self) -> None:
        limit = os.environ.get("WATCHDOG_USEC", "")
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._every_s = int(limit) / 3e6 if limit.isdigit() else math.inf
        self._next = 0.0

    def beat(self) -> None:
        """Send a sign of life, at most three times per limit."""
        if not self._address or (now := time.monotonic()) < self._next:
            return
        self._next = now + self._every_s
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"READY=1\nWATCHDOG=1", self._address.replace("@", "\0", 1))


class Node:
    """Part of a ``Peer`` or ``Source`` that communicates."""

    def __init__(
        self,
        settings: NodeSettings,
        machine: Machine[Any],
        *,
        execute: Callable[[Instruction], None],
        hello: Callable[[], Hello],
        state: Callable[[str], State],
        installer: TakesBundles | None = None,
        inspect: Callable[[str, Inspect], None] | None = None,
    ) -> None:
        """Listen and dial; call ``execute`` for instructions that do not concern links.

        ``installer`` and ``inspect`` are arguments of :class:`Guests`.
        """
        self._settings = settings
        self._state = state
        self._links = settings.links()
        self._watchdog = Watchdog()
        self._waker = Waker()
        self.wake = self._waker.wake
        """Make :meth:`step` return soon; any thread may call this."""
        self._links.poller.add_descriptor(self._waker.descriptor)
        self._linked = linked = LinkedProcesses(settings.name, settings.peers)
        self._refused = RefusedMessages(self._links)
        self.link_counts = counts = LinkCounts(peer.name for peer in settings.peers.peers)
        self._outbox = Outbox(settings.name, self._links, linked.links_of, counts)
        self.driver = MachineDriver(machine, self._outbox, execute, self._refused.counts, counts.suspicions)
        admission = Admission(
            settings.name,
            settings.role,
            settings.peers,
            settings.manifest,
            strict_bundle=settings.strict_bundle,
            has_store=installer is not None,
            closed=settings.closed,
        )
        self._handshake = Handshake(
            linked,
            self._links,
            admission,
            self._refused,
            hello=hello,
            on_admitted=self._on_admitted,
            on_forgotten=self._on_forgotten,
        )
        self.counts: Counter[str] = self._refused.counts
        """Number of dropped messages and refused connections, by reason."""
        self.mismatched = self._handshake.mismatched
        """Peers with another model, each with its id and the message that names both ids."""
        self._guests = Guests(
            linked, settings.manifest, send=self.send_to, state=state, installer=installer, inspect=inspect
        )
        self._inbox = Inbox(linked, self._handshake, admission, self._refused, counts, self._guests, self.feed)

    def feed(self, event: Event) -> None:
        """Give the machine an event, as :meth:`MachineDriver.feed` does."""
        self.driver.feed(event)

    @property
    def problems(self) -> Mapping[str, str]:
        """Latest problem of each peer of ``peers.yaml`` that has one, as a printable line.

        Any thread may read this snapshot.
        """
        return self._handshake.problems.reasons

    def send_to(self, name: str, message: Message) -> bool:
        """Send a message outside of routing; return False if no link accepts it."""
        return any(self._links.send(link, [framing.encode(message)]) for link in self._linked.links_of.get(name, ()))

    def step(
        self, at_most: float = MAX_WAIT_S, more: Callable[[], None] = lambda: None, *, unread_for: float = 0.0
    ) -> None:
        """Take a turn: wait for events, at most ``at_most`` seconds, and handle them all.

        Call ``more`` when all messages have been read; events that it feeds are handled together with them. Messages of
        the turn to the same process share a header. Messages may stay unread for ``unread_for`` seconds, unless
        :attr:`wake` is called, so that fewer turns handle more messages each.
        """
        self._watchdog.beat()
        due = self.driver.machine.next_check()
        events = self._wait(at_most, due, unread_for)
        self.driver.in_turn, self.driver.has_handled = True, False
        try:
            for event in events:
                self._on_link_event(event)
            more()
            self.driver.handle_events()
            self._end_turn(due)
        finally:
            self.driver.in_turn = False

    def _wait(self, at_most: float, due: float | None, unread_for: float) -> list[LinkEvent]:
        now, waker = time.monotonic(), self._waker
        until = min(now + at_most, self._outbox.held_until, self._linked.next_due, self._guests.state_due)
        if due is not None:
            until = min(until, due)
        wait = max(0.0, until - now)
        waker.asleep = True
        if unread_for and not waker.woken:
            unread_for = min(unread_for, wait)
            waker.wait(unread_for)
            wait -= unread_for
        events = self._links.poll(0.0 if waker.woken else wait)
        waker.asleep = waker.woken = False
        if self._links.poller.can_read(waker.descriptor):
            waker.drain()
        return events

    def _on_link_event(self, event: LinkEvent) -> None:
        if isinstance(event, Incoming):
            self._inbox.receive(event)
        elif isinstance(event, LinkUp):
            self._handshake.link_up(event.link, time.monotonic())
            if self._settings.role == "peer":
                self._handshake.send(event.link, self._state(event.link.dialed))
        elif isinstance(event, LinkDown):
            self._refused.forget(event.link)
            self._handshake.link_down(event, time.monotonic())
        elif event.name not in self._linked.links_of:
            self._handshake.problems.note(event.name, "link", event.why)

    def _end_turn(self, due: float | None) -> None:
        """Do what is due, and send the messages."""
        now = time.monotonic()
        if now >= self._linked.next_due:
            self._handshake.do_due(now)
        if (
            not self.driver.has_handled and due is not None and due <= now
        ):  # checks that became due meanwhile end the next wait
            self.feed(Tick())
        if now >= self._guests.state_due:
            self._guests.send_states(now)
        self._handshake.problems.forget_old(now)
        if now >= self._outbox.held_until:
            self._outbox.let_go()
        self.driver.send_outbox()
        self.link_counts.sent[NO_CODEC] = self._links.sent_bytes
        if refused := self._links.refused:
            self.counts["connections refused"] = refused

    def change_peers(self, peers: PeersFile, keys: KeyPair | None) -> None:
        """Use this file and this key pair from now on, and greet all linked processes again.

        Links of processes that the file no longer lists, or lists with another key, are ended, and so are incoming
        connections of unknown processes then. The address of this process, the heartbeat, and the choice to use keys
        must not change.
        """
        before, after = (
            {(p.name, p.public_key) for p in file.peers} | {(s.name, s.public_key) for s in file.sources}
            for file in (self._settings.peers, peers)
        )
        changed = {name for name, _ in before - after}
        self._settings = replace(self._settings, peers=peers, keys=keys)
        suspicions = self.link_counts.suspicions
        suspicions |= dict.fromkeys({peer.name for peer in peers.peers} - suspicions.keys(), 0)
        self._handshake.change(peers)
        self._links.change(self._settings.dialed, curve_of(peers, self._settings.name, keys))
        if changed:
            # A connection without an admitted process was authenticated by the previous keys, perhaps by a revoked one.
            of_user = self._linked.user_of
            self._links.hang_up_others(
                {link for link, name in self._linked.name_of.items() if changed.isdisjoint((name, of_user[link]))}
            )
            self.feed(Removed(frozenset(changed)))
        self.repeat_greeting()

    def repeat_greeting(self) -> None:
        """Send HELLO to all linked processes again, since its content has changed."""
        self._handshake.send_to_all(self._handshake.hello())

    def leave(self, reason: str) -> None:
        """Send BYE to all linked processes, and close the links."""
        self._outbox.let_go()
        self.driver.send_outbox()
        self._handshake.send_to_all(Bye(reason))
        time.sleep(0.02)  # lets libzmq write BYE; if it is lost, the others notice the end of the link
        self.close()

    def close(self) -> None:
        """Close the links now."""
        self._links.close()
        self._waker.close()

    # Processes that come and leave.

    def _on_admitted(self, link: Link, greeting: Hello | Welcome, first: bool) -> None:
        name = greeting.name
        self._outbox.codec_of[name] = greeting.codec
        hello = Hello(*msgspec.structs.astuple(greeting))
        known = self.driver.machine.neighbors.get(name)
        if greeting.role not in GUESTS and (known is None or known.hello != hello):
            self.feed(NeighborUp(hello))
        if first and isinstance(greeting, Hello) and self._settings.role == "peer":
            self._handshake.send(link, self._state(name))
        if greeting.role == "pusher" and self._guests.installer is not None:
            self._guests.installer.greeted(name)

    def _on_forgotten(self, name: str, why: str, was_pusher: bool) -> None:
        if was_pusher and self._guests.installer is not None:
            self._guests.installer.lost(name)
        self._outbox.forget(name)
        self.feed(NeighborDown(name, why))
