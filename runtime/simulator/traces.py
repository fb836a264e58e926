"""Recorded losses of devices: a CSV of ``device,time,up|down``, or an event trace of the Failure Trace Archive.

The first site begins where the trace does, with its first devices. Each further one, and each repetition, begins at a
random time with a random device; after the end comes the beginning.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ls_edge.core.errors import UsageError
from ls_edge.core.files import read_file
from ls_edge.runtime.simulator.churn import LOSSES, Churn, Losses

MOST_BYTES = 200_000_000
_STATES = {"up": "up", "down": "kill", **{kind: kind for kind in LOSSES}}
_NAME, _EVENT, _START, _END = 4, 5, 6, 7
"""Columns of ``event_trace.tab``: name of the node, 1 if it was available, and the times of the event."""


@dataclass(frozen=True)
class Trace:
    """Losses of devices in the past."""

    devices: tuple[tuple[tuple[float, str], ...], ...]
    """Seconds from the beginning, and ``up`` or the kind of loss, of each device in the order of time."""
    seconds: float
    outage_s: float
    """Mean time down."""

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file; raise :class:`UsageError` with the line of what cannot be read."""
        try:
            lines = read_file(Path(path), MOST_BYTES).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--churn {path}: cannot be read ({error}); give a CSV of device,time,up|down") from None
        found: dict[str, list[tuple[float, str]]] = {}
        for number, line in enumerate(lines, 1):
            if (
                not line.strip()
                or line.startswith("#")
                or (not found and line.lower().replace('"', "").startswith("device,"))
            ):
                continue
            try:
                for device, time, state in _events(line):
                    if not device or not 0 <= time < 1e12:
                        raise ValueError
                    found.setdefault(device, []).append((time, _STATES[state]))
            except (ValueError, LookupError, csv.Error):
                raise UsageError(
                    f"--churn {path}:{number}: {line[:60]!r} is not device,time,state; times are seconds, states up, "
                    f"down or {', '.join(LOSSES)}, or give event_trace.tab of the Failure Trace Archive"
                ) from None
        times = [time for events in found.values() for time, _ in events]
        if len(set(times)) < 2:
            raise UsageError(f"--churn {path} has no two times; a trace needs losses over a while")
        begin, seconds = min(times), max(times) - min(times)
        devices = tuple(_changes(sorted((time - begin, state) for time, state in one)) for one in found.values())
        outages = [length for one in devices for length in _outages(one, seconds)]
        return cls(devices, seconds, sum(outages) / len(outages) if outages else 0.0)

    def timelines(self, devices: int, site: int, rng: random.Random) -> Iterator[Iterator[tuple[float, str]]]:
        """Yield the losses of each device of a site."""
        first, start = (rng.randrange(len(self.devices)), rng.random() * self.seconds) if site else (0, 0.0)
        for number in range(devices):
            if number and number % len(self.devices) == 0:  # a device of the trace again, at another time
                start = rng.random() * self.seconds
            yield self._timeline(self.devices[(first + number) % len(self.devices)], start)

    def _timeline(self, changes: Sequence[tuple[float, str]], start: float) -> Iterator[tuple[float, str]]:
        begin = bisect.bisect_right(changes, (start, "~"))
        yield 0.0, changes[begin - 1][1] if begin else _before(changes)
        offset = -start
        while True:
            for at, state in changes[begin:]:
                yield at + offset, state
            begin, offset = 0, offset + self.seconds
            yield offset, _before(changes)


def read_losses(texts: Sequence[str]) -> Losses:
    """Read each ``--churn``: a file, or what :meth:`Churn.parse` reads."""
    return tuple(Trace.read(text) if Path(text).suffix in (".csv", ".tab") else Churn.parse(text) for text in texts)


def _events(line: str) -> list[tuple[str, float, str]]:
    if "\t" in line:
        fields = line.split("\t")
        state = {"1": "up", "0": "down"}[fields[_EVENT].strip()]
        after = "down" if state == "up" else "up"
        return [(fields[_NAME], float(fields[_START]), state), (fields[_NAME], float(fields[_END]), after)]
    device, time, state = (part.strip() for part in next(csv.reader([line])))
    return [(device, float(time), state.lower())]


def _changes(events: Sequence[tuple[float, str]]) -> tuple[tuple[float, str], ...]:
    """Leave out events that change nothing; of several at the same time, the last one counts."""
    last = dict(events)
    return tuple(
        (at, state)
        for (at, state), before in zip(last.items(), [None, *last.values()], strict=False)
        if state != before
    )


def _before(changes: Sequence[tuple[float, str]]) -> str:
    """Return the state before the first change: the other one."""
    return "kill" if changes[0][1] == "up" else "up"


def _outages(changes: Sequence[tuple[float, str]], seconds: float) -> Iterator[float]:
    spans = [(0.0, _before(changes)), *changes, (seconds, "up")]
    for (at, state), (end, _) in itertools.pairwise(spans):
        if state not in ("up", "slow") and end > at:
            yield end - at
