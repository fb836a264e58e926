"""Push of a bundle to the peers of a ``peers.yaml`` over their own links, for ``ls-edge push``.

Each peer asks for the files that it lacks, in pieces; this side answers. No peer is switched before every peer has
its complete, verified bundle and has built its engines. A peer may take any time as long as it makes progress. Then the
peers switch and warm up one after the other; the next one follows only after the others have greeted the last one
again. The first failure ends the push: peers that were not switched yet stay unchanged.
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
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.core.text import name_blocks, short_id
from ls_edge.runtime.clients.session import Client, Session, source_name
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import Chunk, FileVersion, Hello, Install, Offer, Stored, StoreState, Want
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.problems import one_line

CONNECT_S = 5.0
"""Seconds in which all peers have to answer before anything is sent."""
AGAIN_S = 1.0
"""Seconds after which the bundle is offered again to a peer that has not answered."""
REACH_S = 5.0
"""Seconds to wait until other peers have greeted a peer that is warm again."""
SETTLE_S = 0.2
"""Seconds until other peers know that a peer is warm: two STATE messages."""
MAX_INSTALLS = 3
"""Maximum number of INSTALL messages to a peer that restarts without having switched."""
_COMPLETE = (StoreState.READY, StoreState.SWITCHING, StoreState.ACTIVE)
"""States of a peer that has the complete bundle."""


class PushResult(msgspec.Struct, frozen=True):
    """Result for one peer: an entry of ``ls-edge push --json``."""

    parts: int
    """Number of files of the bundle that it needs."""
    bytes: int
    sent_bytes: int
    """Bytes sent to it: fewer if it already had some files, more if it had to ask again."""
    state: str
    """``active``, ``ready`` (it has the bundle but was not switched), ``failed``, or the state that it reached."""
    reason: str | None


class PushError(LsEdgeError):
    """A push that ended before all peers serve the bundle."""


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


class Pusher(Client):
    """Pusher to the peers of a file; used by one thread. A context manager."""

    def __init__(
        self,
        peers: PeersFile,
        *,
        keys: KeyPair | None,
        only: Collection[str] = (),
        wait: float = 120.0,
        connect: float = CONNECT_S,
        on_change: Callable[[str, str, int, int], None] = lambda _name, _state, _missing, _total: None,
        on_warning: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Dial the peers; ``only`` has the names of those that get the bundle (all if it is empty).

        ``wait`` limits the seconds that a peer may be away or make no progress, ``connect`` the seconds until all have
        answered. ``on_change(name, state, missing, total)`` reports progress in bytes. Raise :class:`UsageError` and
        :class:`LinkError` for keys or names that do not match the file.
        """
        chosen = [peers.peer(one) for one in only] or peers.peers
        self._targets = {peer.name: Target(peer) for peer in peers.peers if peer in chosen}
        super().__init__(peers, keys, _name_of(peers, keys), "pusher")
        self._wait, self._connect_s = wait, connect
        self._on_change, self._on_warning = on_change, on_warning
        self._warned: set[str] = set()
        self._file: FileVersion | None = None
        """The ``peers.yaml`` to offer with the bundle, if any."""

    def hello_to(self, name: str) -> Hello:
        """Return the HELLO of a pusher for a peer that gets the bundle, or that of an observer for other peers."""
        return self._hello if name in self._targets else msgspec.structs.replace(self._hello, role="observer")

    def results(self) -> Mapping[str, PushResult]:
        """Return the result for each peer so far."""
        return {name: _result(target) for name, target in self._targets.items()}

    def push(self, bundle: Bundle, *, new_model: bool = False) -> None:
        """Send a bundle and switch to it; raise :class:`PushError` for the first failure, which ends the push.

        Before anything is sent, raise :class:`BundleError` if a file of the bundle differs from its manifest, and
        :class:`UsageError` if the peers serve another model and ``new_model`` is false.
        """
        self.peers.of_model(bundle.num_blocks)
        offer = self._prepare(
            bundle,
            {name: target.peer.blocks.of_model(bundle.num_blocks) for name, target in self._targets.items()},
        )
        self._connect()
        welcomes = [self.sessions[name].welcome for name in self._targets]
        served = {welcome.model_id for welcome in welcomes if welcome is not None}
        others = served - {"", bundle.manifest.model_id}
        if others:
            theirs = ", ".join(sorted(map(short_id, others)))
            what = (
                f"the peers serve another model ({theirs}) than this bundle "
                f"({short_id(bundle.manifest.model_id)}): sources need the new bundle, too, and requests for "
                "either model may fail until all peers have switched"
            )
            if not new_model:
                raise UsageError(f"{what}; to push it nevertheless, give --new-model")
            self._on_warning(what)
        self._send_all(dict.fromkeys(self._targets, offer))
        self._switch_all(cover=not others)

    def roll_back(self) -> None:
        """Switch the peers that the last push has switched back to their previous bundle; raise :class:`PushError`.

        Peers that already serve the previous bundle of other peers were not reached by that push and stay unchanged.
        """
        self._connect()
        stored = {name: stored for name in self._targets if (stored := self.sessions[name].stored) is not None}
        active = {one.active for one in stored.values()}
        chosen = {
            name: one for name, one in stored.items() if len(active) == 1 or (one.previous and one.previous in active)
        }
        if not chosen:
            raise PushError(
                "the peers serve different bundles, and none is the previous bundle of another peer: "
                + ", ".join(f"{name} {self._served_by(name)}" for name in stored)
                + "; push the bundle that you want"
            )
        for name, one in chosen.items():
            if not one.previous:
                raise PushError(f"{name} has no previous bundle; push the bundle that you want")
        self._targets = {name: self._targets[name] for name in chosen}
        self._send_all({name: (one.previous, 0) for name, one in chosen.items()})
        self._switch_all(cover=True)

    # The steps.

    def _prepare(self, bundle: Bundle, needed: Mapping[str, Collection[int]]) -> tuple[bytes, int]:
        """Verify parts of a bundle and let the peers ask for them; return digest and size of its manifest."""
        path = bundle.folder / MANIFEST
        raw = path.read_bytes()
        if len(raw) > wire.MAX_MANIFEST:
            raise BundleError(f"{path} has {len(raw)} bytes, at most {wire.MAX_MANIFEST} can be pushed")
        digest = hashlib.sha256(raw).digest()
        for part in set(itertools.chain(*needed.values())):
            bundle.read(part_name(part))
        for name, parts in needed.items():
            files = [bundle.part(part_name(part)) for part in parts]
            self._targets[name].files = {part.sha256: (bundle.folder / part.file, part.bytes) for part in files}
            self._targets[name].files[digest.hex()] = (path, len(raw))
        return digest, len(raw)

    def _connect(self) -> None:
        """Wait until all peers have admitted this process."""

        def is_over() -> bool:
            sessions = [self.sessions[name] for name in self._targets]
            return all(one.stored for one in sessions) or any(one.complaint or one.final for one in sessions)

        self.wait_until(is_over, self._connect_s)
        for name, target in self._targets.items():
            session = self.sessions[name]
            if session.stored is None:
                target.failure = session.complaint or session.why or f"nobody has answered at {target.peer.address}"
        failed = [name for name, target in self._targets.items() if target.failure]
        if failed:  # name one for which waiting is useless, if there is one, instead of one that is just starting
            worst = max(failed, key=lambda name: bool(self.sessions[name].complaint or self.sessions[name].final))
            raise PushError(f"{worst}: {self._targets[worst].failure}; nothing was changed")

    def _send_all(self, offers: Mapping[str, tuple[bytes, int]]) -> None:
        """Offer the bundle to all peers in the order of the file, and answer their requests until all have it."""
        for name, (manifest, size) in offers.items():
            target = self._targets[name]
            target.offered = manifest
            target.files.setdefault(manifest.hex(), (Path(), size))
            self._offer(target)
            self._until(target, self._has_heard)
        for target in self._targets.values():
            self._until(target, lambda target: self._has_heard(target) and target.state in _COMPLETE)

    def _switch_all(self, *, cover: bool) -> None:
        """Switch one peer after the other; with ``cover``, only while others hold its blocks."""
        pending = list(self._targets.values())
        while pending := [target for target in pending if target.state != StoreState.ACTIVE]:
            target = self._next_covered(pending) if cover else pending[0]
            state = self.sessions[target.peer.name].state
            self._switch(target)
            self._wait_until_reached(target, set() if state is None else set(state.reaches))

    def _switch(self, target: Target) -> None:
        """Install the bundle, and wait until the peer is warm and has recorded that."""
        installs = 0
        target.moved_at = time.monotonic()
        while target.state != StoreState.ACTIVE:
            session = self.sessions[target.peer.name]
            stored = session.stored
            if stored is not None and target.state == StoreState.READY:
                if installs and stored.reason:
                    self._stop(target, stored.reason)
                if installs == MAX_INSTALLS:
                    self._stop(target, "it restarts without having switched; see its log")
                installs += 1
                session.stored, target.is_told = None, True
                self.send(target.peer.name, Install(target.offered))
            elif stored is not None and stored.reason:
                self._warn(f"{target.peer.name}: {stored.reason}")
            self._look_at(target)
            self.step(0.05)

    def _next_covered(self, pending: Sequence[Target]) -> Target:
        """Wait for a peer whose blocks all have another warm holder; warn of blocks without another holder."""
        if not self.wait_until(lambda: not all(map(self._bare, pending)), self._wait):
            held = name_blocks(self._bare(pending[0]))
            self._stop(pending[0], f"not switched: {held} would have no warm holder meanwhile; see 'ls-edge status'")
        target = next(target for target in pending if not self._bare(target))
        alone = self._without_other_holder(target, self._blocks_of(target))
        if alone and target.state == StoreState.READY:
            self._warn(
                f"only {target.peer.name} holds {name_blocks(alone)}: while it switches, requests wait or skip blocks"
            )
        return target

    def _bare(self, target: Target) -> set[int]:
        """Return the blocks that only this peer serves now, although others hold them by the file."""
        served = self._blocks_of(target) if target.state == StoreState.READY else set()
        others = (session for name, session in self.sessions.items() if name != target.peer.name)
        return served - self._without_other_holder(target, served) - set(itertools.chain(*map(_served, others)))

    def _blocks_of(self, target: Target) -> set[int]:
        welcome = self.sessions[target.peer.name].welcome
        return set(() if welcome is None else welcome.blocks)

    def _without_other_holder(self, target: Target, served: set[int]) -> set[int]:
        """Return the served parts of a peer that no other peer holds, or could hold before it switches itself."""
        others = (session for name, session in self.sessions.items() if name != target.peer.name)
        return served.difference(*((one.welcome or one.peer).blocks for one in others))

    def _wait_until_reached(self, target: Target, before: set[str]) -> None:
        """Wait until a peer that is warm again has its previous links to processes that are still there."""

        def is_reached() -> bool:
            up = {name: session for name, session in self.sessions.items() if session.up}
            there = {name for name, session in up.items() if session.welcome and session.welcome.model_id}
            for name, session in up.items():
                if name != target.peer.name and session.state is not None:
                    there |= set(session.state.reaches)
            wanted = before if len(up) == 1 else before & there
            state = self.sessions[target.peer.name].state
            return state is not None and wanted <= set(state.reaches)

        self.wait_until(is_reached, REACH_S)
        self.listen(SETTLE_S)

    # Waiting and failing.

    def _has_heard(self, target: Target) -> bool:
        """Return whether the peer has answered the offer on its current link."""
        stored = self.sessions[target.peer.name].stored
        return stored is not None and stored.manifest == target.offered

    def _until(self, target: Target, is_true: Callable[[Target], bool]) -> None:
        target.moved_at = time.monotonic()
        while not is_true(target):
            self._look_at(target)
            self.step(0.05)

    def _look_at(self, target: Target) -> None:
        """Raise :class:`PushError` if any peer has failed, or this one makes no progress."""
        for one in self._targets.values():
            session = self.sessions[one.peer.name]
            if one.failure or session.complaint:
                self._stop(one, one.failure or session.complaint)
            if session.stored is not None and one.state in (StoreState.FAILED, StoreState.BUSY):
                self._stop(one, session.stored.reason)
        session = self.sessions[target.peer.name]
        if time.monotonic() > max(target.moved_at, session.up_at) + self._wait:
            why = (session.stored.reason if session.stored is not None else session.why) or "it makes no progress"
            self._stop(target, f"{why}; waited {self._wait:.0f} s")

    def _warn(self, text: str) -> None:
        """Report each warning once."""
        if text not in self._warned:
            self._warned.add(text)
            self._on_warning(text)

    def _stop(self, target: Target, why: str) -> None:
        target.failure = one_line(why)
        switched = [name for name, one in self._targets.items() if one.state == StoreState.ACTIVE]
        rest = f"switched before: {', '.join(switched)}" if switched else "no peer was switched"
        raise PushError(f"{target.peer.name}: {target.failure}; {rest}")

    @property
    def _unknown_file(self) -> str:
        """Reason why a peer asks for a file that this process does not have."""
        return f"it asks for a file that {self.peers.path} does not give it; use the same peers.yaml on both sides"

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

    def _served_by(self, name: str) -> str:
        welcome = self.sessions[name].welcome
        return short_id(welcome.bundle_id) if welcome is not None and welcome.bundle_id else "none"

    def _offer(self, target: Target) -> None:
        target.offered_at = time.monotonic()
        offer, file = Offer(target.offered, target.files[target.offered.hex()][1]), self._file
        if file is not None:
            size = target.files[file.digest.hex()][1]
            offer = msgspec.structs.replace(offer, file=file.digest, file_size=size, version=file.version)
        self.send(target.peer.name, offer)

    def _on_stored(self, target: Target, stored: Stored) -> None:
        if target.last is None or _progress(stored) != _progress(target.last):
            target.moved_at = time.monotonic()
        target.last = stored
        engines = f", {stored.built} of {stored.total} engines, {stored.step}" if stored.total else ""
        self._on_change(target.peer.name, f"{stored.state}{engines}", stored.missing, stored.size)

    def _on_want(self, target: Target, want: Want) -> None:
        path, size = target.files.get(want.digest.hex(), (None, 0))
        if path is None or want.offset + want.size > size:
            target.failure = self._unknown_file
            return
        try:
            with path.open("rb") as stream:
                stream.seek(want.offset)
                data = stream.read(want.size)
        except OSError as error:
            target.failure = f"cannot read {path}: {error.strerror}"
            return
        if len(data) == want.size and self.send(target.peer.name, Chunk(want.digest, want.offset, data)):
            target.sent += len(data)
            if target.last is not None:
                missing = max(0, target.last.missing - len(data))
                self._on_stored(target, msgspec.structs.replace(target.last, missing=missing))


def _progress(stored: Stored) -> tuple[object, ...]:
    """Return the fields that change while a peer makes progress."""
    return stored.state, stored.manifest, stored.missing, stored.built, stored.step


def _result(target: Target) -> PushResult:
    last = target.last
    state = StoreState.FAILED.value if target.failure else last.state if last is not None else "unreachable"
    return PushResult(
        parts=last.parts if last is not None else 0,
        bytes=last.size if last is not None else 0,
        sent_bytes=target.sent,
        state=state,
        reason=target.failure or None,
    )


def _served(session: Session) -> Sequence[int]:
    """Return the blocks of this peer that others can use now."""
    if not session.is_warm or session.welcome is None or session.state is None:
        return ()
    return () if session.state.draining or session.state.stuck else session.welcome.blocks


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
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
