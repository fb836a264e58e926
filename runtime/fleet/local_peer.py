"""``ls-edge peer`` that ends when its standard input does, so that it does not outlive the process that started it."""

from __future__ import annotations

import os
import runpy
import signal
import threading
import time

_AGAIN_S = 0.5
"""Seconds between two signals, which would be one if the main thread had not yet taken the first."""


def end_with_input() -> None:
    """End this process without draining when its standard input ends."""

    def read() -> None:
        while os.read(0, 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)  # drains
        time.sleep(_AGAIN_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()


if __name__ == "__main__":
    end_with_input()
    runpy.run_module("ls_edge", run_name="__main__", alter_sys=True)
