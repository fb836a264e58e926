"""A source: the process that has the images.

What ``ls-edge run`` does, a program can do:

    with Source.open("peers.yaml", "bundle", policy="nearest") as source:
        source.wait_ready()
        answer = source.submit(image).result()
        print(answer.label, answer.latency_ms, answer.degraded)

Every submitted image gets exactly one :class:`Answer` or one error of :class:`ls_edge.errors.RequestError`, within its
budget (guarantee R1). Stem and head run in this process, on a thread of their own; a second thread speaks to the peers.
Any thread may submit; callbacks of the futures run on one of those two threads and should be short.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ls_edge.bundle import Bundle
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.engine import Engine, warm_up
from ls_edge.engines.opening import open_engine
from ls_edge.errors import BudgetExceeded, DataError, NotFinite, Overloaded, RequestError, SourceClosed, UsageError
from ls_edge.evaluation.run_summary import AuditSummary, Rejection
from ls_edge.order_costs import read_order_costs
from ls_edge.peers_file import PeersFile, load_peers
from ls_edge.records import PeerEvent, PeerState
from ls_edge.runtime.audit import Audit, Auditor, Challenge, challenge_itinerary, require_block_files
from ls_edge.runtime.protocol.codec import is_finite
from ls_edge.runtime.protocol.messages import MINOR, Hello, Itinerary, State
from ls_edge.runtime.results import Answer, InFlightRequest, PeerView, RequestState, itinerary_holders, record_of
from ls_edge.runtime.routing.events import Abandon, Fail, Instruction, Note, Returned, Submit
from ls_edge.runtime.routing.events import Answer as Answered
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.routing.source_routing import SourceMachine
from ls_edge.runtime.settings import Settings, checked_budget, whole_number
from ls_edge.runtime.transport.admission import new_alias
from ls_edge.runtime.transport.keys import KeyPair, load_secret
from ls_edge.runtime.transport.node import Node, new_incarnation
from ls_edge.runtime.worker import Worker

log = logging.getLogger("ls_edge.runtime")

_WATCH_EVERY = 0.02
"""Seconds between two looks at how the peers are."""
_FIRST_CHALLENGE = 1 << 62
"""Numbers of challenges, apart from those of requests, which have records."""
_MOST_EVENTS = 100_000
"""Events that are kept: a peer that comes and goes all the time must not fill the memory."""
_SPARE_DEADLINES = 256
"""Deadlines of ended requests that are kept before they are swept out; more means rarer and longer sweeps."""

Image = np.ndarray | bytes
"""Preprocessed float32 ``[3, H, W]``, or an encoded file or uint8 ``[H, W, 3]`` that the source preprocesses itself."""


@dataclass(frozen=True, eq=False)
class _Stemmed:
    inflight: InFlightRequest
    tokens: np.ndarray | None
    """None where the stem failed, or was not run because nobody waited for it any more."""
    error: RequestError | None = None


@dataclass(frozen=True, eq=False)
class _Headed:
    inflight: InFlightRequest
    logits: np.ndarray | None
    """As the tokens of :class:`_Stemmed`."""
    head_us: int = 0
    error: RequestError | None = None


@dataclass(eq=False)
class _Inbox:
    """What other threads have for the thread that speaks."""

    new: deque[InFlightRequest] = field(default_factory=deque)
    abandoned: deque[InFlightRequest] = field(default_factory=deque)
    challenges: deque[Challenge] = field(default_factory=deque)


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
    ) -> None:
        """Open stem and head and dial the peers; errors as those of bundle, engines, keys and addresses."""
        self.settings = settings or Settings()
        self.policy = POLICIES[self.settings.policy]
        if self.policy.runs_in_waves and self.settings.via_source:
            raise UsageError(
                f"policy {self.policy.name} needs peers that reach one another, not every hop through the source; "
                "use fastest, or leave --via source out"
            )
        peers.check_blocks(bundle.num_blocks)
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
        self.events: list[PeerEvent] = []
        """What happened to peers since the source was opened."""
        self._incarnation = new_incarnation()
        self._engines: Mapping[str, Engine] = {
            part: open_engine(bundle, part, threads=self.settings.threads) for part in ("stem", "head")
        }
        warm_ms = [warm_up(engine) for engine in self._engines.values()]
        self.machine = SourceMachine(
            self._alias,
            limits=limits or Limits.for_frames(peers.heartbeat.transfer_s(bundle.manifest.tokens.bytes_per_image)),
            rng=random.SystemRandom(),
            costs=read_order_costs(bundle.manifest.order_costs, bundle.num_blocks),
        )
        if self.policy.needs_order_costs and self.machine.costs is None:
            raise UsageError(
                f"{bundle.folder} has no order_costs, which the policy {self.policy.name} goes by; export it again "
                "with --calibrate DATA, or use nearest"
            )
        self.machine.head_us = round(warm_ms[1] * 2e3)
        self._ids = itertools.count()
        self._inbox = _Inbox()
        self._waiting: OrderedDict[int, InFlightRequest] = OrderedDict()
        self._open: dict[int, InFlightRequest] = {}
        self._inflight: set[int] = set()
        """Requests whose turn has come, and that have not ended or of which this process's engines still have a job."""
        self._deadlines: list[tuple[float, int]] = []
        """A heap of all open requests, with some that have ended since."""
        self._states: dict[str, str] = {}
        self._closing = False
        """Whether the thread that speaks ends, or has; nothing is admitted any more."""
        self._closed = False
        self._lock = threading.Lock()
        self.node = Node(
            name=self._alias,
            role="source",
            peers=peers,
            manifest=bundle.manifest,
            machine=self.machine,
            carry_out=self._carry_out,
            hello=self._hello,
            state=lambda _name: State(True, False, False, 0, 0, 0, 0),
            keys=keys,
            strict_bundle=strict_bundle,
        )
        self.node.on_note = self._on_note
        self._strict_bundle = strict_bundle
        self._bundle_ids: dict[str, str] = {}
        """What each peer said last that it serves."""
        self._challenges: dict[int, Challenge] = {}
        self._challenge_ids = itertools.count(_FIRST_CHALLENGE)
        self._auditor: Auditor | None = None
        if self.settings.audit:
            codecs = {peer.name: str(peer.codec) for peer in peers.peers}
            self._auditor = Auditor(bundle, self.settings.audit, codecs, self._bundle_of, self._ask_for_challenge)
        self._worker: Worker[_Stemmed | _Headed] = Worker("stem and head", self.node.wake)
        self._thread = threading.Thread(target=self._loop, name="source", daemon=True)
        self._thread.start()

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
        **settings: Any,
    ) -> Source:
        """Read ``peers.yaml`` and the bundle and open a source; ``settings`` are fields of :class:`Settings`."""
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
        """Ask for the answer to an image; returns at once. Cancelling the future stops the work on it.

        ``name`` and ``label`` (the true class) only go into the record. An image that is not preprocessed yet is
        preprocessed here, in the caller's thread, before its time starts. Raises :class:`DataError` for an image that
        does not decode or holds NaN or infinity, :class:`UsageError` for an array of another shape or another argument
        that cannot be used, and :class:`SourceClosed` after :meth:`close`; everything later is the future's.
        """
        if not isinstance(name, str):
            raise UsageError(f"name {name!r} is a {type(name).__name__}; give a text")
        budget = self.settings.budget_ms if budget_ms is None else checked_budget(budget_ms)
        label = None if label is None else whole_number("label", label, -(2**63), 2**63 - 1)
        array = self._as_input(image, name)
        now = time.monotonic()
        inflight = InFlightRequest(next(self._ids), array, Future(), now, now + budget / 1e3, name, label)
        with self._lock:
            if self._closing:
                raise SourceClosed("the source was closed; open a new one")
            self._inbox.new.append(inflight)
        inflight.future.add_done_callback(lambda future: self._abandon(inflight) if future.cancelled() else None)
        self.node.wake()
        return inflight.future

    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks that no warm peer serves which this process reaches, directly or through another."""
        held: set[int] = set()
        for n in list(self.machine.neighbours.by_name.values()):
            if n.state is not None and n.state.warm and not n.state.draining:
                held |= {*n.hello.blocks, *n.state.reach_blocks}
        return tuple(sorted(set(range(self.bundle.num_blocks)) - held))

    def wait_ready(self, timeout: float = 5.0) -> tuple[int, ...]:
        """Wait until each block has a warm holder; return those that have none after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        while (missing := self.missing_blocks()) and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.01)
        return missing

    def view(self) -> dict[str, PeerView]:
        """How each peer of ``peers.yaml`` is."""
        views = {}
        now = time.monotonic()
        for peer in self.peers.peers:
            n = self.machine.neighbours.get(peer.name)
            state = PeerState.LOST
            if n is not None:
                s = n.state
                state = PeerState.COLD if s is None or not s.warm else PeerState.ALIVE
                if s is not None and s.warm:
                    if now < n.suspected_until:
                        state = PeerState.SUSPECT
                    state = PeerState.STUCK if s.stuck else PeerState.DRAINING if s.draining else state
            views[peer.name] = PeerView(
                peer.name, peer.blocks, state, n.hello.engine if n else "", bool(n and n.state and n.state.warm)
            )
        return views

    @property
    def duplicates(self) -> Mapping[int, int]:
        """Answers that came after the first one to their request, and were dropped: how many, by request."""
        return dict(self.machine.duplicates)

    @property
    def audits(self) -> AuditSummary | None:
        """What audits found so far; None where the setting ``audit`` is 0."""
        return None if self._auditor is None else self._auditor.snapshot()

    def finish_audits(self, timeout: float = 5.0) -> AuditSummary | None:
        """Wait for the audits of what was answered, at most ``timeout`` seconds, and return what they found."""
        if self._auditor is not None:
            self._auditor.finish(timeout)
        return self.audits

    @property
    def rejected(self) -> Mapping[str, Rejection]:
        """What peers sent that cannot be true, by peer: how often, and why the last was not believed."""
        return self.machine.rejected

    @property
    def problems(self) -> Mapping[str, str]:
        """Why peers cannot be used, or complained of us: name to the latest reason; who is well is not in it."""
        return self.node.problems

    @property
    def mismatched(self) -> Mapping[str, str]:
        """Peers that serve another model, with the message that says both ids."""
        return dict(self.node.mismatched)

    def close(self) -> None:
        """Say goodbye, end what is open with :class:`SourceClosed`; a second call does nothing."""
        with self._lock:
            closed, self._closed, self._closing = self._closed, True, True
        if closed:
            return
        self.node.wake()
        if threading.current_thread() is not self._thread:  # it is where a callback of a future closes the source
            self._thread.join(5.0)
        self._worker.close()
        if self._auditor is not None:
            self._auditor.close()
        for engine in self._engines.values():
            engine.close()

    def _abandon(self, inflight: InFlightRequest) -> None:
        self._inbox.abandoned.append(inflight)
        self.node.wake()

    # The thread that speaks.

    def _loop(self) -> None:
        try:
            watch_at = 0.0
            while not self._closing:
                self.node.step(self._next_wait())
                for result in self._worker.results():
                    self._take(result)
                self._admit()
                if time.monotonic() >= watch_at:
                    watch_at = time.monotonic() + _WATCH_EVERY
                    self._watch_peers()
            self.node.leave("done")
        except Exception:
            log.exception("the source failed")
            self.node.close()
            raise
        finally:
            with self._lock:  # what was submitted before is in the inbox, and nothing comes after
                self._closing = True
            self._fail_open()

    def _fail_open(self) -> None:
        for inflight in [*self._open.values(), *self._inbox.new]:
            self._end(inflight, SourceClosed(f"request {inflight.request}: the source was closed before its answer"))

    def _next_wait(self) -> float:
        if not self._deadlines:
            return 0.1
        return max(0.0, min(0.1, self._deadlines[0][0] - time.monotonic()))

    def _admit(self) -> None:
        """Take in what other threads asked for, end what is over, and begin with whatever has its turn."""
        while self._inbox.new:
            inflight = self._inbox.new.popleft()
            if inflight.state is RequestState.ENDED:  # cancelled between this look at what is new and the last
                continue
            self._open[inflight.request] = self._waiting[inflight.request] = inflight
            self._watch_deadline(inflight)
        while self._inbox.abandoned:
            self._cancel(self._inbox.abandoned.popleft())
        while self._inbox.challenges:
            self._begin_challenge(self._inbox.challenges.popleft())
        self._end_overdue(time.monotonic())
        while self._waiting and len(self._inflight) < self.settings.max_inflight:
            _, inflight = self._waiting.popitem(last=False)
            self._inflight.add(inflight.request)
            inflight.state, inflight.at_worker = RequestState.STEM, True
            self._worker.submit(_job(self._run_stem, inflight))

    def _cancel(self, inflight: InFlightRequest) -> None:
        if inflight.state is RequestState.ENDED:
            return
        if inflight.state is RequestState.ROUTED:
            self.node.feed(Abandon(inflight.request))
        self._forget(inflight)
        inflight.future.set_running_or_notify_cancel()  # for those who wait with concurrent.futures.wait

    def _watch_deadline(self, inflight: InFlightRequest) -> None:
        if len(self._deadlines) > 2 * len(self._open) + _SPARE_DEADLINES:
            self._deadlines = [(other.deadline, other.request) for other in self._open.values()]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (inflight.deadline, inflight.request))

    def _end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            inflight = self._open.get(heapq.heappop(self._deadlines)[1])
            if inflight is not None and inflight.state is not RequestState.ROUTED:
                self._end(inflight, self._overdue(inflight), inflight.answered)

    def _overdue(self, inflight: InFlightRequest) -> RequestError:
        """Why a request that is not with the peers has no answer at its deadline."""
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

    def _take(self, result: _Stemmed | _Headed) -> None:
        inflight = result.inflight
        inflight.at_worker = False
        if inflight.state is RequestState.ENDED:
            self._inflight.discard(inflight.request)
        elif result.error is not None:
            self._end(inflight, result.error, inflight.answered)
        elif isinstance(result, _Headed):
            if result.logits is not None:
                self.machine.head_us = max(result.head_us, self.machine.head_us * 9 // 10)
                self._answer(inflight, result)
        elif result.tokens is not None:
            inflight.state = RequestState.ROUTED
            if self._auditor is not None:
                inflight.stem_tokens = result.tokens
            order = self.policy.wanted_order(self.bundle.num_blocks, self.settings.seed, inflight.request)
            self.node.feed(Submit(inflight.request, self._itinerary(order), result.tokens, inflight.deadline))

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

    def _carry_out(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (Answered, Fail, Returned)):
            raise TypeError(f"a source does not carry out {instruction!r}")
        if instruction.request in self._challenges:
            self._on_challenge(instruction)
            return
        inflight = self._open.get(instruction.request)
        if inflight is None:
            return
        if isinstance(instruction, Answered):
            inflight.state, inflight.at_worker, inflight.answered = RequestState.HEAD, True, instruction
            self._watch_deadline(inflight)
            self._worker.submit(_job(self._run_head, inflight, instruction), priority=0)
        elif isinstance(instruction, Fail):
            self._end(inflight, instruction.error, instruction)

    def _answer(self, inflight: InFlightRequest, headed: _Headed) -> None:
        assert headed.logits is not None
        logits = headed.logits[0]
        record = record_of(inflight, inflight.answered, time.monotonic(), logits, headed.head_us, self.opened)
        answered, stem_tokens = inflight.answered, inflight.stem_tokens
        self._forget(inflight)
        assert record.prediction is not None
        if not inflight.future.set_running_or_notify_cancel():
            return
        if self._auditor is not None and answered is not None and stem_tokens is not None:
            self._auditor.offer(Audit(inflight.request, stem_tokens, answered.itinerary, logits, answered.hands))
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

    def _end(self, inflight: InFlightRequest, error: RequestError, end: Answered | Fail | None = None) -> None:
        if inflight.state is RequestState.ENDED:
            return
        self._forget(inflight)
        error.record = record_of(inflight, end, time.monotonic(), None, 0, self.opened, error)
        if inflight.future.set_running_or_notify_cancel():
            inflight.future.set_exception(error)

    def _forget(self, inflight: InFlightRequest) -> None:
        """A request has ended; it counts as on its way as long as an engine of this process is on it."""
        inflight.state = RequestState.ENDED
        inflight.image = inflight.stem_tokens = inflight.answered = None  # its future may be kept for long
        self._open.pop(inflight.request, None)
        self._waiting.pop(inflight.request, None)
        if not inflight.at_worker:
            self._inflight.discard(inflight.request)

    # Audits.

    def _ask_for_challenge(self, challenge: Challenge) -> None:
        """Called on the auditor's thread."""
        self._inbox.challenges.append(challenge)
        self.node.wake()

    def _begin_challenge(self, challenge: Challenge) -> None:
        """Send the image of an answer that does not match once more, watched, beside what was submitted."""
        number = next(self._challenge_ids)
        self._challenges[number] = challenge
        answer = challenge.audit.itinerary
        itinerary = challenge_itinerary(self._itinerary(answer.remaining), answer)
        deadline = time.monotonic() + self.settings.budget_ms / 1e3
        self.node.feed(Submit(number, itinerary, challenge.audit.stem_tokens, deadline, watch_returns=True))

    def _on_challenge(self, instruction: Answered | Fail | Returned) -> None:
        challenge = self._challenges[instruction.request]
        if isinstance(instruction, Returned):
            challenge.returns.append(instruction)
            return
        del self._challenges[instruction.request]
        if self._auditor is not None:
            self._auditor.challenged(challenge)

    def _bundle_of(self, name: str) -> str:
        """The bundle that a peer serves; empty where it never said so to this process."""
        return self.bundle.manifest.bundle_id if self._strict_bundle else self._bundle_ids.get(name, "")

    # On the worker's thread.

    def _run_stem(self, inflight: InFlightRequest) -> _Stemmed:
        image = inflight.image
        if image is None or _is_over(inflight):
            return _Stemmed(inflight, None)
        inflight.begun = True
        started = time.perf_counter()
        try:
            tokens = self._engines["stem"].run({"images": image[np.newaxis]})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return _Stemmed(inflight, None, RequestError(f"request {inflight.request}: the stem failed: {error}"))
        if not is_finite(tokens):
            failed = NotFinite(
                f"request {inflight.request}: the stem made NaN or infinity of {inflight.name or 'the image'}; "
                "look at the image's values"
            )
            return _Stemmed(inflight, None, failed)
        inflight.image = None
        inflight.stem_us = round((time.perf_counter() - started) * 1e6)
        return _Stemmed(inflight, tokens)

    def _run_head(self, inflight: InFlightRequest, answered: Answered) -> _Headed:
        if _is_over(inflight):
            return _Headed(inflight, None)
        started = time.perf_counter()
        try:
            logits = self._engines["head"].run({"tokens": answered.tokens})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            failed = RequestError(f"request {inflight.request}: the head failed: {error}")
            return _Headed(inflight, None, error=failed)
        if not is_finite(logits):
            return _Headed(inflight, None, error=_not_finite(answered))
        return _Headed(inflight, logits, round((time.perf_counter() - started) * 1e6))

    # Small things.

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

    def _on_note(self, note: Note) -> None:
        if note.what in ("lost", "suspect") and any(p.name == note.peer for p in self.peers.peers):
            self._event(note.peer, PeerState(note.what), note.why)

    def _watch_peers(self) -> None:
        for name, view in self.view().items():
            state = PeerState.LOST if view.state == PeerState.COLD else view.state
            n = self.machine.neighbours.get(name)
            if n is not None:
                self._bundle_ids[name] = n.hello.bundle_id
            if state != self._states.get(name, PeerState.LOST):
                if state not in (PeerState.LOST, PeerState.SUSPECT):
                    self._event(name, state, "")
                self._states[name] = state

    def _event(self, peer: str, state: PeerState, why: str) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(PeerEvent(round((time.monotonic() - self.opened) * 1e6), peer, state, why))


def _is_over(inflight: InFlightRequest) -> bool:
    """Whether no engine needs to run for a request any more; asked just before one would."""
    ended = inflight.state is RequestState.ENDED or inflight.future.cancelled()
    return ended or time.monotonic() >= inflight.deadline


def _not_finite(answered: Answered) -> NotFinite:
    """The error of a request whose logits are not finite, though its tokens were when they came back."""
    holders = ", ".join(itinerary_holders(answered.itinerary)) or "nobody"
    return NotFinite(
        f"request {answered.request}: the head made NaN or infinity of what {holders} computed; check these peers, and "
        "the bundle with 'ls-edge verify'"
    )


def _job(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    return lambda: function(*arguments)


def _name_of(peers: PeersFile, keys: KeyPair | None) -> str:
    if keys is not None:
        for source in peers.sources:
            if source.public_key and source.public_key.encode() == keys.public:
                return source.name
        raise UsageError(f"the secret key belongs to no source of {peers.path}; add its public key under 'sources'")
    if peers.uses_keys:
        raise UsageError(f"{peers.path} has keys, so a source needs its own: give --secret-key NAME.key_secret")
    return f"source-{secrets.token_hex(4)}"
