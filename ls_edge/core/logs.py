"""Log lines on standard error, as text or JSON (``--log-json``), and callbacks of long operations.

The fields of a line are the ``extra`` of a log record. Lines never contain a secret key, and text from outside cannot
control the terminal (:func:`ls_edge.core.errors.printable`).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from ls_edge.core.errors import printable

OnProgress = Callable[[int, int, str], None]
"""Callback that receives the number of finished steps, the total number of steps, and the name of the step."""
OnWarning = Callable[[str], None]
"""Callback that receives the text of a warning."""
MAX_WAITING_LINES = 1000
"""Maximum number of queued log lines, a few hundred kilobytes; additional lines are dropped and counted."""
FLUSH_S = 0.5
"""Maximum time, in seconds, that an ending process waits for its log to be written."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in vars(record).items() if k not in _STANDARD and v not in ("", None)}


class _People(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{at}.{int(record.msecs):03d} {record.levelname:7} {printable(record.getMessage())}"
        fields = " ".join(f"{k}={_short(v)}" for k, v in _fields(record).items())
        if record.exc_info:
            fields += "\n" + "\n".join(map(printable, self.formatException(record.exc_info).splitlines()))
        return f"{text}  {fields}" if fields else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def error_line(text: str) -> str:
    """Return an error as a JSON line of the log."""
    return _Json().format(logging.makeLogRecord({"levelname": "ERROR", "msg": text}))


def _short(value: object) -> str:
    text = printable(value)
    return text if text == str(value) and " " not in text else "'" + text.replace("'", "\\'") + "'"


class _QueuedLines(logging.Handler):
    """Handler with a queue and a writer thread, the only thread that a terminal or pipe without a reader can block."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        # Not a stream: a process that ends while a thread holds the stream's lock would be aborted.
        self._descriptor = descriptor
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_LINES)
        self._dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._thread is None or not self._thread.is_alive():  # also after a fork
            self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
            self._thread.start()
        if self._dropped and self._put(_dropped_lines(self._dropped)):
            self._dropped = 0
        self._dropped += not self._put(record)

    def flush(self) -> None:
        """Wait until all lines are written, but at most :data:`FLUSH_S`."""
        if self._thread is not None and self._thread.is_alive():
            with self._lines.all_tasks_done:
                self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, FLUSH_S)

    def close(self) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        super().close()

    def _put(self, record: logging.LogRecord) -> bool:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((self.format(record) + "\n").encode(errors="backslashreplace"))
            return True
        return False

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            while line:
                try:
                    line = line[os.write(self._descriptor, line) :]
                except BlockingIOError:  # another process made the pipe non-blocking
                    select.select([], [self._descriptor], [])
                except OSError:  # the reader is gone
                    break
            self._lines.task_done()
        self._lines.task_done()


def _dropped_lines(count: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "log lines dropped",
            "count": count,
            "why": "standard error was not read",
        }
    )


def set_up(*, as_json: bool, level: int = logging.INFO) -> None:
    """Write the log of this package to standard error, from ``level`` upward."""
    logger = logging.getLogger("ls_edge")
    for earlier in logger.handlers:
        earlier.close()
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    with contextlib.suppress(AttributeError, OSError):  # there is no stream, or it is in memory
        handler = _QueuedLines(sys.stderr.fileno())
    handler.setFormatter(_Json() if as_json else _People())
    handler.setLevel(level)  # also for child loggers with another level
    if level <= logging.INFO:
        logging.getLogger("ls_edge.engines").handlers.clear()
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False


class LoggedCounts(Counter[str]):
    """Counts of events that other processes can cause; the 1st, 2nd, 4th, 8th, ... event is logged."""

    def note(self, key: str, event: str, **fields: object) -> None:
        """Count ``key``, and log the event with its fields if the count is a power of two."""
        self[key] += 1
        if self[key] & (self[key] - 1) == 0:
            logging.getLogger("ls_edge.runtime").warning(event, extra={**fields, "count": self[key]})


class _EngineStatus(logging.Handler):
    """Handler that prints the status of engine builds and warnings about engines."""

    def emit(self, record: logging.LogRecord) -> None:
        status = getattr(record, "status", None)
        if status is not None:
            print(f"{getattr(record, 'part', 'engine')}: {printable(status)}", file=sys.stderr)  # noqa: T201
        elif record.levelno >= logging.WARNING:
            why = getattr(record, "why", getattr(record, "text", ""))
            print(f"ls-edge: warning: {printable(record.getMessage())}: {printable(why)}", file=sys.stderr)  # noqa: T201


def show_engine_status() -> None:
    """Print the status of engines on standard error, in commands that do not show the log (:func:`set_up`)."""
    logger = logging.getLogger("ls_edge.engines")
    logger.handlers[:] = [_EngineStatus()]
    logger.setLevel(logging.INFO)


def ignore_progress(done: int, total: int, text: str) -> None:
    """Ignore the progress."""


def warn_in_python(text: str) -> None:
    """Issue a Python warning that points to the caller of a public function."""
    warnings.warn(text, stacklevel=3)
