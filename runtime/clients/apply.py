"""Change of a running fleet to match a ``peers.yaml``, for ``ls-edge apply``.

The new file travels like a bundle. Each peer gets it with the parts that it lacks, builds its engines, and accepts the
processes of both files. When all peers do, they switch one after the other, in an order in which every block keeps a
holder. At the end they drop what only the previous file has. Each step is recorded by the peer, so the same command
continues a change that was interrupted at any point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.change.planner import Goal, Plan, Step, plan_change, version_of
from ls_edge.runtime.change.progress import Instruction, Seen
from ls_edge.runtime.clients.manifest import fetch_model
from ls_edge.runtime.clients.push import Pusher
from ls_edge.runtime.clients.sender import AGAIN_S, CONNECT_S, PushResult, Target
from ls_edge.runtime.protocol.messages import FileVersion, Install, Message, Welcome
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.problems import one_line
from ls_edge.runtime.transport.zap import curve_of

PHASE_S = 10.0
"""Seconds within which peers have to accept a file and to record the end of a change, and sources to follow."""


@dataclass(frozen=True)
class Change:
    """Difference between a running fleet and a file."""

    plan: Plan
    version: int
    """Number of the change."""
    missing: Mapping[str, str]
    """Peers of the new file that do not answer, with the reasons."""
    sends: Mapping[str, int]
    """Maximum number of bytes that each peer gets."""
    other_model: str
    """Explanation if the peers serve another model than the bundle; else empty."""
    is_settled: bool
    """Whether every peer that answers matches the file, and accepts no processes of other files."""


class Applier(Pusher):
    """Client that changes a fleet; used by one thread. A context manager."""

    def __init__(
        self,
        new: PeersFile,
        current: PeersFile,
        bundle: Bundle | None,
        *,
        keys: KeyPair | None,
        wait: float = 120.0,
        connect: float = CONNECT_S,
        on_change: Callable[[str, str, int, int], None] = lambda _name, _state, _missing, _total: None,
        on_warning: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Dial the peers of ``new``, and those of ``current``, by which they can be reached now.

        The other arguments are those of :class:`Pusher`. Raise :class:`UsageError` and :class:`LinkError` for keys that
        do not match the files.
        """
        dialed = current.accepting((new,))
        addresses = {peer.name: peer.address for peer in current.peers}
        keys_of = {peer.name: peer.public_key for peer in current.peers}
        at = {peer.name: addresses[peer.name] for peer in dialed.peers if keys_of.get(peer.name, "") == peer.public_key}
        peers = (msgspec.structs.replace(peer, address=at.get(peer.name, peer.address)) for peer in dialed.peers)
        super().__init__(
            msgspec.structs.replace(dialed, peers=tuple(peers)),
            keys=keys,
            wait=wait,
            connect=connect,
            on_change=on_change,
            on_warning=on_warning,
        )
        self._new, self._current, self._bundle, self._keys = new, current, bundle, keys
        self._digest = hashlib.sha256(new.raw).digest()
        self._removed: set[str] = set()
        """Peers that the new file does not list."""
        self._told: set[str] = set()
        """Peers that were told to end the change."""

    def look(self) -> Change:
        """Compare the running fleet with the file; raise :class:`UsageError` if the file does not fit the bundle."""
        missing = self._wait_for_answers()
        listed = {peer.name for peer in self._new.peers}
        welcomes = {
            name: one.welcome for name, one in self.sessions.items() if name not in missing and one.welcome is not None
        }
        for name in missing:
            self._targets.pop(name, None)
        if not welcomes:
            whys = "; ".join(f"{name}: {why}" for name, why in missing.items())
            raise LinkError(f"no peer can be changed ({whys})")
        model = self._bundle
        if model is None:
            if not any(welcome.bundle_id for welcome in welcomes.values()):
                raise UsageError("no peer that answers serves a bundle; give --bundle")
            model, _ = fetch_model(self.peers, self._keys, self._hello.name.rpartition(".")[0])
        new = self._new.of_model(model.num_blocks)
        announced = [[(file.version, file.digest) for file in welcome.files] for welcome in welcomes.values()]
        version = version_of(self._digest, announced)
        self._file = FileVersion(version, self._digest)
        goals = {name: self._goal(new, name, welcome) for name, welcome in welcomes.items() if name in listed}
        self._model_id = model.manifest.model_id
        self._plan = plan_change(
            {name: welcome.blocks for name, welcome in welcomes.items()},
            goals,
            [name for name, welcome in welcomes.items() if welcome.model_id not in ("", self._model_id)],
        )
        return Change(
            self._plan,
            version,
            {name: why for name, why in missing.items() if name in listed},
            {step.peer: self._size_of(step, welcomes[step.peer]) for step in self._plan.steps},
            self._other_model(model),
            not self._plan.steps and all(welcome.files == (self._file,) for welcome in welcomes.values()),
        )

    def apply(self, change: Change) -> None:
        """Carry out a change; raise :class:`PushError` for the first failure, after which the fleet still serves."""
        assert self._file is not None
        size = len(self._new.raw)
        removed = self._removed = {step.peer for step in self._plan.steps if step.kind == "remove"}
        offers = {}
        for name in self._targets:
            stored = self.sessions[name].stored
            offers[name] = (b"" if stored is None else stored.active, 0)
        if self._bundle is not None:
            new = self._new.of_model(self._bundle.num_blocks)
            stay = {name: new.peer(name).blocks for name in self._targets if name not in removed}
            offers |= dict.fromkeys(stay, self._prepare(self._bundle, stay))
        for name, target in list(self._targets.items()):
            if not offers[name][0]:
                if name not in removed:
                    self._stop(target, "it has no bundle yet; give --bundle")
                del self._targets[name], offers[name]
            target.files[self._digest.hex()] = (self._new.path, size)
        self._send_all(offers)
        self._is_whole = not change.missing
        self._carry_out()

    # The steps.

    def _goal(self, new: PeersFile, name: str, welcome: Welcome) -> Goal:
        """Return the state that a peer should reach."""
        entry, stored = new.peer(name), self.sessions[name].stored
        manifest = self._manifest
        is_bundle_new = stored is None or not stored.active or manifest not in (b"", stored.active)
        own = welcome.files[0] if welcome.files else None
        is_current = own is None or own.digest == hashlib.sha256(self._current.raw).digest()
        before = next((peer for peer in self._current.peers if peer.name == name), None)
        is_entry_new = own != self._file and (not is_current or before != self._new.peer(name))
        return Goal(
            frozenset(entry.blocks),
            pauses=is_bundle_new or is_entry_new or self._new.heartbeat != self._current.heartbeat,
            is_reached=own == self._file and not is_bundle_new,
        )

    @property
    def _manifest(self) -> bytes:
        """SHA-256 of the manifest of the bundle; empty without one."""
        return b"" if self._bundle is None else hashlib.sha256((self._bundle.folder / MANIFEST).read_bytes()).digest()

    def _size_of(self, step: Step, welcome: Welcome) -> int:
        """Return the number of bytes that a peer may need."""
        if self._bundle is None:
            return 0
        is_same = welcome.bundle_id == self._bundle.manifest.bundle_id
        parts = step.gained if is_same else step.after
        return sum(self._bundle.part(part_name(part)).bytes for part in parts)

    @property
    def _unknown_file(self) -> str:
        """Reason why a peer asks for a file that this process does not have."""
        return "it lacks parts of the bundle; give --bundle" if self._bundle is None else super()._unknown_file

    def _seen(self, name: str) -> Seen:
        """Return the last report of a peer, with its files."""
        welcome, target = self.sessions[name].welcome, self._targets.get(name)
        files = () if welcome is None else welcome.files
        # Peers end the links of this process with the change if the new file does not list it.
        removes_itself = self._new.source(self._hello.name.rpartition(".")[0]) is None
        is_cut_off = removes_itself and name in self._told and not self.sessions[name].up
        return replace(
            super()._seen(name),
            accepts=welcome is None or any(file.digest == self._digest for file in files),
            has_ended=name in self._removed or files == (self._file,) or is_cut_off,
            late=frozenset(() if target is None or target.last is None else target.last.behind),
        )

    def _wait_for(self, now: Instruction, target: Target | None) -> None:
        """Wait for a peer or for the sources."""
        if now.phase == "cover":
            super()._wait_for(now, target)
            return
        for _ in range(round(PHASE_S / AGAIN_S)):
            if now.phase == "end" and target is not None and self.sessions[now.peer].up:
                self._told.add(now.peer)
                self.send(now.peer, Install(target.offered, True))
            if self._moves_on(now, AGAIN_S):
                return
        names = ", ".join(sorted(self._next().names))
        if target is not None and now.phase == "accept":
            self._stop(target, "it does not accept the new file; see its log")
        elif target is not None and now.phase == "end":
            self._stop(target, "it has not recorded the end of the change; run this again")
        elif now.phase == "follow":
            self._warn(f"{names} still use an older file and not what changes; restart them with {self._new.path}")
        else:
            self._warn(
                f"{names} still use the previous model, which no peer serves soon; restart them with the new bundle"
            )
        self._impatient += (now.phase,)

    def _stop(self, target: Target, why: str) -> None:
        """Raise :class:`PushError`, unless the peer is removed, which does not depend on its consent."""
        if target.peer.name not in self._removed:
            super()._stop(target, why)
        del self._targets[target.peer.name]
        self._warn(f"{target.peer.name}: {one_line(why)}; it is removed anyway")

    def step(self, seconds: float) -> Sequence[tuple[str, Message]]:
        """Handle events, and dial a peer that moves at its new address once it has left the previous one."""
        found = super().step(seconds)
        for name, target in self._targets.items():
            new = next((peer for peer in self._new.peers if peer.name == name), None)
            if new is not None and target.is_told and not self.sessions[name].up and target.peer.address != new.address:
                target.peer = self.sessions[name].peer = new
                dial = {other: one.peer.address for other, one in self.sessions.items()}
                self._links.change(dial, curve_of(self.peers, self._hello.name, self._keys))
        return found


def results_of(applier: Applier, change: Change) -> dict[str, PushResult]:
    """Return the result for each peer: those that do not answer are ``missing``, removed ones ``removed``."""
    results = dict(applier.results())
    removed = {step.peer for step in change.plan.steps if step.kind == "remove"}
    for name in removed & results.keys():
        if results[name].state == "active":
            results[name] = msgspec.structs.replace(results[name], state="removed")
    absent = {name: PushResult(0, 0, 0, "missing", why) for name, why in change.missing.items()}
    return {**absent, **dict.fromkeys(removed, PushResult(0, 0, 0, "removed", None)), **results}
