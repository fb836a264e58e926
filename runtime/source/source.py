"""A source: the process that submits images and gets the answers.

    with Source.open("peers.yaml", "bundle", policy="nearest") as source:
        source.wait_ready()
        answer = source.submit(image).result()
        print(answer.label, answer.latency_ms, answer.degraded)

Every submitted image gets exactly one :class:`Answer` or one error of :class:`ls_edge.core.errors.RequestError`,
within its
budget (guarantee R1). Two threads work for it: the *source thread* runs the links and the routing machine, and stem
and head where they are short; a worker runs these where they are not (:mod:`ls_edge.runtime.execution.loop_threads`).
Any thread
may call the methods of :class:`Source`: they put work into queues of the source thread and read the snapshot that it
publishes (:mod:`ls_edge.runtime.source.peer_monitor`). Callbacks of the futures run on one of those two threads and
should be
short.
"""

from __future__ import annotations

import itertools
import logging
import random
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import BudgetExceeded, DataError, NotFinite, Overloaded, RequestError, SourceClosed, UsageError
from ls_edge.core.order_costs import read_order_costs
from ls_edge.core.peers_file import EngineKind, PeersFile, SourceEntry, load_peers
from ls_edge.core.records import AuditSummary, PeerEvent, Rejection
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.engine import Engine, warm_up
from ls_edge.engines.opening import EngineMemory, announce, choose, open_engine
from ls_edge.runtime.execution.cores import EngineCores
from ls_edge.runtime.execution.counts import RequestCounts
from ls_edge.runtime.execution.loop_threads import LoopThreads
from ls_edge.runtime.protocol.codecs import CODECS, is_finite
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.routing.events import Abandon, Complete, Fail, Instruction, Returned, Submit
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.routing.source_routing import SourceMachine
from ls_edge.runtime.source.audit import Audit, Auditor, Challenge, challenge_itinerary, require_block_files
from ls_edge.runtime.source.deadlines import Deadlines
from ls_edge.runtime.source.peer_monitor import PeerMonitor, PeerView, SourceSnapshot
from ls_edge.runtime.source.results import Answer, InFlightRequest, RequestState, itinerary_holders, record_of
from ls_edge.runtime.source.settings import BudgetMs, Integer, Settings, check_policy, checked
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import KeyPair, load_secret
from ls_edge.runtime.transport.node import Node, new_incarnation

log = logging.getLogger("ls_edge.runtime")

_FIRST_CHALLENGE = 1 << 62
"""First number of a challenge, above those of all requests."""
_POLL_S = 0.1
"""Longest wait for links, in seconds."""
_SHORT_US = 2000
"""Longest usual time of a stem or head that the source thread runs itself: messages wait so long."""

Image = np.ndarray | bytes
"""Preprocessed float32 ``[3, H, W]``, or an encoded file or uint8 ``[H, W, 3]`` that the source preprocesses itself."""


@dataclass(frozen=True, eq=False)
class _StemResult:
    inflight: InFlightRequest
    tokens: np.ndarray | None
    """None where the stem failed, or did not run because the request had ended."""
    error: RequestError | None = None


@dataclass(frozen=True, eq=False)
class _HeadResult:
    inflight: InFlightRequest
    logits: np.ndarray | None
    """As the tokens of :class:`_StemResult`."""
    head_us: int = 0
    error: RequestError | None = None


class Source:
    """Submit images, get answers; make one with :meth:`open` and close it, or use it in ``with``."""

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
        """Open stem and head and dial the peers; raises the errors of bundle, engines, keys and addresses.

        ``on_event`` is called with each :class:`~ls_edge.core.records.PeerEvent` when it happens, on the source
        thread: it
        should return soon. An exception that it raises is logged and has no other effect.
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
        self._incarnation = new_incarnation()
        self.threads: int
        """Threads of stem and head."""
        self.engine: str
        """What runs stem and head, and what was passed over."""
        self.cores = EngineCores.of(peers, peers.source(self.name))
        with self.cores.on_engine():  # where the threads of the engines stay
            self._engines: Mapping[str, Engine] = self._open_engines()
            warm_ms = [warm_up(engine) for engine in self._engines.values()]
        self._machine = SourceMachine(
            self._alias,
            limits=limits or Limits.for_frames(peers.heartbeat.transfer_s(bundle.manifest.tokens.bytes_per_image)),
            rng=random.SystemRandom(),
            costs=read_order_costs(bundle.manifest.order_costs, bundle.num_blocks),
            bands=bundle.bands,
            bundle_id=bundle.manifest.bundle_id if strict_bundle else "",
        )
        check_policy(bundle, self.policy, self._machine.costs)
        self._machine.head_us = round(warm_ms[1] * 2e3)
        self._stem_us = round(warm_ms[0] * 2e3)
        """What the stem takes, rather too much than too little, as :attr:`SourceMachine.head_us`."""
        self._ids = itertools.count()
        self.counts = RequestCounts()
        """Requests so far, and how they ended; for any thread to read."""
        # Of every thread that has the lock.
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, InFlightRequest] = OrderedDict()
        self._inflight: set[int] = set()
        """Requests that were started and have not ended, or whose job this process's engines still have."""
        self._closing = False
        """Whether the source thread ends or has ended; nothing is accepted any more."""
        self._closed = False
        # Filled by other threads, emptied by the source thread.
        self._submitted: deque[InFlightRequest] = deque()
        self._cancelled: deque[int] = deque()
        self._wanted_challenges: deque[Challenge] = deque()
        self._short_jobs: deque[tuple[Callable[[], _StemResult | _HeadResult], bool]] = deque()
        """Stems and heads that the source thread may run itself after a turn, and whether they are urgent."""
        # Of the source thread.
        self._open: dict[int, InFlightRequest] = {}
        self._deadlines = Deadlines()
        """Of the open requests that this process would have to end: not those that the routing machine has."""
        with self.cores.others():  # where the threads that are started here stay
            self._start(keys, strict_bundle, on_event)

    def _start(self, keys: KeyPair | None, strict_bundle: bool, on_event: Callable[[PeerEvent], None] | None) -> None:
        """Link to the peers and start the threads."""
        self._node = Node(
            name=self._alias,
            role="source",
            peers=self.peers,
            manifest=self.bundle.manifest,
            machine=self._machine,
            execute=self._execute,
            hello=self._hello,
            state=lambda _name: State(True, False, False, 0, 0, 0, 0),
            keys=keys,
            strict_bundle=strict_bundle,
        )
        self._monitor = PeerMonitor(
            self.peers, self.bundle.num_blocks, self._machine, self._node, self.opened, on_event
        )
        self._node.on_note = self._monitor.on_note
        self._strict_bundle = strict_bundle
        self._challenges: dict[int, Challenge] = {}
        self._challenge_ids = itertools.count(_FIRST_CHALLENGE)
        self._auditor: Auditor | None = None
        if self.settings.audit:
            codecs = {peer.name: peer.codec for peer in self.peers.peers}
            self._auditor = Auditor(self.bundle, self.settings.audit, codecs, self._bundle_of, self._request_challenge)
        self._loop_threads: LoopThreads[_StemResult | _HeadResult] = LoopThreads(
            self._loop(), self._node.wake, names=("source", "stem and head"), cores=self.cores
        )
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

    def _open_engines(self) -> Mapping[str, Engine]:
        """Stem and head, by the settings, else by what ``peers.yaml`` says of this source."""
        entry = self.peers.source(self.name) or SourceEntry(self.name)
        self.threads = self.settings.threads or entry.threads or 1
        kind: EngineKind = self.settings.engine or entry.engine
        provider = self.settings.provider or (entry.provider if self.settings.engine is None else None)
        choice = choose(self.bundle, kind, provider)
        announce(choice)
        self.engine = str(choice)
        memory, engines = EngineMemory(self.bundle), {}
        try:
            for part in ("stem", "head"):
                engines[part] = open_engine(
                    self.bundle, part, kind=choice.kind, provider=choice.named_provider, threads=self.threads,
                    memory=memory,
                )  # fmt: skip
        except BaseException:
            for opened in engines.values():
                opened.close()
            raise
        return engines

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, image: Image, *, name: str = "", label: int | None = None, budget_ms: float | None = None
    ) -> Future[Answer]:
        """Submit an image and return the future of its answer at once. Cancelling the future stops the work on it.

        ``name`` and ``label`` (the true class) only go into the record. An image that is not preprocessed yet is
        preprocessed here, in the caller's thread, before its time starts. Raises :class:`DataError` for an image that
        does not decode or holds NaN or infinity, :class:`UsageError` for an array of another shape or another argument
        that cannot be used, and :class:`SourceClosed` after :meth:`close`; everything later is the future's.
        """
        if not isinstance(name, str):
            raise UsageError(f"name {name!r} is a {type(name).__name__}; give a text")
        budget = self.settings.budget_ms if budget_ms is None else checked("budget_ms", budget_ms, BudgetMs)
        label = None if label is None else checked("label", label, Integer)
        array = self._as_input(image, name)
        now = time.monotonic()
        inflight = InFlightRequest(next(self._ids), array, Future(), now, now + budget / 1e3, name, label)
        with self._lock:
            if self._closing:
                raise SourceClosed("the source was closed; open a new one")
            self.counts.submitted += 1
            self._submitted.append(inflight)
            self._waiting[inflight.request] = inflight
            self._start_waiting()
        # Without a reference to what refers to the future: answers are freed when their users drop them.
        inflight.future.add_done_callback(partial(self._on_done, inflight.request))
        if self._short_jobs or inflight.deadline < now + _POLL_S:  # else the source thread has a turn in time
            self._node.wake()
        return inflight.future

    @property
    def snapshot(self) -> SourceSnapshot:
        """Peers and counts as the source thread last published them; immutable."""
        return self._monitor.snapshot

    @property
    def events(self) -> tuple[PeerEvent, ...]:
        """What happened to peers since the source was opened."""
        return self._monitor.events

    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks that no warm peer serves which this process reaches, directly or through another."""
        return self.snapshot.missing_blocks

    def may_skip(self, blocks: Sequence[int]) -> bool:
        """Whether answers without these blocks are possible."""
        return len(blocks) <= self.max_skips

    def wait_answerable(self, timeout: float) -> tuple[int, ...]:
        """Wait until each block has a warm holder or may be skipped; return those that have none after ``timeout`` s.

        Empty where answers are possible, without those blocks if need be.
        """

        def is_answerable(snapshot: SourceSnapshot) -> bool:
            return self.may_skip(snapshot.missing_blocks)

        snapshot = self._monitor.wait_for(is_answerable, timeout)
        return () if is_answerable(snapshot) else snapshot.missing_blocks

    def wait_ready(self, timeout: float = 5.0) -> tuple[int, ...]:
        """Wait until each block has a warm holder; return those that have none after ``timeout`` seconds."""
        return self._monitor.wait_for(lambda snapshot: not snapshot.missing_blocks, timeout).missing_blocks

    def view(self) -> Mapping[str, PeerView]:
        """Each peer of ``peers.yaml`` as the source finds it."""
        return self.snapshot.peers

    @property
    def duplicates(self) -> Mapping[int, int]:
        """Answers that came after the first one to their request and were dropped: count by request."""
        return self.snapshot.duplicates

    @property
    def audits(self) -> AuditSummary | None:
        """The result of the audits so far; None where the setting ``audit`` is 0."""
        return None if self._auditor is None else self._auditor.snapshot()

    def finish_audits(self, timeout: float = 5.0) -> AuditSummary | None:
        """Wait for the audits of the answers so far, at most ``timeout`` seconds, and return their result."""
        if self._auditor is not None:
            self._auditor.finish(timeout)
        return self.audits

    @property
    def rejected(self) -> Mapping[str, Rejection]:
        """Answers and returns that were dropped because they cannot be true, by sender: count and last reason."""
        return self.snapshot.rejected

    @property
    def problems(self) -> Mapping[str, str]:
        """Why peers cannot be used, or complained of this process: latest reason by name, of those with a problem."""
        return self.snapshot.problems

    @property
    def mismatched(self) -> Mapping[str, str]:
        """Peers that serve another model, with the message that names both ids."""
        return self.snapshot.mismatched

    @property
    def is_open(self) -> bool:
        """Whether images are accepted: False after :meth:`close`, and where an internal error has ended its thread."""
        return not self._closing

    def close(self) -> None:
        """Send BYE, end open requests with :class:`SourceClosed` and join the threads; a second call does nothing."""
        with self._lock:
            closed, self._closed, self._closing = self._closed, True, True
        if closed:
            return
        self._node.wake()
        if not self._loop_threads.is_loop:  # a callback may close the source
            self._loop_threads.join(5.0)
        self._loop_threads.close()
        if self._auditor is not None:
            self._auditor.close()
        for engine in self._engines.values():
            engine.close()

    def _on_done(self, request: int, future: Future[Answer]) -> None:
        if future.cancelled():
            self._cancelled.append(request)
            self._node.wake()

    # On the source thread.

    def _loop(self) -> Iterator[Callable[[], _StemResult | _HeadResult]]:
        """Run the links, a turn at a time; yields the stems and heads that the source thread is to run itself."""
        try:
            while not self._closing:
                self._node.step(self._next_wait(), self._take_over)
                while self._short_jobs:
                    if self._loop_threads.may_run_here:
                        yield self._short_jobs.popleft()[0]
                        self._accept_submitted()  # it may be one of them
                        result = self._loop_threads.result_here()
                        if result is not None:
                            self._on_result(result)
                        del result  # it holds the answer
                    else:
                        job, urgent = self._short_jobs.popleft()
                        self._loop_threads.submit(job, urgent=urgent)
                        del job
                self._monitor.update()
            self._node.leave("done")
        except Exception:
            log.exception("the source failed")
            self._node.close()
        finally:
            with self._lock:  # nothing is submitted after this
                self._closing = True
            for inflight in [*self._open.values(), *self._submitted]:
                self._end(
                    inflight, SourceClosed(f"request {inflight.request}: the source was closed before its answer")
                )
            self._monitor.close()

    def _take_over(self) -> None:
        """Take over what other threads have done and want; in each turn of the node."""
        results = self._loop_threads.results()
        self._accept_submitted()  # some of them may have a result already
        for result in results:
            self._on_result(result)
        self._end_overdue(time.monotonic())
        with self._lock:
            self._start_waiting()

    def _next_wait(self) -> float:
        return max(0.0, min(_POLL_S, self._deadlines.next - time.monotonic()))

    def _accept_submitted(self) -> None:
        """Take over submissions, cancellations and challenges."""
        cancelled = [self._cancelled.popleft() for _ in range(len(self._cancelled))]  # each was submitted before
        while self._submitted:
            inflight = self._submitted.popleft()
            self._open[inflight.request] = inflight
            self._deadlines.add(inflight.request, inflight.deadline)
        for request in cancelled:
            self._cancel(request)
        while self._wanted_challenges:
            self._start_challenge(self._wanted_challenges.popleft())

    def _start_waiting(self) -> None:
        """Start the requests that are next, on any thread that has the lock."""
        while self._waiting and len(self._inflight) < self.settings.max_inflight:
            _, inflight = self._waiting.popitem(last=False)
            self._inflight.add(inflight.request)
            inflight.state, inflight.at_worker = RequestState.STEM, True
            stem = partial(self._run_stem, inflight)
            if len(self._inflight) == 1 and self._stem_us <= _SHORT_US:
                self._short_jobs.append((stem, False))
            else:
                self._loop_threads.submit(stem)

    def _cancel(self, request: int) -> None:
        inflight = self._open.get(request)
        if inflight is None:  # it has ended
            return
        if inflight.state is RequestState.ROUTED:
            self._node.feed(Abandon(inflight.request))
        self._forget(inflight)
        self.counts.cancelled += 1
        inflight.future.set_running_or_notify_cancel()  # for those who wait with concurrent.futures.wait

    def _end_overdue(self, now: float) -> None:
        for request in self._deadlines.pop_due(now):
            inflight = self._open[request]
            self._end(inflight, self._overdue(inflight), inflight.answered)

    def _overdue(self, inflight: InFlightRequest) -> RequestError:
        """Return the error of a request that reached its deadline in this process."""
        if inflight.state is RequestState.WAITING:
            return Overloaded(
                f"request {inflight.request} waited for its turn until its budget was over; send more slowly, "
                f"or raise the budget or max_inflight ({self.settings.max_inflight})"
            )
        if inflight.state is RequestState.STEM and not inflight.begun:
            return Overloaded(
                f"request {inflight.request} waited for the stem until its budget was over; send more slowly, "
                "or raise the budget"
            )
        return BudgetExceeded(
            f"request {inflight.request} was {inflight.state.value} of this process when its budget was over; "
            "raise the budget, or see what else this machine does"
        )

    def _on_result(self, result: _StemResult | _HeadResult) -> None:
        inflight = result.inflight
        inflight.at_worker = False
        if inflight.state is RequestState.ENDED:
            with self._lock:
                self._inflight.discard(inflight.request)
        elif result.error is not None:
            self._end(inflight, result.error, inflight.answered)
        elif isinstance(result, _HeadResult):
            if result.logits is not None:
                self._machine.head_us = max(result.head_us, self._machine.head_us * 9 // 10)
                self._answer(inflight, result)
        elif result.tokens is not None:
            inflight.state = RequestState.ROUTED
            self._stem_us = max(inflight.stem_us, self._stem_us * 9 // 10)
            self._deadlines.remove(inflight.request)
            if self._auditor is not None:
                inflight.stem_tokens = result.tokens
            order = self.policy.wanted_order(self.bundle.bands, self.settings.seed, inflight.request)
            self._node.feed(Submit(inflight.request, self._itinerary(order), result.tokens, inflight.deadline))

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

    def _execute(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (Complete, Fail, Returned)):
            raise TypeError(f"a source does not execute {instruction!r}")
        if instruction.request in self._challenges:
            self._on_challenge(instruction)
            return
        inflight = self._open.get(instruction.request)
        if inflight is None:
            return
        if isinstance(instruction, Complete):
            inflight.state, inflight.at_worker, inflight.answered = RequestState.HEAD, True, instruction
            self._deadlines.add(inflight.request, inflight.deadline)
            head = partial(self._run_head, inflight, instruction)
            if self._machine.head_us <= _SHORT_US:
                self._short_jobs.append((head, True))
            else:
                self._loop_threads.submit(head, urgent=True)
        elif isinstance(instruction, Fail):
            self._end(inflight, instruction.error, instruction)

    def _answer(self, inflight: InFlightRequest, headed: _HeadResult) -> None:
        assert headed.logits is not None
        logits = headed.logits[0]
        record = record_of(inflight, inflight.answered, time.monotonic(), logits, headed.head_us, self.opened)
        answered, stem_tokens = inflight.answered, inflight.stem_tokens
        self._forget(inflight)
        assert record.prediction is not None
        if not inflight.future.set_running_or_notify_cancel():
            self.counts.cancelled += 1
            return
        self.counts.add_answer(record)
        if self._auditor is not None and answered is not None and stem_tokens is not None:
            self._auditor.offer(Audit(inflight.request, stem_tokens, answered.itinerary, logits, answered.seen_holders))
        inflight.future.set_result(
            Answer(
                request=inflight.request,
                logits=logits,
                prediction=record.prediction,
                label=self.bundle.manifest.classes[record.prediction],
                degraded=record.degraded,
                record=record,
            )
        )

    def _end(self, inflight: InFlightRequest, error: RequestError, end: Complete | Fail | None = None) -> None:
        if inflight.state is RequestState.ENDED:
            return
        self._forget(inflight)
        error.record = record_of(inflight, end, time.monotonic(), None, 0, self.opened, error)
        if inflight.future.set_running_or_notify_cancel():
            self.counts.add_error(error, error.record)
            inflight.future.set_exception(error)
        else:
            self.counts.cancelled += 1

    def _forget(self, inflight: InFlightRequest) -> None:
        """Mark a request as ended; it stays in flight while an engine of this process has its job."""
        self._open.pop(inflight.request, None)
        self._deadlines.remove(inflight.request)
        with self._lock:  # it may be starting
            inflight.state = RequestState.ENDED
            self._waiting.pop(inflight.request, None)
            if not inflight.at_worker:
                self._inflight.discard(inflight.request)
        inflight.image = inflight.stem_tokens = inflight.answered = None  # users may keep its future

    # Audits.

    def _request_challenge(self, challenge: Challenge) -> None:
        """Queue a challenge; called on the auditor's thread."""
        self._wanted_challenges.append(challenge)
        self._node.wake()

    def _start_challenge(self, challenge: Challenge) -> None:
        """Send the stem tokens of an answer that does not match once more and collect each return."""
        number = next(self._challenge_ids)
        self._challenges[number] = challenge
        answer = challenge.audit.itinerary
        itinerary = challenge_itinerary(self._itinerary(answer.remaining), answer, self.bundle.bands)
        deadline = time.monotonic() + self.settings.budget_ms / 1e3
        self._node.feed(Submit(number, itinerary, challenge.audit.stem_tokens, deadline, watch_returns=True))

    def _on_challenge(self, instruction: Complete | Fail | Returned) -> None:
        challenge = self._challenges[instruction.request]
        if isinstance(instruction, Returned):
            challenge.returns.append(instruction)
            return
        del self._challenges[instruction.request]
        if self._auditor is not None:
            self._auditor.challenged(challenge)

    def _bundle_of(self, name: str) -> str:
        """Return the id of the bundle that a peer serves, empty where it never announced one; on any thread."""
        view = self.snapshot.peers.get(name)
        return self.bundle.manifest.bundle_id if self._strict_bundle else "" if view is None else view.bundle_id

    # On either thread.

    def _run_stem(self, inflight: InFlightRequest) -> _StemResult:
        image = inflight.image
        if image is None or _is_over(inflight):
            return _StemResult(inflight, None)
        inflight.begun = True
        started = time.perf_counter()
        try:
            tokens = self._engines["stem"].run({"images": image[np.newaxis]})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return _StemResult(inflight, None, RequestError(f"request {inflight.request}: the stem failed: {error}"))
        if not is_finite(tokens):
            failed = NotFinite(
                f"request {inflight.request}: the stem made NaN or infinity of {inflight.name or 'the image'}; "
                "look at the image's values"
            )
            return _StemResult(inflight, None, failed)
        inflight.image = None
        inflight.stem_us = round((time.perf_counter() - started) * 1e6)
        return _StemResult(inflight, tokens)

    def _run_head(self, inflight: InFlightRequest, answered: Complete) -> _HeadResult:
        if _is_over(inflight):
            return _HeadResult(inflight, None)
        started = time.perf_counter()
        try:
            logits = self._engines["head"].run({"tokens": answered.tokens})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            failed = RequestError(f"request {inflight.request}: the head failed: {error}")
            return _HeadResult(inflight, None, error=failed)
        if not is_finite(logits):
            return _HeadResult(inflight, None, error=_not_finite(answered))
        return _HeadResult(inflight, logits, round((time.perf_counter() - started) * 1e6))

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

    def _hello(self) -> Hello:
        m = self.bundle.manifest
        return Hello(self._alias, "source", self._incarnation, MINOR, m.model_id, m.bundle_id)


def _is_over(inflight: InFlightRequest) -> bool:
    """Whether a request needs no engine any more; asked just before one would run."""
    ended = inflight.state is RequestState.ENDED or inflight.future.cancelled()
    return ended or time.monotonic() >= inflight.deadline


def _not_finite(answered: Complete) -> NotFinite:
    """Return the error of a request whose logits are not finite although its tokens were."""
    holders = ", ".join(itinerary_holders(answered.itinerary)) or "nobody"
    return NotFinite(
        f"request {answered.request}: the head made NaN or infinity of what {holders} computed; check these peers, and "
        "the bundle with 'ls-edge verify'"
    )


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
    if keys is not None:
        return peers.source_with_key(keys.public).name
    if peers.uses_keys:
        raise UsageError(f"{peers.path} has keys, so a source needs its own: give --secret-key NAME.key_secret")
    return f"source-{secrets.token_hex(4)}"
