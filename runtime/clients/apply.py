"""Change of a running fleet to match a ``peers.yaml``, for ``ls-edge apply``.

The new file travels like a bundle. Each peer gets it with the parts that it lacks, builds its engines, and accepts the
processes of both files. When all peers do, they switch one after the other, in an order in which every block keeps a
holder. At the end they drop what only the previous file has. Each step is recorded by the peer, so the same command
continues a change that was interrupted at any point.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from ls_edge.core.bundle import MANIFEST, Bundle
from ls_edge.core.errors import LinkError, UsageError
from ls_edge.core.logs import OnProgress, OnWarning, ignore_progress
from ls_edge.core.parts import part_name
from ls_edge.core.peers_file import PeersFile
from ls_edge.core.text import name_blocks, short_id
from ls_edge.runtime.change.planner import Goal, Plan, Step, plan_change, version_of
from ls_edge.runtime.change.progress import Instruction, Phase, Seen, next_instruction
from ls_edge.runtime.clients.fetching import fetch_model
from ls_edge.runtime.clients.sender import AGAIN_S, COMPLETE, CONNECT_S, PushResult, Sender, Target
from ls_edge.runtime.clients.session import REACH_S, STEP_S
from ls_edge.runtime.protocol.messages import FileVersion, Install, Message, StoreState, Welcome
from ls_edge.runtime.transport.keys import KeyPair
from ls_edge.runtime.transport.zap import curve_of

PHASE_S = 10.0
"""Seconds within which peers have to accept a file and to record the end of a change, and sources to follow."""
SETTLE_S = 0.2
"""Seconds until other peers know that a peer is warm: two STATE messages."""
MAX_INSTALLS = 3
"""Maximum number of INSTALL messages to a peer that restarts without having switched."""


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
    """Whether every peer that answers matches the file, accepts no processes of other files, and has no trouble."""


class Applier(Sender):
    """Client that changes a fleet; used by one thread. A context manager."""

    def __init__(
        self,
        new: PeersFile,
        current: PeersFile,
        bundle: Bundle | Literal["previous"] | None,
        *,
        keys: KeyPair | None,
        wait: float = 120.0,
        connect: float = CONNECT_S,
        on_progress: OnProgress = ignore_progress,
        on_warning: OnWarning = lambda _text: None,
    ) -> None:
        """Dial the peers of ``new``, and those of ``current``, by which they can be reached now.

        Peers keep their bundle without ``bundle``. The other arguments are those of :class:`Sender`.
        Raise :class:`UsageError` and :class:`LinkError` for keys that do not match the files.
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
            on_progress=on_progress,
            on_warning=on_warning,
        )
        self._new, self._current, self._keys = new, current, keys
        self._bundle, self._rolls_back = None if bundle == "previous" else bundle, bundle == "previous"
        self._digest = hashlib.sha256(new.raw).digest()
        self._plan = Plan((), {}, {})
        self._model_id = ""
        self._is_whole = True
        """Whether no peer is away, so that the change ends."""
        self._impatient: tuple[Phase, ...] = ()
        """Phases in which sources are not waited for any longer."""
        self._told: set[str] = set()
        """Peers that were told to end the change."""

    def look(self) -> Change:
        """Compare the running fleet with the file; raise :class:`UsageError` if the file does not fit the bundle."""
        self.wait_until(lambda: all(one.stored or one.has_refused for one in self.sessions.values()), self._connect_s)
        missing = {name: one.why_silent for name, one in self.sessions.items() if one.stored is None}
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
            model = fetch_model(self.peers, self._keys, self._hello.name.rpartition(".")[0])
        new = self._new.of_model(model.num_blocks)
        announced = [[(file.version, file.digest) for file in welcome.files] for welcome in welcomes.values()]
        version = version_of(self._digest, announced)
        self._file = FileVersion(version, self._digest)
        goals = {name: self._goal(new, name, welcome) for name, welcome in welcomes.items() if name in listed}
        back = {one.stored.previous_model for name, one in self.sessions.items() if one.stored and self._returns(name)}
        self._model_id = max(back, default=b"").hex() or model.manifest.model_id
        # Two of them after a rollback that did not reach all: repeated, it would exchange them.
        wanted = set(map(self._wanted, goals)) - {b""}
        if self._rolls_back and (len(wanted) > 1 or not any(map(self._returns, welcomes))):
            raise UsageError("no peer can return to a previous bundle, or not all to one; give --bundle to apply one")
        others = {name: one.model_id for name, one in welcomes.items() if one.model_id not in ("", self._model_id)}
        self._plan = plan_change(
            {name: welcome.blocks for name, welcome in welcomes.items()},
            goals,
            others,
        )
        theirs, ours = ", ".join(sorted(map(short_id, set(others.values())))), short_id(self._model_id)
        return Change(
            self._plan,
            version,
            {name: why for name, why in missing.items() if name in listed},
            {step.peer: self._size_of(step, welcomes[step.peer]) for step in self._plan.steps},
            f"the peers serve another model ({theirs}) than this bundle ({ours})" if others else "",
            not self._plan.steps and all(one.files == (self._file,) and not one.note for one in welcomes.values()),
        )

    def apply(self, change: Change) -> None:
        """Carry out a change; raise :class:`PushError` for the first failure, after which the fleet still serves."""
        assert self._file is not None
        size = len(self._new.raw)
        removed = self._removed = {step.peer for step in self._plan.steps if step.kind == "remove"}
        offers = {name: (self._active(name) if name in removed else self._wanted(name), 0) for name in self._targets}
        if self._bundle is not None:
            new = self._new.of_model(self._bundle.num_blocks)
            stay = {name: new.peer(name).blocks for name in self._targets if name not in removed}
            offers |= dict.fromkeys(stay, self._prepare(self._bundle, stay))
        for name, target in list(self._targets.items()):
            if not offers[name][0]:
                if name not in removed:
                    self._stop(target, f"it has no {'previous ' * self._rolls_back}bundle; give --bundle")
                del self._targets[name], offers[name]
            target.files[self._digest.hex()] = (self._new.path, size)
        # In the order of the file, each once the previous one has answered.
        for name, (manifest, size) in offers.items():
            if name in self._targets:
                target = self._targets[name]
                target.offered = manifest
                target.files.setdefault(manifest.hex(), (Path(), size))
                self._offer(target)
                self._until(target, self._has_heard)
        self._is_whole = not change.missing
        self._carry_out()

    def results(self, change: Change) -> dict[str, PushResult]:
        """Return the result for each peer: those that do not answer are ``missing``, removed ones ``removed``."""
        found = {name: PushResult(0, 0, 0, "missing", why) for name, why in change.missing.items()}
        removed = [step.peer for step in change.plan.steps if step.kind == "remove"]
        found |= dict.fromkeys(removed, PushResult(0, 0, 0, "removed", None))
        for name, one in self._targets.items():
            parts, size, state = (one.last.parts, one.last.size, one.last.state) if one.last else (0, 0, "unreachable")
            state = "failed" if one.failure else "removed" if name in removed and state == "active" else state
            found[name] = PushResult(parts, size, one.sent, state, one.failure or None)
        return found

    # The steps.

    def _goal(self, new: PeersFile, name: str, welcome: Welcome) -> Goal:
        """Return the state that a peer should reach."""
        entry, active = new.peer(name), self._active(name)
        is_bundle_new = not active or self._wanted(name) != active
        own = welcome.files[0] if welcome.files else None
        is_current = own is None or own.digest == hashlib.sha256(self._current.raw).digest()
        before = next((peer for peer in self._current.peers if peer.name == name), None)
        is_entry_new = own != self._file and (not is_current or before != self._new.peer(name))
        return Goal(
            frozenset(entry.blocks),
            pauses=is_bundle_new or is_entry_new or self._new.heartbeat != self._current.heartbeat,
            is_reached=own == self._file and not is_bundle_new,
        )

    def _wanted(self, name: str) -> bytes:
        """Return the SHA-256 of the manifest of the bundle that a peer should serve; empty if there is none.

        A rollback is of the last bundle that was sent: peers that it did not reach serve the previous bundle of the
        others already.
        """
        if self._bundle is not None:
            return hashlib.sha256((self._bundle.folder / MANIFEST).read_bytes()).digest()
        stored, active = self.sessions[name].stored, {self._active(name) for name in self.sessions} - {b""}
        if stored is None or not self._rolls_back or (len(active) > 1 and stored.previous not in active):
            return self._active(name)
        return stored.previous

    def _returns(self, name: str) -> bool:
        """Return whether a peer returns to its previous bundle."""
        return self._rolls_back and self._wanted(name) not in (b"", self._active(name))

    def _active(self, name: str) -> bytes:
        """Return the SHA-256 of the manifest of the bundle that a peer serves; empty if it serves none."""
        stored = self.sessions[name].stored
        return b"" if stored is None else stored.active

    def _size_of(self, step: Step, welcome: Welcome) -> int:
        """Return the number of bytes that a peer may need."""
        if self._bundle is None:
            return 0
        is_same = welcome.bundle_id == self._bundle.manifest.bundle_id
        parts = step.gained if is_same else step.after
        return sum({one.sha256: one.bytes for one in map(self._bundle.part, map(part_name, parts))}.values())

    def _carry_out(self) -> None:
        """Follow the instructions of the change until it has ended."""
        while (now := self._next()).phase != "done":
            target = self._targets[now.peer] if now.peer else None
            if now.phase == "send" and target is not None:
                self._until(target, lambda target: self._has_heard(target) and target.state in COMPLETE)
            elif now.phase == "switch" and target is not None:
                self._switch(target)
            else:
                self._wait_for(now, target)

    def _next(self) -> Instruction:
        fleet = {name: self._seen(name) for name, one in self.sessions.items() if one.welcome or name in self._targets}
        return next_instruction(
            self._plan, fleet, self._targets, self._model_id, is_whole=self._is_whole, impatient=self._impatient
        )

    def _switch(self, target: Target) -> None:
        """Install the bundle, and wait until the peer is warm, has recorded that, and is linked again."""
        state = self.sessions[target.peer.name].state
        before, installs = set(() if state is None else state.reaches), 0
        alone = self._plan.outages.get(target.peer.name)
        if alone and target.state == StoreState.READY:
            self._warn(
                f"while {target.peer.name} switches, no peer serves {name_blocks(alone)}: requests wait or skip blocks"
            )
        target.moved_at = time.monotonic()
        while target.state != StoreState.ACTIVE and target.peer.name in self._targets:
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
            self.step(STEP_S)
        self.wait_until(lambda: self._is_reached(target.peer.name, before), REACH_S)
        self.wait_until(lambda: False, SETTLE_S)

    def _is_reached(self, peer: str, before: set[str]) -> bool:
        """Return whether a peer that is warm again has its previous links to processes that are still there."""
        own, state = self.sessions[peer].welcome, self.sessions[peer].state
        model = "" if own is None else own.model_id  # peers of other models do not link to it
        there = {name for name, one in self.sessions.items() if one.welcome and one.welcome.model_id == model != ""}
        up = {name: session for name, session in self.sessions.items() if session.up and name in there}
        for name, session in up.items():
            if name != peer and session.state is not None:
                there |= set(session.state.reaches)
        is_alone = sum(one.up for one in self.sessions.values()) == 1
        wanted = before if is_alone else before & there
        return state is not None and wanted <= set(state.reaches)

    def _seen(self, name: str) -> Seen:
        """Return the last report of a peer."""
        one, target = self.sessions[name], self._targets.get(name)
        welcome, files = one.welcome, () if one.welcome is None else one.welcome.files
        # Peers end the links of this process with the change if the new file does not list it.
        removes_itself = self._new.source(self._hello.name.rpartition(".")[0]) is None
        is_cut_off = removes_itself and name in self._told and not one.up
        can_use = one.is_warm and one.state is not None and not (one.state.draining or one.state.stuck)
        serves = welcome.blocks if can_use and welcome is not None else ()
        return Seen(
            frozenset(serves),
            "" if welcome is None else welcome.model_id,
            has_files=target is None or target.state in COMPLETE,
            is_active=target is None or target.state == StoreState.ACTIVE,
            used_by=frozenset(() if one.state is None else one.state.reaches) - self.sessions.keys(),
            accepts=welcome is None or any(file.digest == self._digest for file in files),
            has_ended=name in self._removed or files == (self._file,) or is_cut_off,
            late=frozenset(() if target is None or target.last is None else target.last.behind),
        )

    def _wait_for(self, now: Instruction, target: Target | None) -> None:
        """Wait for a peer or for the sources; raise :class:`PushError`, or warn, if that takes too long."""
        if now.phase == "cover":
            if target is not None and not self.wait_until(lambda: self._next() != now, self._wait):
                held = name_blocks(now.parts)
                self._stop(target, f"not switched: {held} would have no warm holder meanwhile; see 'ls-edge status'")
            return
        for _ in range(round(PHASE_S / AGAIN_S)):
            if now.phase == "end" and target is not None and self.sessions[now.peer].up:
                self._told.add(now.peer)
                self.send(now.peer, Install(target.offered, True))
            if self.wait_until(lambda: self._next() != now, AGAIN_S):
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
