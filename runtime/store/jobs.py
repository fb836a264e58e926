"""The slow work of an installer: jobs of its thread, the build of engines, and the trial of a new bundle."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol, TypeVar

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LsEdgeError
from ls_edge.core.records import MAX_TEXT
from ls_edge.core.text import one_line
from ls_edge.device.threads import Worker
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.node import Node

log = logging.getLogger("ls_edge.runtime")

AGAIN_S = 2.0
"""Seconds after which a failed write of the record, or the request for a missing piece, is repeated."""
COMPARE_S = 0.1
"""Least time between two comparisons of the disk with what is served, in seconds."""
_NICENESS = 5

NO_PROGRESS = (0, 0, "")

T = TypeVar("T")
Offered = tuple[str, AppliedFile | None]
"""Manifest of a bundle, and the ``peers.yaml`` that comes with it, if any."""


class Fleet(Protocol):
    """View of the peer's bundle and file for an installer; used by the store's thread."""

    @property
    def given(self) -> bytes:
        """Content of the file with which the peer was started, or that it has read again."""

    def parts_of(self, bundle: Bundle, file: AppliedFile | None) -> Collection[int]:
        """Return the parts that this peer serves by a file; raise an error if file or bundle do not fit this peer."""

    def build(
        self, bundle: Bundle, file: AppliedFile | None, on_step: Callable[[int, int, str], None]
    ) -> Iterator[object]:
        """Build the engines of these parts, one at a time."""

    def accept(self, file: AppliedFile) -> None:
        """Record that the processes of a file are accepted, too."""

    def follow(self) -> Callable[[], bool]:
        """Read the recorded files; return a function that uses them and returns whether the peer has to reopen."""


class StoreThread:
    """Thread that writes, verifies and builds; :meth:`handle_results` runs the callbacks on the thread of the links."""

    def __init__(self, name: str) -> None:
        self.node: Node | None = None
        """Node whose thread handles the results."""
        self._worker: Worker[Callable[[], None]] = Worker(f"store of {name}", self.wake, niceness=_NICENESS)

    def do(self, job: Callable[[], T], then: Callable[[T], None], failed: Callable[[str], None]) -> None:
        """Run a job; :meth:`handle_results` then calls ``then`` or ``failed``."""

        def run() -> Callable[[], None]:
            try:
                value = job()
            except LsEdgeError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001  a push must not end the peer
                why = f"the store failed: {error}; apply again"
            else:
                return lambda: then(value)
            return lambda: failed(why)

        self._worker.submit(run)

    def handle_results(self) -> None:
        """Handle the results of completed jobs."""
        for handle in self._worker.results():
            handle()

    def wake(self) -> None:
        """Wake the thread of the links; any thread may call it."""
        if self.node is not None:
            self.node.wake()

    def close(self) -> None:
        """Stop after the current job."""
        self._worker.close()


class EngineBuild:
    """Build of the engines of the next bundle, while the peer serves the previous one."""

    def __init__(self, fleet: Fleet, wake: Callable[[], None]) -> None:
        self.offered: Offered | None = None
        """Bundle and file whose engines are being built."""
        self.progress = NO_PROGRESS
        self._reported = NO_PROGRESS
        self._fleet, self._wake = fleet, wake

    def run(self, bundle: Bundle, file: AppliedFile | None, is_wanted: Callable[[], bool]) -> Callable[[], bool]:
        """Build one engine after the other, then accept the file; return a function that uses it.

        Raise :class:`BundleError` if the bundle is no longer wanted.
        """
        for _ in self._fleet.build(bundle, file, self.report):
            if not is_wanted():
                raise BundleError("another bundle was offered")
        if file is None or not is_wanted():
            return lambda: False
        self._fleet.accept(file)
        return self._fleet.follow()

    def report(self, done: int, total: int, text: str) -> None:
        """Record the number of engines that are built or open, their total, and the next step; for any thread."""
        self.progress = done, total, one_line(text, MAX_TEXT)
        self._wake()

    def has_news(self) -> bool:
        """Return whether there was progress since the last call."""
        before, self._reported = self._reported, self.progress
        return before != self._reported


class Comparison:
    """Comparison of the files on the disk with what is served; processes that greet the peer ask for it."""

    def __init__(self, store: Store, thread: StoreThread) -> None:
        self._store, self._thread = store, thread
        self._found, self._next = "", 0.0

    def result(self) -> str:
        """Return the latest result, which is empty if they are equal, and begin another comparison."""
        if time.monotonic() > self._next:
            self._next = time.monotonic() + COMPARE_S
            self._thread.do(self._store.difference, self._on_result, lambda _: None)
        return self._found

    def _on_result(self, difference: str) -> None:
        text = f"its store is not what it serves from memory ({difference}); check the disk, then apply again"
        self._found = difference and text


class Trial:
    """The served bundle until ``store.json`` records that it was warm; a failed write is repeated."""

    def __init__(self, store: Store, thread: StoreThread, report: Callable[[str], None]) -> None:
        """Call ``report`` with an empty string when that is written, or with the reason if writing fails."""
        self.serving: str | None = None
        """Manifest of the served bundle."""
        self.due: float | None = None
        """Time of the next attempt; None if it is written or nothing is served."""
        self._store, self._thread, self._report = store, thread, report
        self._trouble = ""

    def begin(self, serving: str | None) -> None:
        """Begin with the bundle that is served from now on."""
        self.serving, self.due = serving, None if serving is None else 0.0

    def settle(self) -> None:
        """Record that the bundle is warm."""
        serving = self.serving
        is_due = self.due is not None and time.monotonic() >= self.due
        if self._store.is_confirmed:
            self.due = None
            self._report("")
        elif is_due and serving is not None and serving == self._store.record.active:
            self.due = float("inf")
            self._thread.do(lambda: self._store.confirm(serving), lambda _: self.settle(), self._on_failure)

    def _on_failure(self, why: str) -> None:
        self.due = time.monotonic() + AGAIN_S
        if why != self._trouble:
            self._trouble = why
            log.warning("the store cannot record that the bundle is warm", extra={"why": why})
        self._report(why)
