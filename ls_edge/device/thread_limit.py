"""Check that threads can be started before libraries try, which end the process, hang, or print if they cannot.

OpenBLAS interrupts the process, libzmq aborts it, and a pool of ONNX Runtime that is not complete never ends. Only the
standard library is imported here.
"""

from __future__ import annotations

import contextlib
import os
import threading

COMMANDS = ("predict", "peer", "run", "serve", "bench", "build", "verify", "doctor")
NEEDED = 12 + (os.cpu_count() or 1)
"""Threads that a command starts, without those of its engines: numpy starts one for each core."""


def can_start_threads(count: int = NEEDED) -> bool:
    """Return whether this process can start ``count`` more threads."""
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
        with contextlib.suppress(RuntimeError):
            for thread in started:
                thread.join()
    return True
