"""The thread of a store for slow work, and the view of the peer's bundle and file that this work needs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LsEdgeError
from ls_edge.core.peers_file import PeerConfig
from ls_edge.device.threads import Worker
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.transport.node import Node

AGAIN_S = 2.0
"""Seconds after which a failed write of the record, or the request for a missing piece, is repeated."""
_NICENESS = 5

T = TypeVar("T")
Course = Generator[None, None, T]
"""Steps that each turn of the links continues."""


class Fleet(Protocol):
    """View of the peer's bundle and file for an installer; used by the store's thread."""

    @property
    def given(self) -> bytes:
        """Content of the file with which the peer was started, or that it has read again."""

    def entry_in(self, file: AppliedFile | None, bundle: Bundle) -> PeerConfig:
        """Return the entry of this peer in a file, without parts if it has none.

        Raise an error if file or bundle do not fit this peer.
        """

    def build(
        self, bundle: Bundle, file: AppliedFile | None, on_step: Callable[[int, int, str], None]
    ) -> Iterator[object]:
        """Build the engines of the parts of a file, one at a time."""

    def follow(self) -> Callable[[], bool]:
        """Read the recorded files; return a function that uses them and returns whether the peer has to reopen."""


class StoreThread:
    """Thread that writes, verifies and builds."""

    def __init__(self, name: str) -> None:
        self.node: Node | None = None
        """Node whose turns continue the courses."""
        self._worker: Worker[None] = Worker(f"store of {name}", self.wake, niceness=_NICENESS)

    def do(self, job: Callable[[], T]) -> Course[T]:
        """Run a job; return its result, or raise its error."""
        result = self.submit(job)
        while not result.done():
            yield
        return result.result()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job, and return the future of its result; all errors are a :class:`LsEdgeError`."""
        result = Future[T]()

        def run() -> None:
            try:
                result.set_result(job())
            except LsEdgeError as error:
                result.set_exception(error)
            except Exception as error:  # noqa: BLE001  a push must not end the peer
                result.set_exception(BundleError(f"the store failed: {error}; apply again"))

        self._worker.submit(run)
        return result

    def wake(self) -> None:
        """Wake the thread of the links; any thread may call it."""
        if self.node is not None:
            self.node.wake()

    def close(self) -> None:
        """Stop after the current job."""
        self._worker.close()
