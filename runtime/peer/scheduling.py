"""Scheduling policy of the threads of a peer or source.

A message wakes three threads on its way to the engine. Under the default policy of Linux, each of them may interrupt a
thread on its core, such as an engine call, and the caches are filled twice. With ``SCHED_BATCH`` it waits for a free
core or, if there is none, for the end of a time slice of a few milliseconds. ``docs/results.md`` shows the gain. A
Linux thread inherits the policy of the thread that started it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Run the calling thread, and the threads that it starts, with ``SCHED_BATCH`` within the context.

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
