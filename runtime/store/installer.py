"""The peer's side of ``ls-edge apply``: receive a bundle and a ``peers.yaml``, and switch to them.

The peer asks for each piece of a file (WANT), so it controls how much is in flight: a few pieces, or one piece while it
has requests. A low-priority thread writes, verifies, and builds engines while the peer still serves the previous
bundle. One process pushes at a time: the first one that offers keeps its turn until its link ends, and through a
switch, in which all links end. ``PROTOCOL.md`` describes the messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from ls_edge.core.errors import UsageError
from ls_edge.core.files import MAX_BYTES
from ls_edge.core.records import MAX_TEXT
from ls_edge.core.text import one_line
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.protocol.messages import (
    DIGEST_BYTES,
    MAX_CHUNK,
    Chunk,
    Install,
    Offer,
    PushMessage,
    Stored,
    StoreState,
    Want,
)
from ls_edge.runtime.routing.peer.peer_rules import PeerMachine
from ls_edge.runtime.store.announced import AnnouncedFiles
from ls_edge.runtime.store.jobs import (
    AGAIN_S,
    NO_PROGRESS,
    Comparison,
    EngineBuild,
    Fleet,
    Offered,
    StoreThread,
    T,
    Trial,
)
from ls_edge.runtime.store.store import Store, Wanted
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

WINDOW, BUSY_WINDOW = 8, 1
"""Pieces in flight or being written: usually, and while the peer has requests, so that they wait for at most one."""
MOST_ASKED = 5
"""Number of requests for a piece after which the push fails."""
KEEP_TURN_S = 60.0
"""Seconds for which the pusher that requested a switch keeps its turn until it is back on a link."""


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


@dataclass(eq=False)
class _Push:
    """One offer of one pusher, and the incoming file."""

    pusher: str
    manifest: str
    size: int
    applied: AppliedFile | None
    applied_size: int
    state: StoreState = StoreState.RECEIVING
    reason: str = ""
    wanted: Wanted = field(default_factory=Wanted)
    file: tuple[str, int] | None = None
    """Digest and size of the incoming file."""
    began_at: int = 0
    """Bytes of that file that existed before this push."""
    written: int = 0
    received: int = 0
    asked: int = 0
    tries: int = 0
    behind: tuple[str, ...] = ()
    """Linked sources that have not announced the offered ``peers.yaml``."""
    last: float = field(default_factory=time.monotonic)

    def on(self, event: Event, reason: str = "") -> None:
        """Enter the state that follows an event."""
        self.state, self.reason = TRANSITIONS[self.state, event], one_line(reason, MAX_TEXT) if reason else ""

    @property
    def offered(self) -> Offered:
        """Bundle and file."""
        return self.manifest, self.applied

    def begin(self, received: Callable[[str], int]) -> None:
        """Begin with the first missing file; ``received`` returns how many of its bytes exist."""
        digest, size = self.file = self.wanted.missing[0]
        there = received(digest)
        if there >= size:
            there = 0
        self.began_at = self.written = self.received = self.asked = there
        self.last, self.tries = time.monotonic(), 0

    def expects(self, chunk: Chunk) -> bool:
        """Return whether ``chunk`` is the next requested piece."""
        if self.file is None or self.state is not StoreState.RECEIVING:
            return False
        return (chunk.digest.hex(), chunk.offset) == (self.file[0], self.received) and self.asked > self.received

    def repeat(self, now: float) -> None:
        """Request missing pieces again if they did not arrive in time."""
        if self.asked > self.received and now - self.last > AGAIN_S:
            self.asked, self.last = self.received, now
            self.tries += 1

    def wants(self, window: int, now: float) -> Iterator[Want]:
        """Yield requests for further pieces of the file, with ``window`` bytes in flight or being written."""
        assert self.file is not None
        digest, size = self.file
        while self.asked < size and self.asked - self.written < window:
            length = min(MAX_CHUNK, size - self.asked)
            if self.asked == self.received:
                self.last = now
            yield Want(bytes.fromhex(digest), self.asked, length)
            self.asked += length

    def stored(self, active: bytes, previous: bytes, progress: tuple[int, int, str]) -> Stored:
        """Return the report on this push."""
        missing = sum(size for _, size in self.wanted.missing) - (self.written if self.file is not None else 0)
        return Stored(
            self.state,
            bytes.fromhex(self.manifest),
            active,
            previous,
            self.wanted.parts,
            self.wanted.size,
            max(0, missing),
            self.reason,
            *(progress if self.state in (StoreState.BUILDING, StoreState.SWITCHING) else NO_PROGRESS),
            self.behind,
        )


class Installer:
    """Receiver of bundles for the store of a peer; used by the thread of the peer's links."""

    def __init__(self, store: Store, name: str, fleet: Fleet) -> None:
        """Receive bundles and files for the peer ``name``."""
        self.is_switching = False
        """Whether the peer has to leave and serve the bundle that is now active in the store."""
        self.lacking = ""
        """Parts that the peer should serve and the store lacks, with advice; empty if it lacks none."""
        self.files = AnnouncedFiles(store, fleet)
        self._store, self._fleet = store, fleet
        self._thread = StoreThread(name)
        self.engines = EngineBuild(fleet, self._thread.wake)
        self._trial = Trial(store, self._thread, self._report_switch)
        self._comparison = Comparison(store, self._thread)
        self._machine: PeerMachine | None = None
        self._pushers: set[str] = set()
        self._push: _Push | None = None
        self._turn: tuple[str, float] = ("", 0.0)

    @property
    def note(self) -> str | UnsetType:
        """Note for HELLO: the reason why the peer does not serve all of its parts."""
        found = "" if self._push is not None else self._comparison.result()
        reason = self._store.record.reason or self.lacking or found or self.files.newer_elsewhere()
        return one_line(reason, MAX_TEXT) if reason else UNSET

    @property
    def is_timed(self) -> bool:
        """Whether :meth:`step` has work that depends on the clock."""
        return self._push is not None or self._trial.due is not None

    def attach(self, node: Node, machine: PeerMachine, *, serves: bool) -> None:
        """Use the links of a peer that begins to serve the active bundle or waits for one."""
        self._thread.node, self._machine, self.files.machine = node, machine, machine
        self._trial.begin(self._store.record.active if serves else None)
        self._pushers.clear()
        self._push, self.is_switching = None, False
        self.engines.progress = NO_PROGRESS

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
                self._turn = ("", 0.0)
            self._push = None

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Handle a message of a pusher, if it has the turn."""
        if isinstance(message, Offer):
            self._on_offer(pusher, message)
        elif self._push is None or self._push.pusher != pusher:
            self._report(pusher)
        elif isinstance(message, Chunk):
            self._on_chunk(self._push, message)
        elif isinstance(message, Install):
            self._on_install(self._push, message)

    def step(self) -> None:
        """Handle the results of the store's thread, request missing pieces, and confirm a bundle that is warm."""
        self._thread.handle_results()
        if self._trial.due is not None and self._machine is not None and self._machine.rules.warm:
            self._trial.settle()
        if self._push is not None and self._push.state is StoreState.RECEIVING and self._push.file is not None:
            self._ask(self._push)
        has_news, push = self.engines.has_news(), self._push
        if push is not None and push.applied is not None and push.behind != (behind := self.files.behind(push.applied)):
            push.behind = behind
            self._report(push.pusher)
        if has_news and push is not None and push.state in (StoreState.BUILDING, StoreState.SWITCHING):
            self._report(push.pusher)

    # Messages of pushers.

    def _on_offer(self, pusher: str, offer: Offer) -> None:
        push = self._push
        if self._other_holder(pusher):
            self._report(pusher)
            return
        file = AppliedFile(offer.version, offer.file.hex()) if len(offer.file) == DIGEST_BYTES else None
        manifest = offer.manifest.hex()
        if push is not None and push.offered == (manifest, file) and push.state is not StoreState.FAILED:
            self._report(pusher)  # a repeated offer
            return
        push = self._push = _Push(pusher, manifest, offer.size, file, offer.file_size)
        version = {} if file is None else {"version": file.version}
        log.info("a bundle is offered", extra={"peer": pusher, **version})
        self._look(push)

    def _on_chunk(self, push: _Push, chunk: Chunk) -> None:
        if push.file is None or not push.expects(chunk):
            return  # not requested, or no longer
        digest, size = push.file
        offset, end = push.received, min(push.received + MAX_CHUNK, size)
        if len(chunk.data) != end - offset:
            self._fail(push, f"received {len(chunk.data)} bytes, requested {end - offset}; apply again")
            return
        push.received = end
        push.last, push.tries = time.monotonic(), 0

        def written(_: None) -> None:
            push.written = end
            if push.written == size:
                self._go_on(push)

        self._do_for(push, lambda: self._store.write(digest, size, offset, chunk.data), written)

    def _on_install(self, push: _Push, install: Install) -> None:
        if push.state is StoreState.ACTIVE and install.ends_change:
            self._change_files(push, self._store.end_change, lambda _: self._report(push.pusher))
        elif push.state is StoreState.READY and install.manifest.hex() == push.manifest:
            push.on("installed")
            self._turn = (push.pusher, time.monotonic() + KEEP_TURN_S)
            log.info("switching", extra={"peer": push.pusher, "bundle": self._store.shown_id(push.manifest)})

            is_listed = push.wanted.parts > 0

            def switched(has_to_reopen: bool) -> None:
                if has_to_reopen or not is_listed or push.manifest != self._trial.serving or self.lacking:
                    self.is_switching = True
                else:  # other entries have changed
                    self._trial.begin(push.manifest)

            def failed(why: str) -> None:
                self._turn = ("", 0.0)
                self._failed(push, why)

            # The record is written before the peer drains, so that a full disk costs no answers.
            self._change_files(
                push, lambda: self._store.switch(push.manifest, push.applied, is_listed=is_listed), switched, failed
            )
        self._report(push.pusher)

    def _change_files(
        self,
        push: _Push,
        write: Callable[[], None],
        then: Callable[[bool], None],
        failed: Callable[[str], None] | None = None,
    ) -> None:
        """Write the record, and use its files; call ``then`` with whether the peer has to reopen."""

        def job() -> Callable[[], bool]:
            write()
            return self._fleet.follow()

        self._thread.do(job, lambda follow: then(follow()), failed or (lambda why: self._failed(push, why)))

    # Jobs of the store's thread.

    def _do_for(self, push: _Push, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run a job of a push; ignore its result after the end of the push."""

        def done(value: T) -> None:
            if push is self._push and push.state is StoreState.RECEIVING:
                then(value)

        self._thread.do(job, done, lambda why: self._failed(push, why))

    def _failed(self, push: _Push, why: str) -> None:
        if push is not self._push or push.state is StoreState.FAILED:
            log.warning("the store failed", extra={"why": why})
        elif push.began_at:  # the bytes from before this push may be damaged
            push.began_at = 0
            self._look(push)
        else:
            self._fail(push, why)

    def _report_switch(self, trouble: str) -> None:
        self._turn = ("", 0.0)
        push = self._push
        if push is not None and push.state is StoreState.SWITCHING and push.manifest == self._trial.serving:
            push.on("unrecorded" if trouble else "recorded", trouble)
        for pusher in self._pushers:
            self._report(pusher)

    def _look(self, push: _Push) -> None:
        def found(wanted: Wanted) -> None:
            push.wanted = wanted
            if wanted.missing:
                push.begin(self._store.received)
            else:
                self._complete(push)
            self._report(push.pusher)

        file = None if push.applied is None else (push.applied.digest, push.applied_size)

        def look() -> Wanted:
            if push.applied_size > MAX_BYTES:
                raise UsageError(f"the offered peers.yaml has {push.applied_size} bytes, at most {MAX_BYTES} are read")
            return self._store.want(
                push.manifest, push.size, lambda bundle: self._fleet.parts_of(bundle, push.applied), file
            )

        self._do_for(push, look, found)

    def _complete(self, push: _Push) -> None:
        push.file = None
        record = self._store.record
        has_failed = record.failed in (push.manifest, push.applied and push.applied.digest)
        reason = record.reason if record.failed is not None and has_failed else ""
        is_removed = not push.wanted.parts and record.active is None and push.applied in record.accepts
        is_served = push.manifest == self._trial.serving and not self.lacking
        if is_removed:
            push.on("served", reason)
        elif is_served and push.applied in (None, record.file):
            push.on("served" if self._trial.due is None else "warming", reason)
        else:
            push.on("stored", reason)
            if self.engines.offered != push.offered:
                self._build_for(push.offered)

    def _build_for(self, offered: Offered) -> None:
        """Build the engines of a complete bundle for all pushers that offer it, until another one is offered."""
        self.engines.offered, self.engines.progress = offered, NO_PROGRESS
        manifest, file = offered

        def is_wanted() -> bool:
            return self._push is None or self._push.offered == offered

        def ended(why: str = "") -> None:
            self.engines.offered = None
            push = self._push
            if push is None or push.offered != offered or push.state is not StoreState.BUILDING:
                return
            if why:
                self._fail(push, why)
                return
            push.on("built", push.reason)
            log.info("a bundle is complete", extra={"peer": push.pusher, "bundle": self._store.shown_id(manifest)})
            self._report(push.pusher)

        def built(follow: Callable[[], bool]) -> None:
            follow()
            ended()

        self._thread.do(lambda: self.engines.run(self._store.open(manifest), file, is_wanted), built, ended)

    def _go_on(self, push: _Push) -> None:
        """Begin with the next file, or check all files after the last one."""
        push.began_at, push.file = 0, None
        push.wanted = msgspec.structs.replace(push.wanted, missing=push.wanted.missing[1:])
        if push.wanted.missing:
            push.begin(self._store.received)
        else:
            self._look(push)
        self._report(push.pusher)

    # Messages to pushers.

    def _ask(self, push: _Push) -> None:
        now = time.monotonic()
        push.repeat(now)
        if push.tries >= MOST_ASKED:
            self._fail(push, f"{push.pusher} does not send the requested pieces; apply again")
            return
        is_busy = self._machine is not None and bool(self._machine.held)
        for want in push.wants(MAX_CHUNK * (BUSY_WINDOW if is_busy else WINDOW), now):
            self._send(push.pusher, want)

    def _fail(self, push: _Push, reason: str) -> None:
        push.on("failed", reason)
        push.file = None
        shown = self._store.shown_id(push.manifest)
        log.warning("a push failed", extra={"peer": push.pusher, "bundle": shown, "why": push.reason})
        self._report(push.pusher)

    def _other_holder(self, pusher: str) -> str:
        """Return the name of another pusher whose turn it is, or an empty string."""
        kept, until = self._turn
        holder = self._push.pusher if self._push is not None else kept if time.monotonic() < until else ""
        return "" if holder == pusher else holder

    def _report(self, pusher: str) -> None:
        record, push = self._store.record, self._push
        active, previous = bytes.fromhex(record.active or ""), bytes.fromhex(record.previous or "")
        if push is not None and push.pusher == pusher:
            said = push.stored(active, previous, self.engines.progress)
        elif other := self._other_holder(pusher):
            reason = f"{other} is pushing a bundle; try again when it has finished"
            said = Stored(StoreState.BUSY, b"", active, previous, reason=one_line(reason, MAX_TEXT))
        else:
            said = Stored(StoreState.IDLE, b"", active, previous)
        self._send(pusher, said)

    def _send(self, pusher: str, message: Want | Stored) -> None:
        assert self._thread.node is not None
        self._thread.node.send_to(pusher, message)
