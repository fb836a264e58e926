"""The scheduling policy of the threads of a peer or source: a thread that wakes does not interrupt another one.

A message wakes three threads on its way to the engine. Under the default policy of Linux each may interrupt a thread on
its core, such as an engine call, and the caches are filled twice. With ``SCHED_BATCH`` it waits for a free core or, if
there is none, for the end of a time slice of a few milliseconds. ``docs/measurements.md`` has the gain.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Run the calling thread, and the threads that it starts, with ``SCHED_BATCH`` within the context; Linux only.

    A thread keeps its policy if that is not the default one, or if the system does not allow the change.
    """
    if sys.platform != "linux":
        yield
        return
    usual, changed = os.sched_param(0), False
    with contextlib.suppress(OSError):  # forbidden by a sandbox, or not in the C library
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, usual)
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, usual)
