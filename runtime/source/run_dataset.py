"""Answer a data set: submit its images, collect a record for each request, and describe the run.

``ls-edge run`` and the demo do this between opening a source and printing a summary. At most ``concurrency`` requests
are in flight. Images are decoded ahead, so latencies do not include decoding.

A run that is stopped or ended by an error still returns the records of its answers.
"""

from __future__ import annotations

import queue
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from ls_edge.core.errors import DataError, ImageRejected, RequestError, UsageError
from ls_edge.core.peer_reports import PeerState
from ls_edge.core.records import AuditSummary, PeerContext, PeerEvent, RequestRecord, RunContext
from ls_edge.data.datasets import ImageRef, ImageSet, match_classes
from ls_edge.data.preprocess import iterate
from ls_edge.runtime.routing.policies import find_policy
from ls_edge.runtime.source.arrivals import poisson_arrivals
from ls_edge.runtime.source.results import Answer
from ls_edge.runtime.source.source import Source

TICK_S = 0.1
"""Seconds between two calls of ``on_tick``; a request to stop is noticed at most this late."""

AUDITS_S = 30.0
"""Maximum wait for the audits of the last answers, in seconds."""


@dataclass
class DatasetRun:
    """Result of :func:`run_dataset`."""

    records: list[RequestRecord]
    events: list[PeerEvent]
    context: RunContext
    skipped_images: list[tuple[str, str]] = field(default_factory=list)
    """Images that could not be used, each with its name and the reason."""
    given_up: int = 0
    """Number of requests in flight when the run was stopped; they have no record."""
    error: Exception | None = None
    """Error that ended the run before its last image: the source was closed, or an image could not be read."""


def run_dataset(
    source: Source,
    images: ImageSet,
    *,
    concurrency: int = 4,
    on_record: Callable[[RequestRecord], None] | None = None,
    on_skip: Callable[[str, DataError], None] | None = None,
    on_tick: Callable[[], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    rate: float | None = None,
) -> DatasetRun:
    """Submit each image of the set once and wait for all answers; errors of requests become records.

    Without ``rate``, ``concurrency`` images are in flight, and the next one is submitted when one of them ends. With
    ``rate``, in images per second, images are submitted at random times (a Poisson process with the source's seed).

    All callbacks run on the calling thread: ``on_record`` for each record as it arrives, ``on_tick`` about every
    :data:`TICK_S` seconds. For events of peers, see ``on_event`` of :class:`Source`. Once ``stop`` returns true, no
    further image is submitted, and the requests in flight are given up. Raise :class:`DataError` if no image at all
    could be used.
    """
    images = match_classes(images, source.bundle.manifest.classes)
    skipped: list[tuple[str, str]] = []

    def skip(name: str, error: DataError) -> None:
        skipped.append((name, str(error)))
        if on_skip is not None:
            on_skip(name, error)

    def skip_here(image: ImageRef, error: DataError) -> None:
        skip(image.name, error)
        run.take_meanwhile()

    run = _Submissions(source, on_record, skip, on_tick, stop)
    on_time, on_wait = run.preprocess_ms.append, run.take_meanwhile
    decoded = iterate(images, source.preprocess, skip_here, on_time=on_time, on_wait=on_wait)
    run.submit_all(decoded, concurrency, rate)
    if len(skipped) == len(images) and not run.records:  # peers rejected them
        raise DataError(f"{images.source}: none of {len(images)} images can be used; the first: {skipped[0][1]}")
    given_up = run.give_up()
    if images.live is not None and images.live.problem:
        images = replace(images, images=images.images[: images.live.taken])  # the frames that existed
    context = _context(source, run, images, skipped, concurrency, rate)
    records = sorted(run.records, key=lambda record: record.id)
    return DatasetRun(records, run.events(), context, skipped, given_up, run.error)


def _context(
    source: Source,
    run: _Submissions,
    images: ImageSet,
    skipped: Sequence[tuple[str, str]],
    concurrency: int,
    rate: float | None,
) -> RunContext:
    """Return what a summary has to know of a run besides its records."""
    manifest, asked = source.bundle.manifest, source.settings
    return RunContext(
        bundle_id=manifest.bundle_id,
        model=manifest.model,
        method=manifest.method,
        policy=asked.policy,
        seed=asked.seed,
        classes=manifest.classes,
        peers={v.name: PeerContext(v.blocks, v.state, v.engine) for v in source.snapshot.peers.values()},
        settings={
            "concurrency": concurrency,
            "rate": rate,
            "images": len(images),
            "images_skipped": len(skipped),
            **_settings_of(source),
        },
        account=images.account(name for name, _ in skipped),
        preprocess_ms=tuple(run.preprocess_ms),
        wall_s=time.monotonic() - run.started,
        rejected=source.snapshot.rejected,
        duplicates_dropped=max(0, source.snapshot.late_answers - run.late_before),  # another model counts from 0
        audit=_finish_audits(source, run.stop),
    )


def _settings_of(source: Source) -> dict[str, Any]:
    """Return the settings in force of a source, for the JSON."""
    asked, engines = source.settings, source.engines
    return {
        **msgspec.structs.asdict(asked),
        "max_skips": source.max_skips,
        "threads": 0 if engines is None else engines.threads,
        "engine": "" if engines is None else engines.engine,
        "waves": asked.waves if find_policy(asked.policy).runs_in_waves else 0,
        "bands": source.bundle.bands.to_json(),
    }


def _finish_audits(source: Source, stop: Callable[[], bool]) -> AuditSummary | None:
    """Wait for the audits of the last answers, at most :data:`AUDITS_S` seconds or until the run is stopped."""
    end = time.monotonic() + AUDITS_S
    audits = source.audits
    while audits is not None and audits.waiting and time.monotonic() < end and not stop():
        audits = source.finish_audits(TICK_S)
    return audits


class _Stopped(Exception):
    """The run was stopped while it waited for an image or skipped unusable ones."""


class _Submissions:
    """Requests of a run that are in flight, and the records of the ended ones."""

    def __init__(
        self,
        source: Source,
        on_record: Callable[[RequestRecord], None] | None,
        on_reject: Callable[[str, DataError], None],
        on_tick: Callable[[], None] | None,
        stop: Callable[[], bool],
    ) -> None:
        self.started = time.monotonic()
        self.records: list[RequestRecord] = []
        self.error: Exception | None = None
        self.in_flight: set[Future[Answer]] = set()
        self._source = source
        self._on_record, self._on_reject = on_record, on_reject
        self._on_tick = on_tick
        self.stop = stop
        self.preprocess_ms: list[float] = []
        self._since = round((self.started - source.opened) * 1e6)
        """Microseconds from the opening of the source to the start of the run."""
        self._classes = source.bundle.manifest.classes
        self._ended: queue.SimpleQueue[Future[Answer]] = queue.SimpleQueue()
        self._tick_at = time.monotonic() + TICK_S
        self.late_before = source.snapshot.late_answers

    def submit_all(self, decoded: Iterable[tuple[int, ImageRef, Any]], concurrency: int, rate: float | None) -> None:
        """Submit the images and wait for their answers, until the run is stopped."""
        began = time.monotonic()
        arrivals = poisson_arrivals(rate or 1.0, random.Random(self._source.settings.seed))
        try:
            upcoming = iter(decoded)
            while True:
                if rate is None:  # wait before taking the next image: a camera's frame must be recent
                    self._wait_for(concurrency - 1)
                else:
                    self._wait_until(began + next(arrivals))
                if self.error or self.stop() or (item := next(upcoming, None)) is None:
                    break
                _, image, array = item
                future = self._source.submit(array, name=image.name, label=image.label)
                self.in_flight.add(future)
                future.add_done_callback(self._ended.put)
        except _Stopped:
            pass
        except Exception as error:
            # An error that ends the run must not lose the answers so far.
            if not self.records and not self.in_flight:
                raise
            self.error = error
        self._wait_for(0)

    def _wait_for(self, most: int) -> None:
        """Wait until at most ``most`` requests are in flight or the run is stopped."""
        self._take_ended(0.0)
        while len(self.in_flight) > most and not self.stop():
            self._take_ended(TICK_S)

    def _wait_until(self, at: float) -> None:
        """Wait until a time of :func:`time.monotonic`, or until the run is stopped."""
        while (left := at - time.monotonic()) > 0 and not self.stop():
            self._take_ended(left)
        self._take_ended(0.0)

    def take_meanwhile(self) -> None:
        """Collect ended requests; raise :class:`_Stopped` if the run is stopped."""
        self._take_ended(0.0)
        if self.stop():
            raise _Stopped

    def give_up(self) -> int:
        """Cancel the requests in flight and return their number."""
        self._take_ended(0.0)
        given_up = sum(future.cancel() for future in self.in_flight)
        while self.in_flight:  # a future that could not be canceled has just ended
            self._take_ended(TICK_S)
        return given_up

    def events(self) -> list[PeerEvent]:
        """Return the events of peers since the start of the run, and earlier events of peers that became alive."""
        return [
            PeerEvent(max(0, event.at_us - self._since), event.peer, event.state, event.why)
            for event in self._source.events
            if event.at_us >= self._since or event.state is PeerState.ALIVE
        ]

    def _take_ended(self, wait_s: float) -> None:
        """Collect ended requests; wait for one at most ``wait_s`` seconds, and no longer than until the next tick."""
        try:
            self._take(self._ended.get(timeout=max(0.0, min(wait_s, self._tick_at - time.monotonic()))))
            while True:
                self._take(self._ended.get_nowait())
        except queue.Empty:
            pass
        if time.monotonic() >= self._tick_at:
            self._tick_at = time.monotonic() + TICK_S
            if self._on_tick is not None:
                self._on_tick()

    def _take(self, future: Future[Answer]) -> None:
        self.in_flight.discard(future)
        if future.cancelled():
            return
        error = future.exception()
        if error is None and (classes := future.result().classes) != self._classes:
            # Labels are positions in the classes of the previous model.
            error = UsageError(
                f"the peers changed to a model of other classes, {len(classes)} instead of {len(self._classes)}; run "
                "again to use it"
            )
        record = future.result().record if error is None else error.record if isinstance(error, RequestError) else None
        if record is None:
            self.error = self.error or (error if isinstance(error, Exception) else None)
            return
        if isinstance(error, ImageRejected):  # a source with the bundle would have skipped it
            self._on_reject(record.image, error)
            return
        record = msgspec.structs.replace(record, submitted_us=record.submitted_us - self._since)
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)
