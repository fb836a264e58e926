"""A thread for engine calls, so that the thread of the links never waits for one.

Engine libraries release the interpreter while they run; a test shows that a process whose engine is busy or hangs
still answers its neighbours. A call cannot be interrupted: a thread that hangs is left behind when the process ends.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Worker(Generic[T]):
    """Runs jobs one at a time, the lowest ``priority`` first, and collects what they return."""

    def __init__(self, name: str, wake: Callable[[], None], *, niceness: int = 0) -> None:
        """``wake`` is called from the thread after each job; ``niceness`` above 0 lets others go first."""
        self._niceness = niceness
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], T] | None]] = queue.PriorityQueue()
        self._results: queue.SimpleQueue[T] = queue.SimpleQueue()
        self._count = itertools.count()
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T], priority: int = 1) -> None:
        """Queue a job, which must not raise."""
        self._jobs.put((priority, next(self._count), job))

    def results(self) -> list[T]:
        """Take what has been returned since the last call."""
        taken: list[T] = []
        while True:
            try:
                taken.append(self._results.get_nowait())
            except queue.Empty:
                return taken

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the job that runs; return whether the thread ended within ``timeout`` seconds."""
        self._jobs.put((-1, next(self._count), None))
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":  # there a thread has a niceness of its own
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while True:
            _, _, job = self._jobs.get()
            if job is None:
                return
            self._results.put(job())
            self._wake()
