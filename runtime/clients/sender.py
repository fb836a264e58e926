"""Client that sends files to the stores of peers, for ``ls-edge apply``.

Each peer asks for the files that it lacks, in pieces; this side answers. A peer may take any time as long as it makes
progress.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import BundleError, LsEdgeError, UsageError
from ls_edge.core.logs import OnProgress, OnWarning
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.core.text import byte_size, one_line
from ls_edge.runtime.clients.session import STEP_S, Client, source_name
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Chunk, FileVersion, Offer, Stored, StoreState, Want
from ls_edge.runtime.transport.keys import KeyPair

CONNECT_S = 5.0
"""Seconds in which all peers have to answer before anything is sent."""
AGAIN_S = 1.0
"""Seconds after which the bundle is offered again to a peer that has not answered."""
_PROGRESS = ("state", "manifest", "missing", "built", "step")
"""Fields of STORED that change while a peer makes progress."""
COMPLETE = (StoreState.READY, StoreState.SWITCHING, StoreState.ACTIVE)
"""States of a peer that has the complete bundle."""


class PushResult(msgspec.Struct, frozen=True):
    """Result for one peer: an entry of ``ls-edge apply --json``."""

    parts: int
    """Number of files of the bundle that it needs."""
    bytes: int
    sent_bytes: int
    """Bytes sent to it: fewer if it already had some files, more if it had to ask again."""
    state: str
    """``active``, ``ready`` (it has the bundle but was not switched), ``failed``, or the state that it reached."""
    reason: str | None


class PushError(LsEdgeError):
    """A change that ended before all peers had switched."""


@dataclass(eq=False)
class Target:
    """Progress of one peer, over all of its links."""

    peer: PeerConfig
    files: dict[str, tuple[Path, int]] = field(default_factory=dict)
    """Files that it may ask for, with their sizes, by SHA-256."""
    offered: bytes = b""
    offered_at: float = 0.0
    last: Stored | None = None
    sent: int = 0
    moved_at: float = 0.0
    """Time of its last progress."""
    failure: str = ""
    is_told: bool = False
    """Whether it was told to switch."""

    @property
    def state(self) -> str:
        """Last reported state of the offered bundle; empty if there was no report."""
        last = self.last
        return last.state if last is not None and (last.manifest == self.offered or last.state == "busy") else ""


class Sender(Client):
    """Client that sends a bundle, and a ``peers.yaml``, to peers; used by one thread. A context manager."""

    def __init__(
        self,
        peers: PeersFile,
        *,
        keys: KeyPair | None,
        wait: float,
        connect: float,
        on_progress: OnProgress,
        on_warning: OnWarning,
    ) -> None:
        """Dial the peers.

        ``wait`` limits the seconds that a peer may be away or make no progress, ``connect`` the seconds until all have
        answered. ``on_progress`` gets the percentage of the bytes that a peer has. Raise :class:`UsageError` and
        :class:`LinkError` for keys or names that do not match the file.
        """
        self._targets = {peer.name: Target(peer) for peer in peers.peers}
        super().__init__(peers, keys, pusher_name(peers, keys), "pusher")
        self._wait, self._connect_s = wait, connect
        self._on_progress, self._on_warning = on_progress, on_warning
        self._warned: set[str] = set()
        self._removed: set[str] = set()
        """Peers that the new file does not list."""
        self._file: FileVersion | None = None
        """The ``peers.yaml`` to offer with the bundle, if any."""

    # The steps.

    def _prepare(self, bundle: Bundle, needed: Mapping[str, Collection[int]]) -> tuple[bytes, int]:
        """Verify parts of a bundle and let the peers ask for them; return digest and size of its manifest."""
        path = bundle.folder / MANIFEST
        raw = path.read_bytes()
        if len(raw) > wire.MAX_MANIFEST:
            raise BundleError(f"{path} has {len(raw)} bytes, at most {wire.MAX_MANIFEST} can be pushed")
        digest = hashlib.sha256(raw).digest()
        for part in set(itertools.chain(*needed.values())):
            with bundle.opened(part_name(part)):
                pass
        for name, parts in needed.items():
            files = [bundle.part(part_name(part)) for part in parts]
            self._targets[name].files = {part.sha256: (bundle.folder / part.file, part.bytes) for part in files}
            self._targets[name].files[digest.hex()] = (path, len(raw))
        return digest, len(raw)

    # Waiting and failing.

    def _has_heard(self, target: Target) -> bool:
        """Return whether the peer has answered the offer on its current link."""
        stored = self.sessions[target.peer.name].stored
        return stored is not None and stored.manifest == target.offered

    def _until(self, target: Target, is_true: Callable[[Target], bool]) -> None:
        target.moved_at = time.monotonic()
        while target.peer.name in self._targets and not is_true(target):
            self._look_at(target)
            self.step(STEP_S)

    def _look_at(self, target: Target) -> None:
        """Raise :class:`PushError` if any peer has failed, or this one makes no progress."""
        for one in list(self._targets.values()):
            session = self.sessions[one.peer.name]
            if one.failure or session.complaint:
                self._stop(one, one.failure or session.complaint)
            if session.stored is not None and one.state in (StoreState.FAILED, StoreState.BUSY):
                self._stop(one, session.stored.reason)
        session = self.sessions[target.peer.name]
        if time.monotonic() > max(target.moved_at, session.up_at) + self._wait:
            why = (
                session.stored.reason if session.stored is not None else session.no_link.why
            ) or "it makes no progress"
            self._stop(target, f"{why}; waited {self._wait:.0f} s")

    def _warn(self, text: str) -> None:
        """Report each warning once."""
        if text not in self._warned:
            self._warned.add(text)
            self._on_warning(text)

    def _stop(self, target: Target, why: str) -> None:
        """Raise :class:`PushError`, unless the peer is removed, which does not depend on its consent."""
        if target.peer.name in self._removed:
            del self._targets[target.peer.name]
            self._warn(f"{target.peer.name}: {one_line(why)}; it is removed anyway")
            return
        target.failure = one_line(why)
        switched = [name for name, one in self._targets.items() if one.state == StoreState.ACTIVE]
        rest = f"switched before: {', '.join(switched)}" if switched else "no peer was switched"
        raise PushError(f"{target.peer.name}: {target.failure}; {rest}")

    # Messages.

    def step(self, seconds: float) -> Sequence[tuple[str, wire.Message]]:
        """Handle events for at most ``seconds``: send the requested pieces, and repeat offers."""
        found = super().step(seconds)
        for name, message in found:
            target = self._targets.get(name)
            if target is not None and isinstance(message, Stored):
                self._on_stored(target, message)
            elif target is not None and isinstance(message, Want):
                self._on_want(target, message)
        now = time.monotonic()
        for target in self._targets.values():
            session = self.sessions[target.peer.name]
            due = target.offered_at < session.up_at or now > target.offered_at + AGAIN_S
            if target.offered and session.welcome is not None and due and not self._has_heard(target):
                self._offer(target)
        return found

    def _offer(self, target: Target) -> None:
        target.offered_at = time.monotonic()
        offer, file = Offer(target.offered, target.files[target.offered.hex()][1]), self._file
        if file is not None:
            size = target.files[file.digest.hex()][1]
            offer = msgspec.structs.replace(offer, file=file.digest, file_size=size, version=file.version)
        self.send(target.peer.name, offer)

    def _on_stored(self, target: Target, stored: Stored) -> None:
        if target.last is None or any(getattr(stored, name) != getattr(target.last, name) for name in _PROGRESS):
            target.moved_at = time.monotonic()
        target.last = stored
        engines = f", {stored.built} of {stored.total} engines, {stored.step}" if stored.total else ""
        text = f"{target.peer.name}: {stored.state}{engines}, {byte_size(stored.missing)} missing"
        self._on_progress(100 * max(0, stored.size - stored.missing) // max(1, stored.size), 100, text)

    def _on_want(self, target: Target, want: Want) -> None:
        path, size = target.files.get(want.digest.hex(), (None, 0))
        if path is None or want.offset + want.size > size:
            target.failure = f"it asks for a file of the bundle that {self.peers.path} does not give it; give --bundle"
            return
        try:
            with path.open("rb") as stream:
                stream.seek(want.offset)
                data = stream.read(want.size)
        except OSError as error:
            target.failure = f"cannot read {path}: {error.strerror}"
            return
        if len(data) != want.size:
            target.failure = f"{path} has become shorter since the push began; export the bundle again"
        elif self.send(target.peer.name, Chunk(want.digest, want.offset, data)):
            target.sent += len(data)
            if target.last is not None:
                missing = max(0, target.last.missing - len(data))
                self._on_stored(target, msgspec.structs.replace(target.last, missing=missing))


def pusher_name(peers: PeersFile, keys: KeyPair | None) -> str:
    """Return the name of the source with this key; raise :class:`UsageError` if it may not push."""
    if not peers.uses_keys:
        raise UsageError(
            f"{peers.path} has no keys, so anybody could push; create keys with 'ls-edge keys new', and write "
            "'may_push: true' below the source that pushes"
        )
    name = source_name(peers, keys, "")
    if not any(source.name == name and source.may_push for source in peers.sources):
        raise UsageError(
            f"source {name!r} may not push; write 'may_push: true' below it in {peers.path} on all machines"
        )
    return name
