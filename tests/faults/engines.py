"""Faults of engines: calls that hang, are slow, stall or lie, and a wall clock that jumps.

Each engine call reads the current faults from a JSON file of :class:`Faults`, which :func:`write` replaces atomically.
:func:`inject` wraps the engines of a peer of this process; ``python -m tests.faults.peer`` is a peer with faults.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from ls_edge.core.files import write_file
from ls_edge.engines.engine import Engine
from ls_edge.runtime.peer.peer import Peer


class Faults(msgspec.Struct, frozen=True):
    """Faults of a peer."""

    hang: bool = False
    """Whether engine calls do not return."""
    slow: float = 1.0
    """Factor on the time of engine calls."""
    least_ms: float = 0.0
    """Minimum time of an engine call per image, as on a slower board."""
    stall_ms: float = 0.0
    """Length of a random stall of the engine."""
    stall_part: float = 0.0
    """Fraction of engine calls that stall."""
    lie: float = 0.0
    """Fraction of engine calls that return their input as if the block had run."""
    not_finite: float = 0.0
    """Fraction of engine calls whose result contains a NaN."""
    clock_jump_s: float = 0.0
    """Offset of the wall clock of the process."""


def write(path: Path, faults: Faults) -> None:
    """Set the faults of the peer that reads ``path``."""
    write_file(path, msgspec.json.encode(faults))


class Control:
    """Reader of the file in the process of a peer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = (0, 0)
        self._faults = Faults()
        self._jump = 0.0
        self._time = time.time

    def read(self) -> Faults:
        """Return the current faults; an unreadable file changes nothing."""
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
        # Only this process sees the jump; other processes share the clock of the machine.
        if seconds != self._jump:
            self._jump = seconds
            real = self._time
            time.time = lambda: real() + seconds


class FaultyEngine:
    """An engine with the faults that a :class:`Control` reads."""

    def __init__(self, engine: Engine, control: Control) -> None:
        self.part, self.kind, self.provider = engine.part, engine.kind, engine.provider
        self.signature = engine.signature
        self._engine, self._control = engine, control
        self._random = random.Random(engine.part)

    def run(self, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
        """Run the engine with the current faults."""
        called = time.perf_counter()
        result = self._engine.run(inputs)
        faults = self._control.read()
        spent = time.perf_counter() - called
        time.sleep(max(spent, faults.least_ms * len(result) / 1e3) * max(1.0, faults.slow) - spent)
        if faults.stall_ms and self._random.random() < faults.stall_part:
            time.sleep(faults.stall_ms / 1e3)
        while self._control.read().hang:
            time.sleep(0.005)
        if faults.lie and self._random.random() < faults.lie:
            tokens = inputs.get("tokens", result[:0])
            result[...] = tokens if tokens.shape == result.shape else result[..., ::-1].copy()
        if faults.not_finite and self._random.random() < faults.not_finite:
            result.flat[0] = np.nan
        return result

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def wrap(engines: Mapping[int, Engine], path: Path) -> Mapping[int, Engine]:
    """Return the engines with the faults that ``path`` sets."""
    control = Control(path)
    return {block: FaultyEngine(engine, control) for block, engine in engines.items()}


def inject(peer: Peer, path: Path) -> Peer:
    """Make a peer of this process, not served yet, open engines with the faults that ``path`` sets."""
    open_engines = peer.open_engines
    peer.open_engines = lambda *words: wrap(open_engines(*words), path)
    return peer
