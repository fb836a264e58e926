"""A lock on a run folder: one training writes to it at a time; the lock ends with its process.

The lock is ``flock`` on the file ``.lock`` in the folder, which is removed when training ends; a file that a killed
process left behind does not block another. On file systems without locks training goes on without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from ls_edge.core.errors import RunError

LOCK = ".lock"


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made if it is not there, and then removed again if nothing came into it.

    Raises :class:`RunError` where another process holds it, :class:`OSError` where the folder cannot be written.
    """
    there = folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK
    descriptor = _acquire(path, folder)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)  # while it is held: nobody can have locked it since
            os.close(descriptor)
        if not there:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _acquire(path: Path, folder: Path) -> int | None:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            process = f" (process {holder})" if holder.isdigit() else ""
            raise RunError(
                f"another training{process} writes to {folder}; wait until it ends, or give another folder with --out"
            ) from None
        except OSError:  # a file system that has no locks
            os.close(descriptor)
            return None
        if _is_still(path, descriptor):
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)  # its holder removed the file between our opening and locking it


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
