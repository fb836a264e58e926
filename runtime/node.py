"""What a peer process and a source process have in common: links, greetings, and a routing machine in between.

Frames from the links are checked, turned into events and given to the machine; its instructions are carried out. A
process is introduced by HELLO, which must name the same model (guarantee R7), come from somebody who stands in
``peers.yaml`` and, on a CURVE link, carry the name that the key belongs to. What is not well formed or not allowed is
counted, dropped and answered with a COMPLAINT (guarantee R5); it never raises.

One thread runs :meth:`Node.step` in a loop. Other threads talk to it through :meth:`Node.wake`.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable

import msgspec
import zmq

from ls_edge.bundle import Manifest
from ls_edge.errors import LinkError, UsageError, WireError
from ls_edge.peers import PeersFile
from ls_edge.runtime import codec as codecs
from ls_edge.runtime import wire
from ls_edge.runtime.door import Door, may_be_called
from ls_edge.runtime.keys import KeyPair
from ls_edge.runtime.links import Curve, Incoming, Link, LinkDown, Links, LinkUp
from ls_edge.runtime.routing.events import (
    Arrived,
    Event,
    Instruction,
    NeighbourDown,
    NeighbourState,
    NeighbourUp,
    Note,
    Received,
    Send,
    TellState,
    Tick,
    Unsendable,
)
from ls_edge.runtime.routing.machine import Machine
from ls_edge.runtime.wire import Bye, Complaint, Hello, Message, Run, State
from ls_edge.runtime.zap import is_worth_saying

log = logging.getLogger("ls_edge.runtime")

STATE_EVERY = 0.1
"""Seconds between two STATE of a process."""
_EXPLAIN = 500
"""Longest explanation that is sent or logged, in characters."""
_DROPPED = {
    "malformed": "dropped a message",
    "complaints": "a neighbour complains",
    "hello refused": "refused a process",
}


class Node:
    """A process among the others; ``Peer`` and ``Source`` each have one."""

    def __init__(
        self,
        *,
        name: str,
        role: str,
        peers: PeersFile,
        manifest: Manifest,
        machine: Machine,
        carry_out: Callable[[Instruction], None],
        hello: Callable[[], Hello],
        state: Callable[[str], State],
        keys: KeyPair | None,
        strict_bundle: bool = False,
    ) -> None:
        """``carry_out`` gets the instructions that are not about links (Compute, Answer, Fail)."""
        self.name = name
        self.role = role
        self.counts: Counter[str] = Counter()
        """What was dropped or refused, by reason."""
        self.mismatched: dict[str, str] = {}
        """Peers that serve another model: name to the message that says both ids."""
        self.on_note: Callable[[Note], None] | None = None
        self._peers = peers
        self._manifest = manifest
        self._door = Door(name, role, peers, manifest, strict_bundle=strict_bundle)
        self._machine = machine
        self._carry_out = carry_out
        self._hello = hello
        self._state = state
        self._links_of: dict[str, list[Link]] = {}
        self._name_of: dict[Link, str] = {}
        self._codec_of: dict[str, str] = {}
        self._tell_at = 0.0
        self._tokens = manifest.tokens
        own = next((p for p in peers.peers if p.name == name), None)
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        try:
            self._links = Links(
                {p.name: p.address for p in peers.peers if p.name != name},
                bind=own.bind if own is not None and role == "peer" else None,
                heartbeat=peers.heartbeat,
                max_frame=max(wire.MAX_HEADER, codecs.wire_bytes("raw", self._tokens.count, self._tokens.dim)),
                curve=_curve(peers, name, keys),
            )
        except BaseException:
            self._wake_in.close()
            self._wake_out.close()
            raise
        self._links.register(self._wake_in.fileno())

    def wake(self) -> None:
        """Make :meth:`step` return soon; any thread may call it."""
        with contextlib.suppress(OSError):  # it is awake already, or closed
            self._wake_out.send(b"x")

    def watch(self, descriptor: int) -> None:
        """Make :meth:`step` return also when this file descriptor can be read."""
        self._links.register(descriptor)

    def step(self, at_most: float = 0.1) -> None:
        """Wait for something, at most ``at_most`` seconds, and act on all that happened."""
        now = time.monotonic()
        due = self._machine.next_check()
        wait = min(at_most, self._tell_at - now, *(() if due is None else (due - now,)))
        events = self._links.poll(max(0.0, wait))
        self._drain_wakes()
        for event in events:
            if isinstance(event, LinkUp):
                self._send_link(event.link, self._hello())
                self._send_link(event.link, self._state(event.link.dialled))
            elif isinstance(event, LinkDown):
                self._link_down(event)
            else:
                self._incoming(event)
        now = time.monotonic()
        if due is not None and due <= now:  # what became due meanwhile ends the next wait at once
            self.feed(Tick())
        if now >= self._tell_at:
            self.feed(Tick())  # what it says of itself is of now
            self._tell_everybody()
        if self._links.gate is not None:
            self.counts["connections refused"] = sum(self._links.gate.refused.values()) + self._links.failed[""]

    def feed(self, event: Event) -> None:
        """Give the machine an event and carry out what it says.

        Engines start before messages are written: libzmq's thread may take this core while it writes. Only tracks for
        others go first, since a wave waits for their transfer and not for the start of our own track.
        """
        instructions = self._machine.handle(event, time.monotonic())
        for instruction in instructions:
            if isinstance(instruction, Send) and _begins_track(instruction.message):
                self._send(instruction)
        for instruction in instructions:
            if not isinstance(instruction, (Send, TellState, Note)):
                self._carry_out(instruction)
        for instruction in instructions:
            if isinstance(instruction, Send):
                if not _begins_track(instruction.message):
                    self._send(instruction)
            elif isinstance(instruction, TellState):
                self._tell_at = 0.0
            elif isinstance(instruction, Note):
                self._note(instruction)

    def say_hello_again(self) -> None:
        """Tell everybody what HELLO says now (the engine is warm, say)."""
        for links in list(self._links_of.values()):
            self._send_link(links[0], self._hello())
        self._tell_at = 0.0

    def leave(self, reason: str) -> None:
        """Say BYE to everybody and close the links."""
        for links in list(self._links_of.values()):
            self._send_link(links[0], Bye(reason))
        time.sleep(0.02)  # lets libzmq's thread write the goodbyes; a lost one costs the others a monitor event
        self.close()

    def close(self) -> None:
        """Close the links at once."""
        self._links.close()
        self._wake_in.close()
        self._wake_out.close()

    # Incoming.

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(self._wake_in.recv(4096)) == 4096:
                pass

    def _incoming(self, event: Incoming) -> None:
        try:
            if not 1 <= len(event.frames) <= 2:
                raise WireError(f"message of {len(event.frames)} frames, 1 or 2 are allowed; dropped")
            message = wire.decode(event.frames[0].buffer)
            if (len(event.frames) == 2) != isinstance(message, Run):
                raise WireError(f"{type(message).__name__.lower()} with a wrong number of frames; dropped")
            self._act(event, message)
        except WireError as error:
            self._count("malformed", self._name_of.get(event.link, event.user), str(error))
            self._send_link(event.link, Complaint(str(error)[:_EXPLAIN]))

    def _act(self, event: Incoming, message: Message) -> None:
        link = event.link
        if isinstance(message, Hello):
            self._greet(event, message)
            return
        name = self._name_of.get(link)
        if isinstance(message, Complaint):
            self._count("complaints", name or event.user, message.what[:_EXPLAIN])
            return
        if name is None:
            self.counts["before hello"] += 1
            self._send_link(link, self._hello())
            return
        if isinstance(message, State):
            self._door.check_state(message)
            self.feed(NeighbourState(name, message))
        elif isinstance(message, Bye):
            self._forget_process(name, f"left ({message.reason})" if message.reason else "left")
        elif isinstance(message, Run):
            self.feed(self._arrived(name, message, event.frames[1]))
        else:
            self.feed(Received(name, message))

    def _arrived(self, name: str, run: Run, frame: zmq.Frame) -> Arrived:
        self._door.check_run(run, name)
        started = time.perf_counter_ns()
        tokens = codecs.decode(run.codec, frame.buffer, run.count, run.dim)
        finite = codecs.is_finite(tokens)
        return Arrived(name, run, tokens, (time.perf_counter_ns() - started) // 1000, finite)

    def _greet(self, event: Incoming, hello: Hello) -> None:
        link, name = event.link, hello.name
        reason = self._door.reason_to_refuse(hello, event.user)
        if reason:
            self._count("hello refused", name, reason)
            if hello.model_id != self._manifest.model_id and any(p.name == name for p in self._peers.peers):
                self.mismatched[name] = reason
            self._send_link(link, Complaint(reason[:_EXPLAIN]))
            return
        self.mismatched.pop(name, None)
        known = self._machine.neighbours.get(name)
        if link.dialled and link in self._links_of.get(name, ()) and known is not None and known.hello == hello:
            # Nothing new: the other side has lost track of us, since it greets those whom it does not know.
            self._send_link(link, self._hello())
        links = self._links_of.setdefault(name, [])
        first = link not in links
        if first:
            links.append(link)
            links.sort(key=lambda one: not one.dialled)
            self._name_of[link] = name
        self._codec_of[name] = hello.codec if hello.codec in codecs.CODECS else "raw"
        self.feed(NeighbourUp(hello))
        if first and not link.dialled:
            self._send_link(link, self._hello())
            self._send_link(link, self._state(name))

    def _count(self, what: str, peer: str, why: str) -> None:
        """Count what was dropped, and say so the 1st, 2nd, 4th, 8th time: nobody may fill our disk."""
        self.counts[what] += 1
        if is_worth_saying(self.counts[what]):
            log.warning(_DROPPED[what], extra={"peer": peer or "?", "why": why, "count": self.counts[what]})

    def _link_down(self, event: LinkDown) -> None:
        name = self._name_of.pop(event.link, None)
        if name is None:
            return
        links = self._links_of.get(name, [])
        if event.link in links:
            links.remove(event.link)
        if not links:
            self._forget_process(name, event.why)

    def _forget_process(self, name: str, why: str) -> None:
        for link in self._links_of.pop(name, []):
            self._name_of.pop(link, None)
        self.feed(NeighbourDown(name, why))

    # Outgoing.

    def _send(self, send: Send) -> None:
        message = send.message
        frames: list[bytes | memoryview] = []
        if isinstance(message, Run):
            codec = self._codec_of.get(send.to, "raw")
            started = time.perf_counter_ns()
            payload = codecs.encode(codec, send.tokens)
            spent = (time.perf_counter_ns() - started) // 1000
            message = msgspec.structs.replace(
                message,
                codec=codec,
                count=self._tokens.count,
                dim=self._tokens.dim,
                itinerary=_add_codec_time(message.itinerary, self.name, spent),
            )
            frames = [wire.encode(message), payload]
        else:
            frames = [wire.encode(message)]
        links = self._links_of.get(send.to)
        if not links or not any(self._links.send(link, frames) for link in links):
            self.counts["unsendable"] += 1
            self.feed(Unsendable(send.to, send.message))

    def _send_link(self, link: Link, message: Message) -> None:
        self._links.send(link, [wire.encode(message)])

    def _tell_everybody(self) -> None:
        self._tell_at = time.monotonic() + STATE_EVERY
        if self.role == "peer":
            for name, links in self._links_of.items():
                self._links.send(links[0], [wire.encode(self._state(name))])

    def _note(self, note: Note) -> None:
        level = logging.INFO if note.what in ("rerouted", "engine is back") else logging.WARNING
        extra = {"peer": note.peer, "why": note.why}
        log.log(level, note.what, extra=extra | ({"request": note.request.hex()[:8]} if note.request else {}))
        if self.on_note is not None:
            self.on_note(note)


def _begins_track(message: Message) -> bool:
    return isinstance(message, Run) and message.itinerary.track is not None and not message.returning


def new_incarnation() -> int:
    """A number that tells this process from the one that had its name before."""
    return secrets.randbits(63)


def _add_codec_time(itinerary: wire.Itinerary, name: str, codec_us: int) -> wire.Itinerary:
    visits = itinerary.visits
    if not visits or visits[-1].holder != name:
        return itinerary
    last = msgspec.structs.replace(visits[-1], codec_us=visits[-1].codec_us + codec_us)
    return msgspec.structs.replace(itinerary, visits=(*visits[:-1], last))


def _curve(peers: PeersFile, name: str, keys: KeyPair | None) -> Curve | None:
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
            f"the secret key is not {name!r}'s: its public key {belongs}; check --secret-key and {peers.path}"
        )
    return Curve(keys, peer_keys, names)
