"""Exchange of the model under a running source: after SIGHUP, or when the peers serve another one.

Peers of two models do not work together. So a source opens a new loop for the next model in addition to the present
one, which answers as long as its peers do. Once peers serve all parts of the next model, new requests go there, and the
previous loop ends with its last request. A source without a bundle follows the model that its peers serve.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial

from ls_edge.core.bundle import Bundle
from ls_edge.core.text import short_id
from ls_edge.runtime.source.follower import AGAIN_S
from ls_edge.runtime.source.loop import SourceLoop
from ls_edge.runtime.source.peer_monitor import SourceSnapshot

log = logging.getLogger("ls_edge.runtime")

_LOOK_S = 0.05


class ModelExchange:
    """The present loop of a source, and its replacement by the loop of another model."""

    def __init__(
        self,
        loop: SourceLoop,
        reopen: Callable[[Bundle, SourceLoop], SourceLoop],
        use: Callable[[SourceLoop, Bundle], None],
    ) -> None:
        """Begin with ``loop``; ``reopen(bundle, before)`` opens another, ``use`` sends new requests there."""
        self.loop = loop
        self._reopen, self._use = reopen, use
        self._turn = threading.Lock()
        self._closed = threading.Event()
        self._ending: list[threading.Thread] = []

    def is_over(self) -> bool:
        """Return whether the source is closed."""
        return self._closed.is_set() or self.loop.requests.line.is_closed

    def exchange(self, bundle: Bundle, goes_on: Callable[[], bool], *, hands_over: bool) -> tuple[int, ...]:
        """Use a bundle as soon as peers serve all parts of it, or give up when ``goes_on()`` returns false.

        Return the parts without a holder if it was given up. With ``hands_over``, the next loop answers the open
        requests from their beginning if peers of the present model are missing.
        """
        with self._turn:
            before = self.loop
            after = self._reopen(bundle, before)
            try:
                while lacking := after.monitor.wait_for(lambda it: not it.missing_blocks, _LOOK_S).missing_blocks:
                    if self.is_over() or not goes_on():
                        return lacking
                after.succeed(before)
                self._use(after, bundle)
                self.loop = after
            finally:
                if self.loop is not after or self._closed.is_set():
                    after.close()
            log.info("uses another model", extra={"bundle": short_id(bundle.manifest.bundle_id)})
            ending = threading.Thread(
                target=self._end, args=(before, after if hands_over else None), name="previous model", daemon=True
            )
            self._ending = [*(one for one in self._ending if one.is_alive()), ending]
            ending.start()
        return ()

    def _end(self, before: SourceLoop, after: SourceLoop | None) -> None:
        """Close the previous loop after its last request."""
        while not before.requests.line.is_empty and not self._closed.wait(_LOOK_S):
            if after is not None and before.monitor.snapshot.missing_blocks:
                before.hand_over(after)
        before.close()

    def close(self) -> None:
        """Close the present loop and the previous ones."""
        self._closed.set()
        self.loop.close()
        if not self.loop.is_own_thread:  # a callback may close the source
            for ending in self._ending:
                ending.join(AGAIN_S)


class ModelFollower:
    """Thread that follows the model of the peers, for a source without a bundle."""

    def __init__(self, models: ModelExchange, fetch: Callable[[Collection[str]], Bundle]) -> None:
        """Use the model that ``fetch(names)`` gets from peers."""
        self._models, self._fetch = models, fetch
        self._left: set[str] = set()
        """Models that were left while other peers still serve them."""
        self._thread = threading.Thread(target=self._run, name="model follower", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the end of the thread, after the exchange was closed."""
        if not self._models.loop.is_own_thread:
            self._thread.join(AGAIN_S)

    def _run(self) -> None:
        refused = ""
        while not self._models.is_over():
            monitor = self._models.loop.monitor
            found = monitor.wait_for(lambda it: bool(self._next_of(it)), _LOOK_S if self._left else AGAIN_S)
            if not found.other_models:
                self._left.clear()
            if self._models.is_over() or not (model_id := self._next_of(found)):
                continue
            try:
                bundle = self._fetch([name for name, one in found.other_models.items() if one == model_id])
                before = self._models.loop.model_id
                if not self._models.exchange(
                    bundle, lambda: self._next_of(self._models.loop.monitor.snapshot) == model_id, hands_over=True
                ):
                    self._left.add(before)
            except Exception as error:  # noqa: BLE001  such as no descriptor for a moment: nothing else follows the model
                if str(error) != refused:
                    refused = str(error)
                    log.warning("not following a model", extra={"why": refused})
                monitor.wait_for(partial(lambda before, now: now.other_models != before, found.other_models), AGAIN_S)

    def _next_of(self, found: SourceSnapshot) -> str:
        """Return the id of another model that peers serve, or an empty string.

        During a change both models may be whole; the one that was left is the previous one.
        """
        for model_id, _ in Counter(found.other_models.values()).most_common():
            if found.missing_blocks or model_id not in self._left:
                return model_id
        return ""
