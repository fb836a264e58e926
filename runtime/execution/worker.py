"""A thread for jobs that take long, so that the thread of the links never waits for one.

A job cannot be interrupted: a thread that hangs is left behind when the process ends. Engine calls have
:mod:`ls_edge.runtime.execution.loop_threads`.
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
"""Most characters of the name of a thread of Linux."""


class JobQueue(Generic[T]):
    """Jobs for a thread, urgent ones first, and what they returned; any thread may use it."""

    def __init__(self) -> None:
        self.closed = False
        """Whether the thread is to end."""
        self._urgent: deque[Callable[[], T]] = deque()
        self._jobs: deque[Callable[[], T]] = deque()
        self._results: deque[T] = deque()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each job, and one to wake the thread; in C, unlike the queues that order what is in them."""

    @property
    def is_empty(self) -> bool:
        """Whether no job waits."""
        return not self._urgent and not self._jobs

    def put(self, job: Callable[[], T], *, urgent: bool = False) -> None:
        """Queue a job, which must not raise."""
        (self._urgent if urgent else self._jobs).append(job)
        self._signals.put(None)

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the next job that was put, :meth:`wake` or :meth:`close`, at most ``timeout`` seconds."""
        with contextlib.suppress(queue.Empty):
            self._signals.get(timeout=timeout)

    def take(self) -> Callable[[], T] | None:
        """The next job; None where there is none."""
        if self._urgent:
            return self._urgent.popleft()
        return self._jobs.popleft() if self._jobs else None

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._signals.put(None)

    def close(self) -> None:
        """Have the thread end after the job that it runs."""
        self.closed = True
        self._signals.put(None)

    def add_result(self, result: T) -> None:
        """Note what a job returned."""
        self._results.append(result)

    def results(self) -> list[T]:
        """Take what has been returned since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]


class Worker(Generic[T]):
    """Runs jobs one at a time, in their order, and collects what they return."""

    def __init__(self, name: str, wake: Callable[[], None], *, niceness: int = 0) -> None:
        """``wake`` is called from the thread after each job; ``niceness`` above 0 lets others go first.

        The system knows the thread by ``name``.
        """
        self._name = name
        self._niceness = niceness
        self._jobs: JobQueue[T] = JobQueue()
        self._wake = wake
        self._running = threading.Thread(target=self._run, name=name, daemon=True)
        self._running.start()

    def submit(self, job: Callable[[], T]) -> None:
        """Queue a job, which must not raise."""
        self._jobs.put(job)

    def results(self) -> list[T]:
        """Take what has been returned since the last call."""
        return self._jobs.results()

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the job that runs; return whether the thread ended within ``timeout`` seconds."""
        self._jobs.close()
        self._running.join(timeout)
        return not self._running.is_alive()

    def _run(self) -> None:
        introduce_thread(self._name, self._niceness)
        while True:
            self._jobs.wait()
            job = None if self._jobs.closed else self._jobs.take()
            if job is None:
                return
            self._jobs.add_result(job())
            self._wake()


def introduce_thread(name: str, niceness: int = 0) -> None:
    """Tell the system the name and the niceness of the calling thread; on Linux, where each thread has its own."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        Path(f"/proc/self/task/{thread}/comm").write_text(name[:_MAX_NAME], encoding="utf-8")
    if niceness:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
