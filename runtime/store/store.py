"""Bundles on a peer's disk: the folder of ``ls-edge peer --store DIR``.

::

    DIR/store.json             the served bundle and the previous one, and the applied peers.yaml
    DIR/files/<sha256>         a complete, verified file, named by the SHA-256 of its content
    DIR/files/<sha256>.part    an incomplete file, as far as it has arrived

A bundle consists of its manifest and the parts that this peer needs. The ``peers.yaml`` of ``ls-edge apply`` is a file
like them; once there is one, it is used instead of the file with which the peer was started. A file loses ``.part``
once its digest is verified, and ``store.json`` is replaced atomically. So the process or the machine may stop at any
moment: the served bundle is complete, and received data is kept.

A failed write never stops the peer: it serves the bundle that it has, and the write is repeated later. A bundle that
cannot be served is given up only for a complete previous one.

This module does not use sockets; :mod:`~ls_edge.runtime.store.installer` receives the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import BundleError, LsEdgeError, UsageError
from ls_edge.core.files import read_file, write_file
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import HeldParts, PeersFile, parse_peers
from ls_edge.core.text import short_id
from ls_edge.core.validation import InvalidDocument, decode_json
from ls_edge.runtime.change.record import TRIAL_STARTS, AppliedFile, Before, StoreRecord
from ls_edge.runtime.store.files import FileStore, digest_of, is_file

log = logging.getLogger("ls_edge.runtime")

_OWN = re.compile(r"\.?[0-9a-f]{64}(\.|\Z)")
"""Names of files that a store writes; others in its folder belong to the user."""


class Wanted(msgspec.Struct, frozen=True):
    """Files of an offered bundle that a peer needs."""

    missing: tuple[tuple[str, int], ...] = ()
    """SHA-256 and size of each missing file; only the manifest while that is missing."""
    parts: int = 0
    size: int = 0
    """Size of all parts in bytes."""
    shown_id: str = "?"
    """Short id of the bundle as shown elsewhere, once its manifest has arrived."""


class Store(FileStore):
    """The bundles of one peer; only one process can open it."""

    def __init__(self, folder: str | Path, blocks: Collection[int]) -> None:
        """Open or create the store of a peer that serves ``blocks``.

        Raise :class:`UsageError` if the folder cannot be used. A full disk is not an error: the peer waits for space.
        """
        super().__init__(folder)
        self.blocks = HeldParts(sorted(blocks))
        """Parts that the peer should serve."""
        self._path = self.folder / "store.json"
        self._change = threading.RLock()
        self._saved = True
        self.record = self._read()
        """Record of the served bundle and of the last switch."""
        self.difference = ""
        """Difference, with advice, between disk and memory, by the last :meth:`compare`; empty if there is none."""
        self._models: dict[str, bytes] = {}
        """Id of the model by manifest, so that a report opens each manifest once."""

    # The served bundle.

    def begin(self) -> None:
        """Count a start of the process, and give up a bundle that never becomes warm."""
        starts = self.record.trial_starts
        if starts is None:
            return
        if starts >= TRIAL_STARTS:
            self.give_up(f"it did not become warm in {TRIAL_STARTS} starts of the process")
            return
        try:
            self.change(lambda record: msgspec.structs.replace(record, trial_starts=starts + 1))
        except BundleError as error:
            log.warning("this start is not counted", extra={"why": str(error)})

    def open_active(self) -> Bundle | None:
        """Open the served bundle; return None if there is none. Raise :class:`BundleError` if it is damaged."""
        return None if self.record.active is None else self.open(self.record.active)

    def open(self, manifest: str) -> Bundle:
        """Open a bundle of the store; its parts are verified when they are read."""
        try:
            is_intact = is_file(self._files / manifest, manifest)
        except OSError as error:
            raise self._disk_error(error) from None
        if not is_intact:
            raise BundleError(f"the manifest {self._files / manifest} is missing or damaged; apply the bundle again")
        opened = Bundle.open(self._files, manifest).manifest
        stem, head, *blocks = (
            msgspec.structs.replace(part, file=part.sha256)
            for part in (opened.parts.stem, opened.parts.head, *opened.parts.blocks)
        )
        parts = msgspec.structs.replace(opened.parts, stem=stem, head=head, blocks=tuple(blocks))
        return Bundle(self._files, msgspec.structs.replace(opened, parts=parts))

    def model_of(self, manifest: str | None) -> bytes:
        """Return the id of the model of a bundle; empty without a bundle, or if its manifest is damaged."""
        if manifest is not None and manifest not in self._models:
            with contextlib.suppress(BundleError):
                self._models[manifest] = bytes.fromhex(self.open(manifest).manifest.model_id)
        return self._models.get(manifest or "", b"")

    def read_file(self, file: AppliedFile) -> PeersFile:
        """Return an applied ``peers.yaml``; raise :class:`BundleError` if it is damaged, or its own errors."""
        raw = self.read_raw(file.digest)
        if hashlib.sha256(raw).hexdigest() != file.digest:
            path = self._files / file.digest
            raise BundleError(f"the applied peers.yaml {path} is missing or damaged; run 'ls-edge apply' again")
        return parse_peers(raw, Path(f"peers.yaml of version {file.version}"))

    def accept(self, file: AppliedFile, present: bytes) -> None:
        """Accept the processes of a stored file in addition, until the change of the fleet has ended.

        ``present`` is the content of the file that counts now. Raise :class:`BundleError` if writing fails.
        """
        given = AppliedFile(0, hashlib.sha256(present).hexdigest())
        with self._change:
            if self.record.file is None:  # the file with which the peer was started may be overwritten
                self.write(given.digest, len(present), 0, present)
            self.change(lambda record: record.accepting(file, given))

    def change(self, step: Callable[[StoreRecord], StoreRecord]) -> None:
        """Write the record that follows from the present one, unless it is written; raise :class:`BundleError`."""
        with self._change:
            record = step(self.record)
            if record == self.record and self._saved:
                return
            try:
                write_file(self._path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
            except OSError as error:
                raise self._disk_error(error) from None
            self.record, self._saved = record, True

    def held(self, bundle: Bundle) -> HeldParts:
        """Return the parts that the peer should serve and that have arrived."""
        wanted = self.blocks.of_model(bundle.num_blocks)
        return HeldParts(part for part in wanted if (self._files / bundle.part(part_name(part)).sha256).exists())

    def switch(self, manifest: str, file: AppliedFile | None = None, *, is_listed: bool = True) -> None:
        """Make a complete bundle and an accepted file active, and keep the previous ones.

        Serve nothing any more if the file does not list this peer. Raise :class:`BundleError` on failure.
        """
        self.open(manifest)
        self.change(lambda record: record.switched(manifest, file, is_listed=is_listed))

    def confirm(self, manifest: str) -> None:
        """Record that a bundle is warm if it is the active one; raise :class:`BundleError` if that fails."""
        self.change(lambda record: record.confirmed() if record.active == manifest else record)

    def give_up(self, why: str) -> bool:
        """Go back to the previous bundle if that is complete; return whether it is."""
        with self._change:
            record = self.record
            to = record.fallback
            is_same = record.before is not None and to.active == record.active
            fault = "" if is_same else self._fault_of(to.active, partly=to.file != record.file)
            reason = f"{fault or 'went back to the previous ' + ('peers.yaml' if is_same else 'bundle')}: {why}"
            log.error("cannot serve a bundle", extra={"bundle": self._shown_id(record.active or ""), "why": reason})
            if fault:
                self.record = msgspec.structs.replace(record, failed=record.active, reason=reason)
            else:
                self.record, self._saved = record.given_up(reason), False
                with contextlib.suppress(BundleError):  # confirm() repeats it
                    self.change(lambda record: record)
            return not fault

    def compare(self) -> None:
        """Set :attr:`difference`, without reading the parts."""
        record, difference = self.record, ""
        try:
            if record.active is not None and decode_json(read_file(self._path), StoreRecord) != record:
                difference = f"{self._path.name} is of another bundle or file"
            elif (bundle := self.open_active()) is not None:
                for part in self.blocks.of_model(bundle.num_blocks):
                    file = bundle.part(part_name(part))
                    if (self._files / file.sha256).stat().st_size != file.bytes:
                        difference = f"the file of {part_name(part)} is cut off"
        except OSError as error:
            difference = f"{error.strerror}: {error.filename}"
        except InvalidDocument as error:
            difference = f"{self._path.name}{error}"
        except LsEdgeError as error:
            difference = str(error)
        text = f"its store is not what it serves from memory ({difference}); check the disk, then apply again"
        self.difference = difference and text

    def drop_damaged(self) -> bool:
        """Remove the damaged parts of the served bundle; return whether there were any and others are left."""
        with contextlib.suppress(BundleError, OSError):
            if (bundle := self.open_active()) is not None:
                held = [bundle.part(part_name(part)).sha256 for part in self.held(bundle)]
                return 0 < sum(self._holds(digest) for digest in held) < len(held)
        return False

    # Offered bundles. One thread at a time.

    def want(
        self,
        manifest: str,
        size: int,
        parts_of: Callable[[Bundle], Collection[int]],
        file: tuple[str, int] | None = None,
    ) -> Wanted:
        """Return the missing files of a bundle, after verifying the existing ones.

        ``file`` has the SHA-256 and the size of a ``peers.yaml`` that comes with it. Once both are there, ``parts_of``
        returns the parts that this peer needs, and raises if the bundle does not fit. Raise :class:`BundleError` if the
        bundle cannot be used or does not fit on the disk.
        """
        try:
            self._make_folder()
            self.compare()
            if self.difference:  # the folder was removed, for example
                self._saved = False
                self.change(lambda record: record)
            if not self._holds(manifest):
                if not size:
                    raise BundleError("that bundle is no longer in this store; apply it again")
                self._require_space([(manifest, size)])
                return Wanted(((manifest, size),))
            if file is not None and not self._holds(file[0]):
                self._require_space([file])
                return Wanted((file,))
            bundle = self.open(manifest)
            parts = [bundle.part(part_name(part)) for part in parts_of(bundle)]
            sizes = {part.sha256: part.bytes for part in parts}
            missing = [(digest, size) for digest, size in sizes.items() if not self._holds(digest)]
            self._collect({manifest, *sizes, *(() if file is None else (file[0],))})
            self._require_space(missing)
            self.compare()
        except OSError as error:
            raise self._disk_error(error) from None
        return Wanted(tuple(missing), len(sizes), sum(sizes.values()), short_id(bundle.manifest.bundle_id))

    def fill(self, bundle: Bundle) -> str:
        """Copy the missing files of a bundle from its folder; return the SHA-256 of its manifest, for :meth:`switch`.

        Raise :class:`BundleError` as :meth:`want` and :meth:`write` do.
        """
        path = bundle.folder / MANIFEST
        manifest, size = digest_of(path), path.stat().st_size
        names = {part.sha256: name for name, part in bundle.manifest.part_names()}
        while missing := self.want(manifest, size, lambda it: self.blocks.of_model(it.num_blocks)).missing:
            for digest, length in missing:
                self.write(digest, length, 0, bundle.read(names[digest]) if digest in names else path.read_bytes())
        return manifest

    # Inside.

    def _read(self) -> StoreRecord:
        """Return the content of ``store.json``; an empty record with the reason if it is damaged or was removed."""
        try:
            return decode_json(read_file(self._path), StoreRecord)
        except FileNotFoundError:
            if not any(self._files.glob("*")):
                return StoreRecord()
            fault = " is missing, and there are files of bundles"
        except OSError as error:  # an empty record would give up its bundles
            raise UsageError(f"cannot read {self._path}: {error.strerror}; check the disk, and start again") from None
        except InvalidDocument as error:
            fault = str(error)
        reason = f"{self._path}{fault}; apply the bundle again"
        log.error("the store has no record of its bundles", extra={"why": reason})
        return StoreRecord(reason=reason)

    def _shown_id(self, manifest: str) -> str:
        """Return the short id of a bundle as shown elsewhere, or a question mark if it is not in the store."""
        try:
            return short_id(self.open(manifest).manifest.bundle_id)
        except BundleError:
            return "?"

    def _fault_of(self, previous: str | None, *, partly: bool) -> str:
        """Return why the previous bundle cannot be served, or an empty string.

        With ``partly``, it was served with another file, so the blocks in the store are enough, or none at all.
        """
        if previous is None:
            return "" if partly else "there is no previous bundle to go back to"
        try:
            bundle = self.open(previous)
            for part in self.held(bundle) if partly else self.blocks.of_model(bundle.num_blocks):
                bundle.read(part_name(part))
        except LsEdgeError:
            return "the previous bundle is not complete either"
        return ""

    def _collect(self, offered: set[str]) -> None:
        """Remove files that none of the offered, the active and the previous bundle needs.

        Keep all files while one of these manifests cannot be opened or the record is lost, since the parts are unknown.
        """
        record = self.record
        before = record.before or Before(None, None)
        keep = {*offered, *(f"{digest}.part" for digest in offered)}
        keep |= {file.digest for file in (record.file, before.file, *record.accepts) if file is not None}
        needed = [manifest for manifest in (record.active, record.previous, before.active) if manifest is not None]
        try:
            if not needed and record.reason:
                raise BundleError(record.reason)
            for manifest in needed:
                keep |= {manifest, *(part.sha256 for _, part in self.open(manifest).manifest.part_names())}
        except BundleError as error:
            log.warning("nothing is removed from the store", extra={"why": str(error)})
            return
        for path in self._files.iterdir():
            if path.name not in keep and _OWN.match(path.name) and not path.is_dir():
                path.unlink(missing_ok=True)
