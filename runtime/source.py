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

import itertools
import logging
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np

from ls_edge.arrangement import random_order
from ls_edge.bundle import Bundle
from ls_edge.costs import read_order_costs
from ls_edge.errors import Overloaded, RequestError, SourceClosed, UsageError
from ls_edge.peers import PeersFile, load_peers
from ls_edge.runtime.answers import Answer, PeerView, Pending, record_of
from ls_edge.runtime.door import new_alias
from ls_edge.runtime.engines import Engine, open_engine
from ls_edge.runtime.keys import KeyPair, load_secret
from ls_edge.runtime.node import Node, new_incarnation
from ls_edge.runtime.preprocess import Preprocessor
from ls_edge.runtime.routing.events import Abandon, Fail, Instruction, Note, Submit
from ls_edge.runtime.routing.events import Answer as Answered
from ls_edge.runtime.routing.neighbours import Limits
from ls_edge.runtime.routing.policy import POLICIES
from ls_edge.runtime.routing.source import SourceMachine
from ls_edge.runtime.wire import MINOR, Hello, Itinerary, State
from ls_edge.runtime.worker import Worker
from ls_edge.trace import PeerEvent

log = logging.getLogger("ls_edge.runtime")

_WATCH_EVERY = 0.02
"""Seconds between two looks at how the peers are."""

Image = np.ndarray | bytes
"""Preprocessed float32 ``[3, H, W]``, or an encoded file or uint8 ``[H, W, 3]`` that the source preprocesses itself."""


@dataclass(frozen=True)
class Settings:
    """What holds for every request of a source."""

    policy: str = "nearest"
    budget_ms: float = 10_000.0
    """Time for a request, waiting for its turn included."""
    max_skips: int | None = None
    """Most blocks that an answer may leave out; a quarter of the model's where it is None."""
    seed: int = 0
    """Draws the orders of the policy ``random``."""
    max_inflight: int = 64
    """Requests on their way at once; the others wait their turn."""
    via_source: bool = False
    """Every hop through this process, for peers that cannot reach each other."""
    threads: int = 1
    """Threads of stem and head."""
    price: float = 1.0
    """What a second is worth to the policy ``quality``, in nats of log-likelihood."""
    waves: int = 2
    """Waves in which the policy ``parallel`` runs a model: fewer are faster, more are nearer to a plain order."""
    late_tracks: Literal["later", "skip"] = "later"
    """What becomes of the blocks of a track that does not come back: they run later, or are left out while
    :attr:`max_skips` allows."""


@dataclass(frozen=True, eq=False)
class _Stemmed:
    pending: Pending
    tokens: np.ndarray | None
    error: RequestError | None = None


@dataclass(frozen=True, eq=False)
class _Headed:
    pending: Pending
    answered: Answered
    logits: np.ndarray | None
    head_ms: float
    error: RequestError | None = None


@dataclass(eq=False)
class _Inbox:
    """What other threads have for the thread that speaks."""

    new: deque[Pending] = field(default_factory=deque)
    abandoned: deque[Pending] = field(default_factory=deque)


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
        if self.settings.policy not in POLICIES:
            raise UsageError(f"policy {self.settings.policy!r} is not known here; use one of {', '.join(POLICIES)}")
        if self.settings.policy == "parallel" and self.settings.via_source:
            raise UsageError(
                "policy parallel needs peers that reach one another, not every hop through the source; "
                "use fastest, or leave --via source out"
            )
        peers.check_blocks(bundle.blocks)
        self.peers = peers
        self.bundle = bundle
        self.name = name or _name_of(peers, keys)
        self._alias = new_alias(self.name)
        self.max_skips = bundle.blocks // 4 if self.settings.max_skips is None else self.settings.max_skips
        if self.settings.policy == "sequential":
            self.max_skips = 0
        self.preprocess = Preprocessor(bundle.manifest.image)
        self.opened = time.monotonic()
        self.events: list[PeerEvent] = []
        """What happened to peers since the source was opened."""
        self._incarnation = new_incarnation()
        self._engines: Mapping[str, Engine] = {
            part: open_engine(bundle, part, threads=self.settings.threads) for part in ("stem", "head")
        }
        warm_ms = [engine.warm_up() for engine in self._engines.values()]
        self.machine = SourceMachine(
            self._alias,
            limits=limits or Limits(),
            rng=random.SystemRandom(),
            costs=read_order_costs(bundle.manifest.order_costs, bundle.blocks),
        )
        if self.settings.policy == "quality" and self.machine.costs is None:
            raise UsageError(
                f"{bundle.folder} has no order_costs, which the policy quality goes by; export it again with "
                "--calibrate DATA, or use nearest"
            )
        self.machine.head_us = round(warm_ms[1] * 2e3)
        self._ids = itertools.count()
        self._inbox = _Inbox()
        self._waiting: deque[Pending] = deque()
        self._open: dict[int, Pending] = {}
        self._states: dict[str, str] = {}
        self._closing = False
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
        return cls(
            peers if isinstance(peers, PeersFile) else load_peers(peers),
            bundle if isinstance(bundle, Bundle) else Bundle.open(bundle),
            Settings(policy=policy, **settings),
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
        does not decode, :class:`UsageError` for an array of another shape and :class:`SourceClosed` after
        :meth:`close`; everything later is the future's.
        """
        array = self._as_input(image, name)
        now = time.monotonic()
        budget = self.settings.budget_ms if budget_ms is None else budget_ms
        pending = Pending(next(self._ids), array, Future(), now, now + budget / 1e3, name, label)
        with self._lock:
            if self._closing:
                raise SourceClosed("the source was closed; open a new one")
            self._inbox.new.append(pending)
        pending.future.add_done_callback(lambda future: self._abandon(pending) if future.cancelled() else None)
        self.node.wake()
        return pending.future

    def missing_blocks(self) -> tuple[int, ...]:
        """Blocks that no warm peer serves which this process reaches, directly or through another."""
        held: set[int] = set()
        for n in list(self.machine.neighbours.by_name.values()):
            if n.state is not None and n.state.warm and not n.state.draining:
                held |= {*n.hello.blocks, *n.state.reach_blocks}
        return tuple(sorted(set(range(self.bundle.blocks)) - held))

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
            state = "lost"
            if n is not None:
                s = n.state
                state = "cold" if s is None or not s.warm else "alive"
                if s is not None and s.warm:
                    if now < n.suspected_until:
                        state = "suspect"
                    state = "stuck" if s.stuck else "draining" if s.draining else state
            views[peer.name] = PeerView(
                peer.name, peer.blocks, state, n.hello.engine if n else "", bool(n and n.state and n.state.warm)
            )
        return views

    @property
    def duplicates(self) -> Mapping[int, int]:
        """Answers that came after the first one to their request, and were dropped: how many, by request."""
        return dict(self.machine.duplicates)

    @property
    def mismatched(self) -> Mapping[str, str]:
        """Peers that serve another model, with the message that says both ids."""
        return dict(self.node.mismatched)

    def close(self) -> None:
        """Say goodbye, end what is open with :class:`SourceClosed`; a second call does nothing."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self.node.wake()
        self._thread.join(5.0)
        self._worker.close()
        for engine in self._engines.values():
            engine.close()

    def _abandon(self, pending: Pending) -> None:
        self._inbox.abandoned.append(pending)
        self.node.wake()

    # The thread that speaks.

    def _loop(self) -> None:
        try:
            watch_at = 0.0
            while not self._closing:
                self.node.step(self._next_wait())
                self._admit()
                for result in self._worker.results():
                    self._take(result)
                if time.monotonic() >= watch_at:
                    watch_at = time.monotonic() + _WATCH_EVERY
                    self._watch_peers()
            self.node.leave("done")
        except Exception:
            log.exception("the source failed")
            self.node.close()
            raise
        finally:
            self._closing = True
            self._fail_open()

    def _fail_open(self) -> None:
        for pending in [*self._open.values(), *self._inbox.new]:
            self._end(pending, SourceClosed(f"request {pending.request}: the source was closed before its answer"))

    def _next_wait(self) -> float:
        if not self._waiting:
            return 0.1
        return max(0.0, min(0.1, self._waiting[0].deadline - time.monotonic()))

    def _admit(self) -> None:
        while self._inbox.new:
            pending = self._inbox.new.popleft()
            self._open[pending.request] = pending
            self._waiting.append(pending)
        while self._inbox.abandoned:
            pending = self._inbox.abandoned.popleft()
            if self._open.pop(pending.request, None) is not None:
                if pending in self._waiting:
                    self._waiting.remove(pending)
                self.node.feed(Abandon(pending.request))
        now = time.monotonic()
        inflight = len(self._open) - len(self._waiting)
        while self._waiting and (inflight < self.settings.max_inflight or self._waiting[0].deadline <= now):
            pending = self._waiting.popleft()
            if pending.deadline <= now:
                self._end(
                    pending,
                    Overloaded(
                        f"request {pending.request} waited for its turn until its budget was over; send more slowly, "
                        f"or raise the budget or max_inflight ({self.settings.max_inflight})"
                    ),
                )
            else:
                inflight += 1
                self._worker.submit(_job(self._run_stem, pending))

    def _take(self, result: _Stemmed | _Headed) -> None:
        pending = result.pending
        if pending.request not in self._open:
            return
        if result.error is not None:
            self._end(pending, result.error)
        elif isinstance(result, _Stemmed):
            blocks = self.bundle.blocks
            order = tuple(range(blocks))
            if self.settings.policy == "random":
                order = random_order(blocks, self.settings.seed, pending.request)
            itinerary = Itinerary(
                self._alias,
                self.settings.policy,
                order,
                self.max_skips,
                self.settings.via_source,
                price=self.settings.price,
                waves_wanted=self.settings.waves if self.settings.policy == "parallel" else 0,
                late=self.settings.late_tracks,
            )
            self.node.feed(Submit(pending.request, itinerary, result.tokens, pending.deadline))
        else:
            assert result.logits is not None
            self.machine.head_us = max(round(result.head_ms * 1e3), self.machine.head_us * 9 // 10)
            self._answer(pending, result)

    def _carry_out(self, instruction: Instruction) -> None:
        if not isinstance(instruction, (Answered, Fail)):
            raise TypeError(f"a source does not carry out {instruction!r}")
        pending = self._open.get(instruction.request)
        if pending is None:
            return
        if isinstance(instruction, Answered):
            self._worker.submit(_job(self._run_head, pending, instruction), priority=0)
        else:
            self._end(pending, instruction.error, instruction)

    def _answer(self, pending: Pending, headed: _Headed) -> None:
        assert headed.logits is not None
        logits = headed.logits[0]
        record = record_of(pending, headed.answered, time.monotonic(), logits, headed.head_ms, self.opened)
        del self._open[pending.request]
        assert record.prediction is not None
        if not pending.future.set_running_or_notify_cancel():
            return
        pending.future.set_result(
            Answer(
                request=pending.request,
                logits=logits,
                prediction=record.prediction,
                label=self.bundle.manifest.classes[record.prediction],
                degraded=record.degraded,
                record=record,
            )
        )

    def _end(self, pending: Pending, error: RequestError, fail: Fail | None = None) -> None:
        self._open.pop(pending.request, None)
        error.record = record_of(pending, fail, time.monotonic(), None, 0.0, self.opened, error)
        if pending.future.set_running_or_notify_cancel():
            pending.future.set_exception(error)

    # On the worker's thread.

    def _run_stem(self, pending: Pending) -> _Stemmed:
        started = time.perf_counter()
        try:
            assert pending.image is not None
            tokens = self._engines["stem"].run({"images": pending.image[np.newaxis]})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            return _Stemmed(pending, None, RequestError(f"request {pending.request}: the stem failed: {error}"))
        pending.image = None
        pending.stem_ms = (time.perf_counter() - started) * 1e3
        return _Stemmed(pending, tokens)

    def _run_head(self, pending: Pending, answered: Answered) -> _Headed:
        started = time.perf_counter()
        try:
            logits = self._engines["head"].run({"tokens": answered.tokens})
        except Exception as error:  # noqa: BLE001  an engine library may raise anything
            failed = RequestError(f"request {pending.request}: the head failed: {error}")
            return _Headed(pending, answered, None, 0.0, failed)
        return _Headed(pending, answered, logits, (time.perf_counter() - started) * 1e3)

    # Small things.

    def _as_input(self, image: Image, name: str) -> np.ndarray:
        if isinstance(image, np.ndarray) and image.dtype == np.float32:
            shape = (3, *self.bundle.manifest.image.size)
            if image.shape != shape:
                raise UsageError(f"image of shape {image.shape}, the model takes {shape}; use source.preprocess")
            return image
        if isinstance(image, (bytes, np.ndarray)):
            return self.preprocess(image, name or "image")
        raise UsageError(f"image is a {type(image).__name__}; give an array or the bytes of a file")

    def _hello(self) -> Hello:
        m = self.bundle.manifest
        return Hello(self._alias, "source", self._incarnation, MINOR, m.model_id, m.bundle_id)

    def _on_note(self, note: Note) -> None:
        if note.what in ("lost", "suspect") and any(p.name == note.peer for p in self.peers.peers):
            self._event(note.peer, note.what, note.why)

    def _watch_peers(self) -> None:
        for name, view in self.view().items():
            state = "lost" if view.state == "cold" else view.state
            if state != self._states.get(name, "lost"):
                if state not in ("lost", "suspect"):
                    self._event(name, state, "")
                self._states[name] = state

    def _event(self, peer: str, what: str, why: str) -> None:
        self.events.append(PeerEvent((time.monotonic() - self.opened) * 1e3, peer, what, why))


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
