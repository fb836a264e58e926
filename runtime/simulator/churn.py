"""Devices that come and go in simulated time: the rate, kind and duration of losses.

Times up are exponential or Weibull, times down exponential. Devices are independent, but for zones (a switch, a power
strip) that take all of their devices with them. A simulation starts in the steady state: a device is down with
probability ``down / (up + down)``, and has been up for as long as those that one meets by chance.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ls_edge.core.errors import UsageError
from ls_edge.runtime.simulator.simulation import Simulation

LOSSES = {
    "kill": "its process is killed; the others see it immediately",
    "stop": "it is stopped, or its link is silent; heartbeats find it",
    "hang": "its engine does not return; only the deadline of a hop finds it",
    "drain": "it leaves cleanly: it takes no new requests and hands over its own",
}
_NUMBERS, _ZONE_TIMES = ("shape", "zone"), ("zone-up", "zone-down")
_OWN = "own"
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_MOST_S = 366 * 24 * 3600.0
_LEAST_S = 1e-3
_LOOK_EVERY_S = 0.05
"""Interval between two looks at a draining device."""


@dataclass(frozen=True)
class Churn:
    """Churn of devices; times in seconds."""

    up: float
    """Mean time until a device is lost."""
    down: float
    """Mean time until it is back and warm."""
    weights: dict[str, float] = field(default_factory=lambda: {"kill": 1.0})
    """Relative frequency of each kind of :data:`LOSSES`."""
    shape: float = 1.0
    """Shape of the Weibull distribution of times up: below 1, devices that were just repaired fail more often."""
    zone: int = 0
    """Devices of a zone, which are lost together; 0 without zones."""
    zone_up: float = math.inf
    zone_down: float = 0.0

    @property
    def outage_s(self) -> float:
        """Longest mean time down, of devices and zones."""
        return max(self.down, self.zone_down)

    @property
    def zone_loss(self) -> float:
        """Share of the time that a zone is down."""
        return self.zone_down / (self.zone_up + self.zone_down)

    @classmethod
    def parse(cls, text: str) -> Churn:
        """Read ``up=10m,down=30s`` or ``up=10m,down=30s,kill=3,stop=1``; raise :class:`UsageError` for anything else.

        Units are ms, s, m or h. Without weights devices are killed. ``shape=0.7`` makes times up Weibull;
        ``zone=4,zone-up=30h,zone-down=10m`` makes four devices each lose power together.
        """
        given: dict[str, str] = {}
        for piece in text.split(","):
            key, equals, value = (part.strip() for part in piece.partition("="))
            if key in given:
                raise UsageError(f"--churn {text!r} has {key!r} twice; leave one out")
            known = ["up", "down", *_NUMBERS, *_ZONE_TIMES, *LOSSES]
            if key not in known or not equals:
                raise UsageError(
                    f"--churn {text!r}: {piece.strip()!r} cannot be read; write up=10m,down=30s, with weights such as "
                    f"kill=3,stop=1 for other losses than kill (keys: {', '.join(known)})"
                )
            given[key] = value
        missing = [key for key in ("up", "down") if key not in given]
        if missing:
            raise UsageError(f"--churn {text!r} has no {' and no '.join(missing)}; write up=10m,down=30s")
        weights = {key: _weight(text, key, value) for key, value in given.items() if key in LOSSES} or {"kill": 1.0}
        weights = {key: weight for key, weight in weights.items() if weight}
        if not weights:
            raise UsageError(f"--churn {text!r}: all weights are 0, so no device could be lost; leave --churn out")
        zoned = [key for key in ("zone", *_ZONE_TIMES) if key in given]
        if len(zoned) not in (0, 3):
            raise UsageError(f"--churn {text!r} has only {', '.join(zoned)}; write zone=4,zone-up=30h,zone-down=10m")
        return cls(
            _seconds(text, given["up"]),
            _seconds(text, given["down"]),
            weights,
            shape=_within(text, "shape", given.get("shape", "1"), 0.2, 10),
            zone=int(_within(text, "zone", given.get("zone", "0"), 1 if zoned else 0, 1000, whole=True)),
            **({key.replace("-", "_"): _seconds(text, given[key]) for key in _ZONE_TIMES} if zoned else {}),
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


def _weight(text: str, key: str, value: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value):
        raise UsageError(f"--churn {text!r}: {value!r} is not a weight of {key}; write a number such as 1 or 0.5")
    return float(value)


class ChurnProcess:
    """Random process by which devices of a simulation are lost and return."""

    def __init__(
        self,
        sim: Simulation,
        churn: Churn,
        names: Sequence[str],
        rng: random.Random,
        zones: Mapping[str, str] | None = None,
    ) -> None:
        """``zones`` are the zones of devices that are lost together."""
        self._sim = sim
        self._churn = churn
        self._rng = rng
        self._kinds, self._weights = list(churn.weights), list(churn.weights.values())
        self.losses: Counter[str] = Counter()
        """Number of lost devices by kind of loss or ``zone``, including devices that were down from the start."""
        self.down: dict[str, str] = {}
        """Kind of loss by device that is down."""
        self.changes: list[tuple[float, int]] = []
        """Times and changes (1 or -1) of the number of devices that are up, in order."""
        self._causes: dict[str, set[str]] = {name: set() for name in names}
        """Reasons for which each device is down: its own loss, its zone, or both."""
        for name in names:
            if rng.random() < churn.down / (churn.up + churn.down):
                self._lose(name)
            else:
                self._sim.at(self._first_up(), lambda name=name: self._lose(name))  # type: ignore[misc]
        members: dict[str, list[str]] = {}
        for name in names:
            if zones is not None and name in zones:
                members.setdefault(zones[name], []).append(name)
        for zone, inside in members.items():
            if rng.random() < churn.zone_loss:
                self._lose_zone(zone, inside)
            else:
                self._keep_zone(zone, inside)

    def _draw(self, mean: float) -> float:
        return self._rng.expovariate(1 / mean)

    def _first_up(self) -> float:
        """Return the rest of a time up that is met by chance, so longer than usual."""
        if self._churn.shape == 1:
            return self._draw(self._churn.up)
        whole = math.pow(self._rng.gammavariate(1 + 1 / self._churn.shape, 1.0), 1 / self._churn.shape)
        return self._rng.random() * self._scale * whole

    @property
    def _scale(self) -> float:
        return self._churn.up / math.gamma(1 + 1 / self._churn.shape)

    def _stay_up(self, name: str) -> None:
        is_usual = self._churn.shape == 1
        lasts = self._draw(self._churn.up) if is_usual else self._rng.weibullvariate(self._scale, self._churn.shape)
        self._sim.at(lasts, lambda: self._lose(name))

    def _lose(self, name: str) -> None:
        (kind,) = self._rng.choices(self._kinds, self._weights)
        is_up = self._go_down(name, kind, _OWN)
        if is_up and kind == "drain":
            self._leave(name, self._sim.now + self._sim.settings.limits.drain)
        else:
            self._sim.at(self._draw(self._churn.down), lambda: self._end(name))

    def _end(self, name: str) -> None:
        """End a device's own loss."""
        self._come_back(name, _OWN)
        self._stay_up(name)

    def _keep_zone(self, zone: str, members: Sequence[str]) -> None:
        self._sim.at(self._draw(self._churn.zone_up), lambda: self._lose_zone(zone, members))

    def _lose_zone(self, zone: str, members: Sequence[str]) -> None:
        for name in members:
            self._go_down(name, "zone", zone)

        def end() -> None:
            for name in members:
                self._come_back(name, zone)
            self._keep_zone(zone, members)

        self._sim.at(self._draw(self._churn.zone_down), end)

    def _go_down(self, name: str, kind: str, cause: str) -> bool:
        """Take a device down, and return whether it was up."""
        is_up = not self._causes[name]
        self._causes[name].add(cause)
        if not is_up:
            return False
        self.down[name] = kind
        self.losses[kind] += 1
        self.changes.append((self._sim.now, -1))
        if kind in ("kill", "zone"):
            self._sim.kill(name)
        elif kind == "stop":
            self._sim.stop(name)
        elif kind == "hang":
            self._sim.hang_engine(name, hangs=True)
        else:
            self._sim.drain(name)
        return True

    def _leave(self, name: str, at_most: float) -> None:
        """End a draining process as soon as it holds nothing."""
        if self._sim.is_idle(name) or self._sim.now >= at_most:
            self._sim.kill(name)
            self._sim.at(self._draw(self._churn.down), lambda: self._end(name))
        else:
            self._sim.at(_LOOK_EVERY_S, lambda: self._leave(name, at_most))

    def _come_back(self, name: str, cause: str) -> None:
        """Take a cause away, and bring a device back that has no other."""
        self._causes[name].discard(cause)
        if self._causes[name]:
            return
        kind = self.down.pop(name)
        self.changes.append((self._sim.now, 1))
        if kind == "stop":
            self._sim.cont(name)
        elif kind == "hang":
            self._sim.hang_engine(name, hangs=False)
        else:
            self._sim.restart(name)
