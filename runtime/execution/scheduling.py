"""How the system schedules the threads of a peer or source: a thread that wakes does not interrupt another one.

A message wakes three threads on its way to the engine. With the usual policy of Linux each may interrupt who runs on
its core, an engine call among them, and the caches are filled twice. With ``SCHED_BATCH`` it waits for a free core, or
for the end of a time slice (a few milliseconds) where there is none. What that gains is in ``docs/measurements.md``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Give the calling thread, and the threads that are started meanwhile, the policy ``SCHED_BATCH``; Linux only.

    A thread with another policy than the usual one keeps it, and so does one that the system does not allow to change.
    """
    if sys.platform != "linux":
        yield
        return
    usual, changed = os.sched_param(0), False
    with contextlib.suppress(OSError):  # a sandbox forbids it, or the system's library has no such call
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, usual)
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, usual)
