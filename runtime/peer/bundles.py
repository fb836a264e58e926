"""The bundle that a peer serves next: the one that it was given, or the active one of its store."""

from __future__ import annotations

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BundleError, LinkError, LsEdgeError, UsageError
from ls_edge.runtime.store.installer import Installer
from ls_edge.runtime.store.store import Store


class GivenBundle:
    """A bundle that never changes."""

    installer: Installer | None = None
    """Receiver of pushed bundles."""

    def __init__(self, bundle: Bundle | None) -> None:
        self._bundle = bundle

    def next(self) -> Bundle | None:
        """Return the bundle."""
        return self._bundle

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

    def give_up(self, error: LsEdgeError) -> None:
        """Go back to the previous bundle, or wait for a push; raise an error that is not the bundle's fault."""
        if self.installer.is_switching:  # it was not the active bundle that failed
            return
        is_on_trial = self._store.record.trial_starts is not None
        if isinstance(error, LinkError) or not (is_on_trial or isinstance(error, (BundleError, UsageError))):
            raise error
        self._is_broken = not self._store.give_up(str(error))
