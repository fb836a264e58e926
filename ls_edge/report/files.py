"""Files that are written in one step, so that no reader finds half of one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ls_edge.core.errors import LsEdgeError, UsageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_whole(path: str | Path) -> None:
    """Raise :class:`UsageError` where :func:`write_whole` could not write ``path``, before the work for it is done."""
    path = Path(path)
    if path.is_dir():
        raise UsageError(f"{path} is a folder, so it cannot be written; name a file")
    above = next((folder for folder in path.absolute().parents if folder.exists()), Path("/"))
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "may not be written to" if above.is_dir() else "is no folder"
        raise UsageError(f"cannot write {path}: {above} {why}; give another path")


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file so that ``path`` never holds half of it.

    Raises :class:`UsageError` where it cannot be written, and :class:`LsEdgeError` where there is no room for it.
    """
    with open_whole(path) as stream:
        stream.write(text)


@contextlib.contextmanager
def open_whole(path: str | Path) -> Iterator[IO[str]]:
    """A text file to write piece by piece, which stands at ``path`` when the block has ended without an error.

    Errors as :func:`write_whole`.
    """
    path = Path(path)
    if not path.name:
        raise UsageError(f"cannot write {str(path)!r}: that is no name of a file; give another path")
    if path.exists() and not path.is_file():  # such as /dev/stdout or a pipe, which a rename would replace
        try:
            with path.open("w", encoding="utf-8") as stream:
                yield stream
        except OSError as error:
            raise _cannot_write(path, error) from None
        return
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as stream:
            yield stream
        part.replace(path)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _cannot_write(path: Path, error: OSError) -> LsEdgeError:
    if error.errno in _FULL:
        return LsEdgeError(f"cannot write {path}: {error.strerror}; make room there, or give another path")
    return UsageError(f"cannot write {path}: {error.strerror}; give another path")
