"""Send a bundle to the peers of a ``peers.yaml`` over their own links: what ``ls-edge push`` does.

Each peer asks for the files that it lacks, in pieces; this side answers. Nothing is switched before every peer has its
whole bundle, verified. Then one peer after the other drains, switches and warms up, and only after the others have
greeted it again comes the next. The first failure ends it: what was not switched yet stays as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import BundleError, LsEdgeError, UsageError, WireError
from ls_edge.core.peers_file import PeerConfig, PeersFile
from ls_edge.runtime.clients.dialler import Dialler
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.messages import (
    Bye,
    Chunk,
    Complaint,
    Hello,
    Install,
    Offer,
    State,
    Stored,
    StoreState,
    Want,
    Welcome,
)
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.links import Incoming, LinkDown, LinkUp, NoLink
from ls_edge.runtime.transport.node import new_incarnation
from ls_edge.runtime.transport.problems import one_line

CONNECT_S = 5.0
"""Seconds in which all peers have to answer before anything is sent."""
AGAIN_S = 1.0
"""Seconds after which a peer that does not answer is greeted, or offered the bundle, again."""
REACH_S = 5.0
"""Most seconds for which a peer that is warm again is waited for until the others have greeted it."""
SETTLE_S = 0.2
"""Seconds until the others have heard that it is warm: two STATE."""
WARM_UP_S = 1800.0
"""Most seconds for loading and warming up; a board builds its TensorRT engines then."""
_COMPLETE = (StoreState.READY, StoreState.SWITCHING, StoreState.ACTIVE)
"""States of a peer that has all of the bundle."""
MOST_INSTALLS = 3
"""Times that a peer which comes back without having switched is told to."""


class PushResult(msgspec.Struct, frozen=True):
    """What became of one peer: an entry of ``ls-edge push --json``."""

    parts: int
    """Files that it needs of the bundle."""
    bytes: int
    """Their size."""
    sent_bytes: int
    """What was sent to it: less where it had some already, more where it had to ask again."""
    state: str
    """``active``, ``ready`` (it has the bundle and was not switched), ``failed``, or how far it came."""
    reason: str | None
    """Why it is not ``active``."""


class PushError(LsEdgeError):
    """A push that ended before all peers serve the bundle."""


@dataclass(frozen=True)
class _File:
    path: Path
    size: int


@dataclass(eq=False)
class _Target:
    """What is known of one peer."""

    peer: PeerConfig
    files: dict[str, _File] = field(default_factory=dict)
    """What it may ask for, by SHA-256."""
    up: bool = False
    refused: bool = False
    """Whether somebody answers there, and another handshake would fail too."""
    why: str = ""
    complaint: str = ""
    welcome: Welcome | None = None
    state: State | None = None
    stored: Stored | None = None
    """What it said of its store on this link."""
    offered: bytes = b""
    """The bundle that it is offered, again after each greeting."""
    last: Stored | None = None
    sent: int = 0
    greeted_at: float = 0.0
    offered_at: float = 0.0
    moved_at: float = 0.0
    """When it last got further."""
    failure: str = ""


class Pusher(Dialler):
    """Links to all peers of a file; one thread uses it. A context manager."""

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
        """Dial the peers; ``only`` are those that get the bundle, all where it is empty.

        ``wait``: seconds for which a peer may be away or get no further; ``connect``: seconds in which all have to
        answer before anything is sent. ``on_change(name, state, missing, total)`` is called when
        a peer got further, in bytes. Raises :class:`UsageError` and :class:`LinkError` for keys or names
        that do not fit the file.
        """
        hello = Hello(new_alias(_name_of(peers, keys)), "pusher", new_incarnation(), wire.MINOR_OF_ONE, "", "")
        super().__init__(peers, hello, keys)
        self._wait, self._connect_s = wait, connect
        self._on_change, self._on_warning = on_change, on_warning
        self._all = {peer.name: _Target(peer) for peer in peers.peers}
        chosen = [peers.peer(one).name for one in only]
        self._targets = {name: one for name, one in self._all.items() if not chosen or name in chosen}
        self._warned: set[str] = set()

    def _greeted(self) -> Iterable[str]:
        return [name for name, target in self._all.items() if target.welcome is not None]

    def results(self) -> Mapping[str, PushResult]:
        """What became of each peer so far."""
        return {name: self._result(target) for name, target in self._targets.items()}

    def push(self, bundle: Bundle) -> None:
        """Send a bundle and switch to it; raises :class:`PushError` with the first failure, which ends it.

        Raises :class:`BundleError` where a file of the bundle is not what its manifest says, before anything is sent.
        """
        self.peers.check_blocks(bundle.num_blocks)
        path = bundle.folder / MANIFEST
        raw = path.read_bytes()
        if len(raw) > wire.MAX_MANIFEST:
            raise BundleError(f"{path} has {len(raw)} bytes, at most {wire.MAX_MANIFEST} can be pushed")
        digest = hashlib.sha256(raw).digest()
        verified: set[str] = set()
        for target in self._targets.values():
            target.files = {digest.hex(): _File(path, len(raw))}
            for block in target.peer.blocks:
                part = bundle.part(f"block {block}")
                if part.sha256 not in verified:
                    bundle.read(f"block {block}")
                    verified.add(part.sha256)
                target.files[part.sha256] = _File(bundle.folder / part.file, part.bytes)
        self._connect()
        others = {
            target.welcome.model_id for target in self._targets.values() if target.welcome and target.welcome.model_id
        } - {bundle.manifest.model_id}
        if others:
            self._on_warning(
                f"the peers serve another model ({', '.join(sorted(one[:8] for one in others))}) than this bundle "
                f"({bundle.manifest.model_id[:8]}): sources need the new bundle too, and until all have switched some "
                "requests of either model find no holder"
            )
        self._send_all({name: (digest, len(raw)) for name in self._targets})
        self._switch_all(cover=not others)

    def roll_back(self) -> None:
        """Switch to the bundle before, where the last push has switched; raises :class:`PushError`.

        Peers that serve what others would go back to were not reached by that push, and stay as they are.
        """
        self._connect()
        stored = {name: target.stored for name, target in self._targets.items() if target.stored is not None}
        active = {one.active for one in stored.values()}
        chosen = {
            name: one for name, one in stored.items() if len(active) == 1 or (one.previous and one.previous in active)
        }
        if not chosen:
            raise PushError(
                "the peers serve different bundles, and none the one that another had before: "
                + ", ".join(f"{name} {one.active.hex()[:8] or 'none'}" for name, one in stored.items())
                + "; push the bundle that you want"
            )
        for name, one in chosen.items():
            if not one.previous:
                raise PushError(f"{name} has no bundle before its first one; push the bundle that you want")
        self._targets = {name: self._targets[name] for name in chosen}
        self._send_all({name: (one.previous, 0) for name, one in chosen.items()})
        self._switch_all(cover=True)

    # The steps.

    def _connect(self) -> None:
        """Wait until all peers have let us in."""
        end = time.monotonic() + self._connect_s
        while time.monotonic() < end and not any(t.complaint or t.refused for t in self._targets.values()):
            if all(t.stored for t in self._targets.values()):
                break
            self._step(0.02)
        for target in self._targets.values():
            if target.stored is None:
                target.failure = target.complaint or target.why or f"nobody has answered at {target.peer.address}"
        for name, target in self._targets.items():
            if target.failure:
                raise PushError(f"{name}: {target.failure}; nothing was changed")

    def _send_all(self, offers: Mapping[str, tuple[bytes, int]]) -> None:
        """Offer the bundle to all, in the order of the file, and answer what they ask until all have it."""
        for name, (manifest, size) in offers.items():
            target = self._targets[name]
            target.offered, target.moved_at = manifest, time.monotonic()
            target.files.setdefault(manifest.hex(), _File(Path(), size))
            self._offer(target)
            self._until(target, lambda t: t.stored is not None and t.stored.manifest == t.offered)
        for target in self._targets.values():
            self._until(target, lambda t: t.stored is not None and _state(t) in _COMPLETE)

    def _switch_all(self, *, cover: bool) -> None:
        """Switch one peer after the other; with ``cover`` only while others hold its blocks."""
        for name, target in self._targets.items():
            if _state(target) == StoreState.ACTIVE:
                continue
            if cover and _state(target) == StoreState.READY:
                self._wait_for_cover(target)
            reached = set(target.state.reaches) if target.state is not None else set()
            installs = 0
            target.moved_at = began = time.monotonic()
            while _state(target) != StoreState.ACTIVE:
                if target.stored is not None and _state(target) == StoreState.READY:
                    if installs and target.stored.reason:
                        self._stop(target, target.stored.reason)
                    if installs == MOST_INSTALLS:
                        self._stop(target, "it comes back without having switched; see its log")
                    installs += 1
                    target.stored = None
                    self._send(target.peer.name, Install(target.offered))
                if target.up and target.stored is not None:
                    if target.stored.reason:
                        self._warn(f"{name}: {target.stored.reason}")
                    if target.state is None or not target.state.warm:  # it warms up
                        target.moved_at = time.monotonic()
                if time.monotonic() > began + WARM_UP_S:
                    self._stop(target, f"it did not become warm in {WARM_UP_S:.0f} s; see its log")
                self._look_at(target)
                self._step(0.05)
            self._wait_until_reached(name, target, reached)

    def _wait_for_cover(self, target: _Target) -> None:
        """Wait until each block that a peer serves has another holder that is warm; warn where there is none."""
        name = target.peer.name
        end = time.monotonic() + self._wait
        served = target.welcome.blocks if target.welcome is not None else ()
        alone = [b for b in served if not any(b in t.peer.blocks for n, t in self._all.items() if n != name)]
        if alone:
            self._warn(f"{name} alone holds {_blocks(alone)}: requests wait for it, or skip, while it switches")
        while True:
            held = {block for other, t in self._all.items() if other != name for block in _serves(t)}
            bare = [block for block in served if block not in held and block not in alone]
            if not bare:
                return
            if time.monotonic() > end:
                self._stop(
                    target, f"not switched: {_blocks(bare)} would have no warm holder meanwhile; see 'ls-edge status'"
                )
            self._step(0.05)

    def _warn(self, text: str) -> None:
        """Warn once of each thing."""
        if text not in self._warned:
            self._warned.add(text)
            self._on_warning(text)

    def _wait_until_reached(self, name: str, target: _Target, before: set[str]) -> None:
        """Wait until a peer that is warm again has links to all that it had links to and that are still there."""
        end = time.monotonic() + REACH_S
        while time.monotonic() < end:
            seen = {one for n, t in self._all.items() if n != name and t.state and t.up for one in t.state.reaches}
            seen |= {n for n, t in self._all.items() if t.up and t.welcome and t.welcome.model_id}
            alone = sum(1 for t in self._all.values() if t.up) == 1
            wanted = before if alone else before & seen
            if target.state is not None and wanted <= set(target.state.reaches):
                break
            self._step(0.05)
        end = time.monotonic() + SETTLE_S
        while (left := end - time.monotonic()) > 0:
            self._step(left)

    # Waiting and failing.

    def _until(self, target: _Target, true: Callable[[_Target], bool]) -> None:
        target.moved_at = time.monotonic()
        while not true(target):
            self._look_at(target)
            self._step(0.05)

    def _look_at(self, target: _Target) -> None:
        """Raise where any peer has failed, or this one gets no further."""
        for one in self._targets.values():
            if one.failure:
                self._stop(one, one.failure)
            if one.complaint:
                self._stop(one, one.complaint)
            if one.stored is not None and _state(one) in (StoreState.FAILED, StoreState.BUSY):
                self._stop(one, one.stored.reason)
        if time.monotonic() > target.moved_at + self._wait:
            why = (target.stored.reason if target.stored is not None else target.why) or "it gets no further"
            self._stop(target, f"{why}; waited {self._wait:.0f} s")

    def _stop(self, target: _Target, why: str) -> None:
        target.failure = one_line(why)
        switched = [name for name, t in self._targets.items() if _state(t) == StoreState.ACTIVE]
        rest = f"switched before: {', '.join(switched)}" if switched else "no peer was switched"
        raise PushError(f"{target.peer.name}: {target.failure}; {rest}")

    # Messages.

    def _step(self, seconds: float) -> None:
        for event in self._links.poll(max(0.0, seconds)):
            target = self._all[event.name if isinstance(event, NoLink) else event.link.dialled]
            if isinstance(event, LinkUp):
                target.up, target.refused, target.why, target.complaint = True, False, "", ""
                target.moved_at = time.monotonic()
                target.welcome = target.state = target.stored = None
                self._greet(target)
            elif isinstance(event, LinkDown):
                target.up, target.why, target.state, target.stored = False, event.why, None, None
            elif isinstance(event, NoLink):
                target.why, target.refused = event.why, event.final
            else:
                self._on_message(target, event)
        now = time.monotonic()
        for target in self._all.values():
            if target.up and target.welcome is None and not target.complaint and now > target.greeted_at + AGAIN_S:
                self._greet(target)
            known = target.stored is not None and target.stored.manifest == target.offered
            if target.up and target.welcome and target.offered and not known and now > target.offered_at + AGAIN_S:
                self._offer(target)

    def _greet(self, target: _Target) -> None:
        target.greeted_at = time.monotonic()
        hello = (
            self._hello if target.peer.name in self._targets else msgspec.structs.replace(self._hello, role="observer")
        )
        self._send(target.peer.name, hello)

    def _offer(self, target: _Target) -> None:
        target.offered_at = time.monotonic()
        self._send(target.peer.name, Offer(target.offered, target.files[target.offered.hex()].size))

    def _on_message(self, target: _Target, event: Incoming) -> None:
        try:
            message = wire.decode(event.frames[0].buffer)
        except WireError as error:
            target.complaint = f"what it says cannot be read: {error}"
            return
        if isinstance(message, Welcome):
            target.welcome = message
            if target.offered:
                self._offer(target)
        elif isinstance(message, State):
            target.state = message
        elif isinstance(message, Stored):
            if target.last is None or _progress(message) != _progress(target.last):
                target.moved_at = time.monotonic()
            target.stored = target.last = message
            self._on_change(target.peer.name, message.state, message.missing, message.size)
        elif isinstance(message, Want):
            self._on_want(target, message)
        elif isinstance(message, Complaint):
            target.complaint = one_line(message.what)
        elif isinstance(message, Bye):  # its links end next
            target.why = f"it left ({one_line(message.reason)})" if message.reason else "it left"

    def _on_want(self, target: _Target, want: Want) -> None:
        file = target.files.get(want.digest.hex())
        if file is None or want.offset + want.size > file.size:
            target.failure = (
                f"it asks for a file that {self.peers.path} does not give it; copy the same peers.yaml to both"
            )
            return
        try:
            data = _read(file.path, want.offset, want.size)
        except OSError as error:
            target.failure = f"cannot read {file.path}: {error.strerror}"
            return
        if len(data) == want.size and self._send(target.peer.name, Chunk(want.digest, want.offset, data)):
            target.sent += len(data)
            target.moved_at = time.monotonic()
            if target.last is not None:
                missing = max(0, target.last.missing - len(data))
                target.last = msgspec.structs.replace(target.last, missing=missing)
                self._on_change(target.peer.name, target.last.state, missing, target.last.size)

    def _result(self, target: _Target) -> PushResult:
        last = target.last
        state = StoreState.FAILED.value if target.failure else last.state if last is not None else "unreachable"
        return PushResult(
            parts=last.parts if last is not None else 0,
            bytes=last.size if last is not None else 0,
            sent_bytes=target.sent,
            state=state,
            reason=target.failure or None,
        )


def _state(target: _Target) -> str:
    """How far the offered bundle is, as it said last; as before its link was lost until it says something else."""
    said = target.stored or target.last
    return (
        said.state
        if said is not None and said.manifest == target.offered
        else (said.state if said is not None and said.state == StoreState.BUSY else "")
    )


def _progress(stored: Stored) -> tuple[str, bytes, int]:
    return stored.state, stored.manifest, stored.missing


def _serves(target: _Target) -> Iterator[int]:
    """Blocks that others can have run there now."""
    state, welcome = target.state, target.welcome
    if target.up and welcome is not None and state is not None:
        yield from welcome.blocks if state.warm and not state.draining and not state.stuck else ()


def _blocks(blocks: Collection[int]) -> str:
    return ("block " if len(blocks) == 1 else "blocks ") + ", ".join(map(str, sorted(blocks)))


def _read(path: Path, offset: int, size: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.pread(descriptor, size, offset)
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
    """The source whose key this is, if it may push."""
    if not peers.uses_keys:
        raise UsageError(
            f"{peers.path} has no keys, so anybody could push; make some with 'ls-edge keys new', and write "
            "'may_push: true' below the source that pushes"
        )
    if keys is None:
        raise UsageError(f"{peers.path} has keys, so pushing needs that of a source that may: give --secret-key FILE")
    source = peers.source_with_key(keys.public)
    if not source.may_push:
        raise UsageError(
            f"source {source.name!r} may not push; write 'may_push: true' below it in {peers.path}, on every machine"
        )
    return source.name
