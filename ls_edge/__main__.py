"""Entry point of ``ls-edge`` and ``python -m ls_edge``: handles the locale and signals before all imports."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from ls_edge.cli import interrupts

_STARTS_THREADS = ("predict", "peer", "run", "serve", "bench", "build", "verify", "doctor")
"""Commands that load libraries which start threads."""


def main() -> NoReturn:
    """Run the command line of this process."""
    if sys.getfilesystemencoding() != "utf-8":  # start again: names of classes and files are UTF-8 everywhere
        os.environ["PYTHONUTF8"] = "1"  # for further processes; python -E and -I ignore it
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])  # noqa: S606  this very command
    interrupts.install()
    try:
        if sys.argv[1:2] and sys.argv[1] in _STARTS_THREADS:
            from ls_edge.device.threads import can_start_threads

            if not can_start_threads():
                from ls_edge.cli.main import fail
                from ls_edge.core.errors import THREAD_LIMIT

                fail(THREAD_LIMIT, 1, sys.argv)
        from ls_edge.cli.main import main as run

        run()
    except KeyboardInterrupt:  # a signal between two imports
        interrupts.leave(interrupts.received)


if __name__ == "__main__":
    main()
