"""The next bundle of a peer with a store, and its engines."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LinkError, LsEdgeError, UsageError
from ls_edge.core.logs import OnProgress
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import HeldParts, PeerConfig
from ls_edge.core.text import name_blocks
from ls_edge.engines.opening import build_engines
from ls_edge.runtime.change.record import AppliedFile
from ls_edge.runtime.peer.setup import PeerSetup
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.keys import load_secret
from ls_edge.runtime.transport.zap import curve_of, read_again

log = logging.getLogger("ls_edge.runtime")
_SHORT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # errors of a machine that lacks something for a moment


class StoredBundle:
    """The active bundle of a store, which a push or a failure exchanges for another."""

    def __init__(
        self,
        store: Store,
        given: PeerSetup,
        present: Callable[[], PeerSetup],
        use: Callable[[PeerSetup], bool],
    ) -> None:
        """Serve from a store; ``given`` has the file with which the peer was started.

        ``present()`` returns the present setup, and ``use(setup)`` uses the files of another one; it returns whether
        the peer has to reopen instead.
        """
        self._store, self._given, self._present, self._use = store, given.peers, present, use
        self.installer = Installer(store, given.entry.name, self)
        self._note_file()
        self._is_broken = False
        """Whether the active bundle cannot be served, so that the peer waits for a push."""

    def opened(self, setup: PeerSetup) -> PeerSetup:
        """Return the setup with the active bundle, or without one to wait for a push.

        It is limited to the parts that the store has, so that a changed entry does not stop these. Raise
        :class:`BundleError` if the bundle is damaged, or the store has none of its parts.
        """
        if self.installer.is_switching:
            self.installer.is_switching = self._is_broken = False
        setup = setup.of_model(None if self._is_broken else self._store.open_active())
        self._store.blocks, self.installer.lacking = setup.entry.blocks, ""
        if setup.bundle is None:
            return setup
        held = self._store.held(setup.bundle)
        if missing := set(setup.entry.blocks) - set(held):
            lacking = f"its store lacks {name_blocks(missing)}; send it again with 'ls-edge apply PEERS --bundle DIR'"
            if not held:
                raise BundleError(lacking)
            self.installer.lacking = lacking
            log.warning("serves only a part of its blocks", extra={"peer": setup.entry.name, "why": lacking})
        return replace(setup, entry=msgspec.structs.replace(setup.entry, blocks=held))

    def adopt(self, setup: PeerSetup) -> PeerSetup:
        """Return the setup with the applied files of the store, if there are any that can be used."""
        record = self._store.record
        if record.file is None:
            return setup
        try:
            version, read = record.file.version, self._store.read_file
            others = sorted(record.accepts, key=lambda file: -file.version)
            return setup.using(
                read(record.file),
                setup.keys,
                newer=tuple(read(file) for file in others if file.version > version),
                older=tuple(read(file) for file in others if file.version <= version),
            )
        except LsEdgeError as error:
            log.error("the applied peers.yaml cannot be used", extra={"peer": setup.entry.name, "why": str(error)})
            return setup

    def read_again(self, setup: PeerSetup) -> PeerSetup:
        """Read the secret key again and, unless a file was applied, the file with which the peer was started."""
        if self._store.record.file is None:
            return setup.using(*read_again(setup.peers, setup.keys, setup.entry.name))
        keys = setup.keys
        self._note_file()
        return self.adopt(replace(setup, keys=load_secret(keys.path) if keys is not None and keys.path else keys))

    def _note_file(self) -> None:
        """Log that an applied file is used instead of the file with which the peer was started."""
        file = self._store.record.file
        if file is not None and file.digest != hashlib.sha256(self._given.raw).hexdigest():
            why = f"it was applied after {self._given.path}; change it with 'ls-edge apply'"
            log.info("uses the applied peers.yaml", extra={"version": file.version, "why": why})

    # The fleet as the installer sees it, on the store's thread.

    @property
    def given(self) -> bytes:
        """Content of the file with which the peer was started, or that it has read again."""
        return self._present().peers.raw

    def entry_in(self, file: AppliedFile | None, bundle: Bundle) -> PeerConfig:
        """Return the entry of this peer in a file, without parts if it has none.

        Raise an error if file or bundle do not fit this peer.
        """
        setup, name = self._present(), self._present().entry.name
        peers = setup.peers if file is None else self._store.read_file(file)
        peers.check_codecs(codec_of)
        if not any(source.may_push for source in peers.sources):
            raise UsageError(f"no source of {peers.path} may push, so the fleet could not be changed again")
        if all(peer.name != name for peer in peers.peers):
            return msgspec.structs.replace(setup.entry, blocks=HeldParts())
        curve_of(peers, name, setup.keys)
        return peers.of_model(bundle.num_blocks).peer(name)

    def build(self, bundle: Bundle, file: AppliedFile | None, on_step: OnProgress) -> Iterator[object]:
        """Build the engines of the parts of a file, one at a time."""
        entry, wanted = self.entry_in(file, bundle), self._present().settings.engine
        return build_engines(
            bundle,
            [part_name(part) for part in entry.blocks],
            kind=wanted or entry.engine,
            provider=entry.provider if wanted in (None, "onnx") else None,
            max_batch=entry.max_batch,
            gpu_mem_limit=entry.gpu_mem_limit,
            on_step=on_step,
        )

    def follow(self) -> Callable[[], bool]:
        """Read the recorded files; return a function that uses them and returns whether the peer has to reopen."""
        setup = self.adopt(self._present())
        return lambda: self._use(setup)

    def close(self) -> None:
        """Stop receiving, and close the store."""
        self.installer.close()

    def give_up(self, error: LsEdgeError) -> None:
        """Go back to the previous bundle, serve the intact parts of this one, or wait for a push.

        Raise an error that is not the bundle's fault.
        """
        if self.installer.is_switching:  # it was not the active bundle that failed
            return
        record = self._store.record
        is_file_new = record.before is not None and record.before.file != record.file  # with another address, perhaps
        lacks_key = type(error) is UsageError and self._present().keys is None
        is_short = isinstance(error.__context__, OSError) and error.__context__.errno in _SHORT  # the files are intact
        is_ours = isinstance(error, BundleError) or (record.trial_starts is not None and not lacks_key)
        if is_short or not is_ours or (isinstance(error, LinkError) and not is_file_new):
            if record.trial_starts is not None:  # this start says nothing about the bundle
                with contextlib.suppress(BundleError):
                    self._store.change(lambda record: msgspec.structs.replace(record, trial_starts=1))
            raise error
        self._is_broken = not self._store.give_up(str(error)) and not self._store.drop_damaged()
