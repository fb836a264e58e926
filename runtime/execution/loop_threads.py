"""The two threads of a peer or source: a loop, and a worker for engine calls, which may change places.

Engine libraries release the interpreter lock, so a process whose engine is busy or hangs still answers its neighbours
(tests show that). A call cannot be interrupted: a thread that hangs is abandoned when the process ends.

Handing a job to another thread and its result back wakes two threads, which may take longer than an engine call of a
small model. So the loop's thread runs a short job itself, between two turns. If the job takes longer than expected,
the worker continues the loop, and the first thread becomes the worker when its job has returned. An engine that hangs
therefore does not cut a process off from its neighbours. This is the pattern Leader/Followers with two threads
(Schmidt, Stal, Rohnert, Buschmann: Pattern-Oriented Software Architecture, volume 2, 2000, chapter 5).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.worker import JobQueue, introduce_thread

T = TypeVar("T")

TAKE_OVER_S = 0.1
"""Seconds until the other thread continues the loop: longer than a short job takes on a busy machine, shorter than
neighbours wait for a silent process."""
_WATCH_EVERY_S = 0.05
"""Seconds between two looks at the job of the loop's thread: a trade-off between detection and wake-ups."""
_WATCH_FOR_S = 1.0
"""Seconds after the last short job in which the worker still looks, so that an idle process does not wake."""


class LoopThreads(Generic[T]):
    """Two threads, one of which runs a loop and the other one jobs.

    The loop yields a job for its own thread if :attr:`may_run_here` permits that, and finds the result in
    :meth:`result_here` when it continues. All other jobs are submitted. The worker does not begin a job while the
    loop's thread has one: if both hung, no thread would continue the loop.
    """

    def __init__(
        self,
        loop: Iterator[Callable[[], T]],
        wake: Callable[[], None],
        *,
        names: tuple[str, str],
        cores: EngineCores,
    ) -> None:
        """Call ``wake`` after each job of the worker; the first of ``names`` is that of the loop's thread.

        If ``cores`` reserves some for the engine, the worker runs all jobs there.
        """
        self._loop = loop
        self._wake = wake
        self._cores = cores
        self._jobs: JobQueue[T] = JobQueue()
        self._result: T | None = None
        self._threads = tuple(
            threading.Thread(target=self._run, args=(name, index == 0), name=name, daemon=True)
            for index, name in enumerate(names)
        )
        self._ended = threading.Event()
        self.error: BaseException | None = None
        """The exception that the loop raised."""
        self._is_waiting = False
        """Whether the worker waits for a job."""
        # Only the thread that holds the lock of `_changed` uses these.
        self._changed = threading.Condition(threading.Lock())
        """Notified when the loop's thread has finished a job."""
        self._leader: threading.Thread | None = self._threads[0]
        self._began: float | None = None
        """When the job began that the loop's thread runs."""
        self._last_began = 0.0
        self._watches = False
        """Whether the worker looks at the loop's thread from time to time."""

    def start(self) -> None:
        """Start both threads, which end after :meth:`close`."""
        with self._cores.others():
            self._threads[0].start()
        with self._cores.on_engine():
            self._threads[1].start()

    def submit(self, job: Callable[[], T], *, urgent: bool = False) -> None:
        """Queue a job for the worker; it must not raise."""
        self._jobs.put(job, urgent=urgent)

    @property
    def may_run_here(self) -> bool:
        """Whether the loop's thread may run a short job, because the worker is free and could take over the loop."""
        return self._is_waiting and self._jobs.is_empty and not self._cores.engine

    def result_here(self) -> T | None:
        """Return the result of the job that was just yielded; None if it still runs, and now belongs to the worker."""
        result, self._result = self._result, None
        return result

    def results(self) -> list[T]:
        """Return the results of the worker's jobs since the last call."""
        return self._jobs.results()

    @property
    def is_loop(self) -> bool:
        """Whether the calling thread runs the loop."""
        return threading.current_thread() is self._leader

    def join(self, timeout: float | None = None) -> None:
        """Wait until the loop has ended, at most ``timeout`` seconds."""
        self._ended.wait(timeout)

    def close(self, timeout: float = 1.0) -> bool:
        """End both threads, the loop's after its loop; return whether they ended within ``timeout`` seconds."""
        self._jobs.close()
        end = time.monotonic() + timeout
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _run(self, name: str, leads: bool) -> None:
        introduce_thread(name)
        while self._lead() if leads else self._follow():
            leads = not leads

    def _lead(self) -> bool:
        """Run the loop until it ends, or return True when the other thread has taken it over."""
        try:
            for job in self._loop:
                if not self._begins():
                    self._jobs.put(job, urgent=True)
                elif not self._end(job()):
                    return True
                del job  # it holds tokens, and the next turn may be long
        except BaseException as error:  # noqa: BLE001  the caller of join() asks for it
            self.error = error
        self._ended.set()
        return False

    def _follow(self) -> bool:
        """Run jobs until the end, or return True when this thread has taken over the loop."""
        while True:
            self._is_waiting = True
            self._jobs.wait(_WATCH_EVERY_S if self._watches else None)
            if self._jobs.closed:
                return False
            with self._changed:
                taken_over = self._takes_over()
                job = self._jobs.take() if self._began is None and not taken_over else None
                self._is_waiting = job is None and not taken_over
            if taken_over:
                self._jobs.wake()  # for a job that waits
                return True
            if job is not None:
                self._jobs.add_result(job())
                del job
                self._wake()

    def _begins(self) -> bool:
        """Return whether the loop's thread may run its job now, while the other one watches."""
        with self._changed:
            if not self.may_run_here:
                return False
            self._began = self._last_began = time.monotonic()
            if not self._watches:
                self._watches = True
                self._jobs.wake()
            return True

    def _end(self, result: T) -> bool:
        """Hand over the result of the loop thread's job; return whether this is still the loop's thread."""
        with self._changed:
            if self.is_loop:
                self._result, self._began = result, None
                self._changed.notify()
                return True
            self._jobs.add_result(result)
        self._wake()
        return False

    def _takes_over(self) -> bool:
        """Take over the loop if its thread has had its job for too long; return whether it was taken over.

        The caller holds the lock. If a job waits for this thread, return when the loop's thread has finished its own
        job, or after that time.
        """
        if self._began is None:
            self._watches = time.monotonic() < self._last_began + _WATCH_FOR_S
        while self._began is not None:
            left = self._began + TAKE_OVER_S - time.monotonic()
            if left <= 0:
                self._leader, self._began = threading.current_thread(), None
                return True
            if self._jobs.is_empty:
                break
            self._changed.wait(left)
        return False
