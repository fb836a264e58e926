"""Cores and scheduling policy of the threads of a peer or source.

The engine's thread runs on some cores and all other threads run on the rest. A Linux thread inherits the cores and the
scheduling policy of the thread that started it. So the threads of the links start within :meth:`EngineCores.others`,
and the threads of an engine library run on the cores of the engine's thread.

A message wakes three threads on its way to the engine. Under the default policy of Linux, each of them may interrupt a
thread on its core, such as an engine call, and the caches are filled twice. With ``SCHED_BATCH`` it waits for a free
core or, if there is none, for the end of a time slice of a few milliseconds. ``docs/results.md`` shows the gain.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass

from ls_edge.core.peers_file import PeerConfig, PeersFile, SourceEntry
from ls_edge.core.text import format_ranges

log = logging.getLogger("ls_edge.runtime")


@dataclass(frozen=True)
class EngineCores:
    """Cores of the engine's thread, and of all other threads; both empty if ``cpus`` is not set."""

    engine: frozenset[int] = frozenset()
    rest: frozenset[int] = frozenset()

    @classmethod
    def of(cls, peers: PeersFile, entry: PeerConfig | SourceEntry | None) -> EngineCores:
        """Return the cores that the key ``cpus`` of an entry requests.

        Raise :class:`~ls_edge.core.errors.ConfigError` if the system does not give these cores to this process, or if
        no core is left for the other threads.
        """
        wanted = frozenset(() if entry is None else entry.cpus or ())
        if entry is None or not wanted:
            return cls()
        own = frozenset(os.sched_getaffinity(0))
        given = _given(wanted, own)
        if wanted - given:
            raise peers.error(
                entry, "cpus",
                f"cpus of {entry.name!r}: the system does not give core {format_ranges(wanted - given)} to this "
                f"process, which may use {format_ranges(own | given)}; list others, or leave cpus out",
            )  # fmt: skip
        if not own - wanted:
            raise peers.error(
                entry, "cpus",
                f"cpus of {entry.name!r} are all cores that this process may use ({format_ranges(own)}); leave one "
                "for its messages, or leave cpus out",
            )  # fmt: skip
        return cls(wanted, own - wanted)

    def on_engine(self) -> contextlib.AbstractContextManager[None]:
        """Run on the cores of the engine, with batch scheduling, and start threads there, within the context."""
        return _on(self.engine)

    def others(self) -> contextlib.AbstractContextManager[None]:
        """Run on the remaining cores, with batch scheduling, and start threads there, within the context."""
        return _on(self.rest)


def _given(wanted: frozenset[int], own: frozenset[int]) -> frozenset[int]:
    """Return the cores among ``wanted`` that the system grants, isolated ones included."""
    try:
        os.sched_setaffinity(0, wanted)
        return frozenset(os.sched_getaffinity(0))
    except OSError:  # none of them
        return frozenset()
    finally:
        os.sched_setaffinity(0, own)


@contextlib.contextmanager
def _on(cores: frozenset[int]) -> Iterator[None]:
    with batch_scheduling():
        if not cores:
            yield
            return
        before = os.sched_getaffinity(0)
        _move(cores)
        try:
            yield
        finally:
            _move(before)


def _move(cores: frozenset[int] | set[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:  # the cores of the process have changed meanwhile
        log.warning("cpus have no effect", extra={"why": f"cores {format_ranges(frozenset(cores))}: {error.strerror}"})


@contextlib.contextmanager
def batch_scheduling() -> Iterator[None]:
    """Run the calling thread, and the threads that it starts, with ``SCHED_BATCH`` within the context.

    A thread keeps its policy if it is not the default one or the system forbids the change.
    """
    usual, changed = os.sched_param(0), False
    with contextlib.suppress(OSError):  # forbidden by a sandbox, or missing in the C library
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, usual)
            changed = True
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, usual)
