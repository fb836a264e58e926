"""A peer: a process that serves some blocks of a bundle until it is stopped.

It serves a bundle that it is given, or the bundle of its store, which ``ls-edge apply`` fills. Without a bundle it
listens, tells all processes that ask, and waits for a push. To switch bundles, or to use another entry of
``peers.yaml``, it drains as on SIGTERM and serves again in the same process, as a new incarnation. SIGTERM drains: the
peer accepts no new work, finishes held work or hands it on, sends BYE, and ends within five seconds; a second SIGTERM
ends it immediately.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import AddressMissing, DeviceLost, LinkError, LsEdgeError, UsageError
from ls_edge.core.logs import ignore_progress
from ls_edge.core.peers_file import PeerConfig, PeersFile, is_loopback, load_peers
from ls_edge.device.threads import batch_scheduling
from ls_edge.engines.engine import Engine
from ls_edge.engines.opening import OnChoice, open_block_engines
from ls_edge.runtime.peer.bundles import StoredBundle
from ls_edge.runtime.peer.counts import PeerSnapshot
from ls_edge.runtime.peer.executor import BlockExecutor
from ls_edge.runtime.peer.incarnation import Incarnation
from ls_edge.runtime.peer.setup import PeerSettings, PeerSetup
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.routing.peer.peer_rules import PeerMachine
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.keys import KeyPair, load_secret
from ls_edge.runtime.transport.node import Node
from ls_edge.runtime.transport.zap import read_again

_P = TypeVar("_P", bound="Peer")
log = logging.getLogger("ls_edge.runtime")

_LISTEN_AGAIN_S = 3.0
"""Seconds for which a peer tries to listen again after a switch."""
ADDRESS_WAIT_S = 60.0
"""Seconds for which a peer waits for an address that no interface has yet: networks may start after services."""

Phase = Literal["opening", "serving", "reverting", "left"]
Outcome = Literal["listening", "changed", "failed", "stopped"]
TRANSITIONS: Mapping[tuple[Phase, Outcome], Phase] = {
    ("opening", "listening"): "serving",
    ("opening", "failed"): "reverting",
    ("opening", "stopped"): "left",
    ("serving", "changed"): "opening",  # there is another setup or bundle to serve
    ("serving", "failed"): "reverting",
    ("serving", "stopped"): "left",
    ("reverting", "changed"): "opening",
    ("reverting", "stopped"): "left",
}
"""The phase that follows each outcome of a phase; a method runs each phase and returns its outcome."""


class Peer:
    """A process that serves the blocks of its entry in ``peers.yaml``; :meth:`serve` blocks until it has left."""

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
        self._setup = PeerSetup(peers, entry, keys, settings or PeerSettings())
        self._fallback: PeerSetup | None = None
        """The last setup with which the peer was warm; None if that is the present one."""
        self._given = bundle
        self._stored: StoredBundle | None = None
        """Bundles of the store; None for a peer that only serves the given bundle."""
        self._incarnation: Incarnation | None = None
        self._failure: LsEdgeError | None = None
        """The error of the last phase that failed."""
        self._stops = 0
        if not peers.uses_keys and not peers.insecure and not is_loopback(entry.bind):
            raise UsageError(f"{entry.bind} is not on the loopback and {peers.path} has no keys; add keys")
        if store is None:
            with contextlib.suppress(AddressMissing):  # serve() waits for it
                self._incarnation = self._listen()
            return
        if not any(source.may_push for source in peers.sources):
            raise UsageError(
                f"no source of {peers.path} may push, so nothing could change the store; write 'may_push: true' below "
                "a source with a key, or start with --bundle"
            )
        opened = Store(store, entry.blocks)
        with batch_scheduling():
            self._stored = StoredBundle(opened, self._setup, lambda: self._setup, self._use)
        self._setup = self._stored.adopt(self._setup)
        opened.blocks = self.entry.blocks
        opened.begin()

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
                f"{file.path} has no keys, so links would not be encrypted even with --secret-key; add public keys, or "
                "omit --secret-key"
            )
        opened = None if bundle is None else Bundle.open(bundle)
        return cls(file, name, opened, PeerSettings(**settings), store=store, keys=keys)

    @property
    def peers(self) -> PeersFile:
        """``peers.yaml`` as last read."""
        return self._setup.peers

    @property
    def entry(self) -> PeerConfig:
        """The entry of this peer in :attr:`peers`."""
        return self._setup.entry

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
        """The served bundle."""
        assert self._running.setup.bundle is not None
        return self._running.setup.bundle

    @property
    def snapshot(self) -> PeerSnapshot:
        """Completed and held work; any thread may read it. Counts begin again after a switch."""
        return PeerSnapshot(self.name) if self._incarnation is None else self._incarnation.snapshot

    def stop(self) -> None:
        """Drain and leave; a second call leaves immediately. Safe in a signal handler."""
        self._stops += 1
        if self._incarnation is not None and self._incarnation.stops < self._stops:  # it may drain already, to switch
            self._incarnation.stop()

    def serve(self, wants_reload: Callable[[], bool] = lambda: False) -> None:
        """Serve until stopped, and switch bundles as pushed; raise the error that keeps the peer from serving.

        Read ``peers.yaml`` and the secret key again when ``wants_reload`` returns true; it is called several times a
        second.
        """
        steps: Mapping[Phase, Callable[[], Outcome]] = {
            "opening": self._open,
            "serving": lambda: self._serve(wants_reload),
            "reverting": self._revert,
        }
        phase: Phase = "opening" if self._incarnation is None else "serving"
        try:
            while phase != "left":
                phase = TRANSITIONS[phase, steps[phase]()]
        finally:
            if self._stored is not None:
                self._stored.close()

    def reload(self) -> None:
        """Read ``peers.yaml`` and the secret key again; if that fails, log the reason and keep the previous ones.

        Links to other processes follow the file immediately. If this peer's own entry or key, the heartbeat or the use
        of keys has changed, the peer drains, hands on its requests, and serves again in the same process.
        """
        before = self._setup
        try:
            if self._stored is None:
                setup = before.using(*read_again(before.peers, before.keys, self.name))
            else:
                setup = self._stored.read_again(before)
            setup.of_model(self._running.setup.bundle)
        except LsEdgeError as error:
            log.warning("not reloaded", extra={"peer": self.name, "why": str(error)})
            return
        log.info("reloaded", extra={"peer": self.name, "peers": len(setup.peers.peers)})
        if self._use(setup):
            self._setup, self._fallback = setup, self._fallback or before
            if not self._running.stops:  # a second stop would leave without handing requests on
                self._running.stop()

    # The phases.

    def _open(self) -> Outcome:
        """Listen with the next bundle; the address may be missing, or after a switch in use for a moment."""
        began = time.monotonic()
        is_told = False
        while self._stops < 1:
            try:
                self._incarnation = self._listen()
            except LsEdgeError as error:
                is_missing = isinstance(error, AddressMissing)
                waits = is_missing and self._incarnation is None  # after a switch, the previous address exists
                patience = ADDRESS_WAIT_S if waits else 0.0 if self._incarnation is None else _LISTEN_AGAIN_S
                if not isinstance(error, LinkError) or time.monotonic() > began + patience:
                    self._failure = error
                    return "failed"
                if waits and not is_told:
                    log.warning("waiting for an address", extra={"peer": self.name, "why": str(error)})
                    is_told = True
                time.sleep(0.25 if is_missing else 0.05)
            else:
                if self._stops:  # the signal arrived in between
                    self._incarnation.stop()
                return "listening"
        return "stopped"

    def _serve(self, wants_reload: Callable[[], bool]) -> Outcome:
        """Serve until the incarnation has left: stopped, to switch, or to serve a reloaded setup."""

        def look() -> None:
            self._settle()
            if wants_reload():
                self.reload()

        try:
            self._running.serve(look)
        except DeviceLost:
            raise
        except LsEdgeError as error:
            self._settle()
            self._failure = error
            return "failed"
        return "stopped" if self._stops else "changed"

    def _revert(self) -> Outcome:
        """Go back to the setup or the bundle before; raise an error that is not their fault."""
        assert self._failure is not None
        if self._fallback is not None:
            log.warning("not reloaded", extra={"peer": self.name, "why": str(self._failure)})
            self._setup, self._fallback = self._fallback, None
        elif self._stored is not None:
            self._stored.give_up(self._failure)
        else:
            raise self._failure
        return "stopped" if self._stops else "changed"

    def _settle(self) -> None:
        """Keep the reloaded setup once a peer is warm with it; one that drains is warm with the previous setup."""
        if self._running.snapshot.warm and not self._running.stops:
            self._fallback = None

    def open_engines(self, setup: PeerSetup, on_choice: OnChoice) -> Mapping[int, Engine]:
        """Choose an engine and open the blocks with it; called on the engine's thread. Raise the library's errors."""
        entry, stored = setup.entry, self._stored
        assert setup.bundle is not None
        return open_block_engines(
            setup.bundle,
            entry.blocks,
            kind=setup.engine_kind,
            provider=entry.provider if setup.settings.engine in (None, "onnx") else None,
            threads=setup.settings.threads or entry.threads,
            max_batch=entry.max_batch,
            gpu_mem_limit=entry.gpu_mem_limit,
            on_step=ignore_progress if stored is None else stored.installer.show_progress,
            on_choice=on_choice,
        )

    def _use(self, setup: PeerSetup) -> bool:
        """Use the files of a setup from the next turn on; return whether the peer has to reopen instead."""
        before = self._setup
        if (
            (before.entry, before.keys) != (setup.entry, setup.keys)
            or before.peers.heartbeat != setup.peers.heartbeat
            or before.peers.uses_keys != setup.peers.uses_keys
        ):
            return True
        self._setup = setup
        self._running.change_peers(setup.of_model(self._running.setup.bundle).peers)
        return False

    @property
    def _running(self) -> Incarnation:
        assert self._incarnation is not None, "the peer of a store begins with serve()"
        return self._incarnation

    def _listen(self) -> Incarnation:
        """Listen with the given bundle, or with the active bundle of the store."""
        stored = self._stored
        if stored is None:
            setup = self._setup.of_model(self._given)
        else:
            self._setup = stored.adopt(self._setup)
            setup = stored.opened(self._setup)
        if setup.bundle is not None:
            setup.peers.check_codecs(codec_of)
        executor = BlockExecutor(setup.entry, setup.engine_kind, lambda on_choice: self.open_engines(setup, on_choice))
        return Incarnation(setup, executor, None if stored is None else stored.installer)
