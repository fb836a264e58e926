"""Files of a store, named by the SHA-256 of their content: receiving, verifying, and their room on the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from ls_edge.core.errors import BundleError, DigestMismatch, UsageError
from ls_edge.core.files import folder_lock, remove_left_parts, sync

log = logging.getLogger("ls_edge.runtime")

SPARE_BYTES = 4 * 1024 * 1024
"""Bytes that stay free on the disk of a store."""
_PIECE = 1 << 20
"""Number of bytes that are hashed at a time."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class FileStore:
    """Folder of complete and incomplete files; only one process can open it."""

    def __init__(self, folder: str | Path) -> None:
        """Open or create the folder.

        Raise :class:`UsageError` if it cannot be used. A full disk is not an error: the peer waits for space.
        """
        self.folder = Path(folder)
        self._files = self.folder / "files"
        self._lock = contextlib.ExitStack()
        self._locked: int | None = None
        """Inode of the locked folder."""
        try:
            self._make_folder()
        except OSError as error:
            if error.errno not in _FULL:
                raise UsageError(
                    f"cannot use {self.folder} as a store: {error.strerror}; give --store a writable folder"
                ) from None
            log.warning("the store is not complete", extra={"why": f"disk full at {self.folder}; make room"})

    def close(self) -> None:
        """Let another process open the store."""
        self._lock.close()

    def received(self, digest: str) -> int:
        """Return the number of received bytes of a file."""
        try:
            return (self._files / f"{digest}.part").stat().st_size
        except OSError:
            return 0

    def write(self, digest: str, size: int, offset: int, data: bytes) -> None:
        """Append to an incoming file of ``size`` bytes, and verify it once it is complete.

        Raise :class:`BundleError` if the disk refuses the data. If the content differs from the digest, drop the file
        and raise :class:`DigestMismatch`.
        """
        path = self._files / f"{digest}.part"
        try:
            with path.open("ab" if offset else "wb") as stream:
                if stream.tell() != offset:
                    raise BundleError(f"{path} has {stream.tell()} bytes, expected {offset}; apply again")
                stream.write(data)
            if offset + len(data) < size:
                return
            found = digest_of(path)
            if found != digest:
                path.unlink()
                raise DigestMismatch(
                    f"the received file is not the file that the manifest names: sha256 {found[:16]}…, expected "
                    f"{digest[:16]}…; nothing was changed, apply again"
                )
            sync(path)
            path.replace(self._files / digest)
            sync(self._files)
        except OSError as error:
            if error.errno in _FULL:
                with contextlib.suppress(OSError):
                    path.unlink()  # half of a file is useless, and others need the space
            raise self._disk_error(error) from None

    def read_raw(self, digest: str) -> bytes:
        """Return the content of a stored file; empty if it cannot be read."""
        try:
            return (self._files / digest).read_bytes()
        except OSError:
            return b""

    def _make_folder(self) -> None:
        """Create and lock the folder, initially and after someone has removed it."""
        self._files.mkdir(parents=True, exist_ok=True)
        folder = self.folder.stat().st_ino
        if folder != self._locked:
            self._lock.close()
            self._lock.enter_context(folder_lock(self.folder))
            remove_left_parts(self.folder)
            self._locked = folder

    def _holds(self, digest: str) -> bool:
        """Return whether the store has an intact file with this digest; remove one that was read and differs."""
        path = self._files / digest
        if is_file(path, digest):
            return True
        path.unlink(missing_ok=True)
        return False

    def _require_space(self, missing: Collection[tuple[str, int]]) -> None:
        needed = sum(size - min(size, self.received(digest)) for digest, size in missing)
        free = shutil.disk_usage(self.folder).free
        if missing and needed + SPARE_BYTES > free:
            raise BundleError(
                f"disk full: {needed + SPARE_BYTES} bytes are needed at {self.folder} and {free} are free; make room"
            )

    def _disk_error(self, error: OSError) -> BundleError:
        if error.errno in _FULL:
            return BundleError(f"disk full at {self.folder}; make room")
        return BundleError(f"cannot use the store {self.folder}: {error.strerror}; check the disk and permissions")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def is_file(path: Path, digest: str) -> bool:
    """Return whether ``path`` is a plain file with this SHA-256; raise ``OSError`` if it cannot be read.

    So a file that an error hides, for example of the disk or of the number of descriptors, does not count as missing.
    """
    try:
        is_plain = stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return is_plain and digest_of(path) == digest
