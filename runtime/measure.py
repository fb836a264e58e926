"""A run over a data set: submit images, collect a record for each request, and say what the run was.

What ``ls-edge run`` and the demo do between opening a source and printing a summary. At most ``concurrency`` requests
are on their way at once; images are decoded ahead, so decoding is in no latency.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec

from ls_edge.datasets import ImageRef, ImageSet, match_classes
from ls_edge.errors import DataError, RequestError
from ls_edge.runtime.answers import Answer
from ls_edge.runtime.preprocess import iterate
from ls_edge.runtime.source import Source
from ls_edge.summary import PeerContext, RunContext
from ls_edge.trace import PeerEvent, RequestRecord

Watch = Callable[[RequestRecord], None]


@dataclass
class Measured:
    """What a run left."""

    records: list[RequestRecord]
    events: list[PeerEvent]
    context: RunContext
    skipped_images: list[tuple[str, str]] = field(default_factory=list)
    """Images that could not be used: name and reason."""


def measure(
    source: Source,
    images: ImageSet,
    *,
    concurrency: int = 4,
    on_record: Watch | None = None,
    on_event: Callable[[PeerEvent], None] | None = None,
    on_skip: Callable[[ImageRef, DataError], None] | None = None,
) -> Measured:
    """Submit each image of the set once and wait for all answers; errors of requests become records.

    Raises :class:`DataError` where not one image could be used.
    """
    started, since = time.monotonic(), (time.monotonic() - source.opened) * 1e3
    images = match_classes(images, source.bundle.manifest.classes)
    gate = threading.Semaphore(concurrency)
    lock = threading.Lock()
    records: list[RequestRecord] = []
    skipped: list[tuple[str, str]] = []
    preprocess_ms: list[float] = []
    told = 0

    def finished(future: Future[Answer]) -> None:
        error = future.exception()
        if error is None:
            record: RequestRecord | None = future.result().record
        else:
            record = error.record if isinstance(error, RequestError) else None
        if record is not None:
            with lock:
                records.append(record)
            if on_record is not None:
                on_record(record)
        gate.release()

    def skip(image: ImageRef, error: DataError) -> None:
        skipped.append((image.name, str(error)))
        if on_skip is not None:
            on_skip(image, error)

    for _, image, array in iterate(images, source.preprocess, skip, on_time=preprocess_ms.append):
        gate.acquire()
        source.submit(array, name=image.name, label=image.label).add_done_callback(finished)
        while on_event is not None and told < len(source.events):
            on_event(source.events[told])
            told += 1
    for _ in range(concurrency):
        gate.acquire()
    while on_event is not None and told < len(source.events):
        on_event(source.events[told])
        told += 1
    duplicates = source.duplicates
    return Measured(
        records=[
            msgspec.structs.replace(r, submitted_ms=r.submitted_ms - since, duplicates=duplicates.get(r.id, 0))
            for r in sorted(records, key=lambda r: r.id)
        ],
        events=[
            PeerEvent(max(0.0, e.at_ms - since), e.peer, e.what, e.why)
            for e in source.events
            if e.at_ms >= since or e.what == "alive"
        ],
        context=RunContext(
            bundle_id=source.bundle.manifest.bundle_id,
            model=source.bundle.manifest.model,
            method=source.bundle.manifest.method,
            policy=source.settings.policy,
            seed=source.settings.seed,
            classes=len(source.bundle.manifest.classes),
            peers={v.name: PeerContext(v.blocks, v.state, v.engine) for v in source.view().values()},
            settings={
                "budget_ms": source.settings.budget_ms,
                "max_skips": source.max_skips,
                "concurrency": concurrency,
                "threads": source.settings.threads,
                "via_source": source.settings.via_source,
                "waves": source.settings.waves if source.settings.policy == "parallel" else 0,
                "late_tracks": source.settings.late_tracks,
                "images": len(images),
                "images_skipped": len(skipped),
            },
            preprocess_ms=tuple(preprocess_ms),
            wall_s=time.monotonic() - started,
        ),
        skipped_images=skipped,
    )
