"""A run under a Poisson process of faults, and the outcome of each request.

Peers are real processes behind proxies, and two peers hold each block. Faults of every kind occur at random times while
images are in flight; each is undone after a while. At the end, all faults are undone and each request is checked: it
has exactly one outcome, no error while each block had a living holder, and its answer replays in one process.

Most faults occur one after the other; a pause lasts while others occur.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import RequestError
from ls_edge.core.records import RequestRecord
from ls_edge.data.datasets import ImageSet
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.protocol.codecs import codec_of
from ls_edge.runtime.source.results import Answer
from ls_edge.runtime.source.source import Source
from tests.faults.cluster import FaultyCluster
from tests.faults.course import KINDS, LAPTOP, Fault, plan
from tests.faults.engines import Faults
from tests.faults.injector import START_S, FaultInjector
from tests.traces import replay

_GIVE_UP = 60.0
"""Seconds beyond the budget after which a request counts as hung."""


class ChaosResult(msgspec.Struct, frozen=True):
    """Result of a run under faults."""

    answered: int
    degraded: int
    failed: dict[str, int]
    """Requests that ended with an error, by type."""
    lost: int
    """Requests with no outcome."""
    twice: int
    """Requests with more than one outcome."""
    not_replayed: int
    """Answers whose logits are not those of their order (guarantee R2), or whose order is outside the bands."""
    ended: list[str]
    """Peers that ended on their own."""
    faults: list[Fault]

    @property
    def holds(self) -> bool:
        """Whether no request was lost, failed, answered twice or not replayed, and no peer ended."""
        return not (self.lost or self.failed or self.twice or self.not_replayed or self.ended)


@dataclass(frozen=True)
class ChaosSettings:
    """Settings of a run."""

    seed: int = 0
    requests: int = 1000
    seconds: float = 25.0
    concurrency: int = 8
    budget_ms: float = 1e3 * START_S  # peers that all were killed may take so long to start on a busy machine
    policy: str = "nearest"
    block_ms: float = 0.0
    """Minimum time of an engine call, so that policies have a choice with small models, too."""
    kinds: tuple[str, ...] = tuple(KINDS)
    keys: bool = False
    """Whether every process has a key, so that links use CURVE."""


def run_chaos(bundle: Path, other_bundle: Path, images: ImageSet, folder: Path, settings: ChaosSettings) -> ChaosResult:
    """Classify images under faults; see the docstring of the module.

    ``other_bundle`` is a bundle of another model for the fault of that name.
    """
    opened = Bundle.open(bundle)
    placement = _placement(opened.num_blocks)
    course = plan(settings.seed, settings.seconds, tuple(placement), settings.kinds)
    images = images.take(settings.requests)
    with FaultyCluster(
        folder, bundle, placement, proxied=True, keys=settings.keys, sources=(LAPTOP,),
    ) as peers:  # fmt: skip
        usual = Faults(least_ms=settings.block_ms)
        for name in placement:
            peers.set_faults(name, usual)
        peers.wait_warm(timeout=START_S)
        with Source.open(
            peers.path, opened, policy=settings.policy, max_skips=0, budget_ms=settings.budget_ms,
            secret_key=peers.secret_key(LAPTOP), name=LAPTOP,
        ) as source:  # fmt: skip
            source.wait_ready()
            watch = _Requests(source)
            arrays = _arrays(opened, images)
            injector = FaultInjector(peers, opened, other_bundle, course, settings.seconds, usual)
            injector.start()
            try:
                watch.submit_all(images, settings.concurrency, arrays, injector.pace)
            finally:
                injector.finish()
            watch.wait(settings.budget_ms / 1e3 + _GIVE_UP)
    ids = [record.id for record in watch.records]
    return ChaosResult(
        answered=sum(record.error is None for record in watch.records),
        degraded=sum(record.degraded for record in watch.records),
        failed=dict(Counter(r.error.split(":")[0] for r in watch.records if r.error is not None)),
        lost=settings.requests - len(set(ids)),
        twice=len(ids) - len(set(ids)),
        not_replayed=_not_replayed(opened, images, watch.records),
        ended=injector.ended,
        faults=course,
    )


def _placement(blocks: int) -> dict[str, list[int]]:
    """Return four peers; two hold each block, and half of the peers hold blocks of both halves."""
    half = blocks // 2
    first, second = list(range(half)), list(range(half, blocks))
    return {"anna": first, "ben": second, "cleo": first[::2] + second[::2], "dan": first[1::2] + second[1::2]}


def _arrays(bundle: Bundle, images: ImageSet) -> dict[str, np.ndarray]:
    preprocess = Preprocessor(bundle.manifest.image)
    return {
        image.name: preprocess(image.read(), image.name)
        for image in {image.name: image for image in images.images}.values()
    }


class _Requests:
    """Requests of a run, and all of their outcomes."""

    def __init__(self, source: Source) -> None:
        self.records: list[RequestRecord] = []
        self._source = source
        self._futures: list[Future[Answer]] = []
        self._lock = threading.Lock()

    def submit_all(
        self, images: ImageSet, concurrency: int, arrays: dict[str, np.ndarray], pace: Callable[[float], None]
    ) -> None:
        """Submit with at most ``concurrency`` in flight; ``pace(part)`` waits until this fraction may be submitted."""
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


def _not_replayed(bundle: Bundle, images: ImageSet, records: list[RequestRecord]) -> int:
    """Return the number of answers that do not replay."""
    arrays, by_id, bad = _arrays(bundle, images), {record.id: record for record in records}, 0
    with Pipeline.open(bundle, threads=1) as pipeline:
        for replayed in replay(pipeline, records, lambda record: arrays[record.image]):
            record = by_id[replayed.id]
            complete = sorted([*record.arrangement.order, *record.skipped]) == list(range(bundle.num_blocks))
            is_wrong = replayed.error > codec_of("raw").replay_tolerance or not complete
            bad += is_wrong or bool(bundle.bands.fault(record.arrangement))
    return bad
