"""Change of a running fleet to what a ``peers.yaml`` says, for ``ls-edge apply``.

The new file travels like a bundle. Each peer gets it with the parts that it lacks, builds its engines, and accepts the
processes of both files. When all peers do, they switch one after the other, in an order in which every block keeps a
holder. At the end they drop what only the previous file has. Each step is recorded by the peer, so the same command
continues a change that was interrupted at any point.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import PeersFile
from ls_edge.runtime.change.planner import WITNESSES, Goal, Plan, Step, plan_change
from ls_edge.runtime.clients.manifest import fetch_model
from ls_edge.runtime.clients.push import Pusher, served_by
from ls_edge.runtime.clients.sender import CONNECT_S, PushResult, Target
from ls_edge.runtime.protocol.messages import FileVersion, Install, Message, Welcome
from ls_edge.runtime.transport.keys import KeyPair, curve_of

ACCEPT_S = 10.0
"""Seconds within which peers that have a file have to accept its processes."""
FOLLOW_S = 10.0
"""Seconds to wait until the sources have the new file, or use the new model."""
END_S = 10.0
"""Seconds within which peers have to record the end of a change."""
END_AGAIN_S = 1.0
"""Seconds after which a peer that has not recorded the end of a change is told again."""


@dataclass(frozen=True)
class Change:
    """Difference between a running fleet and a file."""

    plan: Plan
    version: int
    """Number of the change."""
    missing: Mapping[str, str]
    """Peers of the new file that do not answer, with the reasons."""
    sends: Mapping[str, int]
    """Bytes that each peer gets at most."""
    other_model: str
    """Explanation if the peers serve another model than the bundle has; else empty."""

    is_settled: bool
    """Whether every peer that answers is as the file says, and accepts no processes of other files."""


class Applier(Pusher):
    """Changer of a fleet; used by one thread. A context manager."""

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
        self._plan = Plan((), {}, {})
        self._model_id = ""
        """Model that the peers should serve."""
        self._has_waited = False
        """Whether sources had time to use that model."""

    def look(self) -> Change:
        """Compare the running fleet with the file; raise :class:`UsageError` if the file does not fit the bundle."""
        self.wait_until(
            lambda: all(one.stored or one.complaint or one.final for one in self.sessions.values()), self._connect_s
        )
        listed = {peer.name for peer in self._new.peers}
        silent = {name: one for name, one in self.sessions.items() if one.stored is None}
        missing = {
            name: one.complaint or one.why or f"nobody has answered at {one.peer.address}"
            for name, one in silent.items()
        }
        welcomes = {
            name: one.welcome for name, one in self.sessions.items() if name not in silent and one.welcome is not None
        }
        for name in silent:
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
        files = {file for welcome in welcomes.values() for file in welcome.files}
        version = max((file.version for file in files), default=0)
        if any(file.version == version and file.digest != self._digest for file in files) or not version:
            version += 1
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
        removed = {step.peer for step in self._plan.steps if step.kind == "remove"}
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
        self._wait_until_accepted()
        self._wait_for_sources()
        order = {step.peer: index for index, step in enumerate(self._plan.steps)}
        self._targets = dict(sorted(self._targets.items(), key=lambda item: order.get(item[0], -1)))
        self._switch_all()
        if not change.missing:
            self._end(removed)

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

    def _wait_until_accepted(self) -> None:
        """Wait until all peers accept the processes of the new file."""

        def lacking() -> list[Target]:
            return [
                target
                for name, target in self._targets.items()
                if all(file.digest != self._digest for file in self._files_of(name))
            ]

        if not self.wait_until(lambda: not lacking(), ACCEPT_S):
            self._stop(lacking()[0], "it does not accept the new file; see its log")

    @property
    def _unknown_file(self) -> str:
        """Reason why a peer asks for a file that this process does not have."""
        return "it lacks parts of the bundle; give --bundle" if self._bundle is None else super()._unknown_file

    def _wait_for_sources(self) -> None:
        """Wait for the sources that are linked to the peers; warn of those that do not follow."""

        def late() -> set[str]:
            return {name for one in self._targets.values() if one.last is not None for name in one.last.behind}

        if not self.wait_until(lambda: not late(), FOLLOW_S):
            names = ", ".join(sorted(late()))
            self._warn(f"{names} still use an older file and not what changes; restart them with {self._new.path}")

    def _files_of(self, name: str) -> tuple[FileVersion, ...]:
        welcome = self.sessions[name].welcome
        return () if welcome is None else welcome.files

    def _next_covered(self, pending: Sequence[Target]) -> Target:
        """Wait until other peers hold the parts of the plan's next peer, unless it does not stop serving."""
        kinds = {step.peer: step.kind for step in self._plan.steps}
        is_stopping = kinds.get(pending[0].peer.name, "follow") != "follow"
        return super()._next_covered(pending[:1]) if is_stopping else pending[0]

    def _without_other_holder(self, target: Target, served: set[int]) -> set[int]:
        """Return the parts that have no holder while a peer switches, by the plan."""
        return served & self._plan.outages.get(target.peer.name, frozenset())

    def _bare(self, target: Target) -> set[int]:
        """Return the blocks that only this peer serves now, unless sources use another model by then."""
        return set() if self._is_left(target.peer.name) else super()._bare(target)

    def _is_left(self, name: str) -> bool:
        """Return whether a peer serves the previous model while others serve the whole next one."""
        models = {other: one.welcome.model_id for other, one in self.sessions.items() if one.welcome is not None}
        if models.get(name, "") in ("", self._model_id):
            return False
        served = [served_by(one) for other, one in self.sessions.items() if models.get(other) == self._model_id]
        wanted = {part for step in self._plan.steps for part in step.after}
        return sum(map(bool, served)) >= min(WITNESSES, len(models)) and wanted <= set(itertools.chain(*served))

    def _switch(self, target: Target) -> None:
        """Switch a peer; sources leave the previous model before its peers become too few."""
        if self._is_left(target.peer.name) and not self._has_waited:
            self._has_waited = True

            def using() -> set[str]:
                return {
                    other
                    for name, one in self.sessions.items()
                    if one.state is not None and self._is_left(name)
                    for other in one.state.reaches
                    if other not in self.sessions
                }

            if not self.wait_until(lambda: not using(), FOLLOW_S):
                names = ", ".join(sorted(using()))
                self._warn(
                    f"{names} still use the previous model, which no peer serves soon; restart them with the new bundle"
                )
        super()._switch(target)

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

    def _end(self, removed: set[str]) -> None:
        """Make the peers drop what only the previous file has."""
        told: dict[str, float] = {}
        left = [name for name in self._targets if name not in removed]

        def is_over() -> bool:
            now = time.monotonic()
            for name in left:
                is_due = now > told.get(name, float("-inf")) + END_AGAIN_S
                if is_due and self._files_of(name) != (self._file,) and self.sessions[name].up:
                    told[name] = now
                    self.send(name, Install(self._targets[name].offered, True))
            return all(self._files_of(name) == (self._file,) or self._is_cut_off(name, told) for name in left)

        if not self.wait_until(is_over, END_S):
            late = [name for name in left if self._files_of(name) != (self._file,)]
            self._stop(self._targets[late[0]], "it has not recorded the end of the change; run this again")

    def _is_cut_off(self, name: str, told: Mapping[str, float]) -> bool:
        """Return whether a peer has ended the link because the new file does not list this process."""
        own = self._hello.name.rpartition(".")[0]
        return name in told and not self.sessions[name].up and self._new.source(own) is None


def results_of(applier: Applier, change: Change) -> dict[str, PushResult]:
    """Return the result for each peer: those that do not answer are ``missing``, removed ones ``removed``."""
    results = dict(applier.results())
    removed = {step.peer for step in change.plan.steps if step.kind == "remove"}
    for name in removed & results.keys():
        if results[name].state == "active":
            results[name] = msgspec.structs.replace(results[name], state="removed")
    return results | {
        name: PushResult(0, 0, 0, "missing", why) for name, why in change.missing.items() if name not in results
    }
