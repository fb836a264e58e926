"""Devices and sources that come and go in simulated time: the rate, kind and duration of losses.

Losses are drawn (:class:`Churn`) or recorded (:mod:`ls_edge.runtime.simulator.traces`); several are independent. Drawn
times up are exponential or Weibull, times down exponential. A simulation starts in the steady state: a device is
down with probability ``down / (up + down)``, and the start falls at a random moment of its time up.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ls_edge.core.errors import UsageError
from ls_edge.core.text import show_hours
from ls_edge.runtime.simulator.simulation import SOURCE, Simulation
from ls_edge.runtime.simulator.traces import LOSSES, Trace

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_S = 366 * 24 * 3600.0
_LEAST_S = 1e-3
_LOOK_EVERY_S = 0.05
"""Interval at which draining devices are checked."""
MOST_LOSSES = 1_000_000
"""Maximum number of losses at a site times its devices with blocks: 0.2 to 0.3 ms each."""
_EMPTY_S = 1.0
"""Remaining seconds of computing at which a battery counts as empty."""


@dataclass(frozen=True)
class Churn:
    """Random losses of devices, or of the source; times in seconds."""

    up: float
    """Mean time until a device is lost; NaN if that depends on its battery."""
    down: float
    """Mean time until it is back and warm; for a battery, the charging time."""
    weights: dict[str, float] = field(default_factory=lambda: {"kill": 1.0})
    """Relative frequency of each kind of :data:`LOSSES`."""
    shape: float = 1.0
    """Shape of the Weibull distribution of times up: below 1, devices that were just repaired fail more often."""
    zone: int = 1
    """Number of consecutive devices that are lost together, such as those of a switch or power strip."""
    times: float = 3.0
    """Factor by which the engine of a ``slow`` device takes longer."""
    is_source: bool = False

    @property
    def loss(self) -> float:
        """Share of the time that a device, or its zone, is lost."""
        lost = 1 - self.weights.get("slow", 0.0) / sum(self.weights.values())
        return lost * self.down / (self.up + self.down)

    def per_second(self, devices: int) -> float:
        """Return the mean number of losses per second at a site; NaN if that depends on batteries."""
        return (1 if self.is_source else devices) / (self.up + self.down)

    @classmethod
    def parse(cls, text: str) -> Churn:
        """Read ``up=10m,down=30s`` or ``up=10m,down=30s,kill=3,stop=1``; raise :class:`UsageError` for anything else.

        Units are ms, s, m or h. Without weights devices are killed. ``shape=0.7`` makes times up Weibull; with
        ``zone=4``, four devices each are lost together; with ``of=source``, the source of a site is lost; with
        ``up=battery``, a device is lost when its battery is empty.
        """
        given: dict[str, str] = {}
        for piece in text.split(","):
            key, equals, value = (part.strip() for part in piece.partition("="))
            if key in given:
                raise UsageError(f"--churn {text!r} has {key!r} twice; leave one out")
            known = ["up", "down", "of", "shape", "zone", "times", *LOSSES]
            if key not in known or not equals:
                raise UsageError(
                    f"--churn {text!r}: {piece.strip()!r} cannot be read; write up=10m,down=30s, with weights such as "
                    f"kill=3,stop=1 for other losses than kill (keys: {', '.join(known)}), or a trace, FILE.csv"
                )
            given[key] = value
        missing = [key for key in ("up", "down") if key not in given]
        if missing:
            raise UsageError(f"--churn {text!r} has no {' and no '.join(missing)}; write up=10m,down=30s")
        weighed = {key: _within(text, key, given[key], 0, 9999) for key in given if key in LOSSES} or {"kill": 1.0}
        weights = {key: weight for key, weight in weighed.items() if weight}
        if not weights:
            raise UsageError(f"--churn {text!r}: all weights are 0, so no device could be lost; leave --churn out")
        if "times" in given and "slow" not in weights:
            raise UsageError(f"--churn {text!r}: times is for slow devices; add slow=1, or leave times out")
        is_source, is_battery = given.get("of") == "source", given["up"] == "battery"
        if "of" in given and (not is_source or set(weights) != {"kill"} or "zone" in given or is_battery):
            raise UsageError(
                f"--churn {text!r}: write of=source,up=90h,down=5m; a source is killed, others are devices"
            )
        if is_battery and (set(weights) != {"kill"} or "zone" in given or "shape" in given):
            raise UsageError(f"--churn {text!r}: write up=battery,down=2h; an empty device is off, whatever others do")
        return cls(
            math.nan if is_battery else _seconds(text, given["up"]),
            _seconds(text, given["down"]),
            weights,
            shape=_within(text, "shape", given.get("shape", "1"), 0.2, 10),
            zone=int(_within(text, "zone", given.get("zone", "1"), 1, 1000, whole=True)),
            times=_within(text, "times", given.get("times", "3"), 1, 1000),
            is_source=is_source,
        )


def _seconds(text: str, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", value)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise UsageError(f"--churn {text!r}: {value!r} is not a time from 1ms to 8784h; write 500ms, 30s, 10m or 2h")
    return seconds


def _within(text: str, key: str, value: str, least: float, most: float, *, whole: bool = False) -> float:
    number = float(value) if re.fullmatch(r"\d{1,4}" if whole else r"\d{1,4}(\.\d{1,6})?", value) else -1.0
    if not least <= number <= most:
        raise UsageError(f"--churn {text!r}: {key} {value!r} is not a number from {least:g} to {most:g}")
    return number


Losses = Sequence[Churn | Trace]


def read_losses(texts: Sequence[str]) -> Losses:
    """Read each ``--churn``: a file, or a text for :meth:`Churn.parse`."""
    return tuple(
        Trace.read(text) if Path(text).suffix.lower() in (".csv", ".tab") else Churn.parse(text) for text in texts
    )


def any_of(chances: Sequence[float]) -> float:
    """Return the probability of at least one of several independent events."""
    return 1 - math.prod(1 - chance for chance in chances)


class Battery(NamedTuple):
    """Battery of a device."""

    joules: float
    idle_watts: float
    watts: float
    """Power while it computes, idle power included."""


class ChurnProcess:
    """Losses of a simulation: who is lost, why, and who returns."""

    def __init__(
        self,
        sim: Simulation,
        losses: Losses,
        names: Sequence[str],
        rng: random.Random,
        *,
        idle: Collection[str] = (),
        batteries: Mapping[str, Battery] | None = None,
        site: int = 0,
        on_source: Callable[[bool], None] = lambda _up: None,
    ) -> None:
        """Start the losses of ``names``, in the order of zones; ``idle`` devices hold no blocks and are never lost."""
        self.sim = sim
        self._begun = sim.now
        self._left = MOST_LOSSES // max(1, len(names) - len(idle))
        self._on_source = on_source
        self._idle = frozenset(idle)
        self.losses: Counter[str] = Counter()
        """Number of losses by kind, or ``source``, including devices that are down at the start."""
        self.down: dict[str, str] = {}
        """Kind of loss of each device that is down."""
        self.changes: list[tuple[float, str, int]] = []
        """Times at which a device comes back (1) or is lost (-1), in order."""
        self._causes: dict[str, set[int]] = {name: set() for name in (*names, SOURCE)}
        """Indices of the losses that keep each device down."""
        self._slow: dict[tuple[str, int], float] = {}
        """Slowdown by device and index of the loss."""
        for cause, loss in enumerate(losses):
            if not isinstance(loss, Churn):
                for name, timeline in zip(names, loss.timelines(len(names), site, rng), strict=True):
                    self._replay(name, cause, timeline)
            elif math.isnan(loss.up):
                for name in names:
                    _Discharge(self, cause, loss, name, (batteries or {})[name], rng)
            else:
                zones = [names[at : at + loss.zone] for at in range(0, len(names), loss.zone)]
                for members in [(SOURCE,)] if loss.is_source else zones:
                    _Drawn(self, cause, loss, members, rng)

    def lose(
        self,
        members: Sequence[str],
        kind: str,
        cause: int,
        times: float = Churn.times,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Take devices down, or slow them by ``times``; call ``then`` when those that drain have left."""
        found = [name for name in members if name not in self._idle]
        self._left -= len(found)
        if self._left < 0:
            raise UsageError(
                f"devices of a site were lost too often to simulate in {show_hours(self.sim.now / 3600)}, and not all "
                "requests have ended; give longer times in --churn, or fewer requests"
            )
        if kind == "slow":
            self.losses[kind] += len(found)
            for name in found:
                self._slow[name, cause] = times
                self._set_pace(name)
        lost = [name for name in found if kind != "slow" and self._go_down(name, kind, cause)]
        self._leave(lost, self.sim.now, then)

    def _leave(self, members: Sequence[str], since: float, then: Callable[[], None]) -> None:
        """End draining processes as soon as all of them hold nothing, or after the limit for that."""
        left = [name for name in members if self.down.get(name) == "drain"]
        if any(not self.sim.is_idle(name) for name in left) and self.sim.now < since + self.sim.settings.limits.drain:
            self.sim.at(_LOOK_EVERY_S, lambda: self._leave(left, since, then))
            return
        for name in left:
            self.sim.kill(name)
        then()

    def bring_back(self, members: Sequence[str], cause: int) -> None:
        """End a loss, and bring back the devices that no other loss keeps down."""
        for name in members:
            if self._slow.pop((name, cause), None) is not None:
                self._set_pace(name)
            elif cause in self._causes[name]:
                self._causes[name].discard(cause)
                if not self._causes[name]:
                    self._come_back(name)

    def _set_pace(self, name: str) -> None:
        self.sim.slowness[name] = math.prod(times for (slow, _), times in self._slow.items() if slow == name)

    def _go_down(self, name: str, kind: str, cause: int) -> bool:
        is_up = not self._causes[name]
        self._causes[name].add(cause)
        if not is_up:
            return False
        if name == SOURCE:
            self.losses[SOURCE] += 1
            self.sim.kill(name)
            self._on_source(False)
            return True
        self.down[name] = kind
        self.losses[kind] += 1
        self.changes.append((self.sim.now, name, -1))
        if kind == "hang":
            self.sim.hang_engine(name, hangs=True)
        else:
            getattr(self.sim, kind)(name)  # kill, stop, or drain
        return True

    def _come_back(self, name: str) -> None:
        if name == SOURCE:
            self.sim.restart(name)
            self._on_source(True)
            return
        kind = self.down.pop(name)
        self.changes.append((self.sim.now, name, 1))
        if kind == "stop":
            self.sim.cont(name)
        elif kind == "hang":
            self.sim.hang_engine(name, hangs=False)
        else:
            if kind == "drain" and self.sim.processes[name].alive:  # a trace may not let it leave
                self.sim.kill(name)
            self.sim.restart(name)

    def _replay(self, name: str, cause: int, timeline: Iterator[tuple[float, str]]) -> None:
        """Schedule the next loss or return, which schedules the one after it."""
        change = next(timeline, None)
        if change is None:
            return
        at, kind = change

        def happen() -> None:
            self.bring_back((name,), cause)
            if kind != "up":
                self.lose((name,), kind, cause)
            self._replay(name, cause, timeline)

        if at <= self.sim.now - self._begun:
            happen()
        else:
            self.sim.at(self._begun + at - self.sim.now, happen)


class _Drawn:
    """Random losses of devices that are lost together."""

    def __init__(
        self, process: ChurnProcess, cause: int, churn: Churn, members: Sequence[str], rng: random.Random
    ) -> None:
        self._process, self._cause, self._churn, self._members, self._rng = process, cause, churn, members, rng
        self._at = process.sim.at
        if rng.random() < churn.down / (churn.up + churn.down):
            self._lose()
        else:
            self._at(self._first_up(), self._lose)

    def _first_up(self) -> float:
        """Return the rest of the time up at the start, a random moment, which more likely falls into a long time up."""
        shape = self._churn.shape
        if shape == 1:
            return self._rng.expovariate(1 / self._churn.up)
        return self._rng.random() * self._scale * math.pow(self._rng.gammavariate(1 + 1 / shape, 1.0), 1 / shape)

    @property
    def _scale(self) -> float:
        return self._churn.up / math.gamma(1 + 1 / self._churn.shape)

    def _lose(self) -> None:
        (kind,) = self._rng.choices(list(self._churn.weights), list(self._churn.weights.values()))
        self._process.lose(
            self._members,
            kind,
            self._cause,
            self._churn.times,
            lambda: self._at(self._rng.expovariate(1 / self._churn.down), self._end),
        )

    def _end(self) -> None:
        self._process.bring_back(self._members, self._cause)
        self._at(self._rng.weibullvariate(self._scale, self._churn.shape), self._lose)


class _Discharge:
    """Losses of a device whose battery runs out and is then charged; it starts with a random charge."""

    def __init__(
        self, process: ChurnProcess, cause: int, churn: Churn, name: str, battery: Battery, rng: random.Random
    ) -> None:
        self._process, self._cause, self._churn, self._name, self._battery = process, cause, churn, name, battery
        self._begin(rng.random())

    def _begin(self, charge: float) -> None:
        sim = self._process.sim
        self._since, self._busy = sim.now, sim.busy[self._name]
        self._joules = charge * self._battery.joules
        self._look()

    def _look(self) -> None:
        sim, battery = self._process.sim, self._battery
        idle, busy = sim.now - self._since, max(0.0, sim.busy[self._name] - self._busy)
        left = self._joules - battery.idle_watts * idle - (battery.watts - battery.idle_watts) * busy
        if left > _EMPTY_S * battery.watts:
            sim.at(left / battery.watts, self._look)
            return
        self._process.lose((self._name,), "kill", self._cause)
        sim.at(self._churn.down, self._charged)

    def _charged(self) -> None:
        self._process.bring_back((self._name,), self._cause)
        self._begin(1.0)
