"""Thread for long jobs, so that the thread of the links never waits for them.

A job cannot be interrupted; a thread that hangs is abandoned when the process ends. Engine calls have their own threads
(``runtime/peer/threads.py``).
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_NAME = 15
"""Maximum length of a thread name on Linux, in characters."""


class JobQueue(Generic[T]):
    """Queue of jobs for a thread, urgent jobs first, and of their results; any thread may use it."""

    def __init__(self) -> None:
        self.closed = False
        self._urgent: deque[Callable[[], T | None]] = deque()
        self._jobs: deque[Callable[[], T | None]] = deque()
        self._results: deque[T] = deque()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One item for each job and each call of :meth:`wake`; implemented in C, unlike ``PriorityQueue``."""

    def __len__(self) -> int:
        """Return the number of waiting jobs, which never run after :meth:`end`."""
        return len(self._urgent) + len(self._jobs)

    def submit(self, job: Callable[[], T | None], *, urgent: bool = False) -> None:
        """Queue a job, which must not raise."""
        (self._urgent if urgent else self._jobs).append(job)
        self._signals.put(None)

    def wait(self, timeout: float | None = None) -> None:
        """Wait at most ``timeout`` seconds for the next job, :meth:`wake` or :meth:`end`."""
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=timeout)

    def take(self) -> Callable[[], T | None] | None:
        """Return the next job, or None."""
        if self._urgent:
            return self._urgent.popleft()
        return self._jobs.popleft() if self._jobs else None

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._signals.put(None)

    def end(self) -> None:
        """Stop the thread after its current job."""
        self.closed = True
        self._signals.put(None)

    def add_result(self, result: T | None) -> None:
        """Add the result of a job, unless it is None."""
        if result is not None:
            self._results.append(result)

    @property
    def has_results(self) -> bool:
        """Whether :meth:`results` has any."""
        return bool(self._results)

    def results(self) -> list[T]:
        """Return the results since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]


class Worker(JobQueue[T]):
    """A thread that runs its jobs one at a time."""

    def __init__(self, name: str, wake: Callable[[], None], *, niceness: int = 0) -> None:
        """Start the thread, which calls ``wake`` after each job.

        With a ``niceness`` above 0, the thread yields to other threads. ``name`` is its name in Python and in Linux.
        """
        super().__init__()
        self._name, self._wake, self._niceness = name, wake, niceness
        self._running = threading.Thread(target=self._run, name=name, daemon=True)
        self._running.start()

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the current job; return whether the thread ended within ``timeout`` seconds."""
        self.end()
        self._running.join(timeout)
        return not self._running.is_alive()

    def _run(self) -> None:
        introduce_thread(self._name, self._niceness)
        while True:
            self.wait()
            job = None if self.closed else self.take()
            if job is None:
                return
            self.add_result(job())
            self._wake()


def introduce_thread(name: str, niceness: int = 0) -> None:
    """Set the name and the niceness of the calling thread; does nothing except on Linux."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{thread}/comm").write_text(name[:_MAX_NAME], encoding="utf-8")
    if niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
