"""Files that are replaced in one step, and locks on folders."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from ls_edge.core.errors import LsEdgeError, UsageError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class FolderInUse(UsageError):
    """Another process holds the lock of a folder."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file that replaces ``path`` when the block ends without an error.

    After an error, a kill or a power cut, ``path`` holds the old content or the new one, never a part of it.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", opener=_open_new) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _open_new(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o644)


def write_file(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file of this content, in one step."""
    with replacing(path) as stream:
        stream.write(content)


def read_file(path: Path, limit: int = 64_000_000) -> bytes:
    """Return the content of a file; raise :class:`OSError` if it has more than ``limit`` bytes."""
    with path.open("rb") as stream:
        raw = stream.read(limit + 1)
    if len(raw) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return raw


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; raise :class:`FolderInUse` if another process holds it.

    The lock is ``flock`` on the folder itself, so it ends with the process and leaves no file behind. On a file system
    without such locks, the folder is used unlocked.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUse(f"another process uses {folder}; wait until it ends, or choose another folder") from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)


def check_writable(path: str | Path) -> None:
    """Raise :class:`UsageError` if :func:`open_output` could not write ``path``, before any work is done for it."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"cannot write {path}: it is a folder; name a file")
    above = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "is not writable" if above.is_dir() else "is not a folder"
        raise UsageError(f"cannot write {path}: {above} {why}; give another path")


def write_output(path: str | Path, text: str) -> None:
    """Write a text file that a user named, in one step; see :func:`open_output` for errors."""
    with open_output(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def open_output(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file that a user named; a regular file is replaced when the block ends without an error.

    Raises :class:`UsageError` if the path cannot be written, and :class:`LsEdgeError` if the disk is full.
    """
    path = Path(path)
    if not path.name:
        raise UsageError(f"cannot write {str(path)!r}: it is not the name of a file; give another path")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout or a pipe: replacing it would remove it
            with path.open("w", encoding="utf-8") as stream:
                yield stream
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as binary:
            stream = io.TextIOWrapper(binary, encoding="utf-8")
            yield stream
            stream.detach()  # writes what is buffered, and leaves the file open for syncing
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise LsEdgeError(f"cannot write {path}: {error.strerror}; free some space, or give another path") from None
        raise UsageError(f"cannot write {path}: {error.strerror}; give another path") from None
