"""The peer's side of ``ls-edge push``: it takes an offered bundle into its store, and says when to switch to it.

The peer asks for each piece of a file (WANT), so how much comes is its own decision: a few pieces at once, a single one
while it has requests. A thread of low priority writes and verifies. One process pushes at a time; the first that offers
keeps its turn until its link ends, and through a switch, in which all links end. ``PROTOCOL.md`` has the messages.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LsEdgeError
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.execution.worker import Worker
from ls_edge.runtime.protocol.messages import MAX_CHUNK, Chunk, Install, Offer, PushMessage, Stored, StoreState, Want
from ls_edge.runtime.store.store import NOTHING, Store, Wanted
from ls_edge.runtime.transport.problems import one_line

log = logging.getLogger("ls_edge.runtime")

WINDOW, BUSY_WINDOW = 8, 1
"""Pieces that are on their way or being written at once; the second while the peer has requests, so that these wait
for one piece at most."""
ASK_AGAIN_S = 2.0
"""Seconds without a piece after which it is asked for again."""
MOST_ASKED = 5
"""Times that a piece is asked for in vain."""
KEEP_TURN_S = 60.0
"""Seconds for which whoever asked for a switch keeps its turn without a link."""
_NICENESS = 5
_REASON = 250


@dataclass(eq=False)
class _Push:
    """One offer, from one pusher."""

    pusher: str
    manifest: str
    size: int
    state: StoreState = StoreState.RECEIVING
    reason: str = ""
    wanted: Wanted = NOTHING
    file: tuple[str, int] | None = None
    """Digest and bytes of the file that is coming in."""
    began_at: int = 0
    """Bytes of it that were there before."""
    written: int = 0
    received: int = 0
    asked: int = 0
    tries: int = 0
    last: float = 0.0


@dataclass(frozen=True)
class _Done:
    """What the thread of the store returns: of which push, what it did, and what came of it."""

    push: _Push | None
    what: str
    value: Wanted | int | None = None
    error: LsEdgeError | None = None


class Installer:
    """Takes bundles into the store of a peer; used by the thread of the peer's links."""

    def __init__(self, store: Store, peers: PeersFile, name: str, codecs: Collection[str]) -> None:
        """``codecs`` are those that ``peers.yaml`` may name."""
        self.switch_to: str | None = None
        """The bundle to which a pusher wants the peer to switch."""
        self._store = store
        self._peers = peers
        self._entry = peers.peer(name)
        self._codecs = codecs
        self._send: Callable[[str, Want | Stored], object] = lambda _to, _message: False
        self._wake: Callable[[], None] = lambda: None
        self._is_busy: Callable[[], bool] = lambda: False
        self._is_warm: Callable[[], bool] = lambda: False
        self._pushers: set[str] = set()
        self._push: _Push | None = None
        self._turn: tuple[str, float] = ("", 0.0)
        self._warm = self._serves = False
        self._worker: Worker[_Done] = Worker(f"store of {name}", lambda: self._wake(), niceness=_NICENESS)

    def attach(
        self,
        send: Callable[[str, Want | Stored], object],
        wake: Callable[[], None],
        *,
        is_busy: Callable[[], bool],
        is_warm: Callable[[], bool],
        serves: bool = True,
    ) -> None:
        """Use the links of a process that begins to serve; ``is_busy`` says whether it has requests.

        Without ``serves`` it waits for a bundle, and an Install of the active one makes it try again.
        """
        self._serves = serves
        self._send, self._wake, self._is_busy, self._is_warm = send, wake, is_busy, is_warm
        self._pushers.clear()
        self._push, self._warm = None, False

    def close(self) -> None:
        """Stop after the job that runs."""
        self._worker.close()
        self._store.close()

    def greeted(self, pusher: str) -> None:
        """A pusher was let in, and gets what is there."""
        self._pushers.add(pusher)
        self._report(pusher)

    def lost(self, name: str) -> None:
        """A process has gone; what came of its push is kept on the disk."""
        self._pushers.discard(name)
        if self._push is not None and self._push.pusher == name:
            self._push = None

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Do what a pusher says, as far as it is its turn."""
        if isinstance(message, Offer):
            self._on_offer(pusher, message)
        elif self._push is None or self._push.pusher != pusher:
            self._report(pusher)
        elif isinstance(message, Chunk):
            self._on_chunk(self._push, message)
        elif isinstance(message, Install):
            self._on_install(self._push, message)

    def step(self) -> None:
        """Take what the store's thread has done, and ask for what is missing."""
        for done in self._worker.results():
            if done.push is not None and done.push is self._push:
                self._take(done.push, done)
            elif done.error is not None:
                log.warning("the store failed", extra={"why": str(done.error)})
        push = self._push
        if self._is_warm() and not self._warm:
            self._warm = True
            self._turn = ("", 0.0)
            self._do(None, "confirm", self._store.confirm)
            if push is not None and push.state is StoreState.SWITCHING:
                push.state = StoreState.ACTIVE
            self._report_all()
        if push is not None and push.state is StoreState.RECEIVING and push.file is not None:
            self._ask(push, push.file)

    # What a pusher says.

    def _on_offer(self, pusher: str, offer: Offer) -> None:
        holder, until = self._turn
        if (self._push is not None and self._push.pusher != pusher) or (
            holder not in ("", pusher) and time.monotonic() < until
        ):
            self._report(pusher)
            return
        manifest = offer.manifest.hex()
        push = self._push
        if push is not None and push.manifest == manifest and push.state is not StoreState.FAILED:
            self._report(pusher)  # it was repeated
            return
        push = self._push = _Push(pusher, manifest, offer.size, last=time.monotonic())
        log.info("a bundle is offered", extra={"peer": pusher, "bundle": manifest[:8]})
        self._look(push)

    def _on_chunk(self, push: _Push, chunk: Chunk) -> None:
        if push.file is None or push.state is not StoreState.RECEIVING:
            return
        digest, size = push.file
        expected = min(MAX_CHUNK, size - push.received)
        if chunk.digest.hex() != digest or chunk.offset != push.received or push.asked <= push.received:
            return  # not asked for, or not any more
        if len(chunk.data) != expected:
            self._fail(push, f"{len(chunk.data)} bytes came where {expected} were asked for")
            return
        offset = push.received
        push.received += expected
        push.last, push.tries = time.monotonic(), 0

        def write() -> int:
            self._store.write(digest, offset, chunk.data)
            return offset + expected

        self._do(push, "write", write)

    def _on_install(self, push: _Push, install: Install) -> None:
        if push.state is StoreState.READY and install.manifest.hex() == push.manifest:
            push.state = StoreState.SWITCHING
            self.switch_to = push.manifest
            self._turn = (push.pusher, time.monotonic() + KEEP_TURN_S)
            log.info("switching", extra={"peer": push.pusher, "bundle": push.manifest[:8]})
        self._report(push.pusher)

    # What the store's thread does.

    def _look(self, push: _Push) -> None:
        self._do(push, "look", lambda: self._store.want(push.manifest, push.size, self._entry.blocks, self._check))

    def _check(self, bundle: Bundle) -> None:
        self._peers.check_blocks(bundle.num_blocks)
        self._peers.check_codecs(self._codecs)

    def _do(self, push: _Push | None, what: str, job: Callable[[], Wanted | int | None]) -> None:
        def run() -> _Done:
            try:
                return _Done(push, what, job())
            except LsEdgeError as error:
                return _Done(push, what, error=error)
            except Exception as error:  # noqa: BLE001  a push must not end the peer
                return _Done(push, what, error=BundleError(f"the store failed: {error}; push again"))

        self._worker.submit(run)

    def _take(self, push: _Push, done: _Done) -> None:
        if push.state is StoreState.FAILED:
            return
        if done.error is not None:
            if done.what == "finish" and push.began_at:  # what was there before may be what is damaged
                push.began_at = 0
                self._look(push)
                return
            self._fail(push, str(done.error))
        elif isinstance(done.value, Wanted):
            push.wanted = done.value
            if done.value.complete:
                self._complete(push)
            else:
                self._begin(push, done.value.missing[0])
            self._report(push.pusher)
        elif done.what == "write" and isinstance(done.value, int):
            push.written = done.value
            self._finish_if_whole(push)
        elif done.what == "finish" and push.file is not None:
            rest = tuple(one for one in push.wanted.missing if one != push.file)
            push.wanted = Wanted(rest, push.wanted.parts, push.wanted.size)
            if rest:
                self._begin(push, rest[0])
            else:
                push.file = None
                self._look(push)
            self._report(push.pusher)

    def _complete(self, push: _Push) -> None:
        push.file = None
        record = self._store.record
        active = record.active == push.manifest and self._serves
        push.state = StoreState.READY if not active else StoreState.ACTIVE if self._warm else StoreState.SWITCHING
        if record.failed == push.manifest:
            push.reason = one_line(f"it went back to the bundle before: {record.reason}", _REASON)
        if not active:
            log.info("a bundle is complete", extra={"peer": push.pusher, "bundle": push.manifest[:8]})

    def _begin(self, push: _Push, file: tuple[str, int]) -> None:
        digest, size = file
        there = self._store.received(digest)
        if there > size:
            there = 0
        push.file = file
        push.began_at = push.written = push.received = push.asked = there
        push.last, push.tries = time.monotonic(), 0
        self._finish_if_whole(push)

    def _finish_if_whole(self, push: _Push) -> None:
        if push.file is not None and push.written == push.file[1]:
            digest, size = push.file
            self._do(push, "finish", lambda: self._store.finish(digest, size))

    # What goes out.

    def _ask(self, push: _Push, file: tuple[str, int]) -> None:
        digest, size = file
        now = time.monotonic()
        if push.asked > push.received and now - push.last > ASK_AGAIN_S:
            push.asked, push.last = push.received, now
            push.tries += 1
            if push.tries >= MOST_ASKED:
                self._fail(push, f"{push.pusher} does not send what was asked for; push again")
                return
        window = MAX_CHUNK * (BUSY_WINDOW if self._is_busy() else WINDOW)
        while push.asked < size and push.asked - push.written < window:
            length = min(MAX_CHUNK, size - push.asked)
            if push.asked == push.received:
                push.last = now
            self._send(push.pusher, Want(bytes.fromhex(digest), push.asked, length))
            push.asked += length

    def _fail(self, push: _Push, reason: str) -> None:
        push.state, push.reason, push.file = StoreState.FAILED, one_line(reason, _REASON), None
        log.warning("a push failed", extra={"peer": push.pusher, "bundle": push.manifest[:8], "why": push.reason})
        self._report(push.pusher)

    def _report_all(self) -> None:
        for pusher in self._pushers:
            self._report(pusher)

    def _report(self, pusher: str) -> None:
        record, push = self._store.record, self._push
        active, previous = bytes.fromhex(record.active or ""), bytes.fromhex(record.previous or "")
        holder, until = self._turn
        if push is not None and push.pusher == pusher:
            missing = sum(size for _, size in push.wanted.missing)
            if push.file is not None:
                missing -= push.written
            said = Stored(
                push.state, bytes.fromhex(push.manifest), active, previous, push.wanted.parts, push.wanted.size,
                max(0, missing), push.reason,
            )  # fmt: skip
        elif push is not None or (holder not in ("", pusher) and time.monotonic() < until):
            by = push.pusher if push is not None else holder
            reason = f"{by} pushes a bundle at the moment; try again when it is done"
            said = Stored(StoreState.BUSY, b"", active, previous, reason=one_line(reason, _REASON))
        else:
            said = Stored(StoreState.IDLE, b"", active, previous)
        self._send(pusher, said)
