"""Progress of a run, and of work in steps, on standard error.

On a terminal, a few lines are redrawn several times per second. Otherwise, a plain line is printed every few seconds
and for each change of a peer. Methods may be called from any thread.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from ls_edge.core.errors import printable
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.text import counted, show, show_hours, show_ms
from ls_edge.report.terminal import open_console

if TYPE_CHECKING:
    from ls_edge.core.records import PeerEvent, RequestRecord

REFRESH_HZ = 10
RECENT = 512
LINE_EVERY_S = 5.0
BAR = 40
"""Largest width of the bar in columns."""


class RunProgress:
    """Context manager that shows a run of ``total`` requests through ``peers``."""

    def __init__(
        self,
        total: int,
        peers: Iterable[str] = (),
        *,
        console: Console | None = None,
        line_every_s: float = LINE_EVERY_S,
        label: str = "run",
    ) -> None:
        self._console = console or open_console(stderr=True)
        self._total = total
        self._label = printable(label)
        self._line_every_s = line_every_s
        self._lock = threading.Lock()
        self._states = dict.fromkeys((printable(name) for name in peers), PeerState.UNKNOWN)
        self._counts = Counter[str]()
        self._recent: deque[tuple[float, float | None]] = deque(maxlen=RECENT)
        """End of each recent request, and its latency in ms, or None if it failed."""
        self._warning = ""
        self._begun = self._last_line = time.monotonic()
        self._live: Live | None = None

    def __enter__(self) -> RunProgress:
        self._begun = self._last_line = time.monotonic()
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Standard output belongs to the result of the command, so it is not redirected.
            self._live = Live(self, console=self._console, refresh_per_second=REFRESH_HZ, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._counts:
            self.note(self._status().plain)

    def record(self, record: RequestRecord) -> None:
        """Count an answer or a failed request."""
        now = time.monotonic()
        with self._lock:
            self._counts["answered" if record.error is None else "failed"] += 1
            self._counts["degraded"] += record.degraded
            self._recent.append((now, None if record.error else record.latency_us / 1e3))
            due = self._live is None and now - self._last_line >= self._line_every_s
            if due:
                self._last_line = now
        if due:
            self.note(self._status().plain)

    def event(self, event: PeerEvent) -> None:
        """Note a change of a peer's state."""
        name, state = printable(event.peer), event.state
        with self._lock:
            before = self._states.get(name, PeerState.UNKNOWN)
            self._states[name] = state
        greeting = state == PeerState.ALIVE and before == PeerState.UNKNOWN
        if before != state and not greeting:
            why = f" ({event.why})" if event.why else ""
            # Times count from the start of the run, as in its report, not from the opening of the source.
            at = time.monotonic() - self._begun
            self.note(f"{at:.2f} s: {name} {'is back' if state == PeerState.ALIVE else state}{why}")

    def note(self, text: str) -> None:
        """Print a remark, such as the reason for a wait."""
        self._console.print(f"{self._label}: {printable(text)}", markup=False, highlight=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning once, until it changes; an empty string ends it."""
        if text and text != self._warning:
            self.note(text)
        self._warning = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the current state; called by rich."""
        with self._lock:
            done = self._counts["answered"] + self._counts["failed"]
        yield Text.assemble(self._label, " ", self._status())
        yield ProgressBar(max(self._total, 1), done, width=min(BAR, options.max_width))

    def _status(self) -> Text:
        with self._lock:
            recent, states = list(self._recent), list(self._states.values())
            answered, failed, degraded = (self._counts[name] for name in ("answered", "failed", "degraded"))
        span = max(time.monotonic() - (recent[0][0] if len(recent) == RECENT else self._begun), 1e-3)
        latencies = [ms for _, ms in recent if ms is not None]
        text = Text(f"{answered:,}/{self._total:,}")
        text.append(f"  {show(len(recent) / span)}/s", style="cyan")
        text.append(f"  p50 {show_ms(statistics.median(latencies) if latencies else None)}", style="cyan")
        if degraded:
            text.append(f"  {degraded:,} degraded", style="yellow")
        if failed:
            text.append(f"  {failed:,} failed", style="red")
        if states:
            text.append(f"  {states.count(PeerState.ALIVE)} of {counted(len(states), 'peer')} alive")
        return text


class StepProgress:
    """Context manager that shows the progress of steps; call it as ``progress(done, total, text)``.

    Without a terminal, it prints a line immediately and every few seconds, or every ``line_every_s`` seconds.
    """

    def __init__(self, label: str, *, console: Console | None = None, line_every_s: float = 0.0) -> None:
        self._console = console or open_console(stderr=True)
        self._label = printable(label)
        self._line_every_s = line_every_s or LINE_EVERY_S
        self._next_line = time.monotonic() + line_every_s
        self._first = (0, 0, 0.0)
        """Finished steps, their total, and the time when this total was first reported."""
        self._bar: Progress | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            times = (TimeElapsedColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, *times, console=self._console, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task(self._label, total=None)

    def __enter__(self) -> StepProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, text: str) -> None:
        """Show the number of finished steps, and the next step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, description=f"{self._label}: {printable(text)}")
            return
        now = time.monotonic()
        if total != self._first[1]:
            self._first = done, total, now
        if now >= self._next_line:
            self._next_line = now + self._line_every_s
            passed = done - self._first[0]
            hours = (now - self._first[2]) / 3600
            left = f", {show_hours(hours * (total - done) / passed)} left" if passed > 0 else ""
            line = f"{self._label}: {printable(text)} ({done}/{total}{left})"
            self._console.print(line, markup=False, highlight=False)
