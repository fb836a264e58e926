"""Devices that come and go in simulated time: the rate, kind and duration of losses.

Times up and down are exponential, and devices are independent. A simulation starts in the steady state: a device is
down with probability ``down / (up + down)``.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ls_edge.core.errors import UsageError
from ls_edge.runtime.simulator.simulation import Simulation

LOSSES = {
    "kill": "its process is killed; the others see it immediately",
    "stop": "it is stopped, or its link is silent; heartbeats find it",
    "hang": "its engine does not return; only the deadline of a hop finds it",
    "drain": "it leaves cleanly: it takes no new requests and hands over its own",
}
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

    @classmethod
    def parse(cls, text: str) -> Churn:
        """Read ``up=10m,down=30s`` or ``up=10m,down=30s,kill=3,stop=1``; raise :class:`UsageError` for anything else.

        Units are ms, s, m or h. Without weights devices are killed.
        """
        given: dict[str, str] = {}
        for piece in text.split(","):
            key, equals, value = (part.strip() for part in piece.partition("="))
            if key in given:
                raise UsageError(f"--churn {text!r} has {key!r} twice; leave one out")
            known = ["up", "down", *LOSSES]
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
        return cls(_seconds(text, given["up"]), _seconds(text, given["down"]), weights)


def _seconds(text: str, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", value)
    seconds = float(match[1]) * _UNITS[match[2]] if match else -1.0
    if not _LEAST_S <= seconds <= _MOST_S:
        raise UsageError(f"--churn {text!r}: {value!r} is not a time from 1ms to 8784h; write 500ms, 30s, 10m or 2h")
    return seconds


def _weight(text: str, key: str, value: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", value):
        raise UsageError(f"--churn {text!r}: {value!r} is not a weight of {key}; write a number such as 1 or 0.5")
    return float(value)


class ChurnProcess:
    """Random process by which devices of a simulation are lost and return."""

    def __init__(self, sim: Simulation, churn: Churn, names: Sequence[str], rng: random.Random) -> None:
        self._sim = sim
        self._churn = churn
        self._rng = rng
        self._kinds, self._weights = list(churn.weights), list(churn.weights.values())
        self.losses: Counter[str] = Counter()
        """Number of lost devices by kind of loss, including devices that were down from the start."""
        self.down: dict[str, str] = {}
        """Kind of loss by device that is down."""
        self.changes: list[tuple[float, int]] = []
        """Times and changes (1 or -1) of the number of devices that are up, in order."""
        for name in names:
            if rng.random() < churn.down / (churn.up + churn.down):
                self._lose(name)
            else:
                self._stay_up(name)

    def _draw(self, mean: float) -> float:
        return self._rng.expovariate(1 / mean)

    def _stay_up(self, name: str) -> None:
        self._sim.at(self._draw(self._churn.up), lambda: self._lose(name))

    def _lose(self, name: str) -> None:
        (kind,) = self._rng.choices(self._kinds, self._weights)
        self.down[name] = kind
        self.losses[kind] += 1
        self.changes.append((self._sim.now, -1))
        if kind == "kill":
            self._sim.kill(name)
        elif kind == "stop":
            self._sim.stop(name)
        elif kind == "hang":
            self._sim.hang_engine(name, hangs=True)
        else:
            self._sim.drain(name)
            self._leave(name, self._sim.now + self._sim.settings.limits.drain)
        if kind != "drain":
            self._sim.at(self._draw(self._churn.down), lambda: self._return(name))

    def _leave(self, name: str, at_most: float) -> None:
        """End a draining process as soon as it holds nothing."""
        if self._sim.is_idle(name) or self._sim.now >= at_most:
            self._sim.kill(name)
            self._sim.at(self._draw(self._churn.down), lambda: self._return(name))
        else:
            self._sim.at(_LOOK_EVERY_S, lambda: self._leave(name, at_most))

    def _return(self, name: str) -> None:
        kind = self.down.pop(name)
        self.changes.append((self._sim.now, 1))
        if kind == "stop":
            self._sim.cont(name)
        elif kind == "hang":
            self._sim.hang_engine(name, hangs=False)
        else:
            self._sim.restart(name)
        self._stay_up(name)
