"""A source: the process that submits images and gets the answers.

    with Source.open("peers.yaml", "bundle", policy="nearest") as source:
        source.wait_ready()
        answer = source.submit("photo.jpg").result()
        print(answer.class_name, answer.latency_ms, answer.degraded)

Every submitted image gets exactly one :class:`Answer` or one error of :class:`ls_edge.core.errors.RequestError` within
its budget (guarantee R1). Any thread may call the methods of :class:`Source`. Callbacks of futures run on one of the
two threads of :mod:`~.source_thread` and should be short.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import UsageError
from ls_edge.core.parts import ENDS
from ls_edge.core.peers_file import PeersFile, load_peers
from ls_edge.core.records import AuditSummary, PeerEvent
from ls_edge.runtime.clients.manifest import fetch_model
from ls_edge.runtime.protocol.codecs import CODECS
from ls_edge.runtime.protocol.codecs.image import EncodedImage
from ls_edge.runtime.routing.state.limits import Limits
from ls_edge.runtime.source.image_encoding import encode_image
from ls_edge.runtime.source.peer_monitor import SourceSnapshot
from ls_edge.runtime.source.results import Answer
from ls_edge.runtime.source.settings import BudgetMs, Integer, Settings, checked
from ls_edge.runtime.source.source_thread import SourceThread
from ls_edge.runtime.transport.keys import KeyPair, load_secret, read_again

if TYPE_CHECKING:
    from ls_edge.runtime.source.images import Image


class Source:
    """Submits images and returns answers; open it with :meth:`open`, and close it or use it in ``with``."""

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

        Without a bundle, peers run stem and head, and send the manifest of their model: raise :class:`LinkError` if
        none does, and :class:`ModelMismatch` if two do not agree.
        ``on_event`` is called on the source thread with each :class:`~ls_edge.core.records.PeerEvent` and should return
        soon. An exception that it raises is logged and has no other effect.
        """
        self.settings = settings or Settings()
        if name is not None and not isinstance(name, str):
            raise UsageError(f"name {name!r} is a {type(name).__name__}; give a text")
        self.name = _name_of(peers, keys) if name is None else name
        peers.check_codecs(CODECS)
        self.preprocess: Callable[..., Any]
        """Function that turns an image into an input of :meth:`submit`: an array for the stem, or an encoded image."""
        self._read: Callable[[Any, str], np.ndarray | EncodedImage]
        self.witnesses: tuple[str, ...] = ()
        """Peers that sent the manifest, for a source without a bundle. Two have to agree; a single one is trusted."""
        self.settings.check_audit(is_thin=bundle is None)
        if bundle is None:
            bundle, self.witnesses = fetch_model(peers, keys, self.name)
            self.preprocess = self._read = encode_image
        else:
            from ls_edge.runtime.source.images import reader_of

            self.preprocess, self._read = reader_of(bundle.manifest.image)
        self.bundle = bundle
        """Its manifest alone, if it comes from the peers."""
        self.peers = peers = peers.of_model(bundle.num_blocks)
        auditor = self.settings.auditor
        if auditor and len(peers.peer(auditor).blocks) < bundle.num_blocks + len(ENDS):
            raise UsageError(
                f"auditor {auditor!r} does not hold everything in {peers.path}; name a peer with all blocks"
            )
        self.max_skips = self.settings.skips_of(bundle.num_blocks)
        self._keys = keys
        self.thread = SourceThread(
            self.name,
            peers,
            bundle,
            self.settings,
            keys=keys,
            limits=limits,
            on_event=on_event,
            is_thin=bool(self.witnesses),
        )
        """Links, engines and counts, for metrics and reports."""
        self.counts = self.thread.requests.counts
        self._closed = threading.Lock()
        """Acquired by the first :meth:`close` and never released."""

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
        """Read ``peers.yaml`` and the bundle and open a source; without a bundle, peers run stem and head.

        ``settings`` are fields of :class:`Settings`; ``on_event`` as in :class:`Source`.
        """
        for what, value in (("peers", peers), ("bundle", bundle)):
            if not isinstance(value, (str, Path, PeersFile, Bundle)) and (what == "peers" or value is not None):
                raise UsageError(f"{what} is a {type(value).__name__}; give its path")
        return cls(
            peers if isinstance(peers, PeersFile) else load_peers(peers),
            bundle if bundle is None or isinstance(bundle, Bundle) else Bundle.open(bundle),
            Settings.of(policy, settings),
            keys=load_secret(secret_key) if secret_key is not None else None,
            name=name,
            on_event=on_event,
        )

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, image: Image, *, name: str = "", label: int | None = None, budget_ms: float | None = None
    ) -> Future[Answer]:
        """Submit an image and return the future of its answer. Cancelling the future stops the work on it.

        ``name`` (by default that of a file) and ``label`` (the true class) only go into the record. The image is
        preprocessed in the caller's thread if it is not yet, before its time starts. Raise :class:`DataError` for an
        image that cannot be read or holds NaN or infinity, :class:`UsageError` for an array of another shape or an
        argument that cannot be used, and :class:`SourceClosed` after :meth:`close`; later errors are those of the
        future.
        """
        if not isinstance(name, str):
            raise UsageError(f"name {name!r} is a {type(name).__name__}; give a text")
        budget = self.settings.budget_ms if budget_ms is None else checked("budget_ms", budget_ms, BudgetMs)
        label = None if label is None else checked("label", label, Integer)
        name = name or (Path(image).name if isinstance(image, (str, Path)) else "")
        return self.thread.submit(self._read(image, name), name, label, budget / 1e3)

    async def classify(
        self, image: Image, *, name: str = "", label: int | None = None, budget_ms: float | None = None
    ) -> Answer:
        """Answer an image for asyncio: decode it on a thread, and wait without blocking the loop.

        Arguments and errors are those of :meth:`submit` and its future. Cancelling the task stops the work.
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
        """Peers and counts as the source thread last published them; immutable."""
        return self.thread.monitor.snapshot

    @property
    def events(self) -> tuple[PeerEvent, ...]:
        """Events of peers since the source was opened."""
        return tuple(self.thread.monitor.events.all)

    def may_skip(self, blocks: Sequence[int]) -> bool:
        """Return whether answers may leave these blocks out."""
        return len(blocks) <= self.max_skips and ENDS.keys().isdisjoint(blocks)

    def wait_ready(self, timeout: float = 5.0, *, may_miss: int = 0) -> tuple[int, ...]:
        """Wait until each block, but ``may_miss`` of them, has a warm holder, at most ``timeout`` seconds.

        Without a bundle, wait for stem and head as well. Return what has no holder.
        """

        def is_ready(found: SourceSnapshot) -> bool:
            missing = found.missing_blocks
            return len(missing) <= may_miss and ENDS.keys().isdisjoint(missing)

        return self.thread.monitor.wait_for(is_ready, timeout).missing_blocks

    @property
    def audits(self) -> AuditSummary | None:
        """Result of the audits so far; None without audits."""
        return None if self.thread.auditor is None else self.thread.auditor.summary

    def finish_audits(self, timeout: float = 5.0) -> AuditSummary | None:
        """Wait for the audits of the answers so far, at most ``timeout`` seconds, and return their result."""
        if self.thread.auditor is not None:
            self.thread.auditor.finish(timeout)
        return self.audits

    def reload(self) -> None:
        """Read ``peers.yaml`` and the secret key again: peers, addresses and keys count from now on.

        Requests in flight continue; those at a peer that was removed or has another key run elsewhere. Raise the errors
        of the file, and :class:`UsageError` for changes that need a new source; nothing changes then.
        """
        peers, keys = read_again(self.peers, self._keys, self.name)
        if (peers.uses_keys, peers.heartbeat) != (self.peers.uses_keys, self.peers.heartbeat):
            raise UsageError(f"{peers.path} has another heartbeat, or switched keys on or off; start {self.name} again")
        self.peers, self._keys = peers.of_model(self.bundle.num_blocks), keys
        self.thread.change_peers(self.peers, keys)

    @property
    def is_open(self) -> bool:
        """Whether images are accepted: not after :meth:`close`, nor after an internal error of the source thread."""
        return not self.thread.requests.line.is_closed

    def close(self) -> None:
        """Send BYE, end open requests with :class:`SourceClosed` and join the threads; a second call does nothing."""
        if self._closed.acquire(blocking=False):
            self.thread.close()


def _cancel_submitted(submitting: asyncio.Future[Future[Answer]]) -> None:
    if not submitting.cancelled() and submitting.exception() is None:
        submitting.result().cancel()


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
    if keys is not None:
        return peers.source_with_key(keys.public).name
    if peers.uses_keys:
        raise UsageError(f"{peers.path} has keys, so a source needs its own: give --secret-key NAME.key_secret")
    return f"source-{secrets.token_hex(4)}"
