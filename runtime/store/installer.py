"""The peer's side of ``ls-edge push``: take an offered bundle into the store and switch to it.

The peer asks for each piece of a file (WANT), so it controls how much is under way: a few pieces, a single one while it
has requests. A low-priority thread writes, verifies, and builds engines while the peer still serves the bundle before.
One process pushes at a time; the first that offers keeps its turn until its link ends, and through a switch, in which
all links end. ``PROTOCOL.md`` describes the messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LsEdgeError
from ls_edge.core.records import MAX_TEXT
from ls_edge.runtime.execution.worker import Worker
from ls_edge.runtime.protocol.messages import (
    MAX_CHUNK,
    Chunk,
    Install,
    Offer,
    PushMessage,
    Stored,
    StoreState,
    Want,
)
from ls_edge.runtime.routing.peer_rules import PeerMachine
from ls_edge.runtime.store.store import Store, Wanted
from ls_edge.runtime.transport.node import Node
from ls_edge.runtime.transport.problems import one_line

log = logging.getLogger("ls_edge.runtime")

WINDOW, BUSY_WINDOW = 8, 1
"""Pieces under way or being written; the second while the peer has requests, which so wait for one piece at most."""
ASK_AGAIN_S = 2.0
"""Seconds after which a piece that did not arrive is asked for again, and a failed write of the record is repeated."""
MOST_ASKED = 5
"""Times that a piece is asked for before the push fails."""
KEEP_TURN_S = 60.0
"""Seconds for which the pusher that asked for a switch keeps its turn without a link."""
_NICENESS = 5

_NO_PROGRESS = (0, 0, "")

T = TypeVar("T")
Build = Callable[[Bundle, Callable[[int, int, str], None]], Iterator[object]]


@dataclass(eq=False)
class _Push:
    """One offer of one pusher."""

    pusher: str
    manifest: str
    size: int
    state: StoreState = StoreState.RECEIVING
    reason: str = ""
    wanted: Wanted = field(default_factory=Wanted)
    file: tuple[str, int] | None = None
    """Digest and bytes of the incoming file."""
    began_at: int = 0
    """Bytes of it that were there before this push."""
    written: int = 0
    received: int = 0
    asked: int = 0
    tries: int = 0
    last: float = 0.0


class Installer:
    """Receiver of the bundles for the store of a peer; used by the thread of the peer's links."""

    def __init__(self, store: Store, name: str, check: Callable[[Bundle], None], build: Build) -> None:
        """``check`` raises if a bundle does not fit the peer; ``build`` builds its engines, one at a time."""
        self.is_switching = False
        """Whether the peer has to leave and serve the bundle that is active in the store now."""
        self._store = store
        self._check, self._build = check, build
        self._building = ""
        """Manifest of the bundle whose engines are being built."""
        self._progress = self._reported = _NO_PROGRESS
        self._node: Node | None = None
        self._machine: PeerMachine | None = None
        self._serving: str | None = None
        self._pushers: set[str] = set()
        self._push: _Push | None = None
        self._turn: tuple[str, float] = ("", 0.0)
        self._confirm_at: float | None = None
        """Time to record that the served bundle is warm; None once that is done, or where there is none."""
        self._trouble = ""
        """Reason why that could not be recorded."""
        self._worker: Worker[Callable[[], None]] = Worker(f"store of {name}", self._wake, niceness=_NICENESS)

    @property
    def note(self) -> str | UnsetType:
        """The note of a HELLO: the reason why the peer does not serve the bundle that it should."""
        reason = self._store.record.reason
        return one_line(reason, MAX_TEXT) if reason else UNSET

    @property
    def is_timed(self) -> bool:
        """Whether :meth:`step` has work that no event announces."""
        return self._push is not None or self._confirm_at is not None

    def attach(self, node: Node, machine: PeerMachine, *, serves: bool) -> None:
        """Use the links of a peer that begins to serve the active bundle, or waits for one."""
        self._node, self._machine = node, machine
        self._serving = self._store.record.active if serves else None
        self._pushers.clear()
        self._push, self.is_switching = None, False
        self._progress = self._reported = _NO_PROGRESS
        self._confirm_at = 0.0 if serves else None

    def close(self) -> None:
        """Stop after the current job and close the store."""
        self._worker.close()
        self._store.close()

    def greeted(self, pusher: str) -> None:
        """Report the store to a pusher that was let in."""
        self._pushers.add(pusher)
        self._report(pusher)

    def lost(self, name: str) -> None:
        """Forget a process that is gone; the files of its push stay on the disk."""
        self._pushers.discard(name)
        if self._push is not None and self._push.pusher == name:
            self._push = None

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Handle a message of a pusher if it is that pusher's turn."""
        if isinstance(message, Offer):
            self._on_offer(pusher, message)
        elif self._push is None or self._push.pusher != pusher:
            self._report(pusher)
        elif isinstance(message, Chunk):
            self._on_chunk(self._push, message)
        elif isinstance(message, Install):
            self._on_install(self._push, message)

    def step(self) -> None:
        """Handle the results of the store's thread, ask for missing pieces, and confirm a bundle that is warm."""
        for handle in self._worker.results():
            handle()
        if self._confirm_at is not None and self._machine is not None and self._machine.rules.warm:
            self._settle()
        if self._push is not None and self._push.state is StoreState.RECEIVING and self._push.file is not None:
            self._ask(self._push, self._push.file)
        if self._progress != self._reported:
            self._reported = self._progress
            if self._push is not None and self._push.state in (StoreState.BUILDING, StoreState.SWITCHING):
                self._report(self._push.pusher)

    def progress(self, done: int, total: int, text: str) -> None:
        """Report how many engines are built or open, of how many, and the next step; any thread may call."""
        self._progress = done, total, one_line(text, MAX_TEXT)
        self._wake()

    # Messages of pushers.

    def _on_offer(self, pusher: str, offer: Offer) -> None:
        push = self._push
        if self._other_holder(pusher):
            self._report(pusher)
            return
        manifest = offer.manifest.hex()
        if push is not None and push.manifest == manifest and push.state is not StoreState.FAILED:
            self._report(pusher)  # a repeated offer
            return
        push = self._push = _Push(pusher, manifest, offer.size, last=time.monotonic())
        log.info("a bundle is offered", extra={"peer": pusher})
        self._look(push)

    def _on_chunk(self, push: _Push, chunk: Chunk) -> None:
        if push.file is None or push.state is not StoreState.RECEIVING:
            return
        digest, size = push.file
        expected = min(MAX_CHUNK, size - push.received)
        if chunk.digest.hex() != digest or chunk.offset != push.received or push.asked <= push.received:
            return  # not asked for, or no longer
        if len(chunk.data) != expected:
            self._fail(push, f"received {len(chunk.data)} bytes, asked for {expected}; push again")
            return
        offset = push.received
        push.received += expected
        push.last, push.tries = time.monotonic(), 0

        def written(_: None) -> None:
            push.written = offset + expected
            if push.written == size:
                self._go_on(push)

        self._do_for(push, lambda: self._store.write(digest, size, offset, chunk.data), written)

    def _on_install(self, push: _Push, install: Install) -> None:
        if push.state is StoreState.READY and install.manifest.hex() == push.manifest:
            push.state, push.reason = StoreState.SWITCHING, ""
            self._turn = (push.pusher, time.monotonic() + KEEP_TURN_S)
            log.info("switching", extra={"peer": push.pusher, "bundle": self._store.shown_id(push.manifest)})

            def switched(_: None) -> None:
                self.is_switching = True

            def failed(why: str) -> None:
                self._turn = ("", 0.0)
                self._failed(push, why)

            # The record is written before the peer drains, so a full disk costs no answers.
            self._do(lambda: self._store.switch(push.manifest), switched, failed)
        self._report(push.pusher)

    # Jobs of the store's thread.

    def _do(self, job: Callable[[], T], then: Callable[[T], None], failed: Callable[[str], None]) -> None:
        """Run a job on the store's thread; :meth:`step` calls ``then`` or ``failed``."""

        def run() -> Callable[[], None]:
            try:
                value = job()
            except LsEdgeError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001  a push must not end the peer
                why = f"the store failed: {error}; push again"
            else:
                return lambda: then(value)
            return lambda: failed(why)

        self._worker.submit(run)

    def _do_for(self, push: _Push, job: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run a job of a push; its result counts while the push lasts."""

        def done(value: T) -> None:
            if push is self._push and push.state is StoreState.RECEIVING:
                then(value)

        self._do(job, done, lambda why: self._failed(push, why))

    def _failed(self, push: _Push, why: str) -> None:
        if push is not self._push or push.state is StoreState.FAILED:
            log.warning("the store failed", extra={"why": why})
        elif push.began_at:  # the bytes from before this push may be the damaged ones
            push.began_at = 0
            self._look(push)
        else:
            self._fail(push, why)

    def _settle(self) -> None:
        """Record that the served bundle is warm; a failed write is repeated, and the push waits for it."""
        serving = self._serving
        is_due = self._confirm_at is not None and time.monotonic() >= self._confirm_at
        if self._store.is_confirmed:
            self._confirm_at = None
            self._report_switch(StoreState.ACTIVE, "")
        elif is_due and serving is not None and serving == self._store.record.active:
            self._confirm_at = float("inf")
            self._do(lambda: self._store.confirm(serving), lambda _: self._settle(), self._on_unconfirmed)

    def _on_unconfirmed(self, why: str) -> None:
        self._confirm_at = time.monotonic() + ASK_AGAIN_S
        if why != self._trouble:
            self._trouble = why
            log.warning("the store cannot record that the bundle is warm", extra={"why": why})
        self._report_switch(StoreState.SWITCHING, why)

    def _report_switch(self, state: StoreState, reason: str) -> None:
        self._turn = ("", 0.0)
        push = self._push
        if push is not None and push.state is StoreState.SWITCHING and push.manifest == self._serving:
            push.state, push.reason = state, one_line(reason, MAX_TEXT)
        for pusher in self._pushers:
            self._report(pusher)

    def _look(self, push: _Push) -> None:
        def found(wanted: Wanted) -> None:
            push.wanted = wanted
            if wanted.missing:
                self._begin(push)
            else:
                self._complete(push)
            self._report(push.pusher)

        self._do_for(push, lambda: self._store.want(push.manifest, push.size, self._check), found)

    def _complete(self, push: _Push) -> None:
        push.file = None
        record = self._store.record
        if record.failed == push.manifest:
            push.reason = one_line(record.reason, MAX_TEXT)
        if push.manifest == self._serving:
            push.state = StoreState.ACTIVE if self._confirm_at is None else StoreState.SWITCHING
        else:
            push.state = StoreState.BUILDING
            if self._building != push.manifest:
                self._build_for(push.manifest)

    def _build_for(self, manifest: str) -> None:
        """Build the engines of a complete bundle; for any pusher that offers it, and until another one is offered."""
        self._building, self._progress = manifest, _NO_PROGRESS

        def build() -> None:
            for _ in self._build(self._store.open(manifest), self.progress):
                if self._push is not None and self._push.manifest != manifest:
                    raise BundleError("another bundle was offered")

        def ended(why: str = "") -> None:
            self._building = ""
            push = self._push
            if push is None or push.manifest != manifest or push.state is not StoreState.BUILDING:
                return
            if why:
                self._fail(push, why)
                return
            push.state = StoreState.READY
            shown = self._store.shown_id(manifest)
            log.info("a bundle is complete", extra={"peer": push.pusher, "bundle": shown})
            self._report(push.pusher)

        self._do(build, lambda _: ended(), ended)

    def _begin(self, push: _Push) -> None:
        digest, size = push.file = push.wanted.missing[0]
        there = self._store.received(digest)
        if there >= size:
            there = 0
        push.began_at = push.written = push.received = push.asked = there
        push.last, push.tries = time.monotonic(), 0

    def _go_on(self, push: _Push) -> None:
        """Begin with the next file, or check all of them after the last."""
        push.began_at, push.file = 0, None
        push.wanted = msgspec.structs.replace(push.wanted, missing=push.wanted.missing[1:])
        if push.wanted.missing:
            self._begin(push)
        else:
            self._look(push)
        self._report(push.pusher)

    # Messages to pushers.

    def _ask(self, push: _Push, file: tuple[str, int]) -> None:
        digest, size = file
        now = time.monotonic()
        if push.asked > push.received and now - push.last > ASK_AGAIN_S:
            push.asked, push.last = push.received, now
            push.tries += 1
            if push.tries >= MOST_ASKED:
                self._fail(push, f"{push.pusher} does not send the pieces that it was asked for; push again")
                return
        is_busy = self._machine is not None and bool(self._machine.held)
        window = MAX_CHUNK * (BUSY_WINDOW if is_busy else WINDOW)
        while push.asked < size and push.asked - push.written < window:
            length = min(MAX_CHUNK, size - push.asked)
            if push.asked == push.received:
                push.last = now
            self._send(push.pusher, Want(bytes.fromhex(digest), push.asked, length))
            push.asked += length

    def _fail(self, push: _Push, reason: str) -> None:
        push.state, push.reason, push.file = StoreState.FAILED, one_line(reason, MAX_TEXT), None
        shown = self._store.shown_id(push.manifest)
        log.warning("a push failed", extra={"peer": push.pusher, "bundle": shown, "why": push.reason})
        self._report(push.pusher)

    def _other_holder(self, pusher: str) -> str:
        """Return the name of another pusher whose turn it is, or an empty string."""
        holder, until = self._turn
        if self._push is not None:
            holder = self._push.pusher
        elif time.monotonic() >= until:
            return ""
        return "" if holder == pusher else holder

    def _report(self, pusher: str) -> None:
        record, push = self._store.record, self._push
        active, previous = bytes.fromhex(record.active or ""), bytes.fromhex(record.previous or "")
        if push is not None and push.pusher == pusher:
            missing = sum(size for _, size in push.wanted.missing)
            if push.file is not None:
                missing -= push.written
            said = Stored(
                push.state,
                bytes.fromhex(push.manifest),
                active,
                previous,
                push.wanted.parts,
                push.wanted.size,
                max(0, missing),
                push.reason,
                *(self._progress if push.state in (StoreState.BUILDING, StoreState.SWITCHING) else _NO_PROGRESS),
            )
        elif other := self._other_holder(pusher):
            reason = f"{other} pushes a bundle at the moment; try again when it is done"
            said = Stored(StoreState.BUSY, b"", active, previous, reason=one_line(reason, MAX_TEXT))
        else:
            said = Stored(StoreState.IDLE, b"", active, previous)
        self._send(pusher, said)

    def _send(self, pusher: str, message: Want | Stored) -> None:
        assert self._node is not None
        self._node.send_to(pusher, message)

    def _wake(self) -> None:
        if self._node is not None:
            self._node.wake()
