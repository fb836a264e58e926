"""A peer: a process that serves some blocks of a bundle until it is stopped.

It serves a bundle that it is given, or the bundle of its store, which ``ls-edge push`` fills. Without a bundle it
listens, tells everybody, and waits for a push. To switch, it drains and leaves as on SIGTERM, and serves again in the
same process. SIGTERM drains: no new work, held work is finished or handed on, BYE, and the process ends within five
seconds; a second SIGTERM ends it immediately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LinkError, LsEdgeError, UsageError
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import PeerConfig, PeersFile, is_loopback, load_peers
from ls_edge.core.records import MAX_TEXT
from ls_edge.engines.engine import Engine
from ls_edge.engines.opening import EngineChoice, OnStep, announce, build_engines, open_block_engines
from ls_edge.runtime.peer.cores import EngineCores
from ls_edge.runtime.peer.counts import PeerSnapshot
from ls_edge.runtime.peer.executor import BlockExecutor
from ls_edge.runtime.peer.incarnation import Incarnation
from ls_edge.runtime.peer.setup import PeerSettings, PeerSetup
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.routing.peer.peer_rules import PeerMachine
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.keys import KeyPair, load_secret, read_again
from ls_edge.runtime.transport.node import Node

_P = TypeVar("_P", bound="Peer")
log = logging.getLogger("ls_edge.runtime")

_LISTEN_AGAIN_S = 3.0
"""Seconds for which a peer tries to listen again after a switch."""


class Peer:
    """Serve the blocks that ``peers.yaml`` gives to ``name``; :meth:`serve` blocks until the peer has left."""

    def __init__(
        self,
        peers: PeersFile,
        name: str,
        bundle: Bundle | None = None,
        settings: PeerSettings | None = None,
        *,
        store: str | Path | None = None,
        keys: KeyPair | None = None,
    ) -> None:
        """Listen with a bundle, or open the folder of a store. Raise :class:`LinkError` if the port is in use."""
        self.name = name
        entry = peers.peer(name)
        self.on_step: OnStep = lambda _done, _total, _text: None
        """Called on another thread with the number of open engines, their total, and the next step."""
        self._setup = PeerSetup(peers, entry, keys, EngineCores.of(peers, entry), settings or PeerSettings())
        self._before: PeerSetup | None = None
        """The setup before the last reload, until a peer has become warm with the present one."""
        self._bundle = bundle
        self._is_reopening = False
        self._stops = 0
        self._is_broken = False
        """Whether the active bundle of the store cannot be served."""
        self._installer: Installer | None = None
        self._store: Store | None = None
        self._service: Incarnation | None = None
        if not peers.uses_keys and not peers.insecure and not is_loopback(entry.bind):
            raise UsageError(f"{entry.bind} is not on the loopback and {peers.path} has no keys; add keys")
        if store is None:
            self._service = self._listen(bundle)
        elif not any(source.may_push for source in peers.sources):
            raise UsageError(
                f"{peers.path} lets nobody push, so the store would stay as it is; write 'may_push: true' below a "
                "source with a key, or start with --bundle"
            )
        else:
            self._store = Store(store, entry.blocks)
            with self.cores.others():  # the thread of the installer stays on them
                self._installer = Installer(self._store, name, self._check, self._build)

    @classmethod
    def open(
        cls: type[_P],
        peers: str | Path | PeersFile,
        name: str,
        bundle: str | Path | None = None,
        *,
        store: str | Path | None = None,
        secret_key: str | Path | None = None,
        **settings: Any,
    ) -> _P:
        """Read ``peers.yaml``, the bundle and the key; ``settings`` are fields of :class:`PeerSettings`."""
        keys = load_secret(secret_key) if secret_key is not None else None
        file = peers if isinstance(peers, PeersFile) else load_peers(peers)
        if keys is not None and not file.uses_keys:
            raise UsageError(
                f"{file.path} has no keys, so with --secret-key too no link would be encrypted; add public keys, or "
                "leave --secret-key out"
            )
        opened = None if bundle is None else Bundle.open(bundle)
        return cls(file, name, opened, PeerSettings(**settings), store=store, keys=keys)

    @property
    def peers(self) -> PeersFile:
        """The file as it was last read."""
        return self._setup.peers

    @property
    def entry(self) -> PeerConfig:
        """The entry of this peer in :attr:`peers`."""
        return self._setup.entry

    @property
    def cores(self) -> EngineCores:
        """Cores of the engine and of the other threads."""
        return self._setup.cores

    @property
    def machine(self) -> PeerMachine:
        """The routing machine."""
        return self._running.machine

    @property
    def node(self) -> Node:
        """The links to the other processes."""
        return self._running.node

    @property
    def bundle(self) -> Bundle:
        """The bundle that is served."""
        assert self._running.setup.bundle is not None
        return self._running.setup.bundle

    @property
    def snapshot(self) -> PeerSnapshot:
        """Work done and held; any thread may ask. Counts begin again after a switch."""
        return PeerSnapshot(self.name) if self._service is None else self._service.snapshot

    def stop(self) -> None:
        """Drain and leave; a second call leaves immediately. Safe in a signal handler."""
        self._stops += 1
        if self._service is not None:
            self._service.stop()

    def stop_at_eof(self) -> None:
        """Leave when standard input ends, so as not to outlive the process that started this one."""

        def read() -> None:
            with contextlib.suppress(OSError):
                while os.read(0, 4096):
                    pass
            self.stop()
            self.stop()

        threading.Thread(target=read, daemon=True).start()

    def serve(self, wants_reload: Callable[[], bool] = lambda: False) -> None:
        """Serve until stopped, and switch bundles as pushed; raise the error that keeps the peer from serving.

        Read ``peers.yaml`` and the secret key again when ``wants_reload`` returns true; it is called several times a
        second.
        """

        def look() -> None:
            if self._before is not None and self._running.snapshot.warm:
                self._before = None
            if wants_reload():
                self.reload()

        try:
            if self._store is not None:
                self._store.begin()
            while True:
                if self._service is None or self._is_reopening or self._store is not None:
                    self._service = self._open()
                self._is_reopening = False
                if self._stops:  # the signal arrived in between
                    self._service.stop()
                try:
                    self._service.serve(look)
                except LsEdgeError as error:
                    self._on_failure(error)
                if self._stops or (self._store is None and not self._is_reopening):
                    return
                if self._installer is not None and self._installer.is_switching:
                    self._is_broken = False
        finally:
            if self._installer is not None:
                self._installer.close()

    def reload(self) -> None:
        """Read ``peers.yaml`` and the secret key again; log why that fails, and keep the ones before.

        Links to other processes follow the file at once. If this peer's own entry or key, the heartbeat or the use of
        keys has changed, it drains, hands on its requests, and serves again in the same process.
        """
        before = self._setup
        try:
            peers, keys = read_again(before.peers, before.keys, self.name)
            entry = peers.peer(self.name)
            replace(before, peers=peers, entry=entry).of_model(self._running.setup.bundle)
            if self._store is not None and entry.blocks != before.entry.blocks:
                raise UsageError(f"{self.name} has other blocks; start it again, and push the bundle")
            cores = before.cores if entry == before.entry else EngineCores.of(peers, entry)
        except LsEdgeError as error:
            log.warning("not reloaded", extra={"peer": self.name, "why": str(error)})
            return
        self._setup = setup = replace(before, peers=peers, entry=entry, keys=keys, cores=cores)
        log.info("reloaded", extra={"peer": self.name, "peers": len(peers.peers)})
        if _needs_reopening(before, setup):
            self._before, self._is_reopening = before, True
            self._running.stop()
        else:
            self._running.change_peers(setup.of_model(self._running.setup.bundle).peers)

    def open_engines(self) -> Mapping[int, Engine]:
        """Choose an engine and open the blocks with it, on the engine's thread; raise the library's errors."""
        entry, bundle = self.entry, self.bundle
        return open_block_engines(
            bundle,
            entry.blocks.of_model(bundle.num_blocks),
            kind=self._setup.engine_kind,
            provider=entry.provider,
            threads=self._setup.settings.threads or entry.threads,
            max_batch=entry.max_batch,
            gpu_mem_limit=entry.gpu_mem_limit,
            on_step=self._on_step,
            on_choice=self._on_choice,
        )

    def _build(self, bundle: Bundle, on_step: OnStep) -> Iterator[object]:
        """Build the engines of a bundle that is to be served next, one at a time."""
        return build_engines(
            bundle,
            [part_name(part) for part in self.entry.blocks.of_model(bundle.num_blocks)],
            kind=self._setup.engine_kind,
            provider=self.entry.provider,
            max_batch=self.entry.max_batch,
            gpu_mem_limit=self.entry.gpu_mem_limit,
            on_step=on_step,
        )

    def _on_step(self, done: int, total: int, text: str) -> None:
        self.on_step(done, total, text)
        if self._installer is not None:
            self._installer.progress(done, total, text)

    def _on_choice(self, choice: EngineChoice) -> None:
        announce(choice)
        self._running.engine.text = str(choice)[:MAX_TEXT]

    @property
    def _running(self) -> Incarnation:
        assert self._service is not None, "the peer of a store begins with serve()"
        return self._service

    def _check(self, bundle: Bundle) -> None:
        self._setup.of_model(bundle)
        self._setup.peers.check_codecs(CODECS)

    def _on_failure(self, error: LsEdgeError) -> None:
        """Go back to the setup or the bundle before; raise an error that is not their fault."""
        if self._before is not None and not self._running.snapshot.warm:
            self._undo_reload(error)
        elif self._store is None or self._installer is None:
            raise error
        elif not self._installer.is_switching:  # otherwise it was not the active bundle that failed
            self._go_back(self._store, error)

    def _undo_reload(self, error: LsEdgeError) -> None:
        assert self._before is not None
        log.warning("not reloaded", extra={"peer": self.name, "why": str(error)})
        self._setup, self._before, self._is_reopening = self._before, None, True

    def _listen(self, bundle: Bundle | None) -> Incarnation:
        if bundle is not None:
            self._check(bundle)
        setup = self._setup.of_model(bundle)
        engine = BlockExecutor(setup.entry, lambda: self.open_engines())
        engine.text = setup.engine_kind
        return Incarnation(setup, engine, self._installer)

    def _open(self) -> Incarnation:
        """Begin with the bundle, or that of the store; after a switch the port may be in use for a moment."""
        end = time.monotonic() + (0.0 if self._service is None else _LISTEN_AGAIN_S)
        while True:
            try:
                if self._store is None:
                    return self._listen(self._bundle)
                return self._listen(None if self._is_broken else self._store.open_active())
            except (BundleError, UsageError) as error:
                if self._store is None:
                    raise
                self._go_back(self._store, error)
            except LinkError as error:
                if time.monotonic() <= end:
                    time.sleep(0.05)
                elif self._before is None:
                    raise
                else:
                    self._undo_reload(error)

    def _go_back(self, store: Store, error: LsEdgeError) -> None:
        """Go back to the previous bundle, or wait for a push; raise an error that is not the bundle's fault."""
        if store.record.trial_starts is None and not isinstance(error, (BundleError, UsageError)):
            raise error
        self._is_broken = not store.give_up(str(error))


def _needs_reopening(before: PeerSetup, after: PeerSetup) -> bool:
    files = before.peers, after.peers
    return (
        (before.entry, before.keys) != (after.entry, after.keys)
        or files[0].heartbeat != files[1].heartbeat
        or files[0].uses_keys != files[1].uses_keys
    )
