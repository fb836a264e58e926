"""The progress of work in steps, on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ls_edge.core.errors import printable
from ls_edge.report.terminal import open_console

LINE_EVERY_S = 5.0


class StepProgress:
    """Shows which step of how many is being done; a context manager, called as ``progress(done, total, text)``."""

    def __init__(self, label: str, *, console: Console | None = None) -> None:
        self._console = console or open_console(stderr=True)
        self._label = printable(label)
        self._next_line = 0.0
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._bar = Progress(
                *columns, TimeElapsedColumn(), console=self._console, transient=True, redirect_stdout=False
            )
            self._task = self._bar.add_task(self._label, total=None)

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, text: str) -> None:
        """``done`` of ``total`` steps are done, and ``text`` is what comes next."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"{self._label}: {printable(text)}")
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_EVERY_S
            self._console.print(f"{self._label}: {printable(text)} ({done}/{total})", markup=False, highlight=False)
