"""A source: the process that submits images and gets the answers.

    with Source.open("peers.yaml", "bundle", policy="nearest") as source:
        source.wait_ready()
        answer = source.submit("photo.jpg").result()
        print(answer.class_name, answer.latency_ms, answer.degraded)

Every submitted image gets exactly one :class:`Answer` or one :class:`ls_edge.core.errors.RequestError` within its
budget. Any thread may call the methods of :class:`Source`. Callbacks of futures run on a thread of the source and
should be short.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ls_edge.core.bundle import Bundle
from ls_edge.core.closing import Closing
from ls_edge.core.errors import LinkError, SourceClosed, UsageError
from ls_edge.core.parts import ENDS
from ls_edge.core.peers_file import PeersFile, check_name, load_peers
from ls_edge.core.records import AuditSummary, PeerEvent
from ls_edge.core.text import name_blocks
from ls_edge.runtime.clients.fetching import fetch_model
from ls_edge.runtime.clients.session import source_name
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.source.follower import Follower
from ls_edge.runtime.source.image_encoding import ImageEncoder
from ls_edge.runtime.source.loop import SourceLoop, SourceSetup
from ls_edge.runtime.source.model_exchange import ModelExchange, ModelFollower
from ls_edge.runtime.source.peer_monitor import SourceSnapshot
from ls_edge.runtime.source.results import Answer, RequestCounts
from ls_edge.runtime.source.settings import BudgetMs, Integer, Settings, checked
from ls_edge.runtime.transport.keys import KeyPair, load_secret
from ls_edge.runtime.transport.zap import read_again

if TYPE_CHECKING:
    from ls_edge.data.any_image import Image
    from ls_edge.runtime.source.stem_and_head import StemAndHead
    from ls_edge.runtime.transport.outbox import LinkCounts


EXCHANGE_S = 10.0
"""Seconds within which peers have to serve all parts of a bundle that was read again."""


class Source(Closing):
    """Submission of images to peers. Create it with :meth:`open`; close it, or use it in a ``with`` statement."""

    def __init__(
        self,
        peers: PeersFile,
        bundle: Bundle | None = None,
        settings: Settings | None = None,
        *,
        keys: KeyPair | None = None,
        name: str | None = None,
        limits: Limits | None = None,
        on_event: Callable[[PeerEvent], None] | None = None,
    ) -> None:
        """Open stem and head and dial the peers; raise the errors of bundle, engines, keys and addresses.

        Without a bundle, peers run stem and head and send the manifest of their model: raise :class:`LinkError` if no
        peer sends it.

        ``on_event`` is called on the source thread with each :class:`~ls_edge.core.records.PeerEvent` and should return
        quickly. An exception that it raises is logged and has no other effect.
        """
        self.settings = settings or Settings()
        default = f"source-{secrets.token_hex(4)}"
        self.name = source_name(peers, keys, default) if name is None else _checked_name(name)
        check_name(self.name)
        peers.check_codecs(codec_of)
        self.preprocess: Callable[..., Any]
        """Function that turns an image into an input of :meth:`submit`: an array for the stem, or an encoded image."""
        self.is_thin = bundle is None
        """Whether peers run stem and head."""
        self.settings.check_audit(is_thin=self.is_thin)
        if bundle is None:
            bundle = fetch_model(peers, keys, self.name, self.settings.model_wait_s)
        self.preprocess = self._preprocess_for(bundle)
        self.bundle = bundle
        """The bundle; only its manifest if that comes from the peers."""
        self.given = peers
        """``peers.yaml`` as last read, which is in force until the peers agree on another file."""
        self.peers = peers = peers.of_model(bundle.num_blocks)
        self._keys = keys
        self._limits, self._file = limits, self.given
        self._follower = Follower(self.name, self.given, keys, self._use)
        self._loop = self._open_loop(bundle, on_event=on_event)
        self._next = self._loop, bundle.num_blocks
        """Loop that was opened last, and the number of blocks of its model."""
        self._models = ModelExchange(self._loop, self._reopen, self._use_model)
        self._loop.follow_files()
        self._model_follower = ModelFollower(self._models, self._fetch) if self.is_thin else None
        self._closed = threading.Lock()
        """Acquired by the first :meth:`close` and never released."""

    @property
    def max_skips(self) -> int:
        """Number of blocks that an answer may skip."""
        return self.settings.skips_of(self.bundle.num_blocks)

    def _open_loop(
        self,
        bundle: Bundle,
        before: SourceLoop | None = None,
        on_event: Callable[[PeerEvent], None] | None = None,
    ) -> SourceLoop:
        setup = SourceSetup(self.name, self.settings, self._keys, self._limits, self.is_thin, self._follower)
        return SourceLoop(setup, self._file.within(bundle.num_blocks), bundle, on_event, before)

    def _reopen(self, bundle: Bundle, before: SourceLoop) -> SourceLoop:
        """Open a loop for the next model; it follows the files from now on, like the present one."""
        file, loop = self._file, self._open_loop(bundle, before)
        self._next = loop, bundle.num_blocks
        while file is not self._file:  # another thread followed one meanwhile
            file = self._file
            loop.change_peers(file.within(bundle.num_blocks), self._keys)
        return loop

    def _preprocess_for(self, bundle: Bundle) -> Callable[..., Any]:
        if self.is_thin:
            return ImageEncoder(bundle.manifest.image)
        from ls_edge.data.preprocess import Preprocessor

        return Preprocessor(bundle.manifest.image)

    def _fetch(self, names: Collection[str]) -> Bundle:
        """Return the model of these peers."""
        asked = replace(self._file, peers=tuple(peer for peer in self._file.peers if peer.name in names))
        return fetch_model(asked, self._keys, self.name)

    def _use_model(self, loop: SourceLoop, bundle: Bundle) -> None:
        """Send new requests to the loop of another bundle."""
        self.bundle, self.preprocess = bundle, self._preprocess_for(bundle)
        self._loop = loop
        self._use(self._file)

    @property
    def counts(self) -> RequestCounts:
        """Counts of requests, for metrics; they begin again with another model. Any thread may read them."""
        return self._loop.requests.counts

    @classmethod
    def open(
        cls,
        peers: str | Path | PeersFile,
        bundle: str | Path | Bundle | None = None,
        *,
        policy: str = "nearest",
        secret_key: str | Path | None = None,
        name: str | None = None,
        on_event: Callable[[PeerEvent], None] | None = None,
        **settings: Any,
    ) -> Source:
        """Read ``peers.yaml`` and the bundle, and open a source; without a bundle, peers run stem and head.

        ``settings`` are fields of :class:`Settings`; for ``on_event`` see :class:`Source`.
        """
        for what, value, kind in (("peers", peers, PeersFile), ("bundle", bundle, Bundle)):
            if not isinstance(value, (str, Path, kind)) and (what == "peers" or value is not None):
                raise UsageError(f"{what} must be a path or a {kind.__name__}, not {type(value).__name__}")
        return cls(
            peers if isinstance(peers, PeersFile) else load_peers(peers),
            bundle if bundle is None or isinstance(bundle, Bundle) else Bundle.open(bundle),
            Settings.of({"policy": policy, **settings}),
            keys=load_secret(secret_key) if secret_key is not None else None,
            name=name,
            on_event=on_event,
        )

    def submit(
        self, image: Image, *, name: str = "", label: int | None = None, budget_ms: float | None = None
    ) -> Future[Answer]:
        """Submit an image and return the future of its answer. Canceling the future stops the work on it.

        ``name`` (by default the name of the file) and ``label`` (the true class) only go into the record. If needed,
        the image is preprocessed in the caller's thread, before its budget starts. Raise :class:`DataError` for an
        image that cannot be read or contains NaN or infinity, :class:`UsageError` for an array of another shape or an
        invalid argument, and :class:`SourceClosed` after :meth:`close`; the future has all later errors.
        """
        name = _checked_name(name) or (Path(image).name if isinstance(image, (str, Path)) else "")
        budget = self.settings.budget_ms if budget_ms is None else checked("budget_ms", budget_ms, BudgetMs)
        label = None if label is None else checked("label", label, Integer)
        read, loop = self.preprocess(image, name), self._loop
        try:
            return loop.submit(read, name, label, budget / 1e3)
        except SourceClosed:
            if loop is self._loop:
                raise
            return self._loop.submit(read, name, label, budget / 1e3)  # its model has just been replaced

    async def classify(
        self, image: Image, *, name: str = "", label: int | None = None, budget_ms: float | None = None
    ) -> Answer:
        """Classify an image under asyncio: decode it on a thread, and wait without blocking the event loop.

        See :meth:`submit` for arguments and errors. Canceling the task stops the work.
        """
        loop = asyncio.get_running_loop()
        submitting = loop.run_in_executor(None, lambda: self.submit(image, name=name, label=label, budget_ms=budget_ms))
        try:
            submitted = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(_cancel_submitted)
            raise
        return await asyncio.wrap_future(submitted)

    @property
    def snapshot(self) -> SourceSnapshot:
        """Latest immutable snapshot of peers and counts, published by the source thread."""
        return self._loop.monitor.snapshot

    @property
    def opened(self) -> float:
        """Origin of the times of events and records, on the clock of :func:`time.monotonic`."""
        return self._loop.opened

    @property
    def engines(self) -> StemAndHead | None:
        """Engines of stem and head; None if peers run them."""
        return self._loop.engines

    @property
    def link_counts(self) -> LinkCounts:
        """Counts of messages by peer; they continue to count."""
        return self._loop.node.link_counts

    @property
    def events(self) -> tuple[PeerEvent, ...]:
        """Events of peers since the opening of the source."""
        return tuple(self._loop.monitor.events.all)

    def may_skip(self, blocks: Sequence[int]) -> bool:
        """Return whether answers may skip these blocks."""
        return len(blocks) <= self.max_skips and ENDS.keys().isdisjoint(blocks)

    def wait_ready(self, timeout: float = 5.0, *, may_miss: int = 0) -> tuple[int, ...]:
        """Wait at most ``timeout`` seconds until all blocks, except for ``may_miss`` of them, have warm holders.

        Without a bundle, wait for stem and head as well. Return the parts without a holder; if the source has begun to
        use another model meanwhile, those of that model.
        """

        def is_ready(found: SourceSnapshot) -> bool:
            missing = found.missing_blocks
            return len(missing) <= may_miss and ENDS.keys().isdisjoint(missing)

        waited = self._loop.monitor.wait_for(is_ready, timeout).missing_blocks
        return min(waited, self.snapshot.missing_blocks, key=len)

    @property
    def audits(self) -> AuditSummary | None:
        """Results of the audits so far; None without audits."""
        return None if self._loop.auditor is None else self._loop.auditor.summary

    def finish_audits(self, timeout: float = 5.0) -> AuditSummary | None:
        """Wait at most ``timeout`` seconds for the audits of the answers so far, and return their results."""
        if self._loop.auditor is not None:
            self._loop.auditor.finish(timeout)
        return self.audits

    def reload(self) -> None:
        """Read ``peers.yaml``, the secret key and the bundle again, and use them from now on.

        Requests in flight continue; those at a peer that was removed or has another key run elsewhere. Raise the errors
        of these files, :class:`UsageError` for changes that need a new source, and :class:`LinkError` if no peers serve
        all of another bundle; then the present bundle stays in use.
        """
        peers, keys = read_again(self.given, self._keys, self.name)
        self._check_links(peers)
        bundle = self.bundle if self.is_thin else Bundle.open(self.bundle.folder)
        peers.of_model(bundle.num_blocks)
        self.given, self._keys = peers, keys
        self._follower.reset(peers, keys)
        self._use(peers)
        if bundle.manifest == self.bundle.manifest:
            return
        end = time.monotonic() + EXCHANGE_S
        if lacking := self._models.exchange(bundle, lambda: time.monotonic() < end, hands_over=False):
            raise LinkError(
                f"no peer of {peers.path} has served {name_blocks(lacking)} of the new bundle within {EXCHANGE_S:.0f} "
                "s; apply it to the peers, and reload again"
            )

    def _check_links(self, peers: PeersFile) -> None:
        if (peers.uses_keys, peers.heartbeat) != (self.peers.uses_keys, self.peers.heartbeat):
            raise UsageError(
                f"{peers.path} changes the heartbeat, or switches keys on or off; restart {self.name} to apply that"
            )

    def _use(self, file: PeersFile) -> None:
        """Use a file from now on; raise :class:`UsageError` for changes that need a new source."""
        self._check_links(file)
        self._file, self.peers = file, file.within(self.bundle.num_blocks)
        self._loop.change_peers(self.peers, self._keys)
        loop, num_blocks = self._next
        if loop is not self._loop:
            loop.change_peers(file.within(num_blocks), self._keys)

    @property
    def is_open(self) -> bool:
        """Whether images are accepted; false after :meth:`close` or an internal error of the source thread."""
        return not self._loop.requests.line.is_closed

    def close(self) -> None:
        """Send BYE, end open requests with :class:`SourceClosed` and join the threads; a second call does nothing."""
        if self._closed.acquire(blocking=False):
            self._models.close()
            if self._model_follower is not None:
                self._model_follower.join()


def _cancel_submitted(submitting: asyncio.Future[Future[Answer]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _checked_name(name: Any) -> str:
    if not isinstance(name, str):
        raise UsageError(f"name must be a string, not {type(name).__name__} {name!r}")
    return name
