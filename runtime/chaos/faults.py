"""Faults inside a peer process: an engine that hangs, is slow, stalls or lies, and a wall clock that jumps.

A peer that was started with ``--faults FILE`` looks at the file before each engine call. The file is JSON of
:class:`Faults`; :func:`write` replaces it in one step. A peer without the flag never looks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from ls_edge.core.files import write_file
from ls_edge.engines.engine import Engine, Signature

NEXT_CALL_S = 0.003
"""A call that begins so soon after the one before had waited for it: what a peer takes between two. More would make up
for late sleep where nothing waited, less would not where something did."""


class Faults(msgspec.Struct, frozen=True):
    """What is wrong with a peer."""

    hang: bool = False
    """Engine calls do not return as long as this is set."""
    slow: float = 1.0
    """Engine calls take this many times as long."""
    least_ms: float = 0.0
    """Engine calls take at least this long for each image, as on a slower board."""
    stall_ms: float = 0.0
    """Length of a random stall of the engine."""
    stall_part: float = 0.0
    """Part of the engine calls that stall."""
    lie: float = 0.0
    """Part of the engine calls that return what went in, as if the block had run."""
    not_finite: float = 0.0
    """Part of the engine calls whose result has a NaN."""
    clock_jump_s: float = 0.0
    """The wall clock of the process is off by this much."""


def write(path: Path, faults: Faults) -> None:
    """Set the faults of the peer that looks at ``path``."""
    write_file(path, msgspec.json.encode(faults))


class Control:
    """The peer's side of the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = (0, 0)
        self._faults = Faults()
        self._jump = 0.0
        self._time = time.time
        self.returned_at, self.late_s = 0.0, 0.0
        """When the last engine call of this process returned, and how much later than it was to."""

    def read(self) -> Faults:
        """The faults in force; an unreadable file keeps those before."""
        try:
            stat = self._path.stat()
            stamp = (stat.st_mtime_ns, stat.st_ino)
            if stamp != self._stamp:
                self._faults = msgspec.json.decode(self._path.read_bytes(), type=Faults)
                self._stamp = stamp
                self._jump_clock(self._faults.clock_jump_s)
        except (OSError, msgspec.MsgspecError):
            pass
        return self._faults

    def _jump_clock(self, seconds: float) -> None:
        # Only this process's view of the wall clock: the machine's is other people's too.
        if seconds != self._jump:
            self._jump = seconds
            real = self._time
            time.time = lambda: real() + seconds


class FaultyEngine:
    """An engine with the faults that a :class:`Control` reads."""

    def __init__(self, engine: Engine, control: Control) -> None:
        self._engine = engine
        self._control = control
        self._random = random.Random(engine.part)

    @property
    def part(self) -> str:
        """See :class:`Engine`."""
        return self._engine.part

    @property
    def kind(self) -> str:
        """See :class:`Engine`."""
        return self._engine.kind

    @property
    def provider(self) -> str:
        """See :class:`Engine`."""
        return self._engine.provider

    @property
    def signature(self) -> Signature:
        """See :class:`Engine`."""
        return self._engine.signature

    def run(self, inputs: Mapping[str, np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Run the engine, with whatever is wrong at the moment."""
        control = self._control
        called = time.perf_counter()
        # The device would have been done in time and have begun with what waited for it; only our sleep was late.
        began = called - control.late_s if called - control.returned_at < NEXT_CALL_S else called
        result = self._engine.run(inputs, out)
        faults = control.read()
        spent = time.perf_counter() - called
        wanted = max(spent, faults.least_ms * len(result) / 1e3) * max(1.0, faults.slow)
        ends = max(began + wanted, called + spent)
        left = ends - time.perf_counter()
        if left > 0:
            time.sleep(left)
        control.returned_at = time.perf_counter()
        control.late_s = min(control.returned_at - ends, wanted) if wanted > spent else 0.0
        if faults.stall_ms and self._random.random() < faults.stall_part:
            time.sleep(faults.stall_ms / 1e3)
        while self._control.read().hang:
            time.sleep(0.005)
        if faults.lie and self._random.random() < faults.lie:
            result[...] = inputs["tokens"]
        if faults.not_finite and self._random.random() < faults.not_finite:
            result.flat[0] = np.nan
        return result

    def close(self) -> None:
        """See :class:`Engine`."""
        self._engine.close()
