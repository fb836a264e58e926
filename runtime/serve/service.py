"""Service behind ``ls-edge serve``: images in, answers out, through a source.

Methods run on the server's event loop unless they say otherwise. At most ``max_inflight`` requests are in progress, and
a limited number waits, so memory is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Gauge, Histogram

from ls_edge.core.errors import (
    BudgetExceeded,
    DataError,
    ModelMismatch,
    NotFinite,
    Overloaded,
    RequestError,
    SourceClosed,
    UsageError,
)
from ls_edge.core.parts import shown_parts
from ls_edge.core.text import name_blocks
from ls_edge.data.decoders import Decoders
from ls_edge.runtime.serve.metrics import SourceCollector, add_collectors
from ls_edge.runtime.serve.places import SLOW_AT_ONCE, Places
from ls_edge.runtime.serve.replies import RETRY_AFTER, Refusal
from ls_edge.runtime.source.results import LATENCY_BOUNDS_S, Answer
from ls_edge.runtime.source.source import Source
from ls_edge.version import __version__

SLOW_S = 0.25
"""Time after which a request is slow if the peers decode its image, in seconds."""
OVER_BUDGET_S = 2.0
"""Seconds after the end of its budget until a request is abandoned."""
_TOO_LATE = "the budget ended before the image was decoded; give it more time"
_AFTER_HOLDERS_S = 0.01
"""Seconds for which a request waits longer than its thread waits for holders, whose error says what is missing."""
_STATUS_OF: dict[type[RequestError], int] = {
    Overloaded: 503,
    SourceClosed: 503,
    BudgetExceeded: 504,
    NotFinite: 502,
    ModelMismatch: 502,
}
"""Status by class of error; 500 for all others."""

Decode = Callable[[Callable[[], None]], Sequence[np.ndarray]]
"""Function that decodes images; it calls its argument if one is large or takes long."""


class Place:
    """A place of ``--concurrency``, held by a request until its decoder's thread is free."""

    def __init__(self, places: Places) -> None:
        """Hold a place that was taken."""
        self.decoding: Future[None] | None = None
        self._places = places
        self._since = time.monotonic()
        self._has_left = self._has_ended = False

    def leave(self) -> None:
        """Leave the place to others, since the request takes long."""
        if not self._has_left and not self._has_ended:
            self._has_left = self._places.leave()

    def give_back(self, *, is_answered: bool = False) -> None:
        """End the request."""
        self._has_ended = True
        if self._has_left:
            self._places.end_slow()
        else:
            self._places.give_back(time.monotonic() - self._since, is_answered=is_answered)


class Service:
    """Answers images through a source."""

    def __init__(self, source: Source, *, holder_wait_s: float, queue: int) -> None:
        """Let images wait ``holder_wait_s`` for missing holders, and at most ``queue`` requests wait for a place.

        There are :data:`SLOW_AT_ONCE` places less than the source has requests in flight, and at least one.
        """
        self.source = source
        self._holder_wait_s = holder_wait_s
        self.places = Places(max(1, source.settings.max_inflight - SLOW_AT_ONCE), queue)
        self._threads = ThreadPoolExecutor(self.places.count + SLOW_AT_ONCE, "decoder")
        self.decoders = Decoders()
        self._threads.submit(self.decoders.start)
        self.registry = CollectorRegistry(auto_describe=False)
        add_collectors(self.registry, SourceCollector(source))
        Gauge(
            "ls_edge_http_queue_length", "Requests that wait for a place of --concurrency.", registry=self.registry
        ).set_function(lambda: self.places.waiting)
        self._waits = Histogram(
            "ls_edge_http_queue_seconds", "Time that requests waited for a place of --concurrency.",
            registry=self.registry, buckets=LATENCY_BOUNDS_S,
        )  # fmt: skip
        self._waited_s = 0.0
        self.is_stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether images can be answered now."""
        source = self.source
        return source.is_open and not self.is_stopping and source.may_skip(source.snapshot.missing_blocks)

    def status(self) -> dict[str, Any]:
        """Return the document of ``/status``."""
        source, snapshot = self.source, self.source.snapshot
        manifest = source.bundle.manifest
        peers = {
            name: {
                "state": view.state.value,
                "bundle_id": view.bundle_id or None,
                "blocks": shown_parts(view.blocks),
                "warm": view.warm,
                "credits": view.credits or 0,
                "queue": view.queue or 0,
                "engine": view.engine,
                "reaches": view.reaches,
                "reason": snapshot.problems.get(name),
            }
            for name, view in snapshot.peers.items()
        }
        return {
            "version": __version__,
            "ready": self.is_ready,
            "bundle_id": manifest.bundle_id,
            "model_id": manifest.model_id,
            "model": manifest.model,
            "classes": len(manifest.classes),
            "policy": source.settings.policy,
            "concurrency": self.places.count,
            "budget_ms": source.settings.budget_ms,
            "in_flight": source.counts.in_flight,
            "queue": self.places.queue,
            "waiting": self.places.waiting,
            "waited_ms": round(self._waited_s * 1e3, 2),
            "missing_blocks": shown_parts(snapshot.missing_blocks),
            "peers": peers,
        }

    def stop(self) -> None:
        """Refuse new images, and finish the others. Any thread may call it."""
        self.is_stopping = True

    def close(self) -> None:
        """Stop the decoders, and close the source."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.decoders.close()
        self.source.close()

    @contextlib.asynccontextmanager
    async def place(self, end: float) -> AsyncIterator[Place]:
        """Wait until ``end`` for a place for a request; raise :class:`Refusal` if there is none."""
        if self.is_stopping:
            raise Refusal(503, "the server is stopping", RETRY_AFTER)
        began = time.monotonic()
        is_answered = False
        try:
            await self.places.take(end)
        finally:  # also those that get no place
            self._waited_s = time.monotonic() - began
            self._waits.observe(self._waited_s)
        place = Place(self.places)
        if self.source.is_thin:
            asyncio.get_running_loop().call_later(SLOW_S, place.leave)
        try:
            yield place
            is_answered = True
        finally:
            give_back = functools.partial(place.give_back, is_answered=is_answered)
            if place.decoding is None or place.decoding.done():
                give_back()
            else:  # it was abandoned
                loop = asyncio.get_running_loop()
                place.decoding.add_done_callback(lambda _: _call_soon(loop, give_back))

    async def answer(self, place: Place, decode: Decode, end: float) -> list[Answer]:
        """Return the answers to the images that ``decode`` returns on a decoder's thread; wait until ``end``.

        Expected errors become :class:`Refusal`. If the task is cancelled because the client has gone away, stop the
        work on the images.
        """
        began = time.monotonic()
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        futures: list[Future[Answer]] = []

        def on_slow() -> None:
            _call_soon(loop, place.leave)

        def submit() -> None:
            bundle, images = self.source.bundle, decode(on_slow)
            left_s = self._wait_for_holders(end)
            if bundle is not self.source.bundle:  # it has changed meanwhile
                images = decode(on_slow)
            try:
                for index, image in enumerate(images):
                    futures.append(self.source.submit(image, name=f"image {index}", budget_ms=left_s * 1e3))
            finally:
                for future in futures:
                    future.add_done_callback(wake)

        def wake(_: object) -> None:
            # Only for the last answer: otherwise the loop would take the interpreter from the source's thread.
            if all(future.done() for future in futures):
                _call_soon(loop, end_wait)

        def end_wait() -> None:
            if not ended.done():
                ended.set_result(None)

        # Submitting on the decoder's thread saves a switch of threads.
        submitting = place.decoding = self._threads.submit(submit)
        submitting.add_done_callback(wake)
        try:
            for seconds in (end - began + _AFTER_HOLDERS_S, OVER_BUDGET_S):
                await asyncio.wait((ended,), timeout=seconds)
                if ended.done():
                    submitting.result()
                    return [future.result() for future in futures]
                if not submitting.done():
                    raise BudgetExceeded(_TOO_LATE)
            raise BudgetExceeded("the budget ended before there was an answer; give it more time")
        except (DataError, UsageError) as error:
            raise Refusal(400, str(error)) from None
        except RequestError as error:
            status = _STATUS_OF.get(type(error), 500)
            raise Refusal(status, str(error), RETRY_AFTER if status == 503 else None) from None
        finally:
            submitting.add_done_callback(lambda _: [future.cancel() for future in futures])

    def _wait_for_holders(self, end: float) -> float:
        """Wait for missing holders, and return the seconds that are left."""
        source = self.source
        missing = source.wait_ready(min(self._holder_wait_s, end - time.monotonic()), may_miss=source.max_skips)
        if not source.may_skip(missing):
            raise Refusal(503, f"no reachable peer serves {name_blocks(missing)}; try again", RETRY_AFTER)
        return seconds_until(end)


def seconds_until(end: float) -> float:
    """Return the seconds that are left of a budget; raise :class:`BudgetExceeded` if it is over."""
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise BudgetExceeded(_TOO_LATE)
    return left_s


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
    """Call a function on the event loop, unless that is closed; any thread may call this."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)
