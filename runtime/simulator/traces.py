"""Recorded losses of devices: a CSV of ``device,time,up|down``, or an event trace of the Failure Trace Archive.

The first site starts at the beginning of the trace, with its first devices. Each further site, and each repetition,
starts at a random time with a random device. A trace that ends is repeated.
"""

from __future__ import annotations

import bisect
import csv
import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ls_edge.core.errors import UsageError
from ls_edge.core.files import read_file

LOSSES = ("kill", "stop", "hang", "drain", "slow")
"""Kinds of losses: a killed process, a stopped one or a silent link, an engine that does not return, a process that
leaves cleanly, and an engine that takes longer."""
MOST_BYTES = 200_000_000
_STATES = {"up": "up", "down": "kill", **{kind: kind for kind in LOSSES}}
_OTHER = {"up": "kill", **dict.fromkeys(LOSSES, "up")}
"""State before and after an event of each state."""
_NAME, _EVENT, _START, _END = 4, 5, 6, 7
"""Columns of ``event_trace.tab``: name of the node, 1 if it was available, and the times of the event."""


@dataclass(frozen=True)
class Trace:
    """Recorded losses of devices."""

    devices: tuple[tuple[tuple[float, str], ...], ...]
    """States of each device, ``up`` or a kind of loss, and the seconds at which they begin: the first one at 0."""
    seconds: float
    down: float
    """Mean time down."""

    @classmethod
    def read(cls, path: str | Path) -> Trace:
        """Read a file; raise :class:`UsageError` that names the first line that cannot be read."""
        try:
            lines = read_file(Path(path), MOST_BYTES).decode("utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--churn {path}: cannot be read ({error}); give a CSV of device,time,up|down") from None
        found: dict[str, list[tuple[float, float, str]]] = {}
        for number, line in enumerate(lines, 1):
            is_header = not found and re.match(r"\W*device\W+time\b", line, re.IGNORECASE)
            if not line.strip() or line.startswith("#") or is_header:
                continue
            try:
                device, start, end, state = _event(line)
                if not device or not 0 <= start <= end or start >= 1e12:
                    raise ValueError
                found.setdefault(device, []).append((start, end, _STATES[state]))
            except (ValueError, LookupError, csv.Error):
                raise UsageError(
                    f"--churn {path}:{number}: {line[:60]!r} is not device,time,state; times are seconds, states up, "
                    f"down or {', '.join(LOSSES)}, or give event_trace.tab of the Failure Trace Archive"
                ) from None
        times = [time for events in found.values() for event in events for time in event[:2] if time < 1e12] or [0.0]
        begin, seconds = min(times), max(times) - min(times)
        if seconds < 1e-3:
            raise UsageError(
                f"--churn {path} has no two times a millisecond apart; a trace needs a beginning and an end"
            )
        devices = tuple(_changes(events, begin, seconds) for events in found.values())
        outages = [
            end - at
            for changes in devices
            for (at, state), (end, _) in itertools.pairwise([*changes, (seconds, "up")])
            if state not in ("up", "slow")
        ]
        return cls(devices, seconds, sum(outages) / len(outages) if outages else 0.0)

    def per_second(self, devices: int) -> float:
        """Return the mean number of losses per second at a site."""
        return (
            devices * sum(state != "up" for one in self.devices for _, state in one) / len(self.devices) / self.seconds
        )

    def timelines(self, devices: int, site: int, rng: random.Random) -> Iterator[Iterator[tuple[float, str]]]:
        """Yield the losses of each device of a site."""
        first, start = (rng.randrange(len(self.devices)), rng.random() * self.seconds) if site else (0, 0.0)
        for number in range(devices):
            if number and number % len(self.devices) == 0:  # a device of the trace again, at another time
                start = rng.random() * self.seconds
            yield self._timeline(self.devices[(first + number) % len(self.devices)], start)

    def _timeline(self, changes: Sequence[tuple[float, str]], start: float) -> Iterator[tuple[float, str]]:
        begin = bisect.bisect_right(changes, (start, "~"))
        state, offset = changes[begin - 1][1], -start
        yield 0.0, state
        while len(changes) > 1:
            for at, after in changes[begin:]:
                if after != state:  # the trace may begin as it ended
                    yield at + offset, after
                state = after
            begin, offset = 0, offset + self.seconds


def _event(line: str) -> tuple[str, float, float, str]:
    """Return the event of a line: device, start, end, and state; a state of a CSV has no end."""
    if "\t" in line:
        fields = [part.strip() for part in line.split("\t")]
        return fields[_NAME], float(fields[_START]), float(fields[_END]), {"1": "up", "0": "down"}[fields[_EVENT]]
    device, time, state = (part.strip() for part in next(csv.reader([line])))
    return device, float(time), math.inf, state.lower()


def _changes(events: Sequence[tuple[float, float, str]], begin: float, seconds: float) -> tuple[tuple[float, str], ...]:
    """Return the changes of a device in ``seconds`` since ``begin``; of several at the same time, the last line counts.

    Before its first event, and between the end of an event and the next one, the device is in the other state. Events
    of the same state that overlap are one.
    """
    ordered = sorted(events, key=lambda event: event[0])
    found: dict[float, str] = {}
    last, until = "", 0.0
    for (start, end, state), (following, *_) in itertools.pairwise([*ordered, (math.inf, math.inf, "")]):
        last, until = state, max(end, until) if state == last else end
        found[start - begin] = state
        if until < following:
            found[until - begin] = _OTHER[state]
    states = {0.0: _OTHER[next(iter(found.values()))]} | found
    return tuple(
        (at, state)
        for (at, state), before in zip(states.items(), [None, *states.values()], strict=False)
        if state != before and at < seconds
    )
