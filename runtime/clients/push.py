"""Push of a bundle to the peers of a ``peers.yaml`` over their own links, for ``ls-edge push``.

Each peer asks for the files that it lacks, in pieces; this side answers. No peer is switched before every peer has
its complete, verified bundle and has built its engines. A peer may take any time as long as it makes progress. Then the
peers switch and warm up one after the other; the next one follows only after the others have greeted the last one
again. The first failure ends the push: peers that were not switched yet stay unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.text import name_blocks, short_id
from ls_edge.runtime.change.planner import Goal, Plan, plan_change
from ls_edge.runtime.change.progress import Instruction, Phase, Seen, next_instruction
from ls_edge.runtime.clients.sender import COMPLETE, PushError, Sender, Target
from ls_edge.runtime.clients.session import STEP_S, Session
from ls_edge.runtime.protocol.messages import Install, StoreState

REACH_S = 5.0
"""Seconds to wait until other peers have greeted a peer that is warm again."""
SETTLE_S = 0.2
"""Seconds until other peers know that a peer is warm: two STATE messages."""
MAX_INSTALLS = 3
"""Maximum number of INSTALL messages to a peer that restarts without having switched."""


class Pusher(Sender):
    """Client that pushes bundles to the peers of a file; used by one thread. A context manager."""

    _plan = Plan((), {}, {})
    _model_id = ""
    """Model that the peers should serve, if it may change."""
    _is_whole = True
    """Whether no peer is away, so that the change ends."""
    _impatient: tuple[Phase, ...] = ()
    """Phases in which sources are not waited for any longer."""

    def push(self, bundle: Bundle) -> None:
        """Send a bundle and switch to it; raise :class:`PushError` for the first failure, which ends the push.

        Before anything is sent, raise :class:`BundleError` if a file of the bundle differs from its manifest, and
        :class:`UsageError` if the peers serve another model.
        """
        self.peers.of_model(bundle.num_blocks)
        offer = self._prepare(
            bundle,
            {name: target.peer.blocks.of_model(bundle.num_blocks) for name, target in self._targets.items()},
        )
        self._connect()
        if other := self._other_model(bundle):
            raise UsageError(
                f"{other}; 'ls-edge apply {self.peers.path} --bundle {bundle.folder}' changes the model, and says "
                "what sources will do"
            )
        self._exchange(dict.fromkeys(self._targets, offer))

    def _other_model(self, bundle: Bundle) -> str:
        """Return an explanation if peers that answer serve another model than a bundle has; else an empty string."""
        welcomes = [self.sessions[name].welcome for name in self._targets]
        others = {welcome.model_id for welcome in welcomes if welcome is not None} - {"", bundle.manifest.model_id}
        theirs = ", ".join(sorted(map(short_id, others)))
        ours = short_id(bundle.manifest.model_id)
        return f"the peers serve another model ({theirs}) than this bundle ({ours})" if others else ""

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
        self._exchange({name: (one.previous, 0) for name, one in chosen.items()})

    # The steps.

    def _exchange(self, offers: Mapping[str, tuple[bytes, int]]) -> None:
        """Send a bundle, and switch the peers to it."""
        self._send_all(offers)
        models = {one.welcome.model_id for name, one in self.sessions.items() if name in offers and one.welcome} - {""}
        # A peer that is away is expected to be back before its blocks are needed.
        there = {
            name: frozenset((one.welcome or one.peer).blocks)
            for name, one in self.sessions.items()
            if one.welcome is None or not models or one.welcome.model_id in models
        }
        goals = {
            name: Goal(parts, pauses=True, is_reached=name not in offers or self._targets[name].state == "active")
            for name, parts in there.items()
        }
        self._plan = plan_change(there, goals)
        self._carry_out()

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

    def _seen(self, name: str) -> Seen:
        """Return the last report of a peer."""
        one, target = self.sessions[name], self._targets.get(name)
        return Seen(
            frozenset(served_by(one)),
            "" if one.welcome is None else one.welcome.model_id,
            has_files=target is None or target.state in COMPLETE,
            is_active=target is None or target.state == StoreState.ACTIVE,
            used_by=frozenset(() if one.state is None else one.state.reaches) - self.sessions.keys(),
        )

    def _moves_on(self, now: Instruction, seconds: float) -> bool:
        """Wait until something else is next; return whether it is."""

        def is_over() -> bool:
            then = self._next()
            return (then.phase, then.peer) != (now.phase, now.peer)

        return self.wait_until(is_over, seconds)

    def _wait_for(self, now: Instruction, target: Target | None) -> None:
        """Wait until something else is next; raise :class:`PushError`, or warn, if that takes too long."""
        if target is not None and not self._moves_on(now, self._wait):
            held = name_blocks(now.parts)
            self._stop(target, f"not switched: {held} would have no warm holder meanwhile; see 'ls-edge status'")

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
        self._wait_until_reached(target, before)

    def _wait_until_reached(self, target: Target, before: set[str]) -> None:
        """Wait until a peer that is warm again has its previous links to processes that are still there."""

        def is_reached() -> bool:
            own = self.sessions[target.peer.name].welcome
            model = "" if own is None else own.model_id  # peers of other models do not link to it
            there = {name for name, one in self.sessions.items() if one.welcome and one.welcome.model_id == model != ""}
            up = {name: session for name, session in self.sessions.items() if session.up and name in there}
            for name, session in up.items():
                if name != target.peer.name and session.state is not None:
                    there |= set(session.state.reaches)
            is_alone = sum(one.up for one in self.sessions.values()) == 1
            wanted = before if is_alone else before & there
            state = self.sessions[target.peer.name].state
            return state is not None and wanted <= set(state.reaches)

        self.wait_until(is_reached, REACH_S)
        self.wait_until(lambda: False, SETTLE_S)

    def _served_by(self, name: str) -> str:
        welcome = self.sessions[name].welcome
        return short_id(welcome.bundle_id) if welcome is not None and welcome.bundle_id else "none"


def served_by(session: Session) -> Sequence[int]:
    """Return the blocks of this peer that others can use now."""
    if not session.is_warm or session.welcome is None or session.state is None:
        return ()
    return () if session.state.draining or session.state.stuck else session.welcome.blocks
