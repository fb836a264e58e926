"""The peer's side of ``ls-edge apply``: receive a bundle and a ``peers.yaml``, and switch to them.

The peer asks for each piece of a file (WANT), so it controls how much is in flight: a few pieces, or one piece while it
has requests. A low-priority thread writes, verifies, and builds engines while the peer still serves the previous
bundle. One process pushes at a time: the first one that offers keeps its turn until its link ends, and through a
switch, in which all links end. ``PROTOCOL.md`` describes the messages.

:meth:`Installer._take` is the course of a push, from its offer to the end of the change.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ls_edge.core.errors import BundleError, DigestMismatch, LsEdgeError, UsageError
from ls_edge.core.files import MAX_BYTES
from ls_edge.core.peer_reports import MAX_TEXT
from ls_edge.core.text import one_line
from ls_edge.runtime.change.record import AppliedFile, StoreRecord
from ls_edge.runtime.protocol.messages import (
    DIGEST_BYTES,
    MAX_BEHIND,
    MAX_CHUNK,
    Chunk,
    FileVersion,
    Install,
    Message,
    Offer,
    PushMessage,
    Stored,
    StoreState,
    Want,
)
from ls_edge.runtime.routing.peer.peer_rules import PeerMachine
from ls_edge.runtime.routing.state.neighbors import Neighbor
from ls_edge.runtime.store.jobs import AGAIN_S, Course, Fleet, StoreThread
from ls_edge.runtime.store.store import Store, Wanted
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

WINDOW, BUSY_WINDOW = 8, 1
"""Pieces in flight or being written: usually, and while the peer has requests, so that they wait for at most one."""
MOST_ASKED = 5
"""Number of requests for a piece after which the push fails."""
KEEP_TURN_S = 60.0
"""Seconds for which the pusher that requested a switch keeps its turn until it is back on a link."""
COMPARE_S = 0.1
"""Least time between two comparisons of the disk with what is served, in seconds."""
NO_PROGRESS = (0, 0, "")
_NO_TURN = ("", 0.0)


Event = Literal["served", "warming", "stored", "built", "installed", "recorded", "unrecorded", "failed"]
TRANSITIONS: Mapping[tuple[StoreState, Event], StoreState] = {
    (StoreState.RECEIVING, "served"): StoreState.ACTIVE,  # nothing changes
    (StoreState.RECEIVING, "warming"): StoreState.SWITCHING,  # it is served, and not recorded as warm yet
    (StoreState.RECEIVING, "stored"): StoreState.BUILDING,
    (StoreState.RECEIVING, "failed"): StoreState.FAILED,
    (StoreState.BUILDING, "built"): StoreState.READY,
    (StoreState.BUILDING, "failed"): StoreState.FAILED,
    (StoreState.READY, "installed"): StoreState.SWITCHING,
    (StoreState.SWITCHING, "recorded"): StoreState.ACTIVE,
    (StoreState.SWITCHING, "unrecorded"): StoreState.SWITCHING,
    (StoreState.SWITCHING, "failed"): StoreState.FAILED,
    (StoreState.ACTIVE, "failed"): StoreState.FAILED,  # the end of the change cannot be recorded
}
"""The state of a push that follows each event; a new offer begins another push."""
_WITH_PROGRESS = (StoreState.BUILDING, StoreState.SWITCHING)


@dataclass(eq=False)
class _Push:
    """One offer of one pusher, and the incoming file: the first one that is missing."""

    pusher: str
    offer: Offer
    manifest: str
    applied: AppliedFile | None
    state: StoreState = StoreState.RECEIVING
    reason: str = ""
    wanted: Wanted = field(default_factory=Wanted)
    pieces: list[bytes] = field(default_factory=list)
    """Received pieces that are not being written yet."""
    written: int = 0
    received: int = 0
    asked: int = 0
    tries: int = 0
    last: float = 0.0
    """Time of the last piece, or of the first request without an answer."""
    fault: str = ""
    """Fault of a received piece."""
    behind: tuple[str, ...] = ()
    """Linked sources that have not announced the offered ``peers.yaml``."""
    progress: tuple[int, int, str] = NO_PROGRESS
    """Progress of the engines that was reported."""
    ends: bool = False
    """Whether the pusher has asked for the end of the change."""

    def on(self, event: Event, reason: str = "") -> None:
        """Enter the state that follows an event."""
        self.state, self.reason = TRANSITIONS[self.state, event], one_line(reason, MAX_TEXT) if reason else ""

    def take(self, chunk: Chunk) -> None:
        """Take the next requested piece; ignore others, which were not requested or no longer are."""
        if self.state is not StoreState.RECEIVING or self.asked <= self.received:
            return
        digest, size = self.wanted.missing[0]
        if (chunk.digest.hex(), chunk.offset) == (digest, self.received):
            expected = min(MAX_CHUNK, size - self.received)
            if len(chunk.data) != expected:
                self.fault = f"received {len(chunk.data)} bytes, requested {expected}; apply again"
            self.pieces.append(chunk.data)
            self.received += expected
            self.last, self.tries = time.monotonic(), 0

    def wants(self, window: int) -> Iterator[Want]:
        """Yield requests for further pieces, with ``window`` bytes in flight, and for those that are overdue.

        Raise :class:`BundleError` if the pusher does not send them.
        """
        digest, size = self.wanted.missing[0]
        now = time.monotonic()
        if self.asked > self.received and now - self.last > AGAIN_S:
            self.asked, self.last = self.received, now
            self.tries += 1
        if self.tries >= MOST_ASKED:
            self.fault = f"{self.pusher} does not send the requested pieces; apply again"
        if self.fault:
            raise BundleError(self.fault)
        while self.asked < size and self.asked - self.written < window:
            if self.asked == self.received:
                self.last = now
            length = min(MAX_CHUNK, size - self.asked)
            yield Want(bytes.fromhex(digest), self.asked, length)
            self.asked += length


class AnnouncedFiles:
    """Files of this peer and of its neighbors."""

    def __init__(self, store: Store, fleet: Fleet) -> None:
        self.neighbors: Iterable[Neighbor] = ()
        """Neighbors whose files are compared."""
        self._store, self._fleet = store, fleet

    @property
    def own(self) -> tuple[FileVersion, ...]:
        """Applied file, and the other files whose processes are accepted."""
        record = self._store.record
        if record.file is None:
            return (FileVersion(0, hashlib.sha256(self._fleet.given).digest()),)
        return tuple(FileVersion(file.version, bytes.fromhex(file.digest)) for file in (record.file, *record.accepts))

    def content(self, digest: bytes) -> bytes:
        """Return the content of a file of :attr:`own`; empty for any other digest."""
        if all(file.digest != digest for file in self.own):
            return b""
        return self._fleet.given if self._store.record.file is None else self._store.read_raw(digest.hex())

    def behind(self, file: AppliedFile) -> tuple[str, ...]:
        """Return the linked sources that have not announced a file."""
        digest = bytes.fromhex(file.digest)
        sources = (neighbor.hello for neighbor in self.neighbors if neighbor.hello.role == "source")
        late = [hello.name for hello in sources if all(other.digest != digest for other in hello.files)]
        return tuple(sorted(late)[:MAX_BEHIND])

    def newer_elsewhere(self) -> str:
        """Name the neighbors with a newer file, which this peer missed while it was away; empty if there are none."""
        known = self.own
        peers = (neighbor.hello for neighbor in self.neighbors if neighbor.hello.role == "peer")
        newer = {
            hello.name: hello.files[0].version
            for hello in peers
            if hello.files and hello.files[0].version > known[0].version and hello.files[0] not in known
        }
        if not newer:
            return ""
        runs = f"version {max(newer.values())} of peers.yaml, this peer {known[0].version}"
        return f"{', '.join(sorted(newer))} have {runs}; run 'ls-edge apply' again"


class Installer:
    """Receiver of bundles for the store of a peer; used by the thread of the peer's links."""

    def __init__(self, store: Store, name: str, fleet: Fleet) -> None:
        """Receive bundles and files for the peer ``name``."""
        self.is_switching = False
        """Whether the peer has to leave and serve the bundle that is now active in the store."""
        self.lacking = ""
        """Parts that the peer should serve and the store lacks, with advice; empty if it lacks none."""
        self.progress = NO_PROGRESS
        """Number of engines that are built or open, their total, and the next step."""
        self.files = AnnouncedFiles(store, fleet)
        self._store, self._fleet = store, fleet
        self._thread = StoreThread(name)
        self._courses: list[Course[None]] = []
        """Work that each turn of the links continues."""
        self._compare_at = 0.0
        self._send: Callable[[str, Message], object]
        """Function that sends a message to a pusher; set by :meth:`attach`."""
        self._machine: PeerMachine | None = None
        self._serving: str | None = None
        """Manifest of the served bundle."""
        self._is_settled = True
        """Whether ``store.json`` records that this bundle was warm, or nothing is served."""
        self._pushers: set[str] = set()
        self._push: _Push | None = None
        self._turn: tuple[str, float] = _NO_TURN

    @property
    def note(self) -> str | UnsetType:
        """Note for HELLO: the reason why the peer does not serve all of its parts."""
        differs = self._store.difference if self._push is None else ""
        if self._push is None and time.monotonic() > self._compare_at:
            self._compare_at = time.monotonic() + COMPARE_S
            self._courses.append(self._thread.do(self._store.compare))
        reason = self._store.record.reason or self.lacking or differs or self.files.newer_elsewhere()
        return one_line(reason, MAX_TEXT) if reason else UNSET

    @property
    def is_timed(self) -> bool:
        """Whether :meth:`step` has work that depends on the clock."""
        return self._push is not None or not self._is_settled

    def show_progress(self, done: int, total: int, text: str) -> None:
        """Show how many engines are built or open, their total, and the next step; for any thread."""
        self.progress = done, total, one_line(text, MAX_TEXT)
        self._thread.wake()

    def attach(self, node: Node, machine: PeerMachine, *, serves: bool) -> None:
        """Use the links of a peer that begins to serve the active bundle or waits for one."""
        self._thread.node, self._send = node, node.send_to
        self._machine, self.files.neighbors = machine, machine.neighbors
        self._serving, self._is_settled = self._store.record.active if serves else None, not serves
        self._courses.append(self._settle())
        self._pushers.clear()
        self._push, self.is_switching, self.progress = None, False, NO_PROGRESS

    def close(self) -> None:
        """Stop after the current job, and close the store."""
        self._thread.close()
        self._store.close()

    def greeted(self, pusher: str) -> None:
        """Report on the store to a pusher that was admitted."""
        self._pushers.add(pusher)
        self._report(pusher)

    def lost(self, name: str) -> None:
        """Forget a process that has gone; received files stay on the disk."""
        self._pushers.discard(name)
        if self._push is not None and self._push.pusher == name:
            if self._push.state is not StoreState.SWITCHING:
                self._turn = _NO_TURN
            self._push = None

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Handle a message of a pusher, if it has the turn."""
        push = self._push
        if isinstance(message, Offer) and not self._other_holder(pusher):
            if push is None or push.offer != message or push.state is StoreState.FAILED:
                file = AppliedFile(message.version, message.file.hex()) if len(message.file) == DIGEST_BYTES else None
                self._push = _Push(pusher, message, message.manifest.hex(), file)
                self._courses.append(self._take(self._push))
                return  # otherwise, the offer is repeated
        elif push is None or push.pusher != pusher:
            pass
        elif isinstance(message, Chunk):
            push.take(message)
            return
        elif isinstance(message, Install):
            if push.state is StoreState.ACTIVE and message.ends_change:
                push.ends = True
            elif push.state is StoreState.READY and message.manifest == push.offer.manifest:
                push.on("installed")
                self._turn = (pusher, time.monotonic() + KEEP_TURN_S)
        self._report(pusher)

    def step(self) -> None:
        """Continue the courses, and report on a push to its pusher."""
        for course in tuple(self._courses):
            try:
                next(course)
            except (StopIteration, LsEdgeError) as end:
                self._courses.remove(course)
                if isinstance(end, LsEdgeError):
                    log.warning("the store failed", extra={"why": str(end)})
        if (push := self._push) is not None:
            behind = () if push.applied is None else self.files.behind(push.applied)
            has_news = push.state in _WITH_PROGRESS and push.progress != self.progress
            if has_news or push.behind != behind:
                push.behind, push.progress = behind, self.progress
                self._report(push.pusher)

    # The courses.

    def _take(self, push: _Push) -> Course[None]:
        """Take a push from its offer to the end of the change.

        It ends early when another push replaces it. What it has recorded by then is used nevertheless.
        """
        version = {} if push.applied is None else {"version": push.applied.version}
        log.info("a bundle is offered", extra={"peer": push.pusher, **version})
        try:
            yield from self._receive(push)
            if push.state is StoreState.BUILDING:
                yield from self._install(push)
            while push is self._push or push.ends:
                if push.ends:
                    push.ends = False
                    yield from self._thread.do(partial(self._store.change, StoreRecord.ended))
                    (yield from self._thread.do(self._fleet.follow))()
                    self._report(push.pusher)
                yield
        except LsEdgeError as error:
            self._turn = _NO_TURN
            if push is not self._push:
                raise
            push.on("failed", str(error))
            log.warning(
                "a push failed", extra={"peer": push.pusher, "bundle": push.wanted.shown_id, "why": push.reason}
            )
            self._report(push.pusher)

    def _receive(self, push: _Push) -> Course[None]:
        """Receive the missing files, verify all of them, and decide whether there is anything to install."""
        offer, file = push.offer, push.applied
        if offer.file_size > MAX_BYTES:
            raise UsageError(f"the offered peers.yaml has {offer.file_size} bytes, at most {MAX_BYTES} are read")
        record_file = None if file is None else (file.digest, offer.file_size)
        want = partial(
            self._store.want, push.manifest, offer.size, lambda it: self._fleet.entry_in(file, it).blocks, record_file
        )
        while True:
            push.wanted = yield from self._thread.do(want)
            if push is not self._push:
                return
            if not push.wanted.missing:
                break
            while push.wanted.missing and (yield from self._receive_file(push)):
                push.wanted = msgspec.structs.replace(push.wanted, missing=push.wanted.missing[1:])
        record = self._store.record
        has_failed = record.failed is not None and record.failed in (push.manifest, file and file.digest)
        is_served = push.manifest == self._serving and not self.lacking and file in (None, record.file)
        is_removed = not push.wanted.parts and record.active is None and file in record.accepts
        is_active = is_removed or (is_served and self._is_settled)
        event: Event = "served" if is_active else "warming" if is_served else "stored"
        push.on(event, record.reason if has_failed else "")
        self._report(push.pusher)

    def _receive_file(self, push: _Push) -> Course[bool]:
        """Receive the first missing file; return False if the bytes from before this push may be damaged."""
        digest, size = push.wanted.missing[0]
        began_at = self._store.received(digest)
        if began_at >= size:
            began_at = 0
        push.written = push.received = push.asked = began_at
        push.pieces, push.last, push.tries = [], time.monotonic(), 0
        self._report(push.pusher)
        writes = deque[tuple[int, Future[None]]]()
        while push is self._push:
            try:
                while writes and writes[0][1].done():
                    end, write = writes.popleft()
                    write.result()
                    push.written = end
            except DigestMismatch:
                if not began_at:
                    raise
                return False
            if push.written == size:
                return True
            is_busy = self._machine is not None and bool(self._machine.held)
            for want in push.wants(MAX_CHUNK * (BUSY_WINDOW if is_busy else WINDOW)):
                self._send(push.pusher, want)
            if data := b"".join(push.pieces):
                job = partial(self._store.write, digest, size, push.received - len(data), data)
                writes.append((push.received, self._thread.submit(job)))
                push.pieces = []
            yield
        return False

    def _install(self, push: _Push) -> Course[None]:
        """Build the engines of a complete bundle, and switch to it when the pusher says so."""
        (yield from self._thread.do(partial(self._build, push)))()
        extra = {"peer": push.pusher, "bundle": push.wanted.shown_id}
        if push is self._push:
            push.on("built", push.reason)
            log.info("a bundle is complete", extra=extra)
            self._report(push.pusher)
        while push is self._push and push.state is StoreState.READY:
            yield
        if push.state is not StoreState.SWITCHING:
            return
        log.info("switching", extra=extra)
        is_listed = push.wanted.parts > 0
        # The record is written before the peer drains, so that a full disk costs no answers.
        yield from self._thread.do(partial(self._store.switch, push.manifest, push.applied, is_listed=is_listed))
        has_to_reopen = (yield from self._thread.do(self._fleet.follow))()
        if has_to_reopen or not is_listed or push.manifest != self._serving or self.lacking:
            self.is_switching = True
        else:  # only other entries have changed
            self._is_settled = False
            self._courses.append(self._settle())

    def _build(self, push: _Push) -> Callable[[], bool]:
        """Build the engines of a complete bundle, then accept its file; return a function that uses it.

        Runs on the store's thread. Raise :class:`BundleError` if another bundle was offered meanwhile.
        """
        self.progress = NO_PROGRESS
        for _ in self._fleet.build(self._store.open(push.manifest), push.applied, self.show_progress):
            if (now := self._push) is not None and now.offer != push.offer:  # read once: links end on another thread
                raise BundleError("another bundle was offered")
        if push.applied is None:
            return lambda: False
        self._store.accept(push.applied, self._fleet.given)
        return self._fleet.follow()

    def _settle(self) -> Course[None]:
        """Record that the served bundle is warm, once it is; a failed write is repeated."""
        machine, serving, trouble, again_at = self._machine, self._serving, "", 0.0
        while machine is not None and machine is self._machine and serving is not None and not self._is_settled:
            yield
            is_due = machine.rules.warm and time.monotonic() >= again_at
            if not is_due or serving != self._store.record.active:
                continue
            try:
                yield from self._thread.do(partial(self._store.confirm, serving))
            except LsEdgeError as error:
                again_at = time.monotonic() + AGAIN_S
                if trouble != str(error):
                    trouble = str(error)
                    log.warning("the store cannot record that the bundle is warm", extra={"why": trouble})
            else:
                record, trouble = self._store.record, ""
                self._is_settled = record.active == serving and record.trial_starts is None
            if trouble or self._is_settled:
                self._turn, push = _NO_TURN, self._push
                if push is not None and push.state is StoreState.SWITCHING and push.manifest == serving:
                    push.on("unrecorded" if trouble else "recorded", trouble)
                for pusher in self._pushers:
                    self._report(pusher)

    # Messages to pushers.

    def _other_holder(self, pusher: str) -> str:
        """Return the name of another pusher whose turn it is, or an empty string."""
        kept, until = self._turn
        holder = self._push.pusher if self._push is not None else kept if time.monotonic() < until else ""
        return "" if holder == pusher else holder

    def _report(self, pusher: str) -> None:
        record, push = self._store.record, self._push
        active, previous = bytes.fromhex(record.active or ""), bytes.fromhex(record.previous or "")
        report = Stored(StoreState.IDLE, b"", active, previous)
        if push is not None and push.pusher == pusher:
            report = Stored(
                push.state,
                push.offer.manifest,
                active,
                previous,
                push.wanted.parts,
                push.wanted.size,
                max(0, sum(size for _, size in push.wanted.missing) - push.written),
                push.reason,
                *(self.progress if push.state in _WITH_PROGRESS else NO_PROGRESS),
                push.behind,
            )
        elif other := self._other_holder(pusher):
            reason = f"{other} is pushing a bundle; try again when it has finished"
            report = Stored(StoreState.BUSY, b"", active, previous, reason=one_line(reason, MAX_TEXT))
        self._send(pusher, msgspec.structs.replace(report, previous_model=self._store.model_of(record.previous)))
