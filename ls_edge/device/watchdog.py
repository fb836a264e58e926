"""Signs of life for systemd, which restarts a unit with ``WatchdogSec`` when they stop."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time


class Watchdog:
    """Sender of signs of life; does nothing outside a unit of ``Type=notify``.

    The first one ends the start of the unit, in which engines may be built for minutes.
    """

    def __init__(self) -> None:
        limit = os.environ.get("WATCHDOG_USEC", "")
        self._address = os.environ.get("NOTIFY_SOCKET", "")
        self._every_s = int(limit) / 3e6 if limit.isdigit() else math.inf
        self._next = 0.0

    def beat(self) -> None:
        """Send a sign of life, at most three times per limit."""
        if not self._address or (now := time.monotonic()) < self._next:
            return
        self._next = now + self._every_s
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"READY=1\nWATCHDOG=1", self._address.replace("@", "\0", 1))
