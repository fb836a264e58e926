"""The two threads of a peer or source: one runs the loop, the other one runs engine calls; they may swap roles.

Engine libraries release the interpreter lock, so a process whose engine is busy or hangs still answers its neighbors
(tests show that). A call cannot be interrupted: a thread that hangs is abandoned when the process ends.

Handing a job to another thread and its result back wakes two threads, which may take longer than an engine call of a
small model. So the loop's thread runs a short job itself, between two turns. If the job takes longer than expected,
the worker continues the loop, and the first thread becomes the worker when its job has returned. An engine that hangs
therefore does not cut a process off from its neighbors. This is the Leader/Followers pattern with two threads
(Schmidt, Stal, Rohnert, Buschmann: Pattern-Oriented Software Architecture, volume 2, 2000, chapter 5).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import TypeVar

from ls_edge.device.threads import JobQueue, introduce_thread

T = TypeVar("T")

TAKE_OVER_S = 0.1
"""Seconds until the other thread continues the loop: longer than a short job takes on a busy machine, shorter than the
time that neighbors wait for a silent process."""
_WATCH_EVERY_S = 0.05
"""Seconds between two checks of the loop thread's job: a trade-off between detection and wake-ups."""
_WATCH_FOR_S = 1.0
"""Seconds after the last short job until the worker stops checking, so that an idle process does not wake up."""


class LoopThreads(JobQueue[T]):
    """Two threads: one runs a loop, the other one (the worker) runs the jobs of the queue.

    The worker runs jobs as they are submitted. Short jobs run on the loop's thread when the loop yields, if the worker
    is free to take over the loop. The worker does not begin a job while the loop's thread runs one: if both hung, no
    thread would continue the loop.
    """

    def __init__(
        self,
        loop: Iterator[None],
        wake: Callable[[], None],
        *,
        names: tuple[str, str],
    ) -> None:
        """Call ``wake`` after each job of the worker; ``names`` are the names of the loop's thread and the worker."""
        super().__init__()
        self.ended: Future[None] = Future()
        """Future of the end of the loop; it has the exception that the loop raised."""
        self._loop, self._wake = loop, wake
        self._short: deque[tuple[Callable[[], T | None], bool]] = deque()
        """Jobs for the loop's thread, and whether each is urgent if the worker has to run it."""
        self._threads = tuple(
            threading.Thread(target=self._run, args=(name, index == 0), name=name, daemon=True)
            for index, name in enumerate(names)
        )
        self._lead = _Lead(self._threads[0])
        self._is_waiting = False
        """Whether the worker waits for a job."""

    def start(self) -> None:
        """Start both threads; :meth:`close` ends them."""
        for thread in self._threads:
            thread.start()

    def submit_short(self, job: Callable[[], T | None], *, urgent: bool = False) -> None:
        """Queue a job for the loop's thread, or for the worker if that thread is not free; it must not raise."""
        self._short.append((job, urgent))

    def submit_in_order(self, job: Callable[[], T | None]) -> None:
        """Queue a job for the worker behind all short jobs; called by the loop's thread."""
        while self._short:
            self.submit(self._short.popleft()[0])
        self.submit(job)

    @property
    def is_wanted(self) -> bool:
        """Whether short jobs or results wait for the loop."""
        return bool(self._short) or self.has_results

    @property
    def has_short(self) -> bool:
        """Whether short jobs wait for the loop to yield."""
        return bool(self._short)

    @property
    def may_run_here(self) -> bool:
        """Whether the loop's thread may run a short job: the worker is free and can take over the loop."""
        return self._is_waiting and not self

    @property
    def is_loop(self) -> bool:
        """Whether the calling thread runs the loop."""
        return threading.current_thread() is self._lead.thread

    def close(self, timeout: float = 1.0) -> bool:
        """Stop both threads, letting the loop finish; return whether they ended within ``timeout`` seconds."""
        self.end()
        end = time.monotonic() + timeout
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in others)

    def _run(self, name: str, leads: bool) -> None:
        introduce_thread(name)
        while self._run_loop() if leads else self._run_jobs():
            leads = not leads

    def _run_loop(self) -> bool:
        """Run the loop until it ends, or return True when the other thread has taken it over."""
        try:
            for _ in self._loop:
                for _ in range(len(self._short)):  # jobs submitted meanwhile wait for the next turn
                    if not self._run_short():
                        return True
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits for the end
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        return False

    def _run_short(self) -> bool:
        """Run the next short job or hand it to the worker; return whether this is still the loop's thread."""
        job, urgent = self._short.popleft()
        with self._lead.changed:
            if not self.may_run_here:
                self.submit(job, urgent=urgent)
                return True
            if self._lead.begin():
                self.wake()
        self.add_result(job())
        leads = self._lead.end()
        if not leads:
            self._wake()
        return leads

    def _run_jobs(self) -> bool:
        """Run jobs until :meth:`close`, or return True when this thread has taken over the loop."""
        while True:
            self._is_waiting = True
            self.wait(_WATCH_EVERY_S if self._lead.is_watched else None)
            if self.closed:
                return False
            with self._lead.changed:
                taken_over = self._lead.take_over(self)
                job = self.take() if self._lead.began is None and not taken_over else None
                self._is_waiting = job is None and not taken_over
            if taken_over:
                self.wake()  # a job may wait
                return True
            if job is not None:
                self.add_result(job())
                del job
                self._wake()


class _Lead:
    """The thread that runs the loop, and its short job; guarded by the lock of :attr:`changed`."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.changed = threading.Condition(threading.Lock())
        """Notified when the thread has finished a job."""
        self.began: float | None = None
        """Start time of the thread's job; None without one."""
        self.is_watched = False
        """Whether the worker checks the thread from time to time."""
        self._last_began = 0.0

    def begin(self) -> bool:
        """Begin a job of the calling thread; return whether the worker has to be woken to watch it."""
        self.began = self._last_began = time.monotonic()
        was_watched, self.is_watched = self.is_watched, True
        return not was_watched

    def end(self) -> bool:
        """End the job of the calling thread; return whether it still runs the loop."""
        with self.changed:
            if self.thread is not threading.current_thread():
                return False
            self.began = None
            self.changed.notify()
            return True

    def take_over(self, jobs: JobQueue[T]) -> bool:
        """Let the calling thread run the loop if the other one's job takes too long; return whether it does.

        If a job waits for the calling thread, wait until the other thread has finished its own or exceeded its time.
        """
        if self.began is None:
            self.is_watched = time.monotonic() < self._last_began + _WATCH_FOR_S
        while self.began is not None:
            left = self.began + TAKE_OVER_S - time.monotonic()
            if left <= 0:
                self.thread, self.began = threading.current_thread(), None
                return True
            if not jobs:
                break
            self.changed.wait(left)
        return False
