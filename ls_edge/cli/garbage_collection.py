"""Garbage collection of a process that serves: what was loaded at the start is not looked at again and again."""

from __future__ import annotations

import gc


def exclude_existing_objects() -> None:
    """Leave out of later collections what exists now: modules and engines, which live as long as the process.

    A collection of the oldest generation would walk all of them, while requests wait. May be called again; what became
    garbage since the last call is collected then.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def include_all_objects() -> None:
    """Take :func:`exclude_existing_objects` back, for a process that goes on to do something else."""
    gc.unfreeze()
