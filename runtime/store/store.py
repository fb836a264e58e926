"""Bundles on a peer's disk: the folder of ``ls-edge peer --store DIR``.

::

    DIR/store.json             the served bundle, and the previous one
    DIR/files/<sha256>         a complete, verified file, named by the SHA-256 of its content
    DIR/files/<sha256>.part    an incomplete file, as far as it has arrived

A bundle consists of its manifest and the parts that this peer needs. A file loses ``.part`` once its digest is
verified, and ``store.json`` is replaced atomically. So the process or the machine may stop at any moment: the served
bundle is complete, and received data is kept.

A failed write never stops the peer: it serves the bundle that it has, and the write is repeated later. A bundle that
cannot be served is given up only for a complete previous one.

This module does not use sockets; :mod:`~ls_edge.runtime.store.installer` receives the files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Literal

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle, Digest
from ls_edge.core.errors import BundleError, DigestMismatch, LsEdgeError, UsageError
from ls_edge.core.files import folder_lock, sync, write_file
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import HeldParts
from ls_edge.core.text import short_id

log = logging.getLogger("ls_edge.runtime")

SPARE_BYTES = 4 * 1024 * 1024
"""Bytes that stay free on the disk of a store."""
TRIAL_STARTS = 3
"""Starts of the process after which a peer gives up a bundle that never became warm."""
_PIECE = 1 << 20
"""Number of bytes that are hashed at a time."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class StoreRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of ``store.json``. Bundles are named by the SHA-256 of their manifest."""

    schema: Literal[1] = 1
    active: Digest | None = None
    """The served bundle."""
    previous: Digest | None = None
    """The previous bundle, which is kept."""
    trial_starts: int | None = None
    """Starts of the process with the active bundle, counted until it is warm for the first time; null after that."""
    failed: Digest | None = None
    """The last bundle that could not be served."""
    reason: str = ""
    """Reason why the peer does not serve the bundle that it should."""


class Wanted(msgspec.Struct, frozen=True):
    """Files of an offered bundle that a peer needs."""

    missing: tuple[tuple[str, int], ...] = ()
    """SHA-256 and size of each missing file; only the manifest while that is missing."""
    parts: int = 0
    size: int = 0
    """Size of all parts in bytes."""


class _Identified(msgspec.Struct, frozen=True):
    """The part of a manifest that names its bundle."""

    bundle_id: str


class Store:
    """The bundles of one peer; only one process can open it."""

    def __init__(self, folder: str | Path, blocks: Collection[int]) -> None:
        """Open or create the store of a peer that serves ``blocks``.

        Raise :class:`UsageError` if the folder cannot be used. A full disk is not an error: the peer waits for space.
        """
        self.folder = Path(folder)
        self.blocks = HeldParts(sorted(blocks))
        """Parts that the peer should serve."""
        self._files, self._path = self.folder / "files", self.folder / "store.json"
        self._change = threading.Lock()
        self._lock = contextlib.ExitStack()
        self._locked: int | None = None
        """Inode of the locked folder."""
        self._saved = True
        try:
            self._make_folder()
        except OSError as error:
            if error.errno not in _FULL:
                raise UsageError(
                    f"cannot use {self.folder} as a store: {error.strerror}; give --store a writable folder"
                ) from None
            log.warning("the store is not complete", extra={"why": f"disk full at {self.folder}; make room"})
        self._record = self._read()

    def close(self) -> None:
        """Let another process open the store."""
        self._lock.close()

    @property
    def record(self) -> StoreRecord:
        """Record of the served bundle and of the last switch."""
        return self._record

    @property
    def is_confirmed(self) -> bool:
        """Whether ``store.json`` records that the active bundle was warm."""
        record = self._record
        return self._saved and record.trial_starts is None and record.failed != record.active

    # The served bundle.

    def begin(self) -> None:
        """Count a start of the process, and give up a bundle that never becomes warm."""
        starts = self._record.trial_starts
        if starts is None:
            return
        if starts >= TRIAL_STARTS:
            self.give_up(f"it did not become warm in {TRIAL_STARTS} starts of the process")
            return
        try:
            with self._change:
                self._write(msgspec.structs.replace(self._record, trial_starts=starts + 1))
        except BundleError as error:
            log.warning("this start is not counted", extra={"why": str(error)})

    def open_active(self) -> Bundle | None:
        """Open the served bundle; return None if there is none. Raise :class:`BundleError` if it is damaged."""
        return None if self._record.active is None else self.open(self._record.active)

    def open(self, manifest: str) -> Bundle:
        """Open a bundle of the store; its parts are verified when they are read."""
        if not _is_file(self._files / manifest, manifest):
            raise BundleError(f"the manifest {self._files / manifest} is missing or damaged; push the bundle again")
        opened = Bundle.open(self._files, manifest).manifest
        stem, head, *blocks = (
            msgspec.structs.replace(part, file=part.sha256)
            for part in (opened.parts.stem, opened.parts.head, *opened.parts.blocks)
        )
        parts = msgspec.structs.replace(opened.parts, stem=stem, head=head, blocks=tuple(blocks))
        return Bundle(self._files, msgspec.structs.replace(opened, parts=parts))

    def held(self, bundle: Bundle) -> HeldParts:
        """Return the parts that the peer should serve and that have arrived."""
        wanted = self.blocks.of_model(bundle.num_blocks)
        return HeldParts(part for part in wanted if (self._files / bundle.part(part_name(part)).sha256).exists())

    def shown_id(self, manifest: str) -> str:
        """Return the short id of a bundle as shown elsewhere, or a question mark if it is not in the store."""
        try:
            return short_id(msgspec.json.decode((self._files / manifest).read_bytes(), type=_Identified).bundle_id)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return "?"

    def switch(self, manifest: str) -> None:
        """Make a complete bundle active and keep the previous one; raise :class:`BundleError` on failure."""
        self.open(manifest)
        with self._change:
            if self._record.active != manifest:
                self._write(StoreRecord(active=manifest, previous=self._record.active, trial_starts=1))

    def confirm(self, manifest: str) -> None:
        """Record that a bundle is warm if it is the active one; raise :class:`BundleError` if that fails."""
        with self._change:
            if self._record.active == manifest and not self.is_confirmed:
                record = msgspec.structs.replace(self._record, trial_starts=None)
                if record.failed == manifest:
                    record = msgspec.structs.replace(record, failed=None, reason="")
                self._write(record)

    def give_up(self, why: str) -> bool:
        """Go back to the previous bundle if that is complete; return whether it is."""
        with self._change:
            record = self._record
            fault = self._fault_of_previous()
            reason = f"{fault}: {why}" if fault else f"went back to the previous bundle: {why}"
            log.error("cannot serve a bundle", extra={"bundle": self.shown_id(record.active or ""), "why": reason})
            if fault:
                self._record = msgspec.structs.replace(record, failed=record.active, reason=reason)
            else:
                self._record = StoreRecord(active=record.previous, failed=record.active, reason=reason)
                self._saved = False
                with contextlib.suppress(BundleError):  # confirm() repeats it
                    self._write(self._record)
            return not fault

    # Offered bundles. One thread at a time.

    def want(self, manifest: str, size: int, check: Callable[[Bundle], None]) -> Wanted:
        """Return the missing files of a bundle, after verifying the existing ones.

        ``check`` raises if the bundle does not fit this peer. Raise :class:`BundleError` if the bundle cannot be used
        or does not fit on the disk.
        """
        try:
            self._make_folder()
            if not self._path.exists() and self._record.active is not None:  # the folder was removed
                with self._change:
                    self._write(self._record)
            if not self._holds(manifest):
                if not size:
                    raise BundleError("that bundle is no longer in this store; push it again")
                self._require_space([(manifest, size)])
                return Wanted(((manifest, size),))
            bundle = self.open(manifest)
            check(bundle)
            parts = [bundle.part(name) for name in self._names(bundle)]
            sizes = {part.sha256: part.bytes for part in parts}
            missing = [(digest, size) for digest, size in sizes.items() if not self._holds(digest)]
            self._collect({manifest, *sizes})
            self._require_space(missing)
        except OSError as error:
            raise self._disk_error(error) from None
        return Wanted(tuple(missing), len(sizes), sum(sizes.values()))

    def received(self, digest: str) -> int:
        """Return the number of received bytes of a file."""
        try:
            return self._part(digest).stat().st_size
        except OSError:
            return 0

    def write(self, digest: str, size: int, offset: int, data: bytes) -> None:
        """Append to an incoming file of ``size`` bytes, and verify it once it is complete.

        Raise :class:`BundleError` if the disk refuses the data. If the content differs from the digest, drop the file
        and raise :class:`DigestMismatch`.
        """
        path = self._part(digest)
        try:
            with path.open("ab" if offset else "wb") as stream:
                if stream.tell() != offset:
                    raise BundleError(f"{path} has {stream.tell()} bytes, expected {offset}; push again")
                stream.write(data)
            if offset + len(data) == size:
                self._finish(path, digest)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()  # half of a file is useless, and others need the space
            raise self._disk_error(error) from None

    def fill(self, bundle: Bundle) -> str:
        """Copy the missing files of a bundle from its folder; return the SHA-256 of its manifest, for :meth:`switch`.

        Raise :class:`BundleError` as :meth:`want` and :meth:`write` do.
        """
        path = bundle.folder / MANIFEST
        manifest, size = _digest_of(path), path.stat().st_size
        files = {part.sha256: bundle.folder / part.file for part in bundle.manifest.parts.blocks} | {manifest: path}
        while missing := self.want(manifest, size, lambda _: None).missing:
            for digest, length in missing:
                self.write(digest, length, 0, files[digest].read_bytes())
        return manifest

    # Inside.

    def _make_folder(self) -> None:
        """Create and lock the folder, initially and after someone has removed it."""
        self._files.mkdir(parents=True, exist_ok=True)
        folder = self.folder.stat().st_ino
        if folder != self._locked:
            self._lock.close()
            self._lock.enter_context(folder_lock(self.folder))
            self._locked = folder

    def _read(self) -> StoreRecord:
        """Return the content of ``store.json``; an empty record with the reason if it cannot be read."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=StoreRecord)
        except FileNotFoundError:
            return StoreRecord()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = f"{self._path} cannot be read ({error}); push the bundle again"
            log.error("the store has lost its record", extra={"why": reason})
            return StoreRecord(reason=reason)

    def _write(self, record: StoreRecord) -> None:
        try:
            write_file(self._path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
        except OSError as error:
            raise self._disk_error(error) from None
        self._record, self._saved = record, True

    def _finish(self, path: Path, digest: str) -> None:
        found = _digest_of(path)
        if found != digest:
            path.unlink()
            raise DigestMismatch(
                f"the received file is not the file that the manifest names: sha256 {found[:16]}…, expected "
                f"{digest[:16]}…; nothing was changed, push again"
            )
        sync(path)
        path.replace(self._files / digest)
        sync(self._files)

    def _part(self, digest: str) -> Path:
        return self._files / f"{digest}.part"

    def _names(self, bundle: Bundle) -> list[str]:
        """Return the parts of a bundle that the peer serves."""
        return [part_name(part) for part in self.blocks.of_model(bundle.num_blocks)]

    def _fault_of_previous(self) -> str:
        """Return why the previous bundle cannot be served, or an empty string."""
        if self._record.previous is None:
            return "there is no previous bundle to go back to"
        try:
            bundle = self.open(self._record.previous)
            for name in self._names(bundle):
                bundle.read(name)
        except LsEdgeError:
            return "the previous bundle is not complete either"
        return ""

    def _holds(self, digest: str) -> bool:
        """Return whether the store has an intact file with this digest; remove a damaged one."""
        path = self._files / digest
        if _is_file(path, digest):
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

    def _collect(self, offered: set[str]) -> None:
        """Remove all files that none of the offered, the active and the previous bundle needs."""
        keep = {*offered, *(f"{digest}.part" for digest in offered)}
        for manifest in (self._record.active, self._record.previous):
            if manifest is not None:
                keep.add(manifest)
                with contextlib.suppress(BundleError):
                    keep |= {part.sha256 for _, part in self.open(manifest).manifest.part_names()}
        for path in self._files.iterdir():
            if path.name not in keep:
                path.unlink(missing_ok=True)

    def _disk_error(self, error: OSError) -> BundleError:
        if error.errno in _FULL:
            return BundleError(f"disk full at {self.folder}; make room")
        return BundleError(f"cannot write to the store {self.folder}: {error.strerror}; check the disk and permissions")


def _digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _is_file(path: Path, digest: str) -> bool:
    """Return whether ``path`` is a plain file with this SHA-256."""
    try:
        return not path.is_symlink() and _digest_of(path) == digest
    except OSError:
        return False
