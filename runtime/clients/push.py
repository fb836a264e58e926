"""Push of a bundle to the peers of a ``peers.yaml`` over their own links, for ``ls-edge push``.

Each peer asks for the files that it lacks, in pieces; this side answers. No peer is switched before every peer has
its complete, verified bundle and has built its engines. A peer may take any time as long as it makes progress. Then the
peers switch and warm up one after the other; the next one follows only after the others have greeted the last one
again. The first failure ends the push: peers that were not switched yet stay unchanged.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.text import name_blocks, short_id
from ls_edge.runtime.clients.sender import PushError, Sender, Target
from ls_edge.runtime.clients.session import Session
from ls_edge.runtime.protocol.messages import Install, StoreState

REACH_S = 5.0
"""Seconds to wait until other peers have greeted a peer that is warm again."""
SETTLE_S = 0.2
"""Seconds until other peers know that a peer is warm: two STATE messages."""
MAX_INSTALLS = 3
"""Maximum number of INSTALL messages to a peer that restarts without having switched."""


class Pusher(Sender):
    """Pusher to the peers of a file; used by one thread. A context manager."""

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
        self._send_all(dict.fromkeys(self._targets, offer))
        self._switch_all()

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
        self._send_all({name: (one.previous, 0) for name, one in chosen.items()})
        self._switch_all()

    # The steps.

    def _switch_all(self) -> None:
        """Switch one peer after the other, only while others hold its blocks."""
        pending = list(self._targets.values())
        while pending := [target for target in pending if target.state != StoreState.ACTIVE]:
            target = self._next_covered(pending)
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
        own = self.sessions[target.peer.name].welcome
        others = (
            one
            for name, one in self.sessions.items()
            if name != target.peer.name and own and one.welcome and one.welcome.model_id == own.model_id
        )
        return served - self._without_other_holder(target, served) - set(itertools.chain(*map(served_by, others)))

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
        self.listen(SETTLE_S)

    def _served_by(self, name: str) -> str:
        welcome = self.sessions[name].welcome
        return short_id(welcome.bundle_id) if welcome is not None and welcome.bundle_id else "none"


def served_by(session: Session) -> Sequence[int]:
    """Return the blocks of this peer that others can use now."""
    if not session.is_warm or session.welcome is None or session.state is None:
        return ()
    return () if session.state.draining or session.state.stuck else session.welcome.blocks
