"""``ls-edge peer`` that ends when its standard input does, so that it does not outlive the process that started it."""

from __future__ import annotations

import os
import runpy
import signal
import threading


def end_with_input() -> None:
    """End this process without draining when its standard input ends."""

    def read() -> None:
        while os.read(0, 4096):
            pass
        for _ in range(2):  # the first one drains
            os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=read, daemon=True).start()


if __name__ == "__main__":
    end_with_input()
    runpy.run_module("ls_edge", run_name="__main__", alter_sys=True)
