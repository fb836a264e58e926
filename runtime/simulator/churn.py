"""Devices that are killed and come back in simulated time.

Times up and down are exponential, and devices are independent. A simulation starts in the steady state: a device is
down with probability ``down / (up + down)``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ls_edge.core.errors import UsageError
from ls_edge.runtime.simulator.simulation import Simulation

_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_LEAST_S, _MOST_S = 1e-3, 366 * 24 * 3600.0


@dataclass(frozen=True)
class Churn:
    """Random losses of devices; times in seconds."""

    up: float
    """Mean time until a device is lost."""
    down: float
    """Mean time until it is back and warm."""

    @classmethod
    def parse(cls, text: str) -> Churn:
        """Read ``up=10m,down=30s``, with the units ms, s, m or h; raise :class:`UsageError` for anything else."""
        match = re.fullmatch(r"up=([\d.]+)(ms|s|m|h),\s*down=([\d.]+)(ms|s|m|h)", text.strip())
        try:
            times = [float(match[n]) * _UNITS[match[n + 1]] for n in (1, 3)] if match else []
        except ValueError:
            times = []
        if not times or not all(_LEAST_S <= seconds <= _MOST_S for seconds in times):
            raise UsageError(f"--churn {text!r} has no times from 1ms to 8784h; write up=10m,down=30s")
        return cls(*times)


class ChurnProcess:
    """Losses of a simulation."""

    def __init__(self, sim: Simulation, churn: Churn, names: Sequence[str], rng: random.Random) -> None:
        """Start the losses of ``names``."""
        self._sim, self._churn, self._rng = sim, churn, rng
        self.down: set[str] = set()
        self.changes: list[tuple[float, int]] = []
        """Times at which a device comes back (1) or is lost (-1), in order."""
        for name in names:
            if rng.random() < churn.down / (churn.up + churn.down):
                self._lose(name)
            else:
                self._later(churn.up, self._lose, name)

    def _later(self, mean: float, change: Callable[[str], None], name: str) -> None:
        self._sim.at(self._rng.expovariate(1 / mean), lambda: change(name))

    def _lose(self, name: str) -> None:
        self.down.add(name)
        self.changes.append((self._sim.now, -1))
        self._sim.kill(name)
        self._later(self._churn.down, self._return, name)

    def _return(self, name: str) -> None:
        self.down.discard(name)
        self.changes.append((self._sim.now, 1))
        self._sim.restart(name)
        self._later(self._churn.up, self._lose, name)
