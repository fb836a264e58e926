"""The bundles of one peer on disk, as ``ls-edge push`` brings them: ``ls-edge peer --store DIR``.

::

    DIR/store.json             which bundle is served, and which one was before
    DIR/bundles/<sha256>/      a bundle that is whole: manifest.json and the parts that this peer needs
    DIR/files/<sha256>         a file that is whole and verified, by the SHA-256 of its content
    DIR/incoming/<sha256>      what has come of a file so far
    DIR/lock

A file moves from ``incoming`` to ``files`` once its digest is right, a folder gets its name in ``bundles`` once all of
its files are there (as hard links to ``files``), and ``store.json`` is replaced in one step. So whenever the process or
the machine stops, what is served is a whole bundle, and what has come is kept.

Nothing here knows sockets; :mod:`~ls_edge.runtime.store.installer` brings the files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle, Part
from ls_edge.core.errors import BundleError, DigestMismatch, LsEdgeError, UsageError

log = logging.getLogger("ls_edge.runtime")

SPARE_BYTES = 4 * 1024 * 1024
"""Bytes that stay free on the disk of a store."""
TRIAL_STARTS = 3
"""Starts of a process with a bundle that never got warm, after which it goes back to the one before."""
_PIECE = 1 << 20
"""Bytes that are hashed at a time."""


class StoreRecord(msgspec.Struct, frozen=True):
    """What ``store.json`` holds."""

    schema: int = 1
    active: str | None = None
    """SHA-256 of the manifest of the bundle that is served."""
    previous: str | None = None
    """Of the one before."""
    trial_starts: int | None = None
    """How often a process began with the active bundle while it had never been warm; null once it was."""
    failed: str | None = None
    """The bundle that was switched to last and could not be served, and was given up for the one before."""
    reason: str = ""
    """Why."""


@dataclass(frozen=True)
class Wanted:
    """What a peer needs of an offered bundle."""

    missing: tuple[tuple[str, int], ...]
    """SHA-256 and bytes of each file that is not there; the manifest alone while that is not there."""
    parts: int = 0
    size: int = 0
    """Bytes of all parts."""

    @property
    def complete(self) -> bool:
        """Whether the bundle can be served."""
        return not self.missing


NOTHING = Wanted(())
"""Of a bundle whose manifest has not been looked at."""


class Store:
    """The bundles of one peer. One process has it open."""

    def __init__(self, folder: str | Path) -> None:
        """Open or begin a store; raises :class:`UsageError` where the folder cannot be used."""
        self.folder = Path(folder)
        self._files, self._incoming = self.folder / "files", self.folder / "incoming"
        self._bundles, self._path = self.folder / "bundles", self.folder / "store.json"
        self._change = threading.Lock()
        try:
            for one in (self._files, self._incoming, self._bundles):
                one.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"cannot use {self.folder} as a store: {error.strerror}; give --store a folder that can be written"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._record = self._read()
        except OSError:
            self.close()
            raise UsageError(
                f"another process uses the store {self.folder}; stop it, or give each peer a store of its own"
            ) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let another process open it."""
        with contextlib.suppress(OSError):
            os.close(self._lock)

    @property
    def record(self) -> StoreRecord:
        """Which bundle is served, and what became of the last switch."""
        return self._record

    # Which bundle is served.

    def begin(self) -> str:
        """Count a start of the process, and go back to the bundle before where this one never gets warm.

        Returns why it went back; nothing where it did not.
        """
        record = self._record
        if record.trial_starts is None:
            return ""
        if record.trial_starts >= TRIAL_STARTS:
            why = f"it did not become warm in {TRIAL_STARTS} starts of the process"
            self.give_up(why)
            return why
        self._write(msgspec.structs.replace(record, trial_starts=record.trial_starts + 1))
        return ""

    def open_active(self) -> Bundle | None:
        """The bundle that is served; None where there is none yet. Raises :class:`BundleError` where it is damaged."""
        return None if self._record.active is None else Bundle.open(self._bundles / self._record.active)

    def switch(self, manifest: str) -> None:
        """Serve another bundle, which is complete, from now on; the one before is kept."""
        with self._change:
            if self._record.active != manifest:
                self._write(StoreRecord(active=manifest, previous=self._record.active, trial_starts=1))

    def confirm(self) -> None:
        """Say that the active bundle is warm, so that it is not given up any more."""
        with self._change:
            if self._record.trial_starts is not None:
                self._write(msgspec.structs.replace(self._record, trial_starts=None))

    def give_up(self, why: str) -> bool:
        """Go back to the bundle before, if the active one was never warm; return whether it did."""
        record = self._record
        if record.trial_starts is None:
            return False
        self._write(StoreRecord(active=record.previous, failed=record.active, reason=why))
        log.error("went back to the bundle before", extra={"bundle": (record.active or "")[:8], "why": why})
        return True

    # What is offered. One thread at a time.

    def want(self, manifest: str, size: int, blocks: Collection[int], check: Callable[[Bundle], None]) -> Wanted:
        """Look what is missing of a bundle of which ``blocks`` are served, and put it together if nothing is.

        Every file that is there is verified. ``check`` raises where the bundle does not fit this peer. Raises
        :class:`BundleError` where it cannot be used or does not fit on the disk.
        """
        if not self._holds(manifest):
            if not size:
                raise BundleError(f"the bundle {manifest[:8]} is not in this store any more; push it again")
            self._require_space([(manifest, size)])
            return Wanted(((manifest, size),))
        building = self._bundles / f"{manifest}.part"
        try:
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            self._link(manifest, building / MANIFEST)
            bundle = _open(building)
            check(bundle)
            parts = self._parts(bundle, blocks)
            sizes = {part.sha256: part.bytes for part in parts}
            missing = [(digest, size) for digest, size in sizes.items() if not self._holds(digest)]
            self._collect(manifest, sizes)
            if missing:
                self._require_space(missing)
            else:
                self._complete(building, manifest, parts)
        except OSError as error:
            raise BundleError(_disk(error, self.folder)) from None
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return Wanted(tuple(missing), len(sizes), sum(sizes.values()))

    def received(self, digest: str) -> int:
        """Bytes of a file that have come already."""
        try:
            return (self._incoming / digest).stat().st_size
        except OSError:
            return 0

    def write(self, digest: str, offset: int, data: bytes) -> None:
        """Append to a file that is coming in; raises :class:`BundleError` where the disk does not take it."""
        path = self._incoming / digest
        try:
            with path.open("ab") as stream:
                if stream.tell() != offset:
                    raise BundleError(f"{path} has {stream.tell()} bytes, and {offset} were written; push again")
                stream.write(data)
        except OSError as error:
            path.unlink(missing_ok=True)  # half of a file that does not fit is of no use, and others need the room
            raise BundleError(_disk(error, self.folder)) from None

    def finish(self, digest: str, size: int) -> None:
        """Verify a file that has come in whole; raises :class:`DigestMismatch`, and forgets it, where it is another."""
        path = self._incoming / digest
        try:
            found, length = _digest_of(path)
            if found != digest or length != size:
                path.unlink(missing_ok=True)
                raise DigestMismatch(
                    f"what came is not the file that the manifest names: sha256 {found[:16]}…, {length} bytes, "
                    f"expected {digest[:16]}…, {size} bytes; nothing was changed, push again"
                )
            _sync(path)
            path.replace(self._files / digest)
            _sync(self._files)
        except OSError as error:
            raise BundleError(_disk(error, self.folder)) from None

    # Inside.

    def _read(self) -> StoreRecord:
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=StoreRecord)
        except FileNotFoundError:
            return StoreRecord()
        except msgspec.MsgspecError as error:
            raise UsageError(f"{self._path} cannot be read ({error}); remove it, and push the bundle again") from None
        if record.schema != 1:
            raise UsageError(f"{self._path} has schema {record.schema}, this ls-edge reads 1; install what wrote it")
        for digest in (record.active, record.previous, record.failed):
            if digest is not None and not _is_digest(digest):
                raise UsageError(f"{self._path} names {digest!r}, which is no SHA-256; remove it, and push again")
        return record

    def _write(self, record: StoreRecord) -> None:
        temporary = self._path.with_suffix(".json.part")
        try:
            with temporary.open("wb") as stream:
                stream.write(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self._path)
            _sync(self.folder)
        except OSError as error:
            raise BundleError(_disk(error, self.folder)) from None
        self._record = record

    def _holds(self, digest: str) -> bool:
        """Whether a file is there and is what its name says; a damaged one is removed."""
        path = self._files / digest
        if _is_file(path, digest):
            return True
        path.unlink(missing_ok=True)
        return False

    def _parts(self, bundle: Bundle, blocks: Collection[int]) -> list[Part]:
        parts = [bundle.part(f"block {block}") for block in sorted(blocks)]
        for part in parts:
            if not _is_digest(part.sha256) or not 0 < part.bytes < 1 << 40:
                raise BundleError(
                    f"the manifest gives {part.file!r} a size of {part.bytes} or no SHA-256; export again"
                )
            if part.file == MANIFEST or not part.file.isprintable():
                raise BundleError(f"the manifest names the part {part.file!r}, which no part may be called")
        return parts

    def _complete(self, building: Path, manifest: str, parts: Collection[Part]) -> None:
        """Put the parts beside the manifest, and give the folder its name; one that is there is mended in place."""
        final = self._bundles / manifest
        folder = final if final.is_dir() else building
        for digest, file in {(manifest, MANIFEST), *((part.sha256, part.file) for part in parts)}:
            path = folder / file
            if _is_file(path, digest):
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            self._link(digest, self._incoming / "link")
            (self._incoming / "link").replace(path)
        for path in (folder, *(one for one in folder.rglob("*") if one.is_dir())):
            _sync(path)
        if folder is building:
            building.replace(final)
            _sync(self._bundles)

    def _link(self, digest: str, path: Path) -> None:
        path.unlink(missing_ok=True)
        try:
            os.link(self._files / digest, path)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            shutil.copyfile(self._files / digest, path)  # a file system without links
            _sync(path)

    def _require_space(self, missing: Collection[tuple[str, int]]) -> None:
        needed = sum(size - min(size, self.received(digest)) for digest, size in missing)
        free = shutil.disk_usage(self.folder).free
        if needed + SPARE_BYTES > free:
            raise BundleError(
                f"disk full: {needed + SPARE_BYTES} bytes are needed at {self.folder} and {free} are free; make room"
            )

    def _collect(self, manifest: str, sizes: Mapping[str, int]) -> None:
        """Remove everything but the offered bundle, the active one and the one before."""
        record = self._record
        bundles = {one for one in (record.active, record.previous) if one is not None}
        files = {manifest, *sizes, *bundles}
        for one in bundles:
            with contextlib.suppress(BundleError):
                files |= {part.sha256 for _, part in Bundle.open(self._bundles / one).manifest.part_names()}
        for folder, keep in ((self._files, files), (self._incoming, set(sizes))):
            for path in folder.iterdir():
                if path.name not in keep:
                    path.unlink(missing_ok=True)
        for path in self._bundles.iterdir():
            if path.name.removesuffix(".part") not in bundles | {manifest}:
                shutil.rmtree(path, ignore_errors=True)


def _open(building: Path) -> Bundle:
    """Read a manifest that came; errors speak of the manifest, not of where it lies for the moment."""
    try:
        return Bundle.open(building)
    except LsEdgeError as error:
        raise BundleError(str(error).replace(f"{building}/", "")) from None


def _is_digest(text: str) -> bool:
    return len(text) == 64 and set(text) <= set("0123456789abcdef")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            yield piece


def _digest_of(path: Path) -> tuple[str, int]:
    """SHA-256 and length of a file."""
    digest, length = hashlib.sha256(), 0
    for piece in _pieces(path):
        digest.update(piece)
        length += len(piece)
    return digest.hexdigest(), length


def _is_file(path: Path, digest: str) -> bool:
    """Whether ``path`` is a plain file with this SHA-256."""
    try:
        return not path.is_symlink() and _digest_of(path)[0] == digest
    except OSError:
        return False


def _sync(path: Path) -> None:
    """Have a file or folder written to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full at {folder}; make room, and push again"
    return f"cannot write to the store {folder}: {error.strerror}; check the disk and its permissions"
