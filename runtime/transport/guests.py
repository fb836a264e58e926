"""Guests: observers and pushers, which take no part in routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from ls_edge.core.bundle import Manifest
from ls_edge.core.errors import WireError
from ls_edge.runtime.protocol.messages import (
    MAX_CHUNK,
    Chunk,
    Findings,
    Inspect,
    Message,
    PushMessage,
    State,
    Stored,
    Want,
)
from ls_edge.runtime.transport.handshake import LinkedProcesses

GUEST_STATE_EVERY = 0.1
"""Seconds between two STATE messages to a guest."""


class HoldsFiles(Protocol):
    """Holder of announced files."""

    def content(self, digest: bytes) -> bytes:
        """Return the content of an announced ``peers.yaml``; empty for any other digest."""


class TakesBundles(Protocol):
    """Receiver of pushed bundles."""

    def greeted(self, pusher: str) -> None:
        """Record a pusher that was admitted on a link."""

    def lost(self, name: str) -> None:
        """Record that the last link to a pusher has ended."""

    def receive(self, pusher: str, message: PushMessage) -> None:
        """Handle a message of a pusher."""

    @property
    def files(self) -> HoldsFiles:
        """Files that this process announces."""


class Guests:
    """Service for guests: STATE, the manifest, checks of the machine, and pushes."""

    def __init__(
        self,
        linked: LinkedProcesses,
        manifest: Manifest,
        *,
        send: Callable[[str, Message], object],
        state: Callable[[str], State],
        installer: TakesBundles | None,
        inspect: Callable[[str, Inspect], None] | None,
    ) -> None:
        """Pass pushed bundles to ``installer``, and requests to check the machine to ``inspect``.

        ``inspect`` gets the name of the guest, and its message.
        """
        self.installer = installer
        self._linked, self._manifest = linked, manifest
        self._send, self._state, self._inspect = send, state, inspect
        self._state_at = 0.0

    @property
    def state_due(self) -> float:
        """Time of the next :meth:`send_states`, or infinity."""
        return self._state_at if self._linked.guests else float("inf")

    def send_states(self, now: float) -> None:
        """Send STATE to every guest."""
        self._state_at = now + GUEST_STATE_EVERY
        for name in self._linked.guests:
            self._send(name, self._state(name))

    def receive(self, name: str, message: Message) -> None:
        """Handle a message outside of routing; raise :class:`WireError` if ``name`` may not send it."""
        kind, role = type(message).__name__.lower(), self._linked.guests.get(name)
        if isinstance(message, PushMessage):
            if role != "pusher" or self.installer is None:
                raise WireError(f"{kind} from {name}, which is not a pusher; dropped")
            self.installer.receive(name, message)
        elif isinstance(message, Want) and role is not None:
            self._send_manifest(name, message)
        elif isinstance(message, (Want, Stored, Findings)):
            raise WireError(f"{kind}, which only observers and pushers receive; dropped")
        elif isinstance(message, Inspect):
            if role is None or self._inspect is None:
                raise WireError(f"inspect from {name}, which is not an observer; dropped")
            self._inspect(name, message)
        else:
            raise WireError(f"{kind} from the {role} {name}, which may not route; dropped")

    def _send_manifest(self, name: str, want: Want) -> None:
        """Send a piece of an applied file or of the manifest, whose last piece is shorter than requested."""
        raw = b"" if self.installer is None else self.installer.files.content(want.digest)
        if not raw and want.digest.hex() == self._manifest.bundle_id:
            raw = msgspec.json.encode(self._manifest)
            raw += b" " * (len(raw) % MAX_CHUNK == 0)
        if data := raw[want.offset : want.offset + want.size]:
            self._send(name, Chunk(want.digest, want.offset, data))
