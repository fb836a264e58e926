"""Follower of the model that peers serve, for a source without a bundle.

Peers of two models do not work together. So a source without a bundle opens a new loop for the next model in addition
to the present one, which answers as long as its peers do. Once peers serve all parts of the next model, new requests go
there, and the previous loop ends with its last request. Two peers have to agree on a model, unless there is only one;
and a source that has the model from a single peer, perhaps the only one in its reach, follows that peer.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import LsEdgeError
from ls_edge.core.text import short_id
from ls_edge.runtime.source.follower import AGAIN_S
from ls_edge.runtime.source.loop import SourceLoop
from ls_edge.runtime.source.peer_monitor import SourceSnapshot

log = logging.getLogger("ls_edge.runtime")

_LOOK_S = 0.05

Model = tuple[Bundle, tuple[str, ...]]
"""Bundle of a manifest alone, and the peers that sent it."""


class ModelFollower:
    """Thread that waits for another model."""

    def __init__(
        self,
        loop: SourceLoop,
        witnesses: tuple[str, ...],
        *,
        fetch: Callable[[Collection[str]], Model],
        reopen: Callable[[Bundle, SourceLoop], SourceLoop],
        use: Callable[[SourceLoop, Model], str],
    ) -> None:
        """Follow the peers of ``loop``, whose model comes from ``witnesses``.

        ``fetch(names)`` returns the model on which these peers agree, ``reopen(bundle, before)`` a loop for it, and
        ``use(loop, model)`` sends new requests there and returns the id of the previous model.
        """
        self._loop, self._witnesses = loop, witnesses
        self._fetch, self._reopen, self._use = fetch, reopen, use
        self._left: set[str] = set()
        """Models that were left while other peers still serve them."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the present loop, which wakes the thread, and the one that is about to replace it."""
        self._closed.set()
        self._loop.close()
        if not self._loop.is_own_thread:  # a callback may close the source
            self._thread.join(AGAIN_S)

    def _run(self) -> None:
        refused = ""
        while not self._closed.is_set() and not self._loop.requests.line.is_closed:
            found = self._loop.monitor.wait_for(lambda it: bool(self._next_of(it)), _LOOK_S if self._left else AGAIN_S)
            if not found.other_models:
                self._left.clear()
            if self._closed.is_set() or not (model_id := self._next_of(found)):
                continue
            try:
                self._follow(self._fetch([name for name, one in found.other_models.items() if one == model_id]))
            except LsEdgeError as error:
                if str(error) != refused:
                    refused = str(error)
                    log.warning("not following a model", extra={"why": refused})
                self._pause(found)

    def _pause(self, found: SourceSnapshot) -> None:
        """Wait until the peers of other models change, at most :data:`AGAIN_S` seconds."""
        self._loop.monitor.wait_for(lambda it: it.other_models != found.other_models, AGAIN_S)

    def _next_of(self, found: SourceSnapshot) -> str:
        """Return the id of another model that enough peers serve, or an empty string.

        During a change both models may be whole; the one that was left is the previous one.
        """
        for model_id, count in Counter(found.other_models.values()).most_common():
            serving = tuple(name for name, one in found.other_models.items() if one == model_id)
            is_known = bool(found.missing_blocks) and serving == self._witnesses
            is_previous = model_id in self._left and not found.missing_blocks
            if (count >= min(2, len(found.peers)) or is_known) and not is_previous:
                return model_id
        return ""

    def _follow(self, model: Model) -> None:
        """Open a loop for a model, use it when its peers serve all parts, and end the previous loop."""
        before, bundle = self._loop, model[0]
        after = self._reopen(bundle, before)
        try:
            while (lacking := after.monitor.wait_for(_is_whole, _LOOK_S).missing_blocks) and not self._closed.is_set():
                if not self._next_of(before.monitor.snapshot):  # the peers went back
                    return
            if lacking:
                return
            after.succeed(before)
            self._left.add(self._use(after, model))
            self._loop, self._witnesses = after, model[1]
            log.info(
                "following a model", extra={"bundle": short_id(bundle.manifest.bundle_id), "peers": list(model[1])}
            )
            while not before.requests.line.is_empty and not self._closed.wait(_LOOK_S):
                if before.monitor.snapshot.missing_blocks:
                    before.hand_over(after)
            before.close()
        finally:
            if self._loop is not after or self._closed.is_set():
                after.close()


def _is_whole(found: SourceSnapshot) -> bool:
    return not found.missing_blocks
