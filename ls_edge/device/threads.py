"""Threads of a process: a worker for long jobs, names and scheduling policies, and a check that threads can be started.

Only the standard library is imported here: the check precedes all other imports.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_NAME = 15
"""Maximum length of a thread name on Linux, in characters."""
NEEDED = 12 + (os.cpu_count() or 1)
"""Threads that a command starts, without those of its engines: numpy starts one for each core."""


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
    """A thread that runs long jobs one at a time, so that the thread of the links never waits for them.

    A job cannot be interrupted; a thread that hangs is abandoned when the process ends. Engine calls have their own
    threads (``runtime/peer/threads.py``).
    """

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


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Run the calling thread, and the threads that it starts, with ``SCHED_BATCH`` within the context.

    A message wakes three threads on its way to the engine. Under the default policy of Linux, each of them may
    interrupt a thread on its core, such as an engine call, and the caches are filled twice. With ``SCHED_BATCH`` it
    waits for a free core or, if there is none, for the end of a time slice of a few milliseconds. ``docs/results.md``
    shows the gain. A Linux thread inherits the policy of the thread that started it.

    A thread keeps its policy if it is not the default one or the system forbids the change.
    """
    usual, changed = os.sched_param(0), False
    with contextlib.suppress(OSError):  # forbidden by a sandbox, or missing in the C library
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, usual)
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, usual)


def can_start_threads(count: int = NEEDED) -> bool:
    """Return whether this process can start ``count`` more threads.

    Libraries end the process, hang, or print if they cannot: OpenBLAS interrupts the process, libzmq aborts it, and a
    pool of ONNX Runtime that is not complete never ends.
    """
    release = threading.Event()
    started = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=release.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        release.set()
        ends = time.monotonic() + 10
        with contextlib.suppress(RuntimeError):
            for thread in started:
                thread.join()
                # The system counts a thread for some time after ``join()``, and the caller starts as many again.
                while Path(f"/proc/self/task/{thread.native_id}").exists() and time.monotonic() < ends:
                    time.sleep(0.001)
    return True
