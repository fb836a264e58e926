"""A peer whose bundle comes by ``ls-edge push``: ``ls-edge peer --store DIR``.

It serves the bundle that its store names, or waits for one. To switch, it drains and leaves as on SIGTERM, and serves
again, in the same process, with the new bundle. A bundle that does not load is given up for the one before.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from ls_edge.core.bundle import Bundle, ImageSpec, Manifest, Parts, TokenSpec
from ls_edge.core.bundle import Part as BundlePart
from ls_edge.core.errors import BundleError, LinkError, LsEdgeError, UsageError
from ls_edge.core.peers_file import EngineKind, PeersFile
from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.counts import PeerSnapshot
from ls_edge.runtime.peer.inspector import Examine, Inspector
from ls_edge.runtime.peer.peer import Peer, at_end, read_identity
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.protocol.messages import MINOR, Hello
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.peer_routing import PeerMachine
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.store.store import Store
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.node import Node, new_incarnation

log = logging.getLogger("ls_edge.runtime")

_LISTEN_AGAIN_S = 3.0
"""Seconds for which listening on the own address is tried again after a switch."""
_NO_PART = BundlePart("", "", 0)
_NO_MODEL = Manifest(
    schema=1, bundle_id="", model_id="", model="", method="", classes=(),
    image=ImageSpec((1, 1), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)), tokens=TokenSpec(1, 1), needs_slot=False,
    precision="", opset=0, parts=Parts(_NO_PART, _NO_PART, ()),
)  # fmt: skip


class _WaitingPeer:
    """A peer without a bundle: it listens, says so to everybody, and takes bundles that are pushed."""

    def __init__(
        self,
        peers: PeersFile,
        name: str,
        why: str,
        installer: Installer,
        keys: KeyPair | None,
        examine: Examine | None,
        *,
        until_eof: bool,
    ) -> None:
        self.name, self._entry, self._why = name, peers.peer(name), why
        self._installer, self._until_eof = installer, until_eof
        self._incarnation = new_incarnation()
        self._stopped = False
        self._machine = PeerMachine(name, (), limits=Limits(), rng=random.SystemRandom())
        self.node = Node(
            name=name, role="peer", peers=peers, manifest=_NO_MODEL, machine=self._machine, execute=lambda _: None,
            hello=self._hello, state=self._machine.state, keys=keys, installer=installer,
            closed=f"{name} has no bundle to serve: {why}" if why else f"{name} has no bundle yet",
            inspect=None if examine is None else self._inspect,
        )  # fmt: skip
        self._inspector = None if examine is None else Inspector(examine, self.node.send_to, self.node.wake)
        installer.attach(self.node, self._machine, None)
        if until_eof:
            os.set_blocking(0, False)
            self.node.watch(0)

    @property
    def snapshot(self) -> PeerSnapshot:
        linked, dropped = self._machine.neighbours.by_name, dict(self.node.counts)
        return PeerSnapshot(self.name, linked=frozenset(linked), dropped=dropped)

    def stop(self) -> None:
        self._stopped = True
        self.node.wake()

    def serve(self) -> None:
        log.warning("waiting for a bundle", extra={"peer": self.name, "address": self._entry.bind, "why": self._why})
        try:
            while not self._stopped and not self._installer.is_switching:
                self.node.step(0.1)
                self._installer.step()
                if self._inspector is not None:
                    self._inspector.step()
                if self._until_eof and at_end(0):
                    break
            self.node.leave("draining")
        finally:
            self.node.close()
            if self._inspector is not None:
                self._inspector.close()

    def _inspect(self, name: str) -> None:
        assert self._inspector is not None
        self._inspector.ask(name)

    def _hello(self) -> Hello:
        return Hello(self.name, "peer", self._incarnation, MINOR, "", "", note=self._installer.note)


class StoredPeer:
    """Serve what the store holds, and what is pushed; :meth:`serve` blocks until the peer has left."""

    def __init__(
        self,
        peers: PeersFile,
        name: str,
        store: str | Path,
        *,
        keys: KeyPair | None = None,
        engine: EngineKind | None = None,
        threads: int | None = None,
        strict_bundle: bool = False,
        until_eof: bool = False,
        examine: Examine | None = None,
    ) -> None:
        """Open the store; the other arguments are those of :class:`~ls_edge.runtime.peer.peer.Peer`.

        Raises :class:`UsageError` where nobody could ever push, and what opening the store raises.
        """
        entry = peers.peer(name)
        if not any(source.may_push for source in peers.sources):
            raise UsageError(
                f"{peers.path} lets nobody push, so the store would stay as it is; write 'may_push: true' below a "
                "source with a key, or start with --bundle"
            )
        self.name = name
        self.on_step: Callable[[int, int, str], None] = lambda _done, _total, _text: None
        """As of a :class:`~ls_edge.runtime.peer.peer.Peer`."""
        self.make_peer: Callable[..., Peer] = Peer
        """Constructor of the peer that serves a bundle; emulated boards use a subclass."""
        self._peers, self._keys, self._until_eof, self._strict = peers, keys, until_eof, strict_bundle
        self._engine, self._threads = engine or entry.engine, threads
        self._examine = examine
        self._stops = 0
        self._running: Peer | _WaitingPeer | None = None
        self._store = Store(store, entry.blocks)
        self._is_broken = False
        """Whether the active bundle cannot be served."""
        self.cores = EngineCores.of(peers, entry)
        with self.cores.others():  # where its thread stays
            self._installer = Installer(self._store, name, self._check)

    def stop(self) -> None:
        """Drain and leave; a second call leaves at once. Safe in a signal handler."""
        self._stops += 1
        if self._running is not None:
            self._running.stop()

    @property
    def snapshot(self) -> PeerSnapshot:
        """As of a :class:`~ls_edge.runtime.peer.peer.Peer`; counts begin anew when it switches."""
        running = self._running
        return PeerSnapshot(self.name) if running is None else running.snapshot

    def serve(self) -> None:
        """Serve and switch until stopped; raise what keeps the peer from serving at all."""
        try:
            self._store.begin()
            again = False
            while True:
                running = self._running = self._open(again=again)
                if self._stops:  # the signal came meanwhile
                    running.stop()
                try:
                    running.serve()
                except LsEdgeError as error:
                    if not self._installer.is_switching:  # else it is not the active bundle that failed
                        self._go_back(error)
                again = True
                if self._stops or (self._until_eof and at_end(0)):
                    return
                if self._installer.is_switching:
                    self._is_broken = False
        finally:
            self._installer.close()

    def _check(self, bundle: Bundle) -> None:
        self._peers.check_blocks(bundle.num_blocks)
        self._peers.check_codecs(CODECS)

    def _go_back(self, error: LsEdgeError) -> None:
        """Go back to the previous bundle, or wait for a push; raise an error that is not the bundle's."""
        if self._store.record.trial_starts is None and not isinstance(error, (BundleError, UsageError)):
            raise error
        self._is_broken = not self._store.give_up(str(error))

    def _open(self, *, again: bool) -> Peer | _WaitingPeer:
        end = time.monotonic() + _LISTEN_AGAIN_S
        while True:
            try:
                return self._listen()
            except LinkError:
                if not again or time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def _listen(self) -> Peer | _WaitingPeer:
        while not self._is_broken:
            try:
                bundle = self._store.open_active()
                if bundle is None:
                    break
                return self.make_peer(
                    self._peers, self.name, bundle, keys=self._keys, engine=self._engine, threads=self._threads,
                    strict_bundle=self._strict, until_eof=self._until_eof, installer=self._installer,
                    on_step=self.on_step, examine=self._examine,
                )  # fmt: skip
            except (BundleError, UsageError) as error:
                self._go_back(error)
        return _WaitingPeer(
            self._peers, self.name, self._store.record.reason, self._installer, self._keys, self._examine,
            until_eof=self._until_eof,
        )  # fmt: skip


def open_stored_peer(
    peers: str | Path | PeersFile,
    name: str,
    store: str | Path,
    *,
    secret_key: str | Path | None = None,
    engine: EngineKind | None = None,
    threads: int | None = None,
    strict_bundle: bool = False,
    until_eof: bool = False,
    examine: Examine | None = None,
) -> StoredPeer:
    """Read the files and make a :class:`StoredPeer`; what ``ls-edge peer --store`` does."""
    file, keys = read_identity(peers, secret_key)
    return StoredPeer(
        file, name, store, keys=keys, engine=engine, threads=threads, strict_bundle=strict_bundle,
        until_eof=until_eof, examine=examine,
    )  # fmt: skip
