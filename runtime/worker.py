"""A thread for engine calls, so that the thread of the links never waits for one.

Engine libraries release the interpreter while they run; a test shows that a process whose engine is busy or hangs
still answers its neighbours. A call cannot be interrupted: a thread that hangs is left behind when the process ends.
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

from ls_edge.runtime.engine_cores import EngineCores

T = TypeVar("T")

_MAX_NAME = 15
"""Most characters of the name of a thread of Linux."""


class Worker(Generic[T]):
    """Runs jobs one at a time, urgent ones first, and collects what they return."""

    def __init__(
        self, name: str, wake: Callable[[], None], *, niceness: int = 0, cores: EngineCores | None = None
    ) -> None:
        """``wake`` is called from the thread after each job; ``niceness`` above 0 lets others go first.

        The thread runs on the engine's ``cores`` where they are given, and the system knows it by ``name``.
        """
        self._name = name
        self._niceness = niceness
        self._cores = cores or EngineCores()
        self._urgent: deque[Callable[[], T]] = deque()
        self._jobs: deque[Callable[[], T]] = deque()
        self._signals: queue.SimpleQueue[None] = queue.SimpleQueue()
        """One for each job, and one for the end; in C, unlike the queues that order what is in them."""
        self._closing = False
        self._results: deque[T] = deque()
        self._wake = wake
        self._running = threading.Thread(target=self._run, name=name, daemon=True)
        self._running.start()

    def submit(self, job: Callable[[], T], *, urgent: bool = False) -> None:
        """Queue a job, which must not raise."""
        (self._urgent if urgent else self._jobs).append(job)
        self._signals.put(None)

    def results(self) -> list[T]:
        """Take what has been returned since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def close(self, timeout: float = 1.0) -> bool:
        """Stop after the job that runs; return whether the thread ended within ``timeout`` seconds."""
        self._closing = True
        self._signals.put(None)
        self._running.join(timeout)
        return not self._running.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux":  # there a thread has a name and a niceness of its own
            thread = threading.get_native_id()
            with contextlib.suppress(OSError):
                Path(f"/proc/self/task/{thread}/comm").write_text(self._name[:_MAX_NAME], encoding="utf-8")
            if self._niceness:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, thread, self._niceness)
        with self._cores.on_engine():
            self._work()

    def _work(self) -> None:
        while True:
            self._signals.get()
            if self._closing:
                return
            job = self._urgent.popleft() if self._urgent else self._jobs.popleft()
            self._results.append(job())
            self._wake()
