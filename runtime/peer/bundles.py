"""The bundle that a peer serves next: the one that it was given, or the active one of its store."""

from __future__ import annotations

import logging
from dataclasses import replace

import msgspec

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LinkError, LsEdgeError, UsageError
from ls_edge.core.text import name_blocks
from ls_edge.runtime.peer.setup import PeerSetup
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.store.store import Store

log = logging.getLogger("ls_edge.runtime")


class GivenBundle:
    """A bundle that never changes."""

    installer: Installer | None = None
    """Receiver of pushed bundles."""

    def __init__(self, bundle: Bundle | None) -> None:
        self._bundle = bundle

    def next(self) -> Bundle | None:
        """Return the bundle."""
        return self._bundle

    def limited(self, setup: PeerSetup) -> PeerSetup:
        """Return the setup, because a given bundle has all parts."""
        return setup

    def give_up(self, error: LsEdgeError) -> None:
        """Raise the error, because there is no other bundle."""
        raise error


class StoredBundle:
    """The active bundle of a store, which a push or a failure exchanges for another."""

    def __init__(self, store: Store, installer: Installer) -> None:
        self.installer = installer
        self._store = store
        self._is_broken = False
        """Whether the active bundle cannot be served, so that the peer waits for a push."""

    def next(self) -> Bundle | None:
        """Return the active bundle, or None to wait for a push; raise :class:`BundleError` if it is damaged."""
        if self.installer.is_switching:
            self.installer.is_switching = self._is_broken = False
        return None if self._is_broken else self._store.open_active()

    def limited(self, setup: PeerSetup) -> PeerSetup:
        """Return the setup with the parts that the store has, so that a changed entry does not stop the others.

        Raise :class:`BundleError` if it has none of them.
        """
        self._store.blocks, self.installer.lacking = setup.entry.blocks, ""
        if setup.bundle is None:
            return setup
        held = self._store.held(setup.bundle)
        if missing := set(setup.entry.blocks) - set(held):
            lacking = f"its store lacks {name_blocks(missing)}; send them with 'ls-edge push'"
            if not held:
                raise BundleError(lacking)
            self.installer.lacking = lacking
            log.warning("serves only a part of its blocks", extra={"peer": setup.entry.name, "why": lacking})
        return replace(setup, entry=msgspec.structs.replace(setup.entry, blocks=held))

    def give_up(self, error: LsEdgeError) -> None:
        """Go back to the previous bundle, or wait for a push; raise an error that is not the bundle's fault."""
        if self.installer.is_switching:  # it was not the active bundle that failed
            return
        is_on_trial = self._store.record.trial_starts is not None
        if isinstance(error, LinkError) or not (is_on_trial or isinstance(error, (BundleError, UsageError))):
            raise error
        self._is_broken = not self._store.give_up(str(error))
