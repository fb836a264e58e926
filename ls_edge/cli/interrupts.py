"""Ctrl-C and SIGTERM in a command: one line on standard error and exit code 128 plus the signal's number.

:func:`install` is the first thing that ``ls-edge`` does, before the modules of the command are imported. A signal
then raises ``KeyboardInterrupt`` in the main thread, so that ``with`` and ``finally`` clean up; SIGTERM does the same.
While modules are being imported it ends the process directly: there is nothing to clean up, and extension modules that
are just being initialized swallow exceptions. A second signal always ends the process directly.

Only a few modules of the standard library are imported here.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import FrameType
from typing import NoReturn

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}

RELOADING = ("predict", "peer", "run", "serve")
"""Commands for which SIGHUP means to read their files again, also before they have read them."""
received = 0
"""Signal received, or 0."""
finishing = False
"""Whether the command has finished, except for returning its exit code."""
_pid = 0


def install() -> None:
    """Handle both signals; one that was ignored when the process started stays ignored."""
    global _pid
    _pid = os.getpid()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _interrupt)
    if sys.argv[1:2] and sys.argv[1] in RELOADING and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        ReloadRequest().__enter__()


def stop_on_ctrl_c() -> None:
    """Handle SIGINT even if it was ignored when the process started, as for what a script starts in the background."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, _interrupt)


def leave(number: int) -> NoReturn:
    """End the process immediately, and show the terminal's cursor again."""
    cursor, line = "\x1b[?25h" if os.isatty(2) else "", f"ls-edge: {WORDS[signal.Signals(number)]}"
    if "--log-json" in sys.argv:  # a line of the log, whose modules may not be imported yet
        line = f'{{"time": {time.time():.3f}, "level": "error", "event": "{WORDS[signal.Signals(number)]}"}}'
    try:
        if select.select([], [2], [], 0)[1]:  # its terminal may be stopped by Ctrl-S
            os.write(2, f"{cursor}{line}\n".encode())
    finally:
        os._exit(128 + number)


class StopRequest:
    """Context in which the first signal sets :attr:`number`, and the second ends the process.

    Commands use it to stop cleanly and print results. Without :func:`install` (in a program that imports this
    package) signals are left alone.
    """

    def __init__(self) -> None:
        self.number = 0
        self._before: dict[int, object] = {}

    def __bool__(self) -> bool:
        return self.number != 0

    def __enter__(self) -> StopRequest:
        for number in WORDS:
            if signal.getsignal(number) is _interrupt:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._before:
            signal.signal(number, _interrupt)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        global received
        if self.number:
            leave(number)
        self.number = received = number


class ReloadRequest:
    """Context in which SIGHUP asks a command to read its files again.

    The end of the command's terminal sends SIGHUP too; it stops the command as SIGTERM does.
    """

    def __init__(self) -> None:
        self._asked: dict[str, bool] = {}
        self._before: object = None
        self._terminals: list[int] = []

    def __enter__(self) -> ReloadRequest:
        self._terminals = _terminals()
        earlier = getattr(signal.getsignal(signal.SIGHUP), "__self__", None)  # that of install()
        self._asked = earlier._asked if isinstance(earlier, ReloadRequest) else {}  # the files may be read by now
        self._before = signal.signal(signal.SIGHUP, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGHUP, self._before)  # type: ignore[arg-type]

    def take(self) -> bool:
        """Return whether a signal came since the last call."""
        return self._asked.pop("by a signal", False)  # at once, since the signal may come meanwhile

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        if not self._terminals or _terminals():
            self._asked["by a signal"] = True
        elif self._before is not signal.SIG_IGN:  # as with nohup
            os.kill(os.getpid(), signal.SIGTERM)


def _terminals() -> list[int]:
    """Return the standard streams that are connected to an open terminal."""
    return [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]


def _interrupt(number: int, frame: FrameType | None) -> None:
    global received
    if os.getpid() != _pid:  # a fork of the command, such as one that decodes images
        signal.signal(number, signal.SIG_DFL)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        os.kill(os.getpid(), number)
        return
    if received or finishing or _is_importing(frame):
        leave(number)
    received = number
    raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__") == "importlib._bootstrap":
            return True
        frame = frame.f_back
    return False


def exit_code() -> int:
    """Return the exit code after a signal."""
    return 128 + (received or signal.SIGINT)


def word() -> str:
    """Return the message after a signal."""
    return WORDS[signal.Signals(received or signal.SIGINT)]
