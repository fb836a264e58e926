"""A run under a Poisson process of faults, and what became of every request.

Peers are real processes behind proxies, every block is held by two of them. Faults of every kind come at random times
while images are on their way; each is undone after a while. At the end everything is mended and each request is looked
at: it has exactly one outcome, no error while each block had a living holder, and its answer replays in one process.

Most faults come one after the other. A pause and a lying member last while others come. What a member spoilt that sends
wrong tokens is counted apart, since only an audit notices it; there is one in a course with such a member.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from ls_edge.bundle import Bundle
from ls_edge.data.datasets import ImageSet
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.errors import RequestError
from ls_edge.evaluation.run_summary import Suspect
from ls_edge.records import RequestRecord
from ls_edge.runtime.chaos.faults import Faults
from ls_edge.runtime.chaos.kinds import COURSE_LIES, KINDS
from ls_edge.runtime.chaos.liar import LIES
from ls_edge.runtime.chaos.streams import Attack
from ls_edge.runtime.local_cluster import LocalCluster
from ls_edge.runtime.protocol import messages as wire
from ls_edge.runtime.protocol.codec import REPLAY_TOLERANCE
from ls_edge.runtime.protocol.messages import MAJOR, Hello
from ls_edge.runtime.results import Answer
from ls_edge.runtime.routing.policies import POLICIES
from ls_edge.runtime.source import Source

_GIVE_UP = 60.0
"""Seconds beyond the budget after which a request counts as hung."""
_PAUSE_S = 15.0
_PAUSE_PART = 0.6
"""Longest part of a course that one pause takes."""
_LIES_S = (2.0, 5.0)
"""How long a liar is there."""
_MEET_S = 4.0
"""Longest wait until it has met everybody: somebody may be gone at the moment."""
_BACKGROUND = ("pause", "liar")
"""Kinds that last while other faults come."""
_LIAR, _THIEF, _LAPTOP = "mallory", "thief", "laptop"
_GARBAGE_EVERY_S = 0.01
_START_S = 90.0
"""Longest start of a peer that is believed; it may be paused meanwhile."""


class Fault(msgspec.Struct, frozen=True):
    """One fault: what, to whom, when (seconds since the first request), for how long."""

    kind: str
    peer: str
    at_s: float
    lasts_s: float
    lie: str = ""
    """What a liar does, by its name in :data:`~.liar.LIES`."""


class ChaosResult(msgspec.Struct, frozen=True):
    """What a run under faults left; the document of ``ls-edge chaos --json``."""

    seed: int
    requests: int
    answered: int
    failed: dict[str, int]
    """Requests that ended with an error, by type."""
    lost: int
    """Requests with no outcome."""
    twice: int
    """Requests with more than one outcome."""
    not_replayed: int
    """Answers whose logits are not those of their order (guarantee R2)."""
    worst_replay: float
    """Largest difference of logits over the largest logit."""
    duplicates_dropped: int
    reroutes: int
    degraded: int
    in_waves: int
    """Answers of which some blocks ran side by side."""
    latency_ms: dict[str, float]
    seconds: float
    faults: list[Fault]
    dropped: dict[str, int]
    """What the source counted as malformed or refused."""
    ended: list[str] = []
    """Peers that ended by themselves."""
    spoilt: int = 0
    """Answers that do not replay and name the member among their holders that sent wrong tokens."""
    rejected: dict[str, int] = {}
    """What the source was sent and did not believe, by sender."""
    suspects: dict[str, Suspect] = {}
    """Whom the audit named, in a course with wrong tokens."""
    liar_was_given: dict[str, int] = {}
    """Transfers that others handed to each liar."""

    @property
    def framed(self) -> list[str]:
        """Honest peers of which the audit said that they alone computed something else."""
        return [name for name, one in self.suspects.items() if one.named and name != _LIAR]

    @property
    def unnoticed(self) -> bool:
        """Whether answers were spoilt and the audit never named who did it."""
        return bool(self.spoilt) and _LIAR not in self.suspects

    @property
    def holds(self) -> bool:
        """Whether nothing was lost, failed, answered twice or not replayed, and no peer ended or was blamed."""
        wrong = self.lost or self.failed or self.twice or self.not_replayed
        return not (wrong or self.ended or self.framed or self.unnoticed)


def plan(
    seed: int,
    count: int,
    seconds: float,
    peers: tuple[str, ...],
    kinds: tuple[str, ...] = tuple(KINDS),
    lies: tuple[str, ...] = COURSE_LIES,
) -> list[Fault]:
    """Draw ``count`` faults: gaps are exponential, kinds in turn in shuffled rounds so that none is missing.

    So are the lies of liars.
    """
    rng = random.Random(seed)
    gaps = [rng.expovariate(1.0) for _ in range(count + 1)]
    scale = seconds / sum(gaps)
    order, told = _in_rounds(rng, kinds, count), iter(_in_rounds(rng, lies, count))
    faults, at = [], 0.0
    for kind, gap in zip(order, gaps, strict=False):
        at += gap * scale
        peer, lasts, lie = rng.choice(peers), rng.uniform(0.2, 1.0), ""
        if kind == "pause":
            lasts = min(_PAUSE_S, _PAUSE_PART * seconds)
        elif kind == "liar":
            lasts, lie = rng.uniform(*_LIES_S), next(told)
            peer = _LIAR if LIES[lie].role == "peer" else _THIEF
        faults.append(Fault(kind, peer, round(at, 3), round(lasts, 3), lie))
    return faults


def _in_rounds(rng: random.Random, what: tuple[str, ...], count: int) -> list[str]:
    order: list[str] = []
    while len(order) < count and what:
        turn = list(what)
        rng.shuffle(turn)
        order += turn
    return order[:count]


def run_chaos(
    bundle: Path,
    other_bundle: Path | None,
    images: ImageSet,
    folder: Path,
    *,
    seed: int = 0,
    requests: int = 1000,
    faults: int = 20,
    seconds: float = 25.0,
    concurrency: int = 8,
    budget_ms: float = 20_000.0,
    policy: str = "nearest",
    block_ms: float = 0.0,
    kinds: Sequence[str] = tuple(KINDS),
    lies: Sequence[str] = COURSE_LIES,
    keys: bool = False,
    on_fault: Callable[[Fault], None] | None = None,
    on_answer: Callable[[], None] | None = None,
) -> ChaosResult:
    """Answer ``requests`` images over ``seconds`` under ``faults`` faults; see the module's docstring.

    ``other_bundle`` is a bundle of another model for the fault of that name, which is left out where it is None.
    Engine calls take at least ``block_ms``, so that small models give policies something to weigh. ``keys`` gives
    everybody a key, and so CURVE.
    """
    opened = Bundle.open(bundle)
    placement = _placement(opened.num_blocks)
    chosen = tuple(kind for kind in kinds if kind != "other_bundle" or other_bundle is not None)
    course = plan(seed, faults, seconds, tuple(placement), chosen, tuple(lies))
    spoils = any(_spoils(fault.lie, policy) for fault in course)
    images = images.take(requests)
    with LocalCluster(
        folder, bundle, placement, proxied=True, keys=keys, sources=(_LAPTOP, _THIEF),
        members={_LIAR: range(opened.num_blocks)} if "liar" in chosen else None,
    ) as peers:  # fmt: skip
        usual = Faults(least_ms=block_ms)
        for name in placement:
            peers.set_faults(name, usual)
        peers.wait_warm(timeout=_START_S)
        with Source.open(
            peers.path, opened, policy=policy, max_skips=0, budget_ms=budget_ms, audit=float(spoils),
            secret_key=peers.secret_key(_LAPTOP), name=_LAPTOP,
        ) as source:  # fmt: skip
            source.wait_ready()
            watch = _Watch(source, on_answer)
            arrays = _arrays(opened, images)
            mischief = _Mischief(peers, opened, other_bundle, course, seconds, on_fault, usual)
            started = time.monotonic()
            mischief.start()
            try:
                watch.submit_all(images, concurrency, arrays, mischief.pace)
            finally:
                mischief.finish()
            watch.wait(budget_ms / 1e3 + _GIVE_UP)
            spent = time.monotonic() - started
            audits = source.finish_audits(_GIVE_UP)
            counts = source.snapshot
    bad, worst, spoilt = _replay(opened, images, watch.records, _LIAR if spoils else "")
    latencies = [record.latency_us / 1e3 for record in watch.records if record.error is None] or [0.0]
    return ChaosResult(
        seed=seed,
        requests=requests,
        answered=sum(record.error is None for record in watch.records),
        failed=dict(Counter(r.error.split(":")[0] for r in watch.records if r.error is not None)),
        lost=requests - len({r.id for r in watch.records}),
        twice=len(watch.records) - len({r.id for r in watch.records}),
        not_replayed=bad,
        worst_replay=worst,
        duplicates_dropped=sum(counts.duplicates.values()),
        reroutes=counts.reroutes,
        degraded=sum(r.degraded for r in watch.records),
        in_waves=sum(not r.is_plain for r in watch.records),
        latency_ms={f"p{q}": round(float(np.percentile(latencies, q)), 2) for q in (50, 95, 99, 100)},
        seconds=round(spent, 2),
        faults=course,
        dropped=dict(counts.dropped),
        ended=mischief.ended,
        spoilt=spoilt,
        rejected={name: one.count for name, one in counts.rejected.items()},
        suspects={} if audits is None else dict(audits.suspects),
        liar_was_given=dict(mischief.given),
    )


def _spoils(lie: str, policy: str) -> bool:
    """Whether answers may be wrong that a liar had a part in; made up waves show only where none are wanted."""
    return lie in LIES and (LIES[lie].spoils or (lie == "waves" and POLICIES[policy].runs_in_waves))


def _placement(blocks: int) -> dict[str, list[int]]:
    """Four peers; every block is held by two, and half of the peers hold neither half alone."""
    half = blocks // 2
    first, second = list(range(half)), list(range(half, blocks))
    return {"anna": first, "ben": second, "cleo": first[::2] + second[::2], "dan": first[1::2] + second[1::2]}


def _arrays(bundle: Bundle, images: ImageSet) -> dict[str, np.ndarray]:
    preprocess = Preprocessor(bundle.manifest.image)
    return {
        image.name: preprocess(image.read(), image.name)
        for image in {image.name: image for image in images.images}.values()
    }


class _Watch:
    """Submits and keeps every outcome."""

    def __init__(self, source: Source, on_answer: Callable[[], None] | None) -> None:
        self.records: list[RequestRecord] = []
        self._source = source
        self._on_answer = on_answer
        self._futures: list[Future[Answer]] = []
        self._lock = threading.Lock()

    def submit_all(
        self, images: ImageSet, concurrency: int, arrays: dict[str, np.ndarray], pace: Callable[[float], None]
    ) -> None:
        """Never more than ``concurrency`` on their way; ``pace(part)`` waits until that part may be submitted."""
        gate = threading.Semaphore(concurrency)
        for index, image in enumerate(images.images):
            pace(index / len(images))
            gate.acquire()
            future = self._source.submit(arrays[image.name], name=image.name, label=image.label)
            future.add_done_callback(self._done)
            future.add_done_callback(lambda _: gate.release())
            self._futures.append(future)

    def wait(self, timeout: float) -> None:
        wait_for(self._futures, timeout)

    def _done(self, future: Future[Answer]) -> None:
        error = future.exception()
        record = future.result().record if error is None else getattr(error, "record", None)
        if not isinstance(error, RequestError | None) or record is None:
            return
        with self._lock:
            self.records.append(record)
        if self._on_answer is not None:
            self._on_answer()


class _Mischief:
    """Does the faults at their times, or when the one before is undone, and undoes each."""

    def __init__(
        self,
        peers: LocalCluster,
        bundle: Bundle,
        other: Path | None,
        course: list[Fault],
        seconds: float,
        on_fault: Callable[[Fault], None] | None,
        usual: Faults,
    ) -> None:
        self._peers = peers
        self._usual = usual
        self._bundle = bundle
        self._other = other
        self._course = course
        self._on_fault = on_fault
        self._seconds = seconds
        self.ended: list[str] = []
        self.given: Counter[str] = Counter()
        self._background: dict[str, threading.Thread] = {}
        self._begun = 0
        self._started = 0.0
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mischief", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._started = time.monotonic()
        self._thread.start()

    def finish(self) -> None:
        """Wait until the last fault is undone; raises what went wrong with the faults themselves."""
        self._over.set()
        self._thread.join()
        for thread in self._background.values():
            thread.join()
        self._look_for_ended()
        if self._failure is not None:
            raise self._failure

    def pace(self, part: float) -> None:
        """Wait until ``part`` of the time and of the faults is over, so that requests meet all of them."""
        time.sleep(max(0.0, self._started + part * self._seconds - time.monotonic()))
        while self._begun < int(part * len(self._course)) and self._thread.is_alive():
            time.sleep(0.002)

    def _run(self) -> None:
        try:
            for fault in self._course:
                self._over.wait(max(0.0, self._started + fault.at_s - time.monotonic()))
                self._look_for_ended()
                if fault.kind in _BACKGROUND:
                    before = self._background.get(fault.kind)
                    if before is not None:
                        before.join()
                if fault.kind == "liar":
                    self._begin_lying(fault)
                self._begun += 1
                if self._on_fault is not None:
                    self._on_fault(fault)
                if fault.kind in _BACKGROUND:
                    thread = threading.Thread(target=self._do, args=(fault,), name=fault.kind, daemon=True)
                    self._background[fault.kind] = thread
                    thread.start()
                else:
                    self._do(fault)
                if self._failure is not None:
                    return
        except BaseException as error:  # noqa: BLE001  handed to the caller of finish
            self._failure = error

    def _do(self, fault: Fault) -> None:
        try:
            getattr(self, f"_{fault.kind}")(fault)
        except BaseException as error:  # noqa: BLE001  handed to the caller of finish
            self._failure = error

    def _look_for_ended(self) -> None:
        """Between two faults all peers run; who does not has ended by itself, and is started again."""
        gone = [name for name in self._peers.bundles if not self._peers.alive(name)]
        self.ended += gone
        if gone:
            self._back(*gone)

    def _last(self, fault: Fault) -> None:
        time.sleep(fault.lasts_s)

    def _kill(self, fault: Fault) -> None:
        self._peers.kill(fault.peer)
        self._last(fault)
        self._back(fault.peer)

    def _back(self, *names: str) -> None:
        self._peers.start(*names)
        self._peers.wait_warm(*names, timeout=_START_S)

    def _stop(self, fault: Fault) -> None:
        self._peers.signal(fault.peer, signal.SIGSTOP)
        self._last(fault)
        self._peers.signal(fault.peer, signal.SIGCONT)

    def _pause(self, fault: Fault) -> None:
        self._peers.set_faults(fault.peer, msgspec.structs.replace(self._usual, hang=True))
        time.sleep(0.2)  # so that an engine call is going on
        self._peers.signal(fault.peer, signal.SIGSTOP)
        self._peers.set_faults(fault.peer, self._usual)
        self._last(fault)
        self._peers.signal(fault.peer, signal.SIGCONT)

    def _begin_lying(self, fault: Fault) -> None:
        """Start a liar and wait until it has met the others, so that there is somebody to lie to."""
        self._peers.lie(fault.peer, fault.lie, seed=round(fault.at_s * 1e3))
        end = time.monotonic() + _MEET_S
        wanted = len(self._peers.bundles) + (LIES[fault.lie].role == "peer")
        while self._peers.told(fault.peer).met < wanted and time.monotonic() < end:
            time.sleep(0.02)

    def _liar(self, fault: Fault) -> None:
        self._last(fault)
        self.given[fault.lie] += self._peers.told(fault.peer).given
        self._peers.stop_lying(fault.peer)

    def _garbage(self, fault: Fault) -> None:
        manifest = self._bundle.manifest
        hello = wire.encode(Hello(_LAPTOP, "source", 7, 0, manifest.model_id, manifest.bundle_id))
        ports = [int(self._peers.file.peer(name).bind.rsplit(":", 1)[1]) for name in self._peers.bundles]
        seed = round(fault.at_s * 1e3)
        attacks = [
            Attack(_dial(port), 1 << 30, seed + number, hello, _GARBAGE_EVERY_S) for number, port in enumerate(ports)
        ]
        for attack in attacks:
            attack.start()
        self._last(fault)
        for attack in attacks:
            attack.halt.set()
        for attack in attacks:
            attack.join()

    def _hang(self, fault: Fault) -> None:
        self._engine(fault, msgspec.structs.replace(self._usual, hang=True))

    def _slow(self, fault: Fault) -> None:
        self._engine(fault, msgspec.structs.replace(self._usual, slow=30.0, stall_ms=50.0, stall_part=0.2))

    def _clock(self, fault: Fault) -> None:
        self._engine(fault, msgspec.structs.replace(self._usual, clock_jump_s=-86_400.0))

    def _engine(self, fault: Fault, faults: Faults) -> None:
        self._peers.set_faults(fault.peer, faults)
        self._last(fault)
        self._peers.set_faults(fault.peer, self._usual)

    def _half_open(self, fault: Fault) -> None:
        weather = self._peers.proxies[fault.peer].weather
        weather.hole = True
        self._last(fault)
        weather.hole = False

    def _corrupt(self, fault: Fault) -> None:
        address = self._peers.file.peer(fault.peer).bind
        rng = random.Random(fault.at_s)
        context = zmq.Context()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.connect(address)
            end = time.monotonic() + fault.lasts_s
            while time.monotonic() < end:
                frames = [rng.randbytes(rng.choice((0, 1, 3, 40, 400))) for _ in range(rng.randint(1, 4))]
                if rng.random() < 0.5:
                    frames[0] = b"LS" + bytes([MAJOR]) + frames[0]
                with contextlib.suppress(zmq.Again):
                    dealer.send_multipart(frames, zmq.NOBLOCK)
                time.sleep(0.002)
            dealer.close(0)
        finally:
            context.destroy(linger=0)

    def _other_bundle(self, fault: Fault) -> None:
        assert self._other is not None
        self._peers.kill(fault.peer)
        self._peers.bundles[fault.peer] = self._other
        self._back(fault.peer)
        self._last(fault)
        self._peers.kill(fault.peer)
        self._peers.bundles[fault.peer] = self._bundle.folder
        self._back(fault.peer)

    def _all_gone(self, fault: Fault) -> None:
        names = list(self._peers.bundles)
        for name in names:
            self._peers.kill(name)
        self._last(fault)
        self._back(*names)


def _dial(port: int) -> Callable[[], socket.socket | None]:
    def connect() -> socket.socket | None:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=1.0)
        except OSError:  # the peer is gone at the moment
            time.sleep(0.01)
            return None

    return connect


def _replay(bundle: Bundle, images: ImageSet, records: list[RequestRecord], liar: str) -> tuple[int, float, int]:
    """How many answers are not what their order gives, the largest relative difference, and how many are spoilt.

    These are not what their order gives either, but name ``liar`` among those who ran it; they count apart.
    """
    arrays = _arrays(bundle, images)
    bad, worst, spoilt = 0, 0.0, 0
    with Pipeline.open(bundle, threads=1) as chain:
        for record in records:
            if record.logits is None:
                continue
            logits = chain.forward(arrays[record.image][np.newaxis], record.arrangement)[0]
            error = float(np.abs(logits - np.array(record.logits)).max() / np.abs(logits).max())
            if error > REPLAY_TOLERANCE["raw"] and liar in record.holders:
                spoilt += 1
                continue
            worst = max(worst, error)
            ran: list[Any] = list(record.arrangement.order)
            complete = sorted([*ran, *record.skipped]) == list(range(bundle.num_blocks))
            bad += error > REPLAY_TOLERANCE["raw"] or not complete
    return bad, worst, spoilt
