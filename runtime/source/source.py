"""A source: the process that submits images and gets the answers.

    with Source.open("peers.yaml", "bundle", policy="nearest") as source:
        source.wait_ready()
        answer = source.submit(image).result()
        print(answer.label, answer.latency_ms, answer.degraded)

Every submitted image gets exactly one :class:`Answer` or one error of :class:`ls_edge.core.errors.RequestError` within
its budget (guarantee R1). Two threads work for it: the *source thread* runs the links, the routing machine, and stem
and head if they are short; a worker runs them otherwise (:mod:`ls_edge.runtime.execution.loop_threads`). Any thread may
call the methods of :class:`Source`: they put work into queues of the source thread (:mod:`~.requests`) and read the
snapshot that it publishes (:mod:`~.peer_monitor`). Callbacks of futures run on one of the two threads and should be
short.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import DataError, UsageError
from ls_edge.core.order_costs import read_order_costs
from ls_edge.core.peers_file import PeersFile, SourceEntry, load_peers
from ls_edge.core.records import AuditSummary, PeerEvent, Rejection
from ls_edge.data.preprocess import Preprocessor
from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.counts import RequestCounts
from ls_edge.runtime.execution.loop_threads import LoopThreads
from ls_edge.runtime.protocol.codecs import CODECS, is_finite
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.routing.candidates import Model
from ls_edge.runtime.routing.events import Complete, Fail, Instruction, Returned
from ls_edge.runtime.routing.limits import Limits
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.routing.source_rules import source_machine
from ls_edge.runtime.source.audit import Auditor, Challenges, require_block_files
from ls_edge.runtime.source.peer_monitor import PeerMonitor, PeerView, SourceSnapshot
from ls_edge.runtime.source.requests import Job, Requests
from ls_edge.runtime.source.results import Answer, InFlightRequest
from ls_edge.runtime.source.settings import BudgetMs, Integer, Settings, check_policy, checked
from ls_edge.runtime.source.stem_and_head import HeadResult, StemAndHead, StemResult
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import KeyPair, load_secret
from ls_edge.runtime.transport.node import Node, NodeSettings, new_incarnation

log = logging.getLogger("ls_edge.runtime")

_POLL_S = 0.1
"""Limit on the wait for links, in seconds."""

Image = np.ndarray | bytes
"""Preprocessed float32 ``[3, H, W]``; or an encoded file or uint8 ``[H, W, 3]``, which the source preprocesses."""


class Source:
    """Submits images and returns answers; open it with :meth:`open`, and close it or use it in ``with``."""

    def __init__(
        self,
        peers: PeersFile,
        bundle: Bundle,
        settings: Settings | None = None,
        *,
        keys: KeyPair | None = None,
        name: str | None = None,
        strict_bundle: bool = False,
        limits: Limits | None = None,
        on_event: Callable[[PeerEvent], None] | None = None,
    ) -> None:
        """Open stem and head and dial the peers; raise the errors of bundle, engines, keys and addresses.

        ``on_event`` is called on the source thread with each :class:`~ls_edge.core.records.PeerEvent` and should return
        soon. An exception that it raises is logged and has no other effect.
        """
        self.settings = settings or Settings()
        self.policy = POLICIES[self.settings.policy]
        if self.policy.runs_in_waves and self.settings.via_source:
            raise UsageError(
                f"policy {self.policy.name} needs peers that reach one another, not every hop through the source; "
                "use fastest, or leave --via source out"
            )
        peers.check_blocks(bundle.num_blocks)
        peers.check_codecs(CODECS)
        if self.settings.audit:
            require_block_files(bundle)
        self.peers = peers
        self.bundle = bundle
        if name is not None and not isinstance(name, str):
            raise UsageError(f"name {name!r} is a {type(name).__name__}; give a text")
        self.name = _name_of(peers, keys) if name is None else name
        self._alias = new_alias(self.name)
        self.max_skips = self.settings.skips_of(bundle.num_blocks)
        self.preprocess = Preprocessor(bundle.manifest.image)
        self.opened = time.monotonic()
        """Origin of the times of :attr:`events`, on the clock of :func:`time.monotonic`."""
        self.cores = EngineCores.of(peers, peers.source(self.name))
        with self.cores.on_engine():  # where the threads of the engines stay
            self._engines = StemAndHead(bundle, self.settings, peers.source(self.name) or SourceEntry(self.name))
        costs = read_order_costs(bundle.manifest.order_costs, bundle.num_blocks)
        self._machine = source_machine(
            self._alias,
            limits=limits or Limits.for_frames(peers.heartbeat.transfer_s(bundle.manifest.tokens.bytes_per_image)),
            rng=random.SystemRandom(),
            model=Model(bundle.bands, costs, bundle.manifest.bundle_id if strict_bundle else ""),
        )
        check_policy(bundle, self.policy, costs)
        self._machine.rules.head_us = self._engines.head_us
        self._ids = itertools.count()
        self._requests = Requests(bundle, self.settings, self._engines, self._machine, self._itinerary, self.opened)
        self._closed = threading.Lock()
        """Acquired by the first :meth:`close` and never released."""
        with self.cores.others():  # where the threads that are started here stay
            self._start(keys, strict_bundle, on_event)

    def _start(self, keys: KeyPair | None, strict_bundle: bool, on_event: Callable[[PeerEvent], None] | None) -> None:
        """Link to the peers and start the threads."""
        manifest = self.bundle.manifest
        hello = Hello(self._alias, "source", new_incarnation(), MINOR, manifest.model_id, manifest.bundle_id)
        self._node = Node(
            NodeSettings(self._alias, "source", self.peers, manifest, keys, strict_bundle),
            self._machine,
            execute=self._execute,
            hello=lambda: hello,
            state=lambda _name: State(True, False, False, 0, 0, 0, 0),
        )
        self._monitor = PeerMonitor(
            self.peers, self.bundle.num_blocks, self._machine, self._node, self.opened, on_event
        )
        self._node.call_with_notes(self._monitor.on_note)
        self._auditor: Auditor | None = None
        self._challenges = Challenges(self._node, self._itinerary, self.bundle.bands, self.settings.budget_ms / 1e3)
        if self.settings.audit:
            codecs = {peer.name: peer.codec for peer in self.peers.peers}
            bundle_of = self._own_bundle if strict_bundle else self._bundle_of
            self._auditor = Auditor(self.bundle, self.settings.audit, codecs, bundle_of, self._challenges.request)
        self._loop_threads: LoopThreads[StemResult | HeadResult] = LoopThreads(
            self._loop(), self._node.wake, names=("source", "stem and head"), cores=self.cores
        )
        self._requests.connect(self._node, self._loop_threads, self._auditor)
        self._loop_threads.start()

    @classmethod
    def open(
        cls,
        peers: str | Path | PeersFile,
        bundle: str | Path | Bundle,
        *,
        policy: str = "nearest",
        secret_key: str | Path | None = None,
        name: str | None = None,
        strict_bundle: bool = False,
        on_event: Callable[[PeerEvent], None] | None = None,
        **settings: Any,
    ) -> Source:
        """Read ``peers.yaml`` and the bundle and open a source.

        ``settings`` are fields of :class:`Settings`; ``on_event`` as in :class:`Source`.
        """
        for what, value in (("peers", peers), ("bundle", bundle)):
            if not isinstance(value, (str, Path, PeersFile, Bundle)):
                raise UsageError(f"{what} is a {type(value).__name__}; give its path")
        return cls(
            peers if isinstance(peers, PeersFile) else load_peers(peers),
            bundle if isinstance(bundle, Bundle) else Bundle.open(bundle),
            Settings.of(policy, settings),
            keys=load_secret(secret_key) if secret_key is not None else None,
            name=name,
            strict_bundle=strict_bundle,
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

        ``name`` and ``label`` (the true class) only go into the record. The image is preprocessed in the caller's
        thread if it is not yet, before its time starts. Raise :class:`DataError` for an image that does not decode or
        holds NaN or infinity, :class:`UsageError` for an array of another shape or an argument that cannot be used,
        and :class:`SourceClosed` after :meth:`close`; later errors are those of the future.
        """
        if not isinstance(name, str):
            raise UsageError(f"name {name!r} is a {type(name).__name__}; give a text")
        budget = self.settings.budget_ms if budget_ms is None else checked("budget_ms", budget_ms, BudgetMs)
        label = None if label is None else checked("label", label, Integer)
        array = self._as_input(image, name)
        now = time.monotonic()
        inflight = InFlightRequest(next(self._ids), array, Future(), now, now + budget / 1e3, name, label)
        self._requests.submit(inflight)
        # Without a reference to what refers to the future: answers are freed when their users drop them.
        inflight.future.add_done_callback(partial(_cancel, self._requests, inflight.request))
        if self._requests.short_jobs or inflight.deadline < now + _POLL_S:  # else the source thread has a turn in time
            self._node.wake()
        return inflight.future

    @property
    def threads(self) -> int:
        """Threads of stem and head."""
        return self._engines.threads

    @property
    def engine(self) -> str:
        """Engine of stem and head, and the ones that were passed over."""
        return self._engines.engine

    @property
    def counts(self) -> RequestCounts:
        """Requests so far, and how they ended."""
        return self._requests.counts

    @property
    def snapshot(self) -> SourceSnapshot:
        """Peers and counts as the source thread last published them; immutable."""
        return self._monitor.snapshot

    @property
    def events(self) -> tuple[PeerEvent, ...]:
        """Events of peers since the source was opened."""
        return self._monitor.events

    def missing_blocks(self) -> tuple[int, ...]:
        """Return the blocks without a reachable warm holder, directly or through another peer."""
        return self.snapshot.missing_blocks

    def may_skip(self, blocks: Sequence[int]) -> bool:
        """Return whether answers may leave these blocks out."""
        return len(blocks) <= self.max_skips

    def wait_answerable(self, timeout: float) -> tuple[int, ...]:
        """Wait until answers are possible, if need be without some blocks; return the blocks that prevent them.

        The wait ends after ``timeout`` seconds.
        """

        def is_answerable(snapshot: SourceSnapshot) -> bool:
            return self.may_skip(snapshot.missing_blocks)

        snapshot = self._monitor.wait_for(is_answerable, timeout)
        return () if is_answerable(snapshot) else snapshot.missing_blocks

    def wait_ready(self, timeout: float = 5.0) -> tuple[int, ...]:
        """Wait until each block has a warm holder; return those that have none after ``timeout`` seconds."""
        return self._monitor.wait_for(lambda snapshot: not snapshot.missing_blocks, timeout).missing_blocks

    def view(self) -> Mapping[str, PeerView]:
        """Return the state of each peer of ``peers.yaml``."""
        return self.snapshot.peers

    @property
    def duplicates(self) -> Mapping[int, int]:
        """Number of late answers that were dropped, by request."""
        return self.snapshot.duplicates

    @property
    def audits(self) -> AuditSummary | None:
        """Result of the audits so far; None without audits."""
        return None if self._auditor is None else self._auditor.snapshot()

    def finish_audits(self, timeout: float = 5.0) -> AuditSummary | None:
        """Wait for the audits of the answers so far, at most ``timeout`` seconds, and return their result."""
        if self._auditor is not None:
            self._auditor.finish(timeout)
        return self.audits

    @property
    def rejected(self) -> Mapping[str, Rejection]:
        """Answers and returns that were dropped as impossible: count and last reason by sender."""
        return self.snapshot.rejected

    @property
    def problems(self) -> Mapping[str, str]:
        """Latest reason by peer for those that cannot be used or that complained about this process."""
        return self.snapshot.problems

    @property
    def mismatched(self) -> Mapping[str, str]:
        """Peers that serve another model, with a message that contains both ids."""
        return self.snapshot.mismatched

    @property
    def is_open(self) -> bool:
        """Whether images are accepted: not after :meth:`close`, nor after an internal error of the source thread."""
        return not self._requests.is_closing

    def close(self) -> None:
        """Send BYE, end open requests with :class:`SourceClosed` and join the threads; a second call does nothing."""
        if not self._closed.acquire(blocking=False):
            return
        self._requests.close()
        self._node.wake()
        if not self._loop_threads.is_loop:  # a callback may close the source
            self._loop_threads.join(5.0)
        self._loop_threads.close()
        if self._auditor is not None:
            self._auditor.close()
        self._engines.close()

    # On the source thread.

    def _loop(self) -> Iterator[Job]:
        """Run the links turn by turn, and yield the stems and heads that the source thread should run itself."""
        requests = self._requests
        try:
            while not requests.is_closing:
                self._node.step(requests.next_wait(_POLL_S), self._take_over)
                while requests.short_jobs:
                    if self._loop_threads.may_run_here:
                        yield requests.short_jobs.popleft()[0]
                        requests.accept_submitted()  # it may be one of them
                        result = self._loop_threads.result_here()
                        if result is not None:
                            requests.on_result(result)
                        del result  # it holds the answer
                    else:
                        job, urgent = requests.short_jobs.popleft()
                        self._loop_threads.submit(job, urgent=urgent)
                        del job
                self._monitor.update()
            self._node.leave("done")
        except Exception:
            log.exception("the source failed")
            self._node.close()
        finally:
            requests.close()  # nothing is submitted after this
            requests.end_all()
            self._monitor.close()

    def _take_over(self) -> None:
        """Act on what other threads have done; called in each turn of the node."""
        self._challenges.start()
        self._requests.take_over()

    def _execute(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (Complete, Fail, Returned)):
            raise TypeError(f"a source does not execute {instruction!r}")
        if self._challenges.has(instruction.request):
            challenge = self._challenges.take(instruction)
            if challenge is not None and self._auditor is not None:
                self._auditor.challenged(challenge)
        elif not isinstance(instruction, Returned):
            self._requests.execute(instruction)

    def _itinerary(self, order: tuple[int, ...]) -> Itinerary:
        settings = self.settings
        return Itinerary(
            self._alias,
            settings.policy,
            order,
            self.max_skips,
            settings.via_source,
            latency_weight=settings.latency_weight,
            waves_wanted=settings.waves if self.policy.runs_in_waves else 0,
            on_straggler=settings.on_straggler,
        )

    # On any thread.

    def _bundle_of(self, name: str) -> str:
        """Return the id of the bundle that a peer serves, or an empty string if it never announced one."""
        view = self.snapshot.peers.get(name)
        return "" if view is None else view.bundle_id

    def _own_bundle(self, _name: str) -> str:
        return self.bundle.manifest.bundle_id

    def _as_input(self, image: Image, name: str) -> np.ndarray:
        if isinstance(image, np.ndarray) and image.dtype == np.float32:
            shape = (3, *self.bundle.manifest.image.size)
            if image.shape != shape:
                raise UsageError(f"image of shape {image.shape}, the model takes {shape}; use source.preprocess")
            array = image
        elif isinstance(image, (bytes, np.ndarray)):
            array = self.preprocess(image, name or "image")
        else:
            raise UsageError(f"image is a {type(image).__name__}; give an array or the bytes of a file")
        if not is_finite(array):
            raise DataError(f"{name or 'image'} holds NaN or infinity; correct those values, or leave the image out")
        return array


def _cancel(requests: Requests, request: int, future: Future[Answer]) -> None:
    if future.cancelled():
        requests.cancel(request)


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
    if keys is not None:
        return peers.source_with_key(keys.public).name
    if peers.uses_keys:
        raise UsageError(f"{peers.path} has keys, so a source needs its own: give --secret-key NAME.key_secret")
    return f"source-{secrets.token_hex(4)}"
